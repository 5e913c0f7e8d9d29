"""A lane for each member of a role's replica: its incarnations, and what it did at any time of the run. Pure.

A lane is a list of intervals. The use of an interval comes from the phase that the member reported. A run of many steps
has very many intervals, so :meth:`Lane.spans` returns the use that prevailed in each of a limited number of equal parts
of the run.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from enum import IntEnum
from functools import lru_cache
from typing import Any

from msgspec import Struct

from ....core.phases import idle_cause, phase
from ....core.types import Incarnation, ReplicaId, is_support
from ...model import events as ev
from ...model.actions import Finish, Launch
from ..failure_timeline import fences

MAX_SPANS = 400
"""Number of intervals from which on a lane is shown in equal parts of the run; also their number."""


class Use(IntEnum):
    """What a member did in an interval."""

    ABSENT = 0
    """It was never launched, or the run has ended."""
    STARTS = 1
    """It was launched, and has not joined yet."""
    WORKS = 2
    WAITS = 3
    """It waited for another role or a service."""
    LOADS = 4
    """It was in a phase that does not count as training, for example to load weights."""
    DOWN = 5
    """Its incarnation had ended, and the next one was not launched yet."""


@lru_cache(maxsize=4096)
def use_of(name: str, waits_for: str | None) -> Use:
    """Return the use of the time in a phase; ``waits_for`` is what the member reported that it waits for."""
    if idle_cause(name, waits_for):
        return Use.WAITS
    return Use.WORKS if phase(name).useful else Use.LOADS


class LaneIncarnation(Struct):
    """One incarnation of a member. Times are the manager's (s)."""

    number: int
    node: str
    launched_at: float
    joined_at: float | None = None
    ended_at: float | None = None
    """When its step ended or it was fenced, whichever was first."""


class Span(Struct, frozen=True, array_like=True):
    """An interval (s) and the use of it."""

    since: float
    until: float
    use: Use


class Lane:
    """What one member did."""

    def __init__(self, replica: ReplicaId) -> None:
        self.replica = replica
        self.incarnations: list[LaneIncarnation] = []
        self.current = 0
        """Number of the incarnation that is launched and not fenced; 0 if there is none."""
        self.starts: list[float] = []
        self.uses: list[Use] = []
        """Begin and use of each interval; neighbours differ. The last one lasts on."""

    def enter(self, at: float, use: Use) -> None:
        """Begin an interval, which replaces what was recorded after ``at``."""
        while self.starts and self.starts[-1] >= at:
            self.starts.pop()
            self.uses.pop()
        if not self.uses or self.uses[-1] is not use:
            self.starts.append(at)
            self.uses.append(use)

    def seconds(self, use: Use, now: float) -> float:
        """Return the seconds of one use up to ``now``."""
        ends = (*self.starts[1:], now)
        return sum(end - start for start, end, one in zip(self.starts, ends, self.uses, strict=True) if one is use)

    def spans(self, since: float, until: float) -> list[Span]:
        """Return the intervals between two times; of many, the use that prevailed in each part of the time."""
        if len(self.starts) <= MAX_SPANS:
            ends = (*self.starts[1:], until)
            return [
                Span(start, end, use) for start, end, use in zip(self.starts, ends, self.uses, strict=True)
                if use is not Use.ABSENT and end > start
            ]  # fmt: skip
        return self._prevailing(since, until)

    def _prevailing(self, since: float, until: float) -> list[Span]:
        part_s = (until - since) / MAX_SPANS
        spans: list[Span] = []
        index = max(0, bisect_right(self.starts, since) - 1)
        for part in range(MAX_SPANS):
            start, end = since + part * part_s, since + (part + 1) * part_s
            spent = [0.0] * len(Use)
            while True:
                following = self.starts[index + 1] if index + 1 < len(self.starts) else until
                begun = max(self.starts[index], start)
                if (lasted := min(following, end) - begun) > 0:
                    spent[self.uses[index]] += lasted
                if following >= end or index + 1 >= len(self.starts):
                    break
                index += 1
            use = Use(max(range(len(Use)), key=spent.__getitem__)) if any(spent) else Use.ABSENT
            if spans and spans[-1].use is use and spans[-1].until == start:
                spans[-1] = Span(spans[-1].since, end, use)
            elif use is not Use.ABSENT:
                spans.append(Span(start, end, use))
        return spans


class Lanes:
    """Collects the lanes of a run, from its first event on, in the order of the launches."""

    def __init__(self) -> None:
        self.lanes: dict[ReplicaId, Lane] = {}
        self._ending = False
        self._steps: dict[str, Incarnation] = {}
        """Incarnation by the tag of its step; after a promotion, that of the member."""

    def apply(self, stamped: ev.Stamped) -> None:
        """Apply an event."""
        handler = _HANDLERS.get(type(stamped.event))
        if handler is not None:
            handler(self, stamped.event, stamped.at)

    def _on_phase(self, event: ev.PhaseEntered, at: float) -> None:
        incarnation = event.incarnation
        lane = self.lanes.get(incarnation.replica)
        if lane is not None and lane.current == incarnation.number:
            lane.enter(at, use_of(event.phase, event.waits_for))

    def _on_intended(self, event: ev.Intended, at: float) -> None:
        action = event.action
        if isinstance(action, Launch) and not is_support(action.incarnation.replica):
            incarnation = action.incarnation
            self._steps[action.step] = incarnation
            lane = self.lanes.setdefault(incarnation.replica, Lane(incarnation.replica))
            lane.incarnations.append(LaneIncarnation(incarnation.number, action.node, at))
            lane.current = incarnation.number
            lane.enter(at, Use.STARTS)

    def _on_joined(self, event: ev.Joined, at: float) -> None:
        incarnation = self._incarnation(event.incarnation)
        if incarnation is not None and incarnation.joined_at is None:
            incarnation.joined_at = at

    def _on_step_ended(self, event: ev.StepEnded, at: float) -> None:
        self._end(self._steps.get(event.step, event.incarnation), at)

    def _on_decided(self, event: ev.Decided, at: float) -> None:
        self._ending = self._ending or isinstance(event.action, Finish)
        for fence in fences(event):
            self._end(fence.incarnation, at)

    def _end(self, ended: Incarnation, at: float) -> None:
        lane = self.lanes.get(ended.replica)
        if lane is None or lane.current != ended.number:
            return
        lane.current = 0
        lane.incarnations[-1].ended_at = at
        lane.enter(at, Use.ABSENT if self._ending else Use.DOWN)

    def _on_resumed(self, event: ev.Resumed, at: float) -> None:
        self._ending = False

    def _on_run_ended(self, event: ev.RunEnded, at: float) -> None:
        for lane in self.lanes.values():
            lane.current = 0
            lane.enter(at, Use.ABSENT)

    def _incarnation(self, incarnation: Incarnation) -> LaneIncarnation | None:
        lane = self.lanes.get(incarnation.replica)
        current = lane is not None and lane.current == incarnation.number
        return lane.incarnations[-1] if lane is not None and current else None


_HANDLERS: dict[type, Callable[[Lanes, Any, float], None]] = {
    ev.PhaseEntered: Lanes._on_phase,
    ev.Intended: Lanes._on_intended,
    ev.Joined: Lanes._on_joined,
    ev.StepEnded: Lanes._on_step_ended,
    ev.Decided: Lanes._on_decided,
    ev.Resumed: Lanes._on_resumed,
    ev.RunEnded: Lanes._on_run_ended,
}
