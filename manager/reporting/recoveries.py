"""Measure the recovery of each failed replica: the durations of its stages, and whether an injected fault caused it."""

from __future__ import annotations

from math import inf

from msgspec import Struct

from ...core.faults import FAULT_TRAITS, Fault, TargetKind
from ...core.types import Incarnation, role_of
from ..model.actions import Fence


class Recovery(Struct, frozen=True):
    """The recovery of one replica, from its failure to its first work.

    A stage time (s) is None if that stage was not reached.
    """

    replica: str
    incarnation: int
    """Number of the incarnation that replaced the failed one."""
    cause: str
    rung: str
    injected: bool
    node_before: str
    node_after: str
    detect_s: float | None
    """From the injected fault (or else the failure's first symptom) to the finding."""
    decide_s: float | None
    """From the finding to the fence of the failed incarnation."""
    start_s: float | None
    """From the fence to the new incarnation's Hello."""
    weights_s: float | None
    """From its Hello to a complete weight version."""
    first_work_s: float | None
    """From a complete weight version to the first unit of work (a rollout's first token)."""
    total_s: float | None


class InjectedFault(Struct):
    """An injected fault from its intent on, and which replicas it may have made fail."""

    fault: Fault
    at: float
    incarnation: Incarnation | None
    node: str
    ended_at: float = inf
    """Time (s) at which the fault ended: an incarnation launched later on its node was not affected."""
    effects_until: float = inf
    """Time (s) by which every failure that it caused has been found."""
    performed: bool = False

    def set_performed_at(self, at: float, silence: float) -> None:
        """Set when the fault was performed; it lasts for its ``seconds``.

        Its end may never be journaled, for example on a disk that stays full or after a manager's death. ``silence`` is
        how long finding its effects may take (s).
        """
        if self.fault.seconds:
            self.ended_at = at + self.fault.seconds
            self.effects_until = self.ended_at + silence
        else:
            self.ended_at = at

    def may_have_hit(self, incarnation: Incarnation, node: str, launched_at: float, failed_at: float) -> bool:
        """Return whether this fault can have caused a failure of this incarnation on this node, by target and time."""
        if not self.at <= failed_at <= self.effects_until:
            return False
        hits = FAULT_TRAITS[self.fault.kind].target_kind
        on_node = hits is TargetKind.NODE and node == self.node and launched_at <= self.ended_at
        return hits is TargetKind.RUN or incarnation == self.incarnation or on_node


class RecoveryTrace:
    """One failure of one replica, and the times (s) of its recovery so far."""

    def __init__(self, fence: Fence, at: float) -> None:
        self.fence, self.fenced_at = fence, at
        self.rung = fence.rung
        self.incarnation = fence.incarnation.number + 1
        self.failed_at: float | None = None
        self.found_at: float | None = None
        self.injected = False
        self.node_before = self.node_after = ""
        self.joined_at: float | None = None
        self.weights_at: float | None = None
        self.worked_at: float | None = None

    def recovery(self) -> Recovery:
        """Return the recovery with the durations of its stages."""
        needs_weights = role_of(self.fence.incarnation.replica) == "rollout"
        ready = self.weights_at if needs_weights else self.joined_at
        return Recovery(
            replica=self.fence.incarnation.replica,
            incarnation=self.incarnation,
            cause="; ".join(self.fence.why.evidence),
            rung=self.rung.value,
            injected=self.injected,
            node_before=self.node_before,
            node_after=self.node_after,
            detect_s=_duration(self.failed_at, self.found_at),
            decide_s=_duration(self.found_at, self.fenced_at),
            start_s=_duration(self.fenced_at, self.joined_at),
            weights_s=_duration(self.joined_at, self.weights_at) if needs_weights else None,
            first_work_s=_duration(ready, self.worked_at),
            total_s=_duration(self.failed_at, self.worked_at),
        )


def _duration(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else round(max(0.0, end - start), 3)
