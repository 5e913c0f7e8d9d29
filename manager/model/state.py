"""The state of a run, as the manager knows it. Only :func:`rrl.manager.model.reducer.fold` makes one.

The state is also the head of each journal segment and what ``rrl status`` draws. It holds recorded facts only: a missed
heartbeat is kept in :class:`rrl.health.detection.health_monitor.HealthMonitor` and reaches the state as a finding.
"""

from __future__ import annotations

from enum import StrEnum

from msgspec import Struct

from ...core.faults import Fault
from ...core.run_spec import RunSpec
from ...core.types import (
    Cause,
    Finding,
    Incarnation,
    NodeName,
    Outcome,
    ReplicaId,
    Version,
    role_of,
)
from ...health.detection.baselines import RoleBaseline
from ..cluster.base import AllocationRequest, AllocationState, AllocationStatus, NodeStatus
from .actions import ExternalAction, Finish
from .reward_curve import Rewards
from .token_ages import TokenAges

NEVER_APPEARED = "its step never appeared"
"""Detail of a launch that the cluster accepted, but whose step neither reported to the manager nor was ever listed."""


class Status(StrEnum):
    """Where the newest incarnation of a replica stands. What it does while it works is its phase, not its status."""

    WANTED = "wanted"
    """To be launched, for the first time or again."""
    LAUNCHING = "launching"
    """Its launch was given to the cluster; its first process has not reported yet."""
    STARTING = "starting"
    """Its first process runs; its worker has not joined yet."""
    JOINED = "joined"
    RETIRED = "retired"
    """Not to be launched for now: the run continues degraded until the failures have left the budget's window, or it is
    ending."""
    COMPLETED = "completed"
    """Finished with its work; never started again."""


class FailedIncarnation(Struct, frozen=True):
    """A failed launch or incarnation, kept for the failure budget: when, where and why it failed."""

    at: float
    node: NodeName
    why: str = ""
    refused: bool = False
    """True if the cluster did not launch the incarnation, so that none of its processes ran."""
    step: int = 0
    """Newest committed training step of the run at that time."""
    injected: bool = False
    """True if a fault had been injected into the incarnation."""
    joined: bool = True
    """True if the incarnation had joined: it failed at work, not while it started."""
    not_started: str | None = None
    """Report of a command that could not be started at all; None if it could, or if that is unknown."""
    detector: str = ""
    """Detector whose finding the incarnation was fenced for; empty if it was not launched, or ended for
    another reason."""


class AdmittedProcess(Struct, frozen=True):
    """The first process of a step. No other process is admitted under the step's tag."""

    node: NodeName
    pid: int


class Replica(Struct, frozen=True):
    """What is recorded of a replica: its newest incarnation and its failures."""

    id: ReplicaId
    status: Status = Status.WANTED
    incarnation_number: int = 0
    """Number of the newest incarnation; 0 if the replica was never launched."""
    since: float = 0.0
    """Manager's time (s) of the last status change."""
    down_since: float = 0.0
    """Manager's time (s) since which no incarnation has worked, however often it was started; while one works, the
    previous such time."""
    node: NodeName | None = None
    allocation: str | None = None
    step: str | None = None
    """Tag of the newest incarnation's step."""
    admitted_process: AdmittedProcess | None = None
    """Process that was admitted as the newest incarnation."""
    pid: int | None = None
    host: str = ""
    phase: str = ""
    phase_since: float = 0.0
    past_phases: tuple[str, ...] = ()
    """Phases that the newest incarnation has left."""
    waits_for: ReplicaId | None = None
    note: str = ""
    """Message for users that the newest incarnation reported about itself."""
    listen_address: str | None = None
    weight_address: str | None = None
    weight_version: Version | None = None
    failures: tuple[FailedIncarnation, ...] = ()
    preferred_node: NodeName | None = None
    """Node that the repair ladder chose for the next incarnation."""
    promoted_from: Incarnation | None = None
    """Incarnation of the standby process that was promoted to the newest incarnation."""
    commits: int = 0
    """Training steps that the newest incarnation committed (counted at a gang's first member)."""
    not_before: float = 0.0
    """Manager's time (s) of the earliest next launch (back-off)."""
    fault: str = ""
    """Id of the fault that was injected into the newest incarnation, or into its node."""
    ever_joined: bool = False
    """True if any incarnation has joined."""
    failed_starts: int = 0
    """Number of incarnations that failed by themselves before any had joined."""

    @property
    def role(self) -> str:
        """Return the role's name."""
        return role_of(self.id)

    @property
    def incarnation(self) -> Incarnation:
        """Return the newest incarnation."""
        return Incarnation(self.id, self.incarnation_number)

    @property
    def is_current(self) -> bool:
        """Return whether messages, commits and versions of the newest incarnation are accepted."""
        return self.status in (Status.LAUNCHING, Status.STARTING, Status.JOINED)

    def recent_failures(self, window: float, now: float) -> list[FailedIncarnation]:
        """Return the failures of the last ``window`` seconds."""
        return [failure for failure in self.failures if now < failure.at + window]


class ReleaseResult(StrEnum):
    """The cluster's answer to the release of a single node from its allocation."""

    RELEASED = "released"
    """Done; the next poll no longer lists the node."""
    REFUSED = "refused"


class Node(Struct, frozen=True):
    """What is recorded of a node that the run has, or of one that it had and must not use again."""

    name: NodeName
    allocation: str
    """Tag of its allocation; empty if the node has left and is only remembered because it is excluded."""
    node_group: str = ""
    """Name of the job's node group that it serves."""
    status: NodeStatus | None = None
    excluded: str | None = None
    """Reason why the run stopped using it; None if the run uses it."""
    excluded_at: float = 0.0
    """Manager's time (s) of the exclusion."""
    exclusions: int = 0
    """Number of times that it was excluded."""
    proved: bool = False
    """True if it was excluded by proof: it is not used again while that proof stands."""
    cause: Cause | None = None
    """Cause of the exclusion, if one was found."""
    drain_requested_by: str = ""
    """User who requested its drain: it is not used again before a user requests that."""
    drain_requested_at: float = 0.0
    """Manager's time (s) of that request."""
    drain_reason: str = ""
    """Reason text of this run's own drain that is in force."""
    drain_error: str = ""
    """Why the cluster refused to drain it for this run, so that an administrator has to."""
    release_result: ReleaseResult | None = None
    """Result of releasing this single node, which is tried once; None before."""
    snapshot_address: str = ""
    """Address of its agent's snapshot server, ``tcp://host:port``."""
    probe_error: str | None = None
    """What it lacks that the roles need (``[env] probe``); empty if nothing; None until its agent has reported."""


class Allocation(Struct, frozen=True):
    """An allocation of the run, from its request on."""

    tag: str
    request: AllocationRequest
    requested_at: float
    """Manager's time (s) of the request."""
    status: AllocationStatus | None = None
    releasing: bool = False
    not_before: float = 0.0
    """Manager's time (s) before which a refused release is not requested again."""
    orphan: bool = False
    """True if it was granted after the run had given it up: it is never used, only released."""
    status_at: float = 0.0
    """Manager's time (s) of ``status``."""
    running_since: float | None = None
    """Manager's time (s) at which it was first observed to run; its walltime counts from about then."""
    unsatisfiable_since: float | None = None
    """Manager's time (s) since which the cluster reports that it can never start by itself."""
    ending_since: float | None = None
    """Manager's time (s) at which it was first observed to end."""

    @property
    def ends_at(self) -> float:
        """Return the manager's time (s) at which the cluster takes the allocation back; inf while it does not run.

        The cluster's own figure is used where it gives one, else the requested walltime.
        """
        if self.running_since is None or self.suspended:
            return float("inf")
        if self.status is not None and self.status.time_left_s is not None:
            return self.status_at + self.status.time_left_s
        return self.running_since + self.request.walltime

    @property
    def pending(self) -> bool:
        """Return whether the cluster may still grant its nodes."""
        return not self.releasing and not self.orphan and not self.running and not self.ending

    @property
    def running(self) -> bool:
        """Return whether its nodes belong to the run, even if all their processes are suspended."""
        granted = (AllocationState.RUNNING, AllocationState.SUSPENDED)
        used = not self.releasing and not self.orphan
        return used and self.status is not None and self.status.state in granted

    @property
    def ending(self) -> bool:
        """Return whether it is ending, so that nothing can be started in it; the cluster reports the reason later."""
        return self.status is not None and self.status.state is AllocationState.ENDING

    @property
    def suspended(self) -> bool:
        """Return whether the cluster has suspended it."""
        return self.status is not None and self.status.state is AllocationState.SUSPENDED

    @property
    def reclaimed(self) -> bool:
        """Return whether the cluster takes it back early: replicas on it move away, and none is started there."""
        return self.running and self.status is not None and self.status.reclaimed


class OrphanStep(Struct, frozen=True):
    """A step of a fenced incarnation whose end has not been observed."""

    incarnation: Incarnation
    node: NodeName
    allocation: str
    since: float
    stop_requested: bool = False
    """True if the cluster was requested to stop it."""
    not_before: float = 0.0
    """Manager's time (s) before which a refused stop is not requested again."""


class PendingIntent(Struct, frozen=True):
    """An intent whose result is not known yet. ``at``: manager's time (s) of the intent."""

    action: ExternalAction
    at: float


class RejectedRequest(Struct, frozen=True):
    """An allocation request that was certainly not granted."""

    tag: str
    at: float
    detail: str
    undelivered: bool = False
    """True if the cluster did not reject it: it never reached the cluster, or was taken from its queue."""
    node_group: str = ""
    """Name of the job's node group whose nodes were requested."""


class State(Struct, frozen=True):
    """Everything that is recorded about a run: the fold of its journal."""

    run: str
    job: RunSpec
    seq: int = 0
    at: float = 0.0
    epoch: int = 0
    started: float = 0.0
    running_since: float | None = None
    """Manager's time (s) at which the first nodes were first observed to run: the run's walltime counts
    from then on."""
    requested_since: float | None = None
    """Manager's time (s) of the first allocation request."""
    requests_made: dict[str, int] = {}
    """Number of requests ever made, by node group: the tags of new ones are numbered on from it."""
    launched: bool = False
    """True if a role was launched since the run began or was last resumed."""
    past_incarnations: dict[ReplicaId, int] = {}
    """Newest incarnation number of replicas that a resumed run no longer has: no number is used twice."""
    ended: float | None = None
    """Manager's time (s) at which the run ended."""
    host: str = ""
    """Host that the manager runs on."""
    managed_since: float = 0.0
    """Manager's time (s) at which the current manager started."""
    step: int = 0
    """Newest committed training step."""
    metrics: dict[str, float] = {}
    """Metrics of that step."""
    rewards: Rewards = Rewards()
    token_ages: TokenAges = TokenAges()
    replicas: dict[ReplicaId, Replica] = {}
    nodes: dict[NodeName, Node] = {}
    allocations: dict[str, Allocation] = {}
    findings: dict[str, Finding] = {}
    """Standing WARN and FAIL findings, by ``Finding.key``; those about replicas only while the incarnation
    is current."""
    baselines: dict[str, RoleBaseline] = {}
    """Learned baselines, by role."""
    intents: dict[str, PendingIntent] = {}
    """Intents without a result yet, by the action's tag."""
    rejected_requests: tuple[RejectedRequest, ...] = ()
    """Requests that were not granted, newest last, within the recovery window."""
    reclaimed: dict[str, str] = {}
    """Allocations that the cluster took back, with its explanation, while a replica that was on one is current."""
    external_cancellations: tuple[float, ...] = ()
    """Manager's times (s) at which the last remaining allocation ended because it was cancelled from outside."""
    orphan_steps: dict[str, OrphanStep] = {}
    """Orphan steps, by tag."""
    triggered_faults: tuple[str, ...] = ()
    """Ids of the faults that were injected or rejected."""
    requested_faults: tuple[Fault, ...] = ()
    """Faults that users requested and that are not due yet."""
    handled_commands: tuple[str, ...] = ()
    """Ids of the user commands that were taken from the mailbox."""
    cancelled_by: str = ""
    """User who cancelled the run; empty if none did."""
    keep_allocations: bool = False
    """True if that user wants to keep the allocations."""
    requested_restarts: dict[ReplicaId, str] = {}
    """User who requested the restart of a replica, by replica, until that restart begins."""
    node_commands: dict[NodeName, tuple[str, str]] = {}
    """Pending ``drain`` or ``undrain`` of a node and the user who requested it, by node."""
    full_restarts: tuple[float, ...] = ()
    """Manager's times (s) of the restarts of the whole run within the recovery window."""
    recoveries: int = 0
    finish: Finish | None = None
    """Decision how the run ends; from then on everything is released."""
    outcome: Outcome | None = None
    """Outcome of the run, set by its last record."""
    why: str = ""

    @property
    def ends_at(self) -> float:
        """Return the manager's time (s) at which the run's walltime is over; inf while it has had no nodes."""
        return float("inf") if self.running_since is None else self.running_since + self.job.walltime

    def replica(self, id: ReplicaId) -> Replica:
        """Return the replica of this id, or a new one that was never launched."""
        return self.replicas.get(id) or Replica(id)

    def is_current(self, incarnation: Incarnation) -> bool:
        """Return whether this incarnation is current: the newest of its replica, launched and not fenced."""
        replica = self.replicas.get(incarnation.replica)
        return replica is not None and replica.is_current and replica.incarnation_number == incarnation.number
