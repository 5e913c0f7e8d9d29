"""The records of the timeline of failures (``failure_timeline``): failures, outages, and injected faults. Pure."""

from __future__ import annotations

from math import inf

from msgspec import Struct

from ...core.faults import FAULT_TRAITS, Fault, TargetKind
from ...core.types import Finding, Incarnation, NodeName, ReplicaId
from ..model import events as ev
from ..model.actions import Fence, InjectFault, Rung, fault_tag


class Diagnosis(Struct, frozen=True):
    """The cause of a failure, as far as it was known at one moment. Times are the manager's (s)."""

    finding: Finding | None
    """The FAIL finding that names the cause: a finding about the node or, if there is none, about the incarnation. None
    if there is neither."""
    symptom_at: float
    detected_at: float
    fault_at: float | None
    """Time of the injected fault that can have caused the failure; None if there is no such fault."""


class Failure(Struct, eq=False):
    """One failure of an incarnation, or of a node (``incarnation`` is None). Times (s) not reached are None."""

    incarnation: Incarnation | None
    node: NodeName
    """Node that failed, or on which the incarnation ran; empty if it was never launched."""
    recorded_at: float
    diagnosis: Diagnosis
    """Diagnosis when the failure was first recorded. When the incarnation is fenced, a new diagnosis replaces it."""
    ended: bool = False
    """True if the incarnation has ended or is fenced; False if it continued."""
    continues: Failure | None = None
    """For a rejected launch: the earlier failure that the launch should have repaired. Both count as one failure. None
    if there was no such failure."""
    ended_run: bool = False
    """True if the run ended because of this failure, so that nothing was fenced or repaired."""
    fence: Fence | None = None
    """The first fence for this failure that counts on the replica's budget; None if there was no such fence."""
    fenced_at: float | None = None
    rung: Rung | None = None
    """The newest rung that was chosen to repair the failure; None if no rung was chosen."""
    successor: Incarnation | None = None
    node_after: NodeName | None = None
    """Node of the successor; None if there is no successor."""
    joined_at: float | None = None
    works_by_joining: bool = False
    """True if the failure counts as repaired once the successor has joined, even if it does no unit of work."""
    weights_at: float | None = None
    worked_at: float | None = None

    @property
    def injected(self) -> bool:
        """Return whether an injected fault can have caused the failure."""
        return self.diagnosis.fault_at is not None

    @property
    def failed_at(self) -> float:
        """Return the time (s) of the failure: the time of the injected fault, else of the first symptom."""
        return self.diagnosis.symptom_at if self.diagnosis.fault_at is None else self.diagnosis.fault_at

    @property
    def recovered_at(self) -> float | None:
        """Return the time (s) of the successor's first unit of work; None if it has not worked.

        With ``works_by_joining``, the successor's join counts if no unit of work is recorded.
        """
        return self.joined_at if self.worked_at is None and self.works_by_joining else self.worked_at


class Outage(Struct, frozen=True):
    """An outage of a replica since the manager's time ``since`` (s). ``node`` is the node of the failed member."""

    replica: ReplicaId
    node: str
    since: float
    gpus: int

    def gpu_seconds(self, until: float) -> float:
        """Return the GPU time (s) lost up to ``until``."""
        return self.gpus * max(0.0, until - self.since)


class Changes(Struct):
    """What one event changed in the timeline."""

    failures: list[Failure] = []
    """Failures that the event reports, and earlier failures of an incarnation that the event fences."""
    raised: Finding | None = None
    """Finding that became FAIL; None if no finding did."""
    ended_outages: list[tuple[Outage, bool]] = []
    """Outages that ended, each with True if the replica has recovered, or False if the run has ended or no longer has
    the replica."""


class InjectedFault(Struct):
    """An injected fault and the incarnations that it hit. It is recorded when its injection is intended."""

    fault: Fault | None
    """The fault; None if an earlier manager injected it."""
    at: float
    """Time (s) from which the fault has an effect."""
    incarnations: tuple[Incarnation, ...]
    """Incarnations that the fault hit directly."""
    node: NodeName = NodeName("")
    ended_at: float = inf
    """Time (s) at which the fault ended. An incarnation that is launched on the fault's node after this time is not
    affected."""
    effects_until: float = inf
    """Time (s) by which every failure that the fault caused has been detected."""
    performed: bool = False

    def set_performed_at(self, at: float, silence: float) -> None:
        """Set the time at which the fault was performed, and derive from it when the fault and its effects end.

        The end is computed from the fault's ``seconds``, because the journal may never contain the end, for example
        while a disk stays full or after a manager's death. ``silence`` is the longest time (s) until the fault's
        effects are detected.
        """
        if self.fault is not None and self.fault.seconds:
            self.ended_at = at + self.fault.seconds
            self.effects_until = self.ended_at + silence
        else:
            self.ended_at = at

    def may_have_hit(self, incarnation: Incarnation, node: NodeName, launched_at: float, failed_at: float) -> bool:
        """Return whether this fault can have caused a failure of this incarnation on this node."""
        if not self.at <= failed_at <= self.effects_until:
            return False
        if incarnation in self.incarnations:
            return True
        hits = None if self.fault is None else FAULT_TRAITS[self.fault.kind].target_kind
        on_node = hits is TargetKind.NODE and node == self.node and launched_at <= self.ended_at
        return hits is TargetKind.RUN or on_node


class InjectedFaults:
    """All injected faults of a run, except those that were certainly not performed."""

    def __init__(self) -> None:
        self.performed = 0
        """Number of faults that were reported as performed."""
        self.silence = 0.0
        """Seconds after a fault's end within which every failure that it caused is found. The value is
        ``limits.silence``."""
        self._faults: dict[str, InjectedFault] = {}
        """Faults by the tag of their injection."""

    def __bool__(self) -> bool:
        return bool(self._faults)

    def behind(self, incarnation: Incarnation, node: NodeName, launched_at: float, failed_at: float) -> float | None:
        """Return the time (s) of the newest fault that can have caused an incarnation's failure; None if none can."""
        times = (
            fault.at for fault in self._faults.values() if fault.may_have_hit(incarnation, node, launched_at, failed_at)
        )
        return max(times, default=None)

    def restore(self, fault: str, incarnation: Incarnation) -> None:
        """Record that a fault hit this incarnation under an earlier manager, at an unknown time."""
        tag = fault_tag(fault)
        known = self._faults.get(tag)
        incarnations = (*(known.incarnations if known is not None else ()), incarnation)
        self._faults[tag] = InjectedFault(None, 0.0, incarnations, performed=True)

    def on_intended(self, action: InjectFault, target: Incarnation | None, at: float) -> None:
        """Record a fault that is about to be injected. The time to its detection counts from ``at`` (s)."""
        injected = InjectedFault(action.fault, at, () if target is None else (target,), action.node)
        injected.set_performed_at(at, self.silence)
        self._faults[action.tag] = injected

    def on_rejected(self, tag: str) -> None:
        """Remove the fault whose injection has this tag, if there is one."""
        self._faults.pop(tag, None)

    def on_reported(self, event: ev.FaultInjected, at: float) -> None:
        """Apply a report that a fault was not performed, was performed, or has ended."""
        tag = fault_tag(event.fault)
        injected = self._faults.get(tag)
        if injected is None:
            return
        if not (event.ok or event.unknown):  # a fault that was not performed causes no failure
            del self._faults[tag]
        elif event.ended:
            injected.ended_at = min(injected.ended_at, at)
            injected.effects_until = min(injected.effects_until, at + self.silence)
        elif event.ok and not injected.performed and injected.fault is not None:
            injected.performed = True
            injected.set_performed_at(at, self.silence)
            self.performed += 1
            traits = FAULT_TRAITS[injected.fault.kind]
            if not traits.by_signals and traits.target_kind is TargetKind.REPLICA:
                injected.at = at  # the fault took effect when the role called its API, perhaps long after the request
