"""Everything the manager believes; :func:`rrl.manager.model.reducer.fold` is the only function that makes it.

State is also the head of each journal segment and what ``rrl status`` draws. It holds what was recorded, not what was
merely seen: silence lives in :class:`rrl.health.detection.watch.Watch` and becomes state only as a finding.
"""

from __future__ import annotations

from enum import StrEnum

from msgspec import Struct

from ...core.faults import Fault
from ...core.run_spec import JobView
from ...core.types import (
    Cause,
    Finding,
    Life,
    NodeName,
    Outcome,
    ReplicaId,
    Version,
    role_of,
)
from ...health.detection.baselines import Lesson
from ..cluster.base import AllocationSeen, AllocationState, Ask, NodeSeen
from .actions import Finish, Outside
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


class Start(Struct, frozen=True):
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


class First(Struct, frozen=True):
    """The first process of a step: nobody else is admitted under its tag."""

    node: NodeName
    pid: int


class Replica(Struct, frozen=True):
    id: ReplicaId
    status: Status = Status.WANTED
    incarnation: int = 0
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
    first: First | None = None
    """who was admitted as its newest life"""
    pid: int | None = None
    host: str = ""
    phase: str = ""
    phase_since: float = 0.0
    passed: tuple[str, ...] = ()
    """phases that its newest life has left"""
    waits_for: ReplicaId | None = None
    note: str = ""
    """what its newest incarnation wants people to know of it"""
    listens: str | None = None
    serves: str | None = None
    holds: Version | None = None
    failures: tuple[Start, ...] = ()
    prefer: NodeName | None = None
    """where the ladder wants its next life (restart in place)"""
    shadow: Life | None = None
    """its newest life is what this shadow became"""
    commits: int = 0
    """steps that its newest life committed (a gang's first member)"""
    not_before: float = 0.0
    """back-off: no launch before this time"""
    fault: str = ""
    """id of the fault that was injected into its newest life, or into that life's node"""
    ever_joined: bool = False
    """some life of it has joined"""
    unstarted: int = 0
    """how many of its lives failed by themselves before any had joined"""

    @property
    def role(self) -> str:
        return role_of(self.id)

    @property
    def life(self) -> Life:
        return Life(self.id, self.incarnation)

    @property
    def believed(self) -> bool:
        """Its newest life counts: messages, commits and published versions of it are accepted."""
        return self.status in (Status.LAUNCHING, Status.STARTING, Status.JOINED)

    def recent(self, window: float, now: float) -> list[Start]:
        """Its failures of the last ``window`` s."""
        return [start for start in self.failures if now < start.at + window]


class Node(Struct, frozen=True):
    name: NodeName
    allocation: str
    """tag of the one that it is in; empty: it has left, and is remembered because it is excluded"""
    part: str = ""
    """of the job's parts, the one that it serves"""
    seen: NodeSeen | None = None
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
    asked_by: str = ""
    """who had it drained: it is not used again before somebody asks for that"""
    asked_at: float = 0.0
    """manager's time (s) of that order"""
    drained: str = ""
    """the reason of our own drain that stands on it"""
    not_drained: str = ""
    """why the cluster did not drain it for us: the administrators are asked to"""
    stays: str = ""
    """why it is not given back by itself (any more)"""
    keeps: str = ""
    """where its agent keeps snapshots, ``tcp://host:port``"""
    probe: str | None = None
    """what it cannot do that roles need (``[env] probe``); empty: it can; None: its agent has not said yet"""


class Allocation(Struct, frozen=True):
    tag: str
    ask: Ask
    at: float
    """manager's time (s) of the request"""
    seen: AllocationSeen | None = None
    releasing: bool = False
    not_before: float = 0.0
    """its give-back was refused: not asked for again before this time"""
    stray: bool = False
    """it landed after it had been given up: never used, only given back"""
    seen_at: float = 0.0
    """manager's time (s) of ``seen``"""
    running_since: float | None = None
    """manager's time (s) at which it was first seen to run: its walltime counts from about then"""
    hopeless_since: float | None = None
    """manager's time (s) since which the cluster says that it never starts by itself"""
    ending_since: float | None = None
    """manager's time (s) at which it was first seen to end"""

    @property
    def ends(self) -> float:
        """Manager's time (s) at which the cluster takes it back, as it says itself, else as was agreed; inf while it
        does not run."""
        if self.running_since is None or self.suspended:
            return float("inf")
        if self.seen is not None and self.seen.left is not None:
            return self.seen_at + self.seen.left
        return self.running_since + self.ask.walltime

    @property
    def pending(self) -> bool:
        """Nodes are still expected of it."""
        return not self.releasing and not self.stray and not self.running and not self.ending

    @property
    def running(self) -> bool:
        """Its nodes are ours, though everything on them may stand still (``suspended``)."""
        held = not self.releasing and not self.stray
        ours = (AllocationState.RUNNING, AllocationState.SUSPENDED)
        return held and self.seen is not None and self.seen.state in ours

    @property
    def ending(self) -> bool:
        """Nothing of it can be used any more; why, the cluster has yet to say."""
        return self.seen is not None and self.seen.state is AllocationState.ENDING

    @property
    def suspended(self) -> bool:
        return self.seen is not None and self.seen.state is AllocationState.SUSPENDED

    @property
    def taken(self) -> bool:
        """The cluster takes it back before its time: whoever is on it leaves, and nobody is started there."""
        return self.running and self.seen is not None and self.seen.taken


class Lingering(Struct, frozen=True):
    """A step of a life that is no longer believed and has not been seen to end."""

    life: Life
    node: NodeName
    allocation: str
    since: float
    asked: bool = False
    """its end was asked for"""
    not_before: float = 0.0
    """that was refused: not asked for again before this time"""


class Open(Struct, frozen=True):
    """An intent whose result is not known yet. ``at``: manager's time (s) of the intent."""

    action: Outside
    at: float


class Refusal(Struct, frozen=True):
    tag: str
    at: float
    detail: str
    unheard: bool = False
    """the cluster did not say so: the request never reached it, or was taken from its queue"""
    part: str = ""
    """of the job's parts, the one whose nodes were asked for"""


class State(Struct, frozen=True):
    run: str
    job: JobView
    seq: int = 0
    at: float = 0.0
    epoch: int = 0
    started: float = 0.0
    running_since: float | None = None
    """when the first nodes were first seen to run: the walltime counts from here, whatever replaces them"""
    asked_since: float | None = None
    """when nodes were first asked for"""
    asked: dict[str, int] = {}
    """requests ever made, by part: the tags of the next ones must be new"""
    launched: bool = False
    """a role was launched since the run began, or went on after it had ended"""
    past: dict[ReplicaId, int] = {}
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
    lessons: dict[str, Lesson] = {}
    """what is usual, by role"""
    intents: dict[str, Open] = {}
    """intended, result not yet known; by the action's tag"""
    refusals: tuple[Refusal, ...] = ()
    """requests that the cluster refused, newest last (within the recovery window)"""
    taken_back: dict[str, str] = {}
    """allocations that the cluster took back, and its words; as long as somebody is believed who was there"""
    emptied: tuple[float, ...] = ()
    """manager's times (s) at which the last that was left of the allocations ended, because somebody cancelled it"""
    lingering: dict[str, Lingering] = {}
    """by step tag"""
    faults: tuple[str, ...] = ()
    """ids of the faults already set off, or refused"""
    ordered: tuple[Fault, ...] = ()
    """faults that people ordered and that are not yet due"""
    commands: tuple[str, ...] = ()
    """ids of the commands already taken"""
    cancelled_by: str = ""
    """who asked for the run's end"""
    keep: bool = False
    """they want to keep the allocations"""
    restarts: dict[ReplicaId, str] = {}
    """who asked for the restart of these replicas, and it has not begun"""
    marks: dict[NodeName, tuple[str, str]] = {}
    """nodes of which a person asked for a ``drain`` or ``undrain``, and who; until it is done"""
    wholes: tuple[float, ...] = ()
    """manager's times (s) of the restarts of the whole run within the recovery window"""
    recoveries: int = 0
    verdict: Finish | None = None
    """how the run ends, once that is decided; everything is then given back"""
    outcome: Outcome | None = None
    """set by the last record"""
    why: str = ""

    @property
    def ends(self) -> float:
        """Manager's time (s) at which the walltime is over; inf while no nodes have come yet."""
        return float("inf") if self.running_since is None else self.running_since + self.job.walltime

    def replica(self, id: ReplicaId) -> Replica:
        return self.replicas.get(id) or Replica(id)

    def believed(self, life: Life) -> bool:
        held = self.replicas.get(life.replica)
        return held is not None and held.believed and held.incarnation == life.incarnation
