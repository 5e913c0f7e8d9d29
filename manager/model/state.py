"""Everything the manager believes; :func:`rrl.manager.model.reducer.fold` is the only function that makes it.

State is also the head of each journal segment and what ``rrl status`` draws. It holds what was recorded, not what was
merely seen: heartbeats are kept in :class:`rrl.health.detection.health_monitor.HealthMonitor`, and silence becomes state
only as a finding.
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
"""what becomes of a launch that was handed over, and neither spoke nor was ever listed"""


class Status(StrEnum):
    """Where a replica's newest incarnation stands; ``serving`` and the like are its phase, not its status."""

    WANTED = "wanted"
    """to be launched (again)"""
    LAUNCHING = "launching"
    """handed to the cluster; its first process has not spoken yet"""
    STARTING = "starting"
    """its first process runs; the worker has not joined yet"""
    JOINED = "joined"
    RETIRED = "retired"
    """not wanted now: gone on without it until its failures have left the window, or the run is ending"""
    COMPLETED = "completed"
    """it has done its work, and is not started again"""


class FailedIncarnation(Struct, frozen=True):
    """A past launch, for budgets: when, where and why it failed."""

    at: float
    node: NodeName
    why: str = ""
    refused: bool = False
    """the cluster did not launch it there: the process never had its turn"""
    step: int = 0
    """the run's newest committed step at that time"""
    injected: bool = False
    """a fault was injected into it"""
    joined: bool = True
    """its life had joined: it failed at work, not on its way there"""
    not_started: str | None = None
    """what was reported of a command that could not be started at all; None: it could, or nobody knows"""
    detector: str = ""
    """the one whose finding it was fenced for; empty: it was not launched, or left for another reason"""


class AdmittedProcess(Struct, frozen=True):
    """The first process of a step: nobody else is admitted under its tag."""

    node: NodeName
    pid: int


class Replica(Struct, frozen=True):
    id: ReplicaId
    status: Status = Status.WANTED
    incarnation_number: int = 0
    """of its newest life; 0 = never launched"""
    since: float = 0.0
    """manager's time (s) of the last status change"""
    down_since: float = 0.0
    """manager's time (s) since which no life of it has worked, however often it was started meanwhile; while one works,
    of the last time"""
    node: NodeName | None = None
    allocation: str | None = None
    step: str | None = None
    """tag of the step of its newest life"""
    admitted_process: AdmittedProcess | None = None
    """who was admitted as its newest life"""
    pid: int | None = None
    host: str = ""
    phase: str = ""
    phase_since: float = 0.0
    past_phases: tuple[str, ...] = ()
    """phases that its newest life has left"""
    waits_for: ReplicaId | None = None
    note: str = ""
    """what its newest incarnation wants people to know of it"""
    listen_address: str | None = None
    weight_address: str | None = None
    weight_version: Version | None = None
    failures: tuple[FailedIncarnation, ...] = ()
    preferred_node: NodeName | None = None
    """where the ladder wants its next life (restart in place)"""
    promoted_from: Incarnation | None = None
    """its newest life is what this shadow became"""
    commits: int = 0
    """steps that its newest life committed (a gang's first member)"""
    not_before: float = 0.0
    """back-off: no launch before this time"""
    fault: str = ""
    """id of the fault that was injected into its newest life, or into that life's node"""
    ever_joined: bool = False
    """some life of it has joined"""
    failed_starts: int = 0
    """how many of its lives failed by themselves before any had joined"""

    @property
    def role(self) -> str:
        return role_of(self.id)

    @property
    def incarnation(self) -> Incarnation:
        return Incarnation(self.id, self.incarnation_number)

    @property
    def is_current(self) -> bool:
        """Its newest life counts: messages, commits and published versions of it are accepted."""
        return self.status in (Status.LAUNCHING, Status.STARTING, Status.JOINED)

    def recent_failures(self, window: float, now: float) -> list[FailedIncarnation]:
        """Its failures of the last ``window`` s."""
        return [start for start in self.failures if now < start.at + window]


class Node(Struct, frozen=True):
    name: NodeName
    allocation: str
    """tag of the one that it is in; empty: it has left, and is remembered because it is excluded"""
    node_group: str = ""
    """of the job's parts, the one that it serves"""
    status: NodeStatus | None = None
    excluded: str | None = None
    """why this run no longer uses it"""
    excluded_at: float = 0.0
    """manager's time (s) of that decision"""
    exclusions: int = 0
    """how often it was excluded"""
    proved: bool = False
    """by proof: it is not used again while that stands"""
    cause: Cause | None = None
    """of its exclusion, where one was found"""
    drain_requested_by: str = ""
    """who had it drained: it is not used again before somebody asks for that"""
    drain_requested_at: float = 0.0
    """manager's time (s) of that order"""
    drain_reason: str = ""
    """the reason of our own drain that stands on it"""
    drain_error: str = ""
    """why the cluster did not drain it for us: the administrators are asked to"""
    kept_because: str = ""
    """why it is not given back by itself (any more)"""
    snapshot_address: str = ""
    """where its agent keeps snapshots, ``tcp://host:port``"""
    probe_error: str | None = None
    """what it cannot do that roles need (``[env] probe``); empty: it can; None: its agent has not said yet"""


class Allocation(Struct, frozen=True):
    tag: str
    request: AllocationRequest
    requested_at: float
    """manager's time (s) of the request"""
    status: AllocationStatus | None = None
    releasing: bool = False
    not_before: float = 0.0
    """its give-back was refused: not asked for again before this time"""
    orphan: bool = False
    """it landed after it had been given up: never used, only given back"""
    status_at: float = 0.0
    """manager's time (s) of ``seen``"""
    running_since: float | None = None
    """manager's time (s) at which it was first seen to run: its walltime counts from about then"""
    unsatisfiable_since: float | None = None
    """manager's time (s) since which the cluster says that it never starts by itself"""
    ending_since: float | None = None
    """manager's time (s) at which it was first seen to end"""

    @property
    def ends_at(self) -> float:
        """Manager's time (s) at which the cluster takes it back, as it says itself, else as was agreed; inf while it
        does not run."""
        if self.running_since is None or self.suspended:
            return float("inf")
        if self.status is not None and self.status.time_left_s is not None:
            return self.status_at + self.status.time_left_s
        return self.running_since + self.request.walltime

    @property
    def pending(self) -> bool:
        """Nodes are still expected of it."""
        return not self.releasing and not self.orphan and not self.running and not self.ending

    @property
    def running(self) -> bool:
        """Its nodes are ours, though everything on them may stand still (``suspended``)."""
        held = not self.releasing and not self.orphan
        ours = (AllocationState.RUNNING, AllocationState.SUSPENDED)
        return held and self.status is not None and self.status.state in ours

    @property
    def ending(self) -> bool:
        """Nothing of it can be used any more; why, the cluster has yet to say."""
        return self.status is not None and self.status.state is AllocationState.ENDING

    @property
    def suspended(self) -> bool:
        return self.status is not None and self.status.state is AllocationState.SUSPENDED

    @property
    def reclaimed(self) -> bool:
        """The cluster takes it back before its time: whoever is on it leaves, and nobody is started there."""
        return self.running and self.status is not None and self.status.reclaimed


class OrphanStep(Struct, frozen=True):
    """A step of a life that is no longer believed and has not been seen to end."""

    incarnation: Incarnation
    node: NodeName
    allocation: str
    since: float
    stop_requested: bool = False
    """its end was asked for"""
    not_before: float = 0.0
    """that was refused: not asked for again before this time"""


class PendingIntent(Struct, frozen=True):
    """An intent whose result is not known yet. ``at``: manager's time (s) of the intent."""

    action: ExternalAction
    at: float


class RejectedRequest(Struct, frozen=True):
    tag: str
    at: float
    detail: str
    undelivered: bool = False
    """the cluster did not say so: the request never reached it, or was taken from its queue"""
    node_group: str = ""
    """of the job's parts, the one whose nodes were asked for"""


class State(Struct, frozen=True):
    run: str
    job: RunSpec
    seq: int = 0
    at: float = 0.0
    epoch: int = 0
    started: float = 0.0
    running_since: float | None = None
    """when the first nodes were first seen to run: the walltime counts from here, whatever replaces them"""
    requested_since: float | None = None
    """when nodes were first asked for"""
    requests_made: dict[str, int] = {}
    """requests ever made, by part: the tags of the next ones must be new"""
    launched: bool = False
    """a role was launched since the run began, or went on after it had ended"""
    past_incarnations: dict[ReplicaId, int] = {}
    """newest incarnation of replicas that the job had before it was resumed without them: none is used twice"""
    ended: float | None = None
    host: str = ""
    """where the manager runs"""
    managed_since: float = 0.0
    """when it started"""
    step: int = 0
    """newest committed trainer step"""
    metrics: dict[str, float] = {}
    """of that step"""
    rewards: Rewards = Rewards()
    token_ages: TokenAges = TokenAges()
    replicas: dict[ReplicaId, Replica] = {}
    nodes: dict[NodeName, Node] = {}
    allocations: dict[str, Allocation] = {}
    findings: dict[str, Finding] = {}
    """by Finding.key; only WARN and FAIL about living things"""
    baselines: dict[str, RoleBaseline] = {}
    """what is usual, by role"""
    intents: dict[str, PendingIntent] = {}
    """intended, result not yet known; by the action's tag"""
    rejected_requests: tuple[RejectedRequest, ...] = ()
    """requests that the cluster refused, newest last (within the recovery window)"""
    reclaimed: dict[str, str] = {}
    """allocations that the cluster took back, and its words; as long as somebody is believed who was there"""
    external_cancellations: tuple[float, ...] = ()
    """manager's times (s) at which the last that was left of the allocations ended, because somebody cancelled it"""
    orphan_steps: dict[str, OrphanStep] = {}
    """by step tag"""
    triggered_faults: tuple[str, ...] = ()
    """ids of the faults already set off, or refused"""
    requested_faults: tuple[Fault, ...] = ()
    """faults that people ordered and that are not yet due"""
    handled_commands: tuple[str, ...] = ()
    """ids of the commands already taken"""
    cancelled_by: str = ""
    """who asked for the run's end"""
    keep_allocations: bool = False
    """they want to keep the allocations"""
    requested_restarts: dict[ReplicaId, str] = {}
    """who asked for the restart of these replicas, and it has not begun"""
    node_commands: dict[NodeName, tuple[str, str]] = {}
    """nodes of which a person asked for a ``drain`` or ``undrain``, and who; until it is done"""
    full_restarts: tuple[float, ...] = ()
    """manager's times (s) of the restarts of the whole run within the recovery window"""
    recoveries: int = 0
    finish: Finish | None = None
    """how the run ends, once that is decided; everything is then given back"""
    outcome: Outcome | None = None
    """set by the last record"""
    why: str = ""

    @property
    def ends_at(self) -> float:
        """Manager's time (s) at which the walltime is over; inf while no nodes have come yet."""
        return float("inf") if self.running_since is None else self.running_since + self.job.walltime

    def replica(self, id: ReplicaId) -> Replica:
        return self.replicas.get(id) or Replica(id)

    def is_current(self, incarnation: Incarnation) -> bool:
        replica = self.replicas.get(incarnation.replica)
        return replica is not None and replica.is_current and replica.incarnation_number == incarnation.number
