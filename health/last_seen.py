"""What is kept of one replica and of one node: the values that :class:`rrl.health.sightings.Watch` writes and that the
detectors read. Times are the manager's clock (s) at receipt."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from math import inf
from typing import Literal

from msgspec import Struct

from rrl.health.activity import Activity
from rrl.health.pace import Pace
from rrl.health.probes import Probes
from rrl.spec.jobview import Limits
from rrl.spec.launch import ExitReason
from rrl.spec.phases import Phase
from rrl.spec.words import AGENT, Life, NodeName, ReplicaId, role_of

BEATS_MISSED = 4
"""beats without a word after which the cluster surely tells a job as suspended, if it is: at once (measured)"""
FLAPS = 4
"""Times that the cluster must cease to call a node up within ``FLAP_WINDOW`` before it counts as one that flaps: what a
restart of slurmd or of slurmctld does to it once or twice is not that."""
FLAP_WINDOW = 600.0
"""s, as ``recovery.window`` is by default"""
_UNNAMED = Phase("")


class StepEnd(Struct, frozen=True):
    """How the step of a life ended; ``at`` is when the manager learned it."""

    code: int | None
    signal: int | None
    reason: ExitReason
    at: float
    said: str = ""
    """its command's last line"""
    detail: str = ""
    """more about ``reason``, for people"""


@dataclass(slots=True, eq=False)
class RoleSighting:
    """What one replica of a role teaches of all."""

    answers: bool = False
    """The thread that waits for work is the one that answers probes. A program may well wait in another one: then its
    silence means nothing, however long. It is asked now and then, until an answer proves it."""
    tries: int = 0
    """so often it was asked for that"""
    slowest_load: float = 0.0
    """s: the longest that such a phase lately took"""
    tensor_seen: bool = False
    """tensor cores of one of it have worked: its work needs them"""
    loaded_since: float = -inf
    """when the newest pass of a phase of its own work (weights are loaded) began that came to its end"""


@dataclass(slots=True, eq=False)
class ReplicaSighting:
    """One life of one replica (an agent is one too), as last seen."""

    life: Life
    home: NodeSighting = field(repr=False)
    launched_at: float
    """or when this manager began to listen, if that is later"""
    last_heard: float
    last_source: str = "launch"
    status: Literal["launched", "joined"] = "launched"
    joined_at: float | None = None
    shadow: Life | None = None
    """it has not been launched, but was told to become this life, and has not been heard as such since"""
    within: float = 0.0
    """s for that"""
    phase: str | None = None
    declared: Phase = _UNNAMED
    """what the job says of ``phase``"""
    phase_since: float = 0.0
    """or since when it is not blocked by another replica any more, if that is later"""
    done: int | None = None
    done_changed_at: float = 0.0
    """when ``done`` last rose"""
    waits_for: ReplicaId | None = None
    beats: int = 0
    """beats heard since ``clock``: so many observations say that it stands still"""
    blocked_since: float | None = None
    """since when ``waits_for`` names somebody"""
    worked_before: bool = False
    """when it was first heard it had made progress already: under an earlier manager it has had its first pass"""
    usual: float | None = None
    """robust usual duration of this phase (s), frozen when ``clock`` started: a running deadline never moves"""
    slowest: float = 0.0
    """the longest of the durations that ``usual`` is of (s)"""
    passed: set[str] = field(default_factory=set)
    """phases that this life has been through once: their first-pass grace is spent"""
    whole: bool = False
    """the beginning of what ``clock`` measures was seen, so that its duration means something"""
    exit: StepEnd | None = None
    gone_witnessed_at: float | None = None
    alive_at: float | None = None
    """when its node's agent last said that its step lives"""
    goodbye_at: float | None = None
    """it said Goodbye: its silence is expected; its end is not, for nobody asked for it"""
    leaving_at: float | None = None
    """it was asked to stop: from then on its end and its silence are expected"""
    held_up: bool = False
    """a member of its gang is suspended: none of them can go on"""
    ganged: bool = False
    """its gang has other members"""
    activity: Activity = field(default_factory=Activity, repr=False)
    probes: Probes = field(default_factory=Probes, repr=False)
    role: RoleSighting = field(default_factory=RoleSighting, repr=False)
    """all replicas of a role share it"""
    pace: Pace = field(default_factory=Pace, repr=False)

    @property
    def node(self) -> NodeName:
        return self.home.node

    @property
    def is_agent(self) -> bool:
        return role_of(self.life.replica) == AGENT

    @property
    def ended(self) -> bool:
        return self.exit is not None or self.gone_witnessed_at is not None

    @property
    def left_at(self) -> float | None:
        """Since when nothing need be heard of it."""
        if self.goodbye_at is None or self.leaving_at is None:
            return self.goodbye_at if self.leaving_at is None else self.leaving_at
        return min(self.goodbye_at, self.leaving_at)

    @property
    def clock(self) -> float:
        """Since when nothing has moved: the phase began, ``done`` last rose, or another replica last blocked it."""
        return max(self.phase_since, self.done_changed_at)

    @property
    def first_pass(self) -> bool:
        return self.phase not in self.passed and not (self.worked_before and self.declared.progresses)


def loops(seen: ReplicaSighting) -> bool:
    """It is in a phase in which it merely waits for others, and asks again and again whether they are ready."""
    return seen.declared.waits_for is not None and not seen.declared.own_work


@dataclass(slots=True, eq=False)
class NodeSighting:
    """One node: who lives there, when anything there was last heard, and what the cluster says of it."""

    node: NodeName
    agent: ReplicaSighting | None = None
    former_agent: ReplicaSighting | None = field(default=None, repr=False)
    """forgotten since anything here was last heard, like ``departed``"""
    boot: str = ""
    last_heard: float | None = None
    """of anything on it, agent or replica"""
    residents: dict[Life, ReplicaSighting] = field(default_factory=dict, repr=False)
    departed: dict[Life, ReplicaSighting] = field(default_factory=dict, repr=False)
    """replaced or forgotten since anything here was last heard. Without them a lost node would look well as soon as its
    replicas are started elsewhere"""
    state: str | None = None
    """the cluster's last word; None = it has not spoken yet"""
    detail: str = ""
    """its words when it first said so"""
    since: float = 0.0
    observations: int = 0
    """readings in a row that said so"""
    down_said: tuple[float, str] | None = None
    """since when, and with which words, it was last called down"""
    suspended_at: float | None = None
    """the cluster said that everything on it is suspended, and nothing was heard of it since"""
    looked_at: float | None = None
    """when the cluster was last asked what becomes of it, and answered; None: it never has"""
    called_up: bool = False
    """by the newest reading"""
    flaps: deque[float] = field(default_factory=lambda: deque(maxlen=FLAPS), repr=False)
    """when the cluster last ceased to call it up"""

    def asked(self, limits: Limits) -> bool:
        """The cluster has said, since everything here fell silent, what becomes of its job."""
        since = self.last_heard if self.last_heard is not None else self.agent.last_heard if self.agent else 0.0
        return self.looked_at is not None and self.looked_at >= since + BEATS_MISSED * limits.beat
