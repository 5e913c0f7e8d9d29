"""A lane for each member of a role's replica: its incarnations and activities over the whole run. Pure.

A lane is a list of intervals, each with the phase that the member reported. A run of many steps has very many
intervals. For such a run :meth:`Lane.spans` divides the run into a limited number of equal parts, and returns the main
activity in each part.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from enum import StrEnum
from functools import lru_cache
from typing import Any

from msgspec import Struct

from ....core.phases import idle_cause, phase
from ....core.types import Incarnation, ReplicaId, gang_of, is_support
from ...model import events as ev
from ...model.actions import Finish, Launch, Resize
from ..failure_timeline import fences

MAX_SPANS = 400
"""Maximum number of intervals of a lane. A lane with more intervals is shown as this many equal parts of the run."""


class Use(StrEnum):
    """The kind of a member's activity."""

    ABSENT = "absent"
    """The member was never launched, or the run has ended."""
    STARTS = "starts"
    """The member was launched, and has not joined yet."""
    WORKS = "works"
    WRITES = "writes"
    """The member wrote a checkpoint, or published weights."""
    WAITS = "waits"
    """The member waited for another role or a service."""
    LOADS = "loads"
    """The member was in a phase that does not count as training, such as the restore of a checkpoint."""
    DOWN = "down"
    """The member's incarnation had ended, and the next incarnation was not launched yet."""


USEFUL = (Use.WORKS, Use.WRITES)
"""Uses of GPU time that count as useful."""
_WRITING = ("checkpoint", "publish")


class Activity(Struct, frozen=True):
    """A phase that a member reported, or the time between two incarnations (``launching``, ``down``)."""

    phase: str
    use: Use


_ABSENT, _LAUNCHING, _DOWN = Activity("", Use.ABSENT), Activity("launching", Use.STARTS), Activity("down", Use.DOWN)


@lru_cache(maxsize=4096)
def activity(name: str, waits_for: str | None) -> Activity:
    """Return the activity of a phase; ``waits_for`` names what the member waits for, according to its report."""
    if idle_cause(name, waits_for):
        return Activity(name, Use.WAITS)
    if not phase(name).useful:
        return Activity(name, Use.LOADS)
    return Activity(name, Use.WRITES if name in _WRITING else Use.WORKS)


class LaneIncarnation(Struct):
    """One incarnation of a member. Times are the manager's (s)."""

    number: int
    node: str
    launched_at: float
    joined_at: float | None = None
    ended_at: float | None = None
    """When the incarnation's step ended or the incarnation was fenced, whichever was first. None before both."""


class Span(Struct, frozen=True, array_like=True):
    """An interval (s) and what the member did in it."""

    since: float
    until: float
    activity: Activity


class Lane:
    """The activities of one member."""

    def __init__(self, replica: ReplicaId) -> None:
        self.replica = replica
        self.incarnations: list[LaneIncarnation] = []
        self.current = 0
        """Number of the incarnation that is launched and not fenced; 0 if there is no such incarnation."""
        self.starts: list[float] = []
        self.activities: list[Activity] = []
        """Activity of each interval, which begins at the time (s) with the same index in ``starts``. Two neighbours
        always differ, and the last interval has not ended."""

    def enter(self, at: float, activity: Activity) -> None:
        """Record that an activity begins at ``at`` (s), and drop the intervals that begin at this time or later."""
        starts, activities = self.starts, self.activities
        while starts and starts[-1] >= at:
            starts.pop()
            activities.pop()
        if not activities or activities[-1] is not activity:
            starts.append(at)
            activities.append(activity)

    def seconds(self, now: float) -> dict[Activity, float]:
        """Return the seconds of each activity up to ``now``."""
        spent: dict[Activity, float] = defaultdict(float)
        for start, end, one in zip(self.starts, (*self.starts[1:], now), self.activities, strict=True):
            spent[one] += end - start
        spent.pop(_ABSENT, None)
        return spent

    def spans(self, since: float, until: float) -> list[Span]:
        """Return the intervals between two times.

        For a long lane, these are :data:`MAX_SPANS` equal parts, each with its main activity.
        """
        if len(self.starts) > MAX_SPANS:
            return self._prevailing(since, until)
        return [
            Span(start, end, one)
            for start, end, one in zip(self.starts, (*self.starts[1:], until), self.activities, strict=True)
            if one.use is not Use.ABSENT and end > start
        ]

    def _prevailing(self, since: float, until: float) -> list[Span]:
        part_s = (until - since) / MAX_SPANS
        spent: list[dict[Activity, float]] = [defaultdict(float) for _ in range(MAX_SPANS)]
        for start, end, one in zip(self.starts, (*self.starts[1:], until), self.activities, strict=True):
            first, last = int((start - since) / part_s), min(MAX_SPANS - 1, int((end - since) / part_s))
            if first >= last:
                spent[last][one] += end - start
                continue
            for part in range(first, last + 1):
                begun, ended = since + part * part_s, since + (part + 1) * part_s
                spent[part][one] += max(0.0, min(end, ended) - max(start, begun))
        spans: list[Span] = []
        for part, by_activity in enumerate(spent):
            prevailing = max(by_activity, key=by_activity.__getitem__, default=_ABSENT)
            start, end = since + part * part_s, since + (part + 1) * part_s
            if spans and spans[-1].activity == prevailing and spans[-1].until == start:
                spans[-1] = Span(spans[-1].since, end, prevailing)
            elif prevailing.use is not Use.ABSENT:
                spans.append(Span(start, end, prevailing))
        return spans


class Lanes:
    """Collects the lanes of a run, from its first event on, in the order of the launches."""

    def __init__(self) -> None:
        self.lanes: dict[ReplicaId, Lane] = {}
        self._ending = False
        self._steps: dict[str, Incarnation] = {}
        """Incarnation by the tag of its step. For a promoted standby process, it is the incarnation of the member."""

    def apply(self, stamped: ev.Stamped) -> None:
        """Apply an event."""
        handler = _HANDLERS.get(type(stamped.event))
        if handler is not None:
            handler(self, stamped.event, stamped.at)

    def _on_phase(self, event: ev.PhaseEntered, at: float) -> None:
        incarnation = event.incarnation
        lane = self.lanes.get(incarnation.replica)
        if lane is not None and lane.current == incarnation.number:
            lane.enter(at, activity(event.phase, event.waits_for))

    def _on_intended(self, event: ev.Intended, at: float) -> None:
        action = event.action
        if isinstance(action, Launch) and not is_support(action.incarnation.replica):
            incarnation = action.incarnation
            self._steps[action.step] = incarnation
            lane = self.lanes.setdefault(incarnation.replica, Lane(incarnation.replica))
            lane.incarnations.append(LaneIncarnation(incarnation.number, action.node, at))
            lane.current = incarnation.number
            lane.enter(at, _LAUNCHING)

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
        stopped = event.action.stop if isinstance(event.action, Resize) else ()
        for lane in self.lanes.values() if stopped else ():
            if gang_of(lane.replica) in stopped:
                if lane.current:
                    self._end(Incarnation(lane.replica, lane.current), at)
                lane.enter(at, _ABSENT)

    def _end(self, ended: Incarnation, at: float) -> None:
        lane = self.lanes.get(ended.replica)
        if lane is None or lane.current != ended.number:
            return
        lane.current = 0
        lane.incarnations[-1].ended_at = at
        lane.enter(at, _ABSENT if self._ending else _DOWN)

    def _on_resumed(self, event: ev.Resumed, at: float) -> None:
        self._ending = False

    def _on_run_ended(self, event: ev.RunEnded, at: float) -> None:
        for lane in self.lanes.values():
            lane.current = 0
            lane.enter(at, _ABSENT)

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
