"""The conditions of a run that notifications are sent about, found in the state of the run. Pure.

A condition has a key, which identifies its occurrence. Conditions follow from the state alone. So if a manager dies
before it sends a notification, the next manager finds the condition again.
"""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median

from msgspec import Struct

from ...core.run_spec import NotificationKind
from ...core.types import Outcome, gang_of
from ..model.queries import reached_step
from ..model.state import Node, Replica, State, Status

LIMIT_S = 3600.0
"""Seconds after a notification during which no other notification of its kind is sent. A notification about the end of
a run is sent only within this time after the run's end."""
STALLED_AFTER_S = 1800.0
"""Minimum time (s) without a committed training step after which a run counts as stalled. It equals the default of
``limits.first_pass``, the extra time for an incarnation's first pass of a phase (compilation, warm-up)."""
USUAL_STEPS = 20
"""Number of newest training steps from which the usual duration is computed."""
_LEARNED_STEPS = 3
"""Minimum number of durations from which the usual duration is computed. The deadlines of phases have the same
minimum."""


class Condition(Struct, frozen=True):
    """One occurrence that a notification is sent about."""

    kind: NotificationKind
    key: str
    """Text that identifies the occurrence among all occurrences of its kind in the run."""
    text: str


class StallClock:
    """Measures for how long a run has finished no training step, from the states that one manager passes to it.

    A new manager begins to measure at 0 again, as it does for every deadline.
    """

    def __init__(self) -> None:
        self._since: float | None = None
        self._step = 0
        self._running_since: float | None = None
        self._durations: list[float] = []

    def stalled_s(self, state: State, now: float) -> float | None:
        """Return for how long (s) no training step has been finished, as of the manager's time ``now`` (s).

        Returns None if the run does not count as stalled.
        """
        if state.running_since is None or not state.job.steps or state.finish is not None:
            self._since = None
            return None
        step = reached_step(state)
        if self._since is None or state.running_since != self._running_since:  # the run begins, or was resumed
            self._since, self._step, self._running_since = now, step, state.running_since
        if step != self._step:
            self._durations = [*self._durations, (now - self._since) / max(1, step - self._step)][-USUAL_STEPS:]
            self._since, self._step = now, step
        silent = now - self._since
        return silent if silent >= self._patience(state) else None

    def _patience(self, state: State) -> float:
        """Return the time (s) without a step after which the run counts as stalled."""
        if len(self._durations) < _LEARNED_STEPS:
            return STALLED_AFTER_S + state.job.limits.first_pass
        return max(STALLED_AFTER_S, state.job.limits.adaptive * median(self._durations))


def conditions(state: State, now: float, stalled_s: float | None) -> list[Condition]:
    """Return all conditions that hold at the manager's time ``now`` (s).

    ``stalled_s`` is the time (s) without a training step; None if the run does not count as stalled.
    """
    held = list(_drains(state))
    if state.outcome is not None:
        return [*held, *_end(state, now)]
    if stalled_s is not None:
        where = f"{state.step} of {state.job.steps} steps are committed"
        text = (
            f"no training step for {stalled_s / 60:.0f} min; {where};"
            f" to see what the run waits for: rrl status {state.run}"
        )
        held.append(Condition("stalled", f"step {state.step}, {state.paused_s:.0f} s paused", text))
    return [*held, *(() if state.finish is not None else _degraded(state))]


def _end(state: State, now: float) -> Iterator[Condition]:
    """Yield the end of a run, unless the run was cancelled or ended longer ago than :data:`LIMIT_S`."""
    kinds: dict[Outcome, NotificationKind] = {
        Outcome.COMPLETED: "completed",
        Outcome.FAILED: "failed",
        Outcome.REJECTED: "failed",
    }
    if state.outcome in kinds and state.ended is not None and now - state.ended < LIMIT_S:
        yield Condition(kinds[state.outcome], f"ended {state.ended:.3f}", state.why or state.outcome.value)


def _degraded(state: State) -> Iterator[Condition]:
    """Yield each replica without which the run continues."""
    gangs = {gang_of(member.id): member for member in reversed(state.workers) if member.status is Status.RETIRED}
    for gang, member in gangs.items():
        reason = _reason(member)
        text = f"the run continues without {gang}{f': {reason}' if reason else ''}"
        yield Condition("degraded", f"{gang}#{member.incarnation_number}", text)


def _reason(member: Replica) -> str:
    """Return why a member is retired; empty if no reason was recorded for its retirement."""
    restart = member.uncharged_restart
    if restart is not None and restart.at == member.since:
        return restart.why
    return next((failure.why for failure in member.failures[-1:] if failure.at == member.since), "")


def _drains(state: State) -> Iterator[Condition]:
    """Yield each node that the run has drained, or that an administrator should drain."""
    for node in state.nodes.values():
        if node.excluded is not None and (node.drain_reason or node.drain_error):
            yield Condition("drain", f"{node.name} at {node.excluded_at:.3f}", _drain_text(node))


def _drain_text(node: Node) -> str:
    if node.drain_reason:
        return f"{node.name} is drained: {node.excluded}"
    return (
        f"{node.name} should be drained by an administrator, since rrl may not drain it ({node.drain_error}):"
        f" {node.excluded}"
    )
