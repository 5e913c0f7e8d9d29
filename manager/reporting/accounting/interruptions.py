"""Interruptions of replicas and the stages of each: from the failure until the replica works again. Pure.

An interruption begins when an incarnation of a role is fenced, even if it has not failed, as in a drain or a restart
that a user requested. Its stages end with these events:

=============  =========================================================================================
``detect``     the finding; the stage begins with the injected fault, or else with the first symptom
``decide``     the fence of the incarnation, or the end of a run that is resumed
``queue``      the launch of the next incarnation: until then the replica waits for a node, or for a resume
``start``      its ``Joined``: the scheduler has started the step, and the process has joined the run
``load``       its first weight version: it has loaded or received the state to work with
``reconnect``  its first training phase, or its first unit of work
=============  =========================================================================================

A role without weights works as soon as it has joined, so its interruption ends with ``Joined``. If no weight version is
recorded before the first work, the time since ``Joined`` is ``load``. The stage ``replay``, which is training that is
done again, is part of no interruption (``committed_steps``). An incarnation that is fenced before it has joined
continues the interruption.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from msgspec import Struct

from ....core.types import TRAINER, Incarnation, NodeName, ReplicaId, is_support, is_trainer, rank_of
from ...model import events as ev
from ...model.actions import Fence, Finish, Launch, Resize, RestartAll
from ..failure_records import Failure
from ..failure_timeline import FailureTimeline, fences

STAGES = ("detect", "decide", "queue", "start", "load", "reconnect")
"""The stages of an interruption, in order."""
PLANNED = "planned"
"""Cause of an interruption without a failure: a drain, a move, or a restart that a user requested."""
RUN_ENDED = "run ended"
"""Cause of an interruption that began with the end of the run, if the run was resumed later."""
UNKNOWN = "unknown"
"""Cause of a failure without a finding, for example of a launch that the cluster rejected."""
TRAIN = "train"
"""Phase of a trainer that computes a training step."""


class Interruption(Struct, eq=False):
    """The time in which one replica did not work. Times are the manager's (s). A time that was not reached is None."""

    replica: ReplicaId
    number: int
    """Number of the incarnation that ended."""
    cause: str
    """A :class:`rrl.core.types.Cause`, or :data:`PLANNED`, :data:`RUN_ENDED` or :data:`UNKNOWN`."""
    failed_at: float
    detected_at: float
    fenced_at: float
    node: str = ""
    evidence: tuple[str, ...] = ()
    rung: str = ""
    injected: bool = False
    charged: bool = False
    """True if the incarnation had failed."""
    launched_at: float | None = None
    node_after: str = ""
    joined_at: float | None = None
    weights_at: float | None = None
    worked_at: float | None = None
    ended_at: float | None = None
    """When the interruption ended: with the first work, the next failure, or the end of the replica or the run. None
    if it is open."""

    def stages(self, now: float) -> Iterator[tuple[str, float, float]]:
        """Yield (stage, start, end) of the stages that took time; an open stage lasts until ``now``."""
        end = now if self.ended_at is None else self.ended_at
        weights_at = self.weights_at if self.weights_at is not None else self.worked_at
        ends = (self.detected_at, self.fenced_at, self.launched_at, self.joined_at, weights_at, self.worked_at)
        since = self.failed_at
        for stage, reached_at in zip(STAGES, ends, strict=True):
            until = end if reached_at is None else min(reached_at, end)
            if until > since:
                yield stage, since, until
                since = until
            if reached_at is None:
                return

    def seconds(self, now: float) -> dict[str, float]:
        """Return the seconds of each stage that took time."""
        return {stage: until - since for stage, since, until in self.stages(now)}


class Interruptions:
    """Collects the interruptions of a run, from its first event on.

    Each event must be applied to ``timeline`` first.
    """

    def __init__(self, timeline: FailureTimeline) -> None:
        self.all: list[Interruption] = []
        """All interruptions, in the order in which they were recorded."""
        self.open: dict[ReplicaId, Interruption] = {}
        """The interruptions that have not ended, by replica (a gang as a whole)."""
        self._timeline = timeline
        self._nodes: dict[Incarnation, NodeName] = {}
        self._joined: dict[ReplicaId, int] = {}
        """Number of the newest incarnation that has joined, by replica."""
        self._finished: tuple[float, Finish] | None = None

    def apply(self, stamped: ev.Stamped) -> list[Interruption]:
        """Apply an event and return the interruptions that it begins."""
        handler = _HANDLERS.get(type(stamped.event))
        return [] if handler is None else handler(self, stamped.event, stamped.at) or []

    def _on_decided(self, event: ev.Decided, at: float) -> list[Interruption]:
        if isinstance(event.action, Finish):
            self._finished = at, event.action
            for interruption in self.open.values():
                interruption.ended_at = at
            self.open.clear()
            return []
        if self._finished is not None:
            return []
        for id in event.action.stop if isinstance(event.action, Resize) else ():  # the run no longer has the replica
            if id in self.open:
                self.open.pop(id).ended_at = at
        about = event.action.failed if isinstance(event.action, RestartAll) else None
        begun = (self._on_fence(fence, about, at) for fence in fences(event))
        return [interruption for interruption in begun if interruption is not None]

    def _on_fence(self, fence: Fence, about: Incarnation | None, at: float) -> Interruption | None:
        """Return the interruption that a fence begins; None if an open interruption continues, or no role is fenced.

        ``about`` is the failed incarnation if the fence is part of a restart of the whole run, else None.
        """
        gang = fence.incarnation.gang
        if is_support(gang.replica):
            return None
        failure = self._timeline.failures.get(about or fence.incarnation) if about or fence.charged else None
        held = self.open.get(gang.replica)
        if held is not None and (held.number == gang.number or self._joined.get(gang.replica, 0) < gang.number):
            held.rung = fence.rung.value
            if failure is not None and not held.charged:  # another member had been fenced before the failed member
                self._explain(held, failure, fence)
            return None
        if held is not None:
            held.ended_at = min(at, at if failure is None else failure.failed_at)
        interruption = Interruption(
            gang.replica,
            gang.number,
            PLANNED,
            at,
            at,
            at,
            self._nodes.get(gang, NodeName("")),
            tuple(fence.why.evidence),
            fence.rung.value,
        )
        if failure is not None:
            self._explain(interruption, failure, fence)
        elif fence.charged or about:
            interruption.cause, interruption.charged = UNKNOWN, True
        self.open[gang.replica] = interruption
        self.all.append(interruption)
        return interruption

    def _explain(self, interruption: Interruption, failure: Failure, fence: Fence) -> None:
        """Add the cause and the times of a failure to its interruption."""
        finding = failure.diagnosis.finding
        interruption.cause = finding.cause.value if finding is not None else UNKNOWN
        interruption.injected, interruption.charged = failure.injected, True
        interruption.failed_at = min(failure.failed_at, interruption.fenced_at)
        interruption.detected_at = min(failure.diagnosis.detected_at, interruption.fenced_at)
        interruption.evidence = tuple(fence.why.evidence)

    def _on_intended(self, event: ev.Intended, at: float) -> None:
        if not isinstance(event.action, Launch):
            return
        incarnation = event.action.incarnation
        self._nodes[incarnation] = event.action.node
        interruption = self._successor_of(incarnation)
        if interruption is not None and interruption.launched_at is None:
            interruption.launched_at, interruption.node_after = at, event.action.node

    def _on_joined(self, event: ev.Joined, at: float) -> None:
        incarnation = event.incarnation
        if is_support(incarnation.replica) or rank_of(incarnation.replica):
            return
        self._joined[incarnation.replica] = max(incarnation.number, self._joined.get(incarnation.replica, 0))
        interruption = self._successor_of(incarnation)
        if interruption is not None and interruption.joined_at is None:
            interruption.joined_at = at
            if not self._timeline.recovers_by_work(incarnation.replica):
                self._end(interruption, at)

    def _on_version(self, event: ev.VersionAvailable, at: float) -> None:
        if not self.open:
            return
        interruption = self._successor_of(event.incarnation)
        if interruption is not None and interruption.joined_at is not None and interruption.weights_at is None:
            interruption.weights_at = at

    def _on_phase(self, event: ev.PhaseEntered, at: float) -> None:
        if self.open and event.phase == TRAIN and event.incarnation.replica == TRAINER:
            self._on_work(event, at)

    def _on_work(self, event: ev.PhaseEntered | ev.FirstWorkDone, at: float) -> None:
        interruption = self._successor_of(event.incarnation)
        if interruption is not None and interruption.joined_at is not None:
            self._end(interruption, at)

    def _on_resumed(self, event: ev.Resumed, at: float) -> list[Interruption]:
        """Begin the interruption that the end of the run caused for the trainer; return it in a list, or [].

        It begins with the trainer's failure if this failure ended the run, else when the end of the run was decided. No
        interruption begins if the trainer had never joined.
        """
        finished, self._finished = self._finished, None
        number = self._joined.get(TRAINER, 0)
        if finished is None or not number:
            return []
        ended_at, action = finished
        evidence = tuple(action.why.evidence)
        interruption = Interruption(TRAINER, number, RUN_ENDED, ended_at, ended_at, ended_at, evidence=evidence)
        failures = [
            one
            for one in self._timeline.counted
            if one.ended_run
            and one.incarnation is not None
            and is_trainer(one.incarnation.replica)
            and one.incarnation.number == number
        ]
        if failures:
            interruption.failed_at = min(failures[-1].failed_at, ended_at)
            interruption.detected_at = min(failures[-1].diagnosis.detected_at, ended_at)
            interruption.injected, interruption.charged = failures[-1].injected, True
        self.open[TRAINER] = interruption
        self.all.append(interruption)
        return [interruption]

    def _successor_of(self, incarnation: Incarnation) -> Interruption | None:
        """Return the open interruption that this incarnation should end; None if there is none."""
        interruption = self.open.get(incarnation.replica)
        return interruption if interruption is not None and incarnation.number > interruption.number else None

    def _end(self, interruption: Interruption, at: float) -> None:
        interruption.worked_at = interruption.ended_at = at
        self.open.pop(interruption.replica, None)


_HANDLERS: dict[type, Callable[[Interruptions, Any, float], list[Interruption] | None]] = {
    ev.Decided: Interruptions._on_decided,
    ev.Intended: Interruptions._on_intended,
    ev.Joined: Interruptions._on_joined,
    ev.VersionAvailable: Interruptions._on_version,
    ev.PhaseEntered: Interruptions._on_phase,
    ev.FirstWorkDone: Interruptions._on_work,
    ev.Resumed: Interruptions._on_resumed,
}
