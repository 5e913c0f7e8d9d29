"""The vocabulary of docs/glossary.md as value types: frozen, comparable, decodable.

Every module may import this module, which imports only msgspec. The types only name and order things.
"""

from __future__ import annotations

import re
from enum import StrEnum
from functools import lru_cache
from typing import Literal, NewType

from msgspec import Struct

ReplicaId = NewType("ReplicaId", str)
"""``role/index``, for example ``rollout/1``; an agent's id is ``agent/<node>``."""

NodeName = NewType("NodeName", str)

LogLevel = Literal["debug", "info", "warning", "error"]
DEFAULT_LOG_LEVEL: LogLevel = "info"

AGENT = "agent"
"""The role name of the agent: the process on each node that samples the node, witnesses the ends of steps and kills
processes that a step left behind."""

STORE = ReplicaId("trajectories/0")
"""The trajectory store."""
TRAINER = ReplicaId("trainer/0")
"""The trainer, or the first member of its gang."""

STANDBY_ROLE = "standby"
"""The role name of a standby process, which waits on a node to be promoted to a member of the trainer."""

GUEST_ROLE = "guest"
"""The role name of a guest: a rollout on a node of the trainer, which generates while the trainer lends its GPUs."""

SUPPORT_ROLES = (AGENT, STANDBY_ROLE, GUEST_ROLE)
"""The roles that belong to nodes and are not in the job."""


_NAME_CACHE_SIZE = 65536
"""Maximum number of parsed names in each cache. A plan for a thousand nodes parses some ten thousand names."""


def replica_id(role: str, index: int | str) -> ReplicaId:
    """Return the id ``role/index``."""
    return ReplicaId(f"{role}/{index}")


def member_id(replica: ReplicaId, rank: int) -> ReplicaId:
    """Return the id of one process of a gang. The first member has the gang's own id and reports for the gang."""
    return replica if rank == 0 else ReplicaId(f"{replica}.{rank}")


@lru_cache(maxsize=_NAME_CACHE_SIZE)
def gang_of(member: ReplicaId) -> ReplicaId:
    """Return the replica that ``member`` belongs to: ``trainer/0`` for ``trainer/0.3``."""
    role, _, index = member.partition("/")
    return member if role in SUPPORT_ROLES else ReplicaId(f"{role}/{index.partition('.')[0]}")


def is_trainer(replica: ReplicaId) -> bool:
    """Return whether the replica is the trainer or a member of its gang."""
    return gang_of(replica) == TRAINER


def is_support(replica: ReplicaId) -> bool:
    """Return whether the replica is an agent, a standby process or a guest, which only support the roles of the job."""
    return role_of(replica) in SUPPORT_ROLES


def rank_of(member: ReplicaId) -> int:
    """Return the rank of a member within its gang; 0 for a single process."""
    role, _, index = member.partition("/")
    return 0 if role in SUPPORT_ROLES else int(index.partition(".")[2] or 0)


@lru_cache(maxsize=_NAME_CACHE_SIZE)
def role_of(replica: ReplicaId) -> str:
    """Return the role name in a replica id."""
    return replica.partition("/")[0]


def standby_id(node: NodeName, slot: int | None = None) -> ReplicaId:
    """Return the id of the process on ``node`` that waits to be promoted to a member of the trainer.

    The id is ``standby/<node>``, or ``standby/<node>:<slot>`` if there may be several on the node.
    """
    return replica_id(STANDBY_ROLE, node if slot is None else f"{node}:{slot}")


def guest_id(node: NodeName, slot: int | None = None) -> ReplicaId:
    """Return the id of a guest on ``node``; with a ``slot`` if there may be several."""
    return replica_id(GUEST_ROLE, node if slot is None else f"{node}:{slot}")


def slot_of(guest: ReplicaId) -> int:
    """Return which of the guests of its node this one is, from 0 on."""
    return int(index_of(guest).partition(":")[2] or 0)


def index_of(replica: ReplicaId) -> str:
    """Return the part of a replica id after the slash: an index, ``index.rank``, or a node name."""
    return replica.partition("/")[2]


@lru_cache(maxsize=_NAME_CACHE_SIZE)
def natural_sort_key(name: str) -> tuple[tuple[int, str], ...]:
    """Return a sort key that compares numbers in names by value: n2 sorts before n10."""
    return tuple((int(part), "") if part.isdigit() else (0, part) for part in re.split(r"(\d+)", name))


class Incarnation(Struct, frozen=True, order=True):
    """One execution of one replica: the fencing token that every message carries."""

    replica: ReplicaId
    number: int

    def __str__(self) -> str:
        return f"{self.replica}#{self.number}"

    @property
    def gang(self) -> Incarnation:
        """Return the incarnation of the gang. It has the same number, since all members are launched together."""
        return Incarnation(gang_of(self.replica), self.number)


class Version(Struct, frozen=True):
    """A weight version: the step after which it was published, and the trainer incarnation that published it.

    Versions are ordered by their time of publication, so the incarnation is compared first: a restarted trainer may
    have gone back some steps, but its versions are newer than all versions of its predecessor.
    """

    step: int
    incarnation: int

    def __lt__(self, other: Version) -> bool:
        return self._published < other._published

    def __le__(self, other: Version) -> bool:
        return self._published <= other._published

    def __gt__(self, other: Version) -> bool:
        return self._published > other._published

    def __ge__(self, other: Version) -> bool:
        return self._published >= other._published

    @property
    def _published(self) -> tuple[int, int]:
        return self.incarnation, self.step

    def __str__(self) -> str:
        return f"v{self.step}.{self.incarnation}"


class Verdict(StrEnum):
    """The result of a detector or check."""

    OK = "OK"
    WARN = "WARN"
    FAIL = "FAIL"
    UNKNOWN = "UNKNOWN"


WORST_FIRST = (Verdict.FAIL, Verdict.WARN, Verdict.UNKNOWN, Verdict.OK)


class Cause(StrEnum):
    """What failed, according to a finding."""

    PROCESS = "process"
    """The role's own process exited, was killed or raised an exception."""
    HANG = "hang"
    """The process runs, but does not do what its phase requires."""
    NODE = "node"
    GPU = "gpu"
    FABRIC = "fabric"
    STORAGE = "storage"
    SOFTWARE = "software"
    USER = "user"


class Remedy(StrEnum):
    """What would repair the failure of a finding."""

    NONE = "none"
    RESTART = "restart"
    EXCLUDE = "exclude"
    RESET_GPU = "reset_gpu"
    REBOOT = "reboot"
    DRAIN = "drain"
    SUPPORT = "support"


class Flag(StrEnum):
    """Properties of a finding that decisions depend on, beside its verdict and cause."""

    NOT_STARTED = "not_started"
    """A command could not be started at all; the first evidence contains the reason."""
    OBSERVED = "observe_only"
    """The settings of the job or the site rule out any action because of this finding."""
    HELD_BACK = "held_back"
    """The finding was downgraded, because a cause shared by several nodes is more likely."""
    UNAVAILABLE = "unavailable"
    """The result is unknown because the node lacks the source that the check reads."""
    INVALID_CONFIG = "invalid_config"
    """A built-in role found the job's configuration invalid; the first evidence is the role's message."""
    INPUT_CHANGED = "input_changed"
    """An input file of the run has changed; the first evidence is the message of the role that found it."""
    ON_MOST_NODES = "on_most_nodes"
    """Most nodes of the run had the same finding at nearly the same time."""
    CLEAN_EXIT = "clean_exit"
    """A process exited with code 0 without a stop request: its program returned although the run was not complete."""
    STORAGE_STALLS = "storage_stalls"
    """Storage does not answer on the node now, so that a replica there may have to wait for files."""


class ProbeResult(StrEnum):
    """A worker's reply to a probe."""

    WORKS = "works"
    FAILED = "failed"
    """The handler raised an exception."""
    NO_HANDLER = "no_handler"
    """The process runs, but its role has registered no probe handler."""


class OutsideKind(StrEnum):
    """What only somebody outside of the run can give."""

    EPISODE = "episode"
    """An outside agent must open an episode."""
    AGENT = "agent"
    """An outside agent must go on with an episode that it has opened, and for which no call of it is open."""
    REWARD = "reward"
    """The reward of a finished episode must be posted."""


class OutsideWait(Struct, frozen=True):
    """A wait of the whole run for somebody outside of it, according to the store."""

    kind: OutsideKind
    episode: int | None = None
    """The episode that has been missing longest; None for ``EPISODE``."""
    seconds: float = 0.0
    """Time (s) since the agent opened or finished the episode; for ``EPISODE``, since the trainer waits."""


class DataReport(Struct, frozen=True):
    """What the store knows about the data that the trainer needs next."""

    untaken: bool = False
    """Whether the store has the data, and the trainer does not request them."""
    outside: OutsideWait | None = None
    """What the run waits for outside of itself: without it, the data cannot become complete. None if replicas of the
    run can still complete the data."""
    holders: frozenset[ReplicaId] = frozenset()
    """Replicas that hold some of what the data lack."""
    only_holders: bool = False
    """Whether nobody else can complete the data, because they hold all of it."""


class WeightTraffic(Struct, frozen=True, array_like=True):
    """What a process has received of the weight versions that it has pulled: counters, which never decrease."""

    received: int = 0
    """Bytes received for these versions, with those of the protocol."""
    nbytes: int = 0
    """Full size of these versions in bytes."""
    fallbacks: int = 0
    """Number of deltas that did not result in the right bytes, so that the whole chunk was requested."""

    def since(self, earlier: WeightTraffic) -> WeightTraffic:
        """Return what has been received after ``earlier``; 0 for a counter that a faulty process has decreased."""
        return WeightTraffic(
            max(0, self.received - earlier.received),
            max(0, self.nbytes - earlier.nbytes),
            max(0, self.fallbacks - earlier.fallbacks),
        )


STACKS = "stacks"
"""Source name of evidence from the stacks of processes."""


class Evidence(Struct, frozen=True):
    """One observation for or against a replica or node. ``at`` is the manager's receipt time (s)."""

    source: str
    text: str
    at: float


OUT_OF_GPU_MEMORY = ("torch.OutOfMemoryError", "torch.cuda.OutOfMemoryError")
"""Types of torch's exception for too little memory on the GPU; the second one is its name before torch 2.5."""


class RaisedException(Struct, frozen=True):
    """The uncaught exception that ended a Python process which uses the worker API, as the process itself reports it.

    ``fingerprint`` identifies the type of the exception and where it was raised. It does not include the message, which
    may contain an address or a number that differs each time.
    """

    type: str
    """Name of the class, with its module unless it is built in: ``TypeError``, ``zmq.error.ZMQError``."""
    message: str
    place: str
    """``file:line`` of the innermost frame in the user's own code; the file is relative to the job's folder."""
    fingerprint: str
    environmental: bool = False
    """True if storage, network or memory may have caused the exception, so that a later start may succeed."""
    unrepairable: str | None = None
    """Why every further start would end in the same way, for people; None if a start may help."""
    counts_always: bool = False
    """True if the exception ends the run after some starts although the role has worked before: rrl raised it because
    the role's code breaks a rule of the worker API, or because a model returned values that are not finite."""

    @property
    def out_of_gpu_memory(self) -> bool:
        """Return whether torch found too little memory on the GPU."""
        return self.type in OUT_OF_GPU_MEMORY

    def __str__(self) -> str:
        return f"{self.type}: {self.message} ({self.place})" if self.message else f"{self.type} ({self.place})"


_TITLES = {"exit_record": "process ended", "step_gone": "process gone"}
"""Names for people of the detectors whose identifiers do not explain themselves."""


def title_of(detector: str) -> str:
    """Return the name of a detector or check for people, such as ``process ended`` for ``exit_record``."""
    return _TITLES.get(detector) or detector.replace("_", " ")


class Finding(Struct, frozen=True):
    """The conclusion of a detector or check about a replica (``incarnation``), a node (``node``) or the run (neither).

    ``proof`` means that this observation alone suffices to act (an exit record, a node that Slurm reports as DOWN, Xid
    79).
    """

    detector: str
    verdict: Verdict
    cause: Cause
    remedy: Remedy
    since: float
    evidence: tuple[Evidence, ...]
    incarnation: Incarnation | None = None
    node: NodeName | None = None
    proof: bool = False
    component: str = ""
    """Component of the node: a GPU's UUID, a port (``mlx5_0/1``) or a path; empty for the whole node."""
    flags: tuple[Flag, ...] = ()
    """Properties that decisions depend on, beside verdict, cause and remedy. No decision depends on the text of the
    evidence."""
    shared: tuple[Cause, str, str] | None = None
    """Cause, detector and component that the findings of several nodes or replicas have in common; only set in a
    finding about the run."""
    exception: RaisedException | None = None
    """Exception that ended the process; only set if the finding is about the end of a process that reported an
    exception."""

    @property
    def title(self) -> str:
        """Return the name of the detector or check in words, for people."""
        return title_of(self.detector)

    @property
    def key(self) -> str:
        """Return the key that identifies the finding over time: its detector, subject and component."""
        return f"{self.detector}:{self.incarnation or self.node or 'run'}" + (
            f":{self.component}" if self.component else ""
        )


class GpuUse(Struct, frozen=True, array_like=True):
    """How much the GPUs of one node were used when the node's agent read them last."""

    gpus: int
    """Number of GPUs that the run may use on the node."""
    busy: float | None
    """Mean share of the time (0 to 1) in which a kernel ran on the GPUs; None if unknown."""
    memory_used: int
    """Bytes of the GPUs' memory that are in use, by any process; 0 if unknown."""
    memory_total: int
    """Bytes of the GPUs' memory; 0 if unknown."""


class Outcome(StrEnum):
    """How a run ended."""

    COMPLETED = "completed"
    CANCELLED = "cancelled"
    FAILED = "failed"
    REJECTED = "rejected"
    """The job spec requests something impossible on this cluster; it must be corrected and submitted again."""


class UsageError(Exception):
    """The request is not valid, for example the job spec or the name of a run. A command exits with code 2."""


class OperationFailed(Exception):
    """A valid request could not be carried out, or the run failed. A command exits with code 1."""


class Resources(Struct, frozen=True):
    """CPUs, GPUs and memory that a member uses, or that a node provides."""

    cpus: int = 1
    gpus: int = 0
    mem: int = 0
    """Bytes of memory; 0 stands for the cluster's default."""
