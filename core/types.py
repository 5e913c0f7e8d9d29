"""The vocabulary of docs/glossary.md as types. Everybody may import this; it imports only msgspec.

Value types only: frozen, comparable, decodable. No behaviour beyond naming and ordering.
"""

from __future__ import annotations

import re
from enum import StrEnum
from functools import lru_cache
from typing import NewType

from msgspec import Struct

ReplicaId = NewType("ReplicaId", str)
"""``role/index``, for example ``rollout/1``; an agent's is ``agent/<node>``."""

NodeName = NewType("NodeName", str)

AGENT = "agent"
"""The role name of the small process on each node that samples, witnesses and sweeps."""

TRAINER = ReplicaId("trainer/0")
"""The trainer, or its gang's first member."""

STANDBY_ROLE = "standby"
"""The role name of the warm process on a node that becomes a member at once (:func:`shadow_id`)."""


_NAME_CACHE_SIZE = 65536
"""names taken apart once: a plan for a thousand nodes asks some ten thousand times"""


def replica_id(role: str, index: int | str) -> ReplicaId:
    return ReplicaId(f"{role}/{index}")


def member_id(replica: ReplicaId, rank: int) -> ReplicaId:
    """One process of a gang. Its first member bears the gang's own name: it is who speaks for it."""
    return replica if rank == 0 else ReplicaId(f"{replica}.{rank}")


@lru_cache(maxsize=_NAME_CACHE_SIZE)
def gang_of(member: ReplicaId) -> ReplicaId:
    """The replica that this is a member of: ``trainer/0`` of ``trainer/0.3``. Whoever is no gang is its own."""
    role, _, index = member.partition("/")
    return member if role in (AGENT, STANDBY_ROLE) else ReplicaId(f"{role}/{index.partition('.')[0]}")


def rank_of(member: ReplicaId) -> int:
    """Of a member within its gang; 0 of whoever is no gang."""
    role, _, index = member.partition("/")
    return 0 if role in (AGENT, STANDBY_ROLE) else int(index.partition(".")[2] or 0)


@lru_cache(maxsize=_NAME_CACHE_SIZE)
def role_of(replica: ReplicaId) -> str:
    return replica.partition("/")[0]


def standby_id(role: str, node: NodeName, slot: int | None = None) -> ReplicaId:
    """Of the process that is kept warm on a node to become one of ``role``: ``standby/<node>`` of the trainer,
    ``standby/<node>:rollout`` of another role; ``slot`` where several share the node: ``standby/<node>:<slot>``,
    ``standby/<node>:rollout.<slot>``."""
    parts = ("" if role == role_of(TRAINER) else role, "" if slot is None else str(slot))
    mark = ".".join(part for part in parts if part)
    return replica_id(STANDBY_ROLE, f"{node}:{mark}" if mark else node)


@lru_cache(maxsize=_NAME_CACHE_SIZE)
def standby_role_of(standby: ReplicaId) -> str:
    """The role that a shadow can become one of."""
    mark = index_of(standby).partition(":")[2].partition(".")[0]
    return role_of(TRAINER) if not mark or mark.isdigit() else mark


def index_of(replica: ReplicaId) -> str:
    return replica.partition("/")[2]


@lru_cache(maxsize=_NAME_CACHE_SIZE)
def natural_sort_key(name: str) -> tuple[tuple[int, str], ...]:
    """Sort key of names as people count: n2 before n10."""
    return tuple((int(part), "") if part.isdigit() else (0, part) for part in re.split(r"(\d+)", name))


class Incarnation(Struct, frozen=True, order=True):
    """One incarnation of one replica: the fencing token that every message carries."""

    replica: ReplicaId
    number: int

    def __str__(self) -> str:
        return f"{self.replica}#{self.number}"

    @property
    def gang(self) -> Incarnation:
        """The life that its gang shares: all members are launched with one incarnation, and fenced with it."""
        return Incarnation(gang_of(self.replica), self.number)


class Version(Struct, frozen=True, order=True):
    """A weight version. Orders by step, then by the trainer incarnation that published it."""

    step: int
    incarnation: int

    def __str__(self) -> str:
        return f"v{self.step}.{self.incarnation}"


class Verdict(StrEnum):
    OK = "OK"
    WARN = "WARN"
    FAIL = "FAIL"
    UNKNOWN = "UNKNOWN"


WORST_FIRST = (Verdict.FAIL, Verdict.WARN, Verdict.UNKNOWN, Verdict.OK)


class Cause(StrEnum):
    """Whose fault a finding is."""

    PROCESS = "process"
    """the role's own process: it exited, was killed, raised"""
    HANG = "hang"
    """alive, yet not doing what its phase requires"""
    NODE = "node"
    GPU = "gpu"
    FABRIC = "fabric"
    STORAGE = "storage"
    SOFTWARE = "software"
    USER = "user"


class Remedy(StrEnum):
    NONE = "none"
    RESTART = "restart"
    EXCLUDE = "exclude"
    RESET_GPU = "reset_gpu"
    REBOOT = "reboot"
    DRAIN = "drain"
    SUPPORT = "support"


class Flag(StrEnum):
    """What is special about a finding, beside its verdict and cause: for whoever decides something by it."""

    NOT_STARTED = "not_started"
    """a command could not be started at all; its first evidence says why"""
    OBSERVED = "observe_only"
    """the job's or the site's settings keep it from having consequences"""
    HELD_BACK = "held_back"
    """it was downgraded, because something shared by several nodes is the likelier cause"""
    UNAVAILABLE = "unavailable"
    """nothing on this node can answer the check"""
    ON_MOST_NODES = "on_most_nodes"
    """the same was found on most nodes of the run at nearly the same time"""


class ProbeResult(StrEnum):
    """What a worker replies to a probe."""

    WORKS = "works"
    FAILED = "failed"
    """the handler raised"""
    NO_HANDLER = "no_handler"
    """the process lives; its role has registered nothing that a probe could call"""


STACKS = "stacks"
"""source of evidence that was read off the stacks of processes"""


class Evidence(Struct, frozen=True):
    """One reading that speaks for or against a replica or node. ``at`` is the manager's receipt time (s)."""

    source: str
    text: str
    at: float


class Finding(Struct, frozen=True):
    """What a detector concludes. ``life`` for a replica, else ``node``; neither where it is about the run as a whole.

    ``proof`` marks a reading that is enough by itself (an exit record, Slurm says DOWN, Xid 79).
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
    """of the node, what it is about: a GPU's UUID, a port (``mlx5_0/1``), a path; empty: the whole"""
    flags: tuple[Flag, ...] = ()
    """what decisions go by beside verdict, cause and remedy; never the text of the evidence"""
    shared: tuple[Cause, str, str] | None = None
    """of a finding about the run as a whole: the cause, detector and part that findings of several nodes or replicas
    have in common"""

    @property
    def key(self) -> str:
        """Identity across time: the same detector about the same thing is the same finding."""
        return f"{self.detector}:{self.incarnation or self.node or 'run'}" + (
            f":{self.component}" if self.component else ""
        )


class Outcome(StrEnum):
    """How a run ended."""

    COMPLETED = "completed"
    CANCELLED = "cancelled"
    FAILED = "failed"
    REJECTED = "rejected"
    """the job spec asks for what cannot be here: correct it and submit again"""
