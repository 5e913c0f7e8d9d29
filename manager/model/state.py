"""The state of a run, as the manager knows it. Only :func:`rrl.manager.model.reducer.fold` creates a State.

The head of each journal segment contains a State, and ``rrl status`` displays it. A State holds recorded facts only: a
missed heartbeat is kept in :class:`rrl.health.detection.health_monitor.HealthMonitor`, and reaches the State as a
finding.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from functools import cached_property

from msgspec import Struct

from ...cluster.base import AllocationRequest, AllocationState, AllocationStatus, NodeStatus
from ...core.faults import Fault
from ...core.run_spec import RunSpec
from ...core.types import (
    GUEST_ROLE,
    Cause,
    Finding,
    GpuUse,
    Incarnation,
    NodeName,
    Outcome,
    OutsideWait,
    RaisedException,
    ReplicaId,
    Version,
    WeightTraffic,
    gang_of,
    is_support,
    role_of,
)
from ...health.detection.baselines import RoleBaseline
from .actions import ExternalAction, Finish
from .figures.balance import Sample
from .figures.idle_times import IdleTimes
from .figures.reward_curve import Rewards
from .figures.step_times import Commit
from .figures.stream_figures import EpisodeFigures, StreamFigures
from .figures.token_ages import TokenAges

NEVER_APPEARED = "its step never appeared"
"""Detail text of a launch that the cluster accepted, but whose step never reported to the manager and was never listed
by the cluster."""


class Status(StrEnum):
    """Status of the newest incarnation of a replica. What a working replica does is its phase (``core.phases``)."""

    WANTED = "wanted"
    """The replica waits for its launch, for the first time or again."""
    LAUNCHING = "launching"
    """The incarnation is being launched; its first process has not reported yet."""
    STARTING = "starting"
    """The incarnation's first process runs; its worker has not joined yet."""
    JOINED = "joined"
    RETIRED = "retired"
    """The replica is not launched: the run continues degraded until the replica's failures have left the window, or the
    run is ending."""
    COMPLETED = "completed"
    """The replica has finished its work and is never started again."""


_CURRENT = frozenset({Status.LAUNCHING, Status.STARTING, Status.JOINED})


class FailedIncarnation(Struct, frozen=True):
    """A failed launch or incarnation, kept for the failure budget: when, where and why it failed."""

    at: float
    node: NodeName
    why: str = ""
    refused: bool = False
    """True if the cluster did not launch the incarnation, so that no process of it ran."""
    step: int = 0
    """Newest finished training step of the run at the time of the failure (:func:`.queries.reached_step`)."""
    injected: bool = False
    """True if a fault had been injected into the incarnation."""
    joined: bool = True
    """True if the incarnation had joined before it failed."""
    not_started: str | None = None
    """Error text if the command could not be started; None if it was started, or if this is unknown."""
    detector: str = ""
    """Detector whose finding led to the fence of the incarnation; empty if it was not launched, or failed without a
    finding."""
    crowded: bool = False
    """True if the trainer found too little memory on its GPUs while guests shared them."""


class UnchargedRestart(Struct, frozen=True):
    """The stop of a replica that had not failed, for example because of a drain or a user's request."""

    at: float
    node: NodeName
    why: str


class AdmittedProcess(Struct, frozen=True):
    """The first process of a step. No other process is admitted under the step's tag."""

    node: NodeName
    pid: int


class Replica(Struct, frozen=True):
    """The record of a replica: its newest incarnation and its failures."""

    id: ReplicaId
    status: Status = Status.WANTED
    incarnation_number: int = 0
    """Number of the newest incarnation; 0 if the replica was never launched."""
    since: float = 0.0
    """Manager's time (s) of the last status change."""
    down_since: float = 0.0
    """Manager's time (s) since which no incarnation of the replica has worked, even if several were started. While an
    incarnation works, this is the start of the previous downtime."""
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
    outside: OutsideWait | None = None
    """For the store: what the whole run waits for outside of itself; None if it waits for nobody outside."""
    outside_since: float = 0.0
    """Manager's time (s) since which it waits for that."""
    listen_address: str | None = None
    weight_address: str | None = None
    rendezvous_address: str | None = None
    weight_version: Version | None = None
    traffic: WeightTraffic = WeightTraffic()
    """What the newest incarnation has received of all its weight versions, as of the newest record."""
    traffic_before: WeightTraffic = WeightTraffic()
    """The same as of the record before. The difference is the traffic of its newest versions."""
    failures: tuple[FailedIncarnation, ...] = ()
    uncharged_restart: UnchargedRestart | None = None
    """The newest restart that did not count against the replica's budget. When a gang restarts, it is recorded only for
    the member that was stopped first."""
    preferred_node: NodeName | None = None
    """Node that the repair ladder chose for the next incarnation."""
    returned: bool = False
    """True if the replica was sent back to its own node for lack of another, and has not joined since."""
    promoted_from: Incarnation | None = None
    """Incarnation of the standby process that was promoted to the newest incarnation."""
    commits: int = 0
    """Training steps that the newest incarnation committed (counted at a gang's first member)."""
    advanced: bool = False
    """True once the newest incarnation holds weights of a later step than its first weights. For a trainer, this means
    that it has trained a step."""
    not_before: float = 0.0
    """Manager's time (s) of the earliest next launch (back-off)."""
    fault: str = ""
    """Id of the fault that was injected into the newest incarnation, or into its node."""
    ever_joined: bool = False
    """True if any incarnation has joined."""
    failed_starts: int = 0
    """Number of incarnations that failed, other than by an injected fault or a refusal, before any incarnation had
    joined."""
    ever_worked: bool = False
    """True if any incarnation has completed a unit of work since the run began or was last resumed."""
    last_exception: RaisedException | None = None
    """Exception of the role's code that ended the newest failed incarnation; None if the incarnation failed for another
    reason, or if the replica has done a unit of work since then."""
    exception_starts: int = 0
    """Number of incarnations in a row that ``last_exception`` ended before their first unit of work."""
    clean_exits: int = 0
    """Number of incarnations in a row whose program returned with exit code 0 soon after its start
    (:func:`rrl.manager.model.queries.returned_early`)."""

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
        return self.status in _CURRENT

    def recent_failures(self, window: float, now: float) -> list[FailedIncarnation]:
        """Return the failures of the last ``window`` seconds."""
        return [failure for failure in self.failures if now < failure.at + window]


class ReleaseResult(StrEnum):
    """The cluster's answer to the release of a single node from its allocation."""

    RELEASED = "released"
    """The cluster has released the node; the next poll no longer lists it."""
    REFUSED = "refused"


class Node(Struct, frozen=True):
    """The record of a node that the run holds, or that the run held earlier and must not use again."""

    name: NodeName
    allocation: str
    """Tag of the node's allocation; empty if the run no longer holds the node and only records that it is excluded."""
    node_group: str = ""
    """Name of the job's node group that the node serves."""
    status: NodeStatus | None = None
    excluded: str | None = None
    """Reason why the run stopped using the node; None if the run uses it."""
    excluded_at: float = 0.0
    """Manager's time (s) of the exclusion."""
    exclusions: int = 0
    """Number of times that the node was excluded."""
    proved: bool = False
    """True if the node was excluded by a finding with proof; it is not used again while this finding stands."""
    cause: Cause | None = None
    """Cause of the exclusion, if one was found."""
    lost_spare: bool = False
    """True if the run, not a user, excluded the node while no replica but extras was on it. The run then lacks a spare
    node."""
    drain_requested_by: str = ""
    """User who requested the node's drain; the node is not used again before a user undrains it."""
    drain_requested_at: float = 0.0
    """Manager's time (s) at which a user requested the node's drain."""
    drain_reason: str = ""
    """Reason text of this run's drain of the node; empty if no drain of this run is in force on the node."""
    drain_error: str = ""
    """Why the cluster refused to drain the node for this run, so that an administrator has to drain it; empty if it did
    not refuse."""
    release_result: ReleaseResult | None = None
    """Result of the release of this single node; None before it was tried. The release is tried only once."""
    snapshot_address: str = ""
    """Address of the snapshot server of the node's agent, ``tcp://host:port``."""
    probe_error: str | None = None
    """What ``[env] probe`` found missing on the node, as text. Empty if nothing is missing; None until the node's agent
    has reported."""


class Allocation(Struct, frozen=True):
    """An allocation of the run, recorded from its request until its end."""

    tag: str
    request: AllocationRequest
    requested_at: float
    """Manager's time (s) of the request."""
    status: AllocationStatus | None = None
    releasing: bool = False
    not_before: float = 0.0
    """Manager's time (s) before which a refused request or release is not made again."""
    orphan: bool = False
    """True if the run has given the allocation up, for example before it was granted. It is released, never used."""
    status_at: float = 0.0
    """Manager's time (s) at which ``status`` was recorded."""
    running_since: float | None = None
    """Manager's time (s) at which the allocation was first observed to run; its walltime counts from about this
    time."""
    unsatisfiable_since: float | None = None
    """Manager's time (s) since which the cluster reports that the request can never be met."""
    ending_since: float | None = None
    """Manager's time (s) at which the allocation was first observed to be ending."""
    suspended_since: float | None = None
    """Manager's time (s) at which the allocation was first observed to be suspended; None if it is not suspended."""
    suspended_s: float = 0.0
    """Total seconds of its earlier suspensions."""

    @property
    def ends_at(self) -> float:
        """Return the manager's time (s) at which the cluster ends this allocation; inf while it does not run.

        It is computed from the remaining time that the cluster reports, else from the requested walltime.
        """
        if self.running_since is None or self.suspended:
            return float("inf")
        if self.status is not None and self.status.time_left_s is not None:
            return self.status_at + self.status.time_left_s
        return self.running_since + self.request.walltime + self.suspended_s

    def used_s(self, now: float) -> float:
        """Return how long (s) the allocation has run until ``now`` (manager's time, s), without its suspensions."""
        if self.running_since is None:
            return 0.0
        return (now if self.suspended_since is None else self.suspended_since) - self.running_since - self.suspended_s

    @property
    def pending(self) -> bool:
        """Return whether the cluster may still grant the nodes of this allocation."""
        return not self.releasing and not self.orphan and not self.running and not self.ending

    @property
    def refused(self) -> bool:
        """Return whether the cluster refused the request for now, so that it is made again."""
        return self.pending and self.status is not None and self.status.state is AllocationState.REFUSED

    @property
    def running(self) -> bool:
        """Return whether the nodes of this allocation belong to the run now, including while it is suspended."""
        granted = (AllocationState.RUNNING, AllocationState.SUSPENDED)
        used = not self.releasing and not self.orphan
        return used and self.status is not None and self.status.state in granted

    @property
    def ending(self) -> bool:
        """Return whether this allocation is ending for a reason not reported yet; nothing can be started in it."""
        return self.status is not None and self.status.state is AllocationState.ENDING

    @property
    def suspended(self) -> bool:
        """Return whether the cluster has suspended this allocation."""
        return self.status is not None and self.status.state is AllocationState.SUSPENDED

    @property
    def reclaimed(self) -> bool:
        """Return whether the cluster takes this allocation back early, so that its replicas have to move away."""
        return self.running and self.status is not None and self.status.reclaimed


class OrphanStep(Struct, frozen=True):
    """A step of a fenced incarnation whose end has not been observed."""

    incarnation: Incarnation
    node: NodeName
    allocation: str
    since: float
    stop_requested: bool = False
    """True if the manager has requested that the cluster stops the step."""
    not_before: float = 0.0
    """Manager's time (s) before which a refused stop is not requested again."""


class PendingIntent(Struct, frozen=True):
    """An intent whose result is not known yet; ``at`` is the manager's time (s) of the intent."""

    action: ExternalAction
    at: float


class RejectedRequest(Struct, frozen=True):
    """An allocation request that was certainly not granted. One that is only refused for now stays an allocation."""

    tag: str
    at: float
    detail: str
    undelivered: bool = False
    """True if the cluster did not reject the request: the request never reached the cluster, was removed from the
    queue, or its allocation ended right after it began."""
    node_group: str = ""
    """Name of the job's node group whose nodes were requested."""
    unanswered_since: float | None = None
    """Manager's time (s) since which the cluster answers no request of the node group; None if it answered this one."""


class PoolState(Struct, frozen=True):
    """What is recorded about an elastic rollout pool, apart from its replicas and its allocations."""

    resized_step: int = 0
    """Training step that was committed when the number of replicas last changed; -1 after a user's command, which need
    not wait for the next step."""
    held: int | None = None
    """Number of replicas that a user has set; None if the planner chooses it."""
    spent_node_s: float = 0.0
    """Node seconds that the pool's ended allocations have used, over all resumes."""


MAX_EVALUATIONS = 64
"""Maximum number of evaluations in the state: the first evaluation and the newest evaluations."""


class Evaluation(Struct, frozen=True):
    """The result of an evaluation: the training step of its weights, and its metrics by name (docs/evaluation.md)."""

    step: int
    metrics: dict[str, float]


class State(Struct, frozen=True, dict=True):
    """Everything that is recorded about a run: the fold of its journal."""

    run: str
    job: RunSpec
    seq: int = 0
    at: float = 0.0
    epoch: int = 0
    started: float = 0.0
    running_since: float | None = None
    """Manager's time (s) at which the first nodes were observed to run. The run's walltime counts from this time."""
    requested_since: float | None = None
    """Manager's time (s) of the first allocation request."""
    requests_made: dict[str, int] = {}
    """Number of requests ever made, by node group; the tags of new requests continue this count."""
    launched: bool = False
    """True if a role was launched since the run began or was last resumed."""
    past_incarnations: dict[ReplicaId, int] = {}
    """Newest incarnation number of each replica that the job no longer has, after a resume or because its pool became
    smaller, so that no number is used twice."""
    ended: float | None = None
    """Manager's time (s) at which the run ended."""
    paused_s: float = 0.0
    """Total seconds between an end of the run and its next resume."""
    host: str = ""
    """Host that the manager runs on."""
    managed_since: float = 0.0
    """Manager's time (s) at which the current manager started."""
    step: int = 0
    """Newest committed training step."""
    metrics: dict[str, float] = {}
    """Metrics of the newest committed training step."""
    evaluations: tuple[Evaluation, ...] = ()
    """The first and the newest evaluations (:data:`MAX_EVALUATIONS` in all), in the order of their steps."""
    rewards: Rewards = Rewards()
    token_ages: TokenAges = TokenAges()
    idle_times: IdleTimes = IdleTimes()
    balance: tuple[Sample, ...] = ()
    """Totals of the newest committed steps, in a job with an elastic rollout pool."""
    stream_figures: StreamFigures = StreamFigures()
    episode_figures: EpisodeFigures = EpisodeFigures()
    commits: tuple[Commit, ...] = ()
    """The newest commits since the run began or was resumed, in the order of their steps."""
    ettr: float | None = None
    """Effective training time ratio at the newest record of it; None until one step is undisturbed."""
    gpu_use: dict[NodeName, GpuUse] = {}
    """Use of the GPUs by node: the newest record, which has only nodes that reported since the record before it."""
    gpu_use_at: float = 0.0
    """Manager's time (s) of the record in ``gpu_use``."""
    replicas: Mapping[ReplicaId, Replica] = {}
    nodes: Mapping[NodeName, Node] = {}
    allocations: Mapping[str, Allocation] = {}
    pools: dict[str, PoolState] = {}
    """Records of the elastic rollout pools, by role."""
    cluster_unknown: str = ""
    """Why the cluster's present state is unknown; empty if it is known."""
    cluster_unknown_since: float = 0.0
    """Manager's time (s) since which it is unknown."""
    findings: Mapping[str, Finding] = {}
    """Standing WARN and FAIL findings, by ``Finding.key``. Findings about an incarnation are kept only while it is
    current."""
    baselines: dict[str, RoleBaseline] = {}
    """Learned baselines, by role."""
    intents: Mapping[str, PendingIntent] = {}
    """Intents without a result yet, by the action's tag."""
    rejected_requests: tuple[RejectedRequest, ...] = ()
    """Requests within the recovery window that were not granted, newest last."""
    reclaimed: dict[str, str] = {}
    """The cluster's explanation for each allocation that it took back, by tag. It is kept while a replica that ran
    there is current."""
    external_cancellations: tuple[float, ...] = ()
    """Manager's times (s) at which somebody other than this run cancelled its last remaining allocation."""
    orphan_steps: Mapping[str, OrphanStep] = {}
    """Orphan steps, by tag."""
    triggered_faults: tuple[str, ...] = ()
    """Ids of the faults that were injected or rejected."""
    requested_faults: tuple[Fault, ...] = ()
    """Faults that users requested and that are not due yet."""
    handled_commands: tuple[str, ...] = ()
    """Ids of the user commands that were taken from the mailbox."""
    cancelled_by: str = ""
    """User who cancelled the run; empty if no user has cancelled it."""
    keep_allocations: bool = False
    """True if the user who cancelled the run wants to keep the allocations."""
    requested_restarts: Mapping[ReplicaId, str] = {}
    """User who requested the restart of a replica, by replica; kept until the restart begins."""
    node_commands: Mapping[NodeName, tuple[str, str]] = {}
    """Pending ``drain`` or ``undrain`` of a node and the user who requested it, by node."""
    full_restarts: tuple[float, ...] = ()
    """Manager's times (s), within the recovery window, of the restarts of the whole run."""
    recoveries: int = 0
    guests_withdrawn: bool = False
    """True once the run goes on without guests, until a user resumes it."""
    finish: Finish | None = None
    """Decision that ends the run and fixes its outcome; None while the run continues."""
    outcome: Outcome | None = None
    """Outcome of the run, set by its last record."""
    why: str = ""

    # ── computed once for each state that is asked ───────────────────────────────────────────────────────────────────
    @cached_property
    def workers(self) -> tuple[Replica, ...]:
        """Return the members of the job's roles, without agents, standby processes and guests."""
        return tuple(replica for replica in self.replicas.values() if not is_support(replica.id))

    @cached_property
    def guests(self) -> tuple[Replica, ...]:
        """Return the rollouts on nodes of the trainer, also those that do not run now."""
        return tuple(replica for replica in self.replicas.values() if replica.role == GUEST_ROLE)

    @cached_property
    def gangs(self) -> tuple[list[Replica], ...]:
        """Return for each gang the list of its members in order of rank; the gangs are in the order of the job spec."""
        members_by_gang: dict[ReplicaId, list[Replica]] = {}
        for member in self.workers:
            members_by_gang.setdefault(gang_of(member.id), []).append(member)
        return tuple(members_by_gang.values())

    @cached_property
    def occupied(self) -> frozenset[NodeName]:
        """Return the nodes on which a current incarnation of a role is."""
        return frozenset(member.node for member in self.workers if member.is_current and member.node is not None)

    @cached_property
    def worked(self) -> frozenset[str]:
        """Return the roles of which a replica has completed, or has worked since the run began or was last resumed."""
        did = (one for one in self.replicas.values() if one.ever_worked or one.status is Status.COMPLETED)
        return frozenset(one.role for one in did)

    @cached_property
    def findings_about(self) -> dict[Incarnation | NodeName, list[Finding]]:
        """Return the standing findings about each incarnation and each node."""
        findings: dict[Incarnation | NodeName, list[Finding]] = {}
        for finding in self.findings.values():
            for subject in (finding.incarnation, finding.node):
                if subject is not None:
                    findings.setdefault(subject, []).append(finding)
        return findings

    @property
    def evaluated(self) -> int:
        """Return the newest step with a known evaluation; -1 if there is no such step."""
        return self.evaluations[-1].step if self.evaluations else -1

    @property
    def ends_at(self) -> float:
        """Return the manager's time (s) at which the run's walltime is over; inf until the run has its first nodes."""
        return float("inf") if self.running_since is None else self.running_since + self.job.walltime

    def run_seconds(self, now: float) -> float:
        """Return the run time (s) up to ``now`` (manager's time, s) or the end of the run.

        The pauses before a resume do not count.
        """
        return (now if self.ended is None else self.ended) - self.started - self.paused_s

    def replica(self, id: ReplicaId) -> Replica:
        """Return the replica with this id; if none is recorded, return a replica that was never launched."""
        return self.replicas.get(id) or Replica(id)

    def is_current(self, incarnation: Incarnation) -> bool:
        """Return whether this incarnation is current: the newest of its replica, launched and not fenced."""
        replica = self.replicas.get(incarnation.replica)
        return replica is not None and replica.is_current and replica.incarnation_number == incarnation.number
