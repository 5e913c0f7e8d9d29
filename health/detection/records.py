"""What is kept of one replica and of one node: written by :class:`rrl.health.detection.watch.Watch`, read by detectors.

Times are the manager's clock (s) at receipt. Loads of CPU and GPU come from the node's agent every few seconds. They
count as evidence only while they arrive without a gap: an agent that is silent or cannot measure says nothing about who
is idle. A busy GPU is no proof of progress either, where a collective spins (``spins``). A probe asks a replica for a
small piece of real work; its answer is stronger evidence than a heartbeat, which a thread of its own sends.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from math import inf
from typing import Literal

from msgspec import Struct

from ...core.launch import ExitReason
from ...core.phases import Phase
from ...core.run_spec import Limits
from ...core.types import AGENT, Life, NodeName, ProbeResult, ReplicaId, role_of
from .baselines import Pace

GAP = 15.0
"""s between two loads after which nobody knows what was in between; the agent tells some every 2 s"""
IDLE_CPU = 0.05
"""cores: who does nothing but beat takes less than 0.01 (measured), an idle engine of several processes 0.02 to 0.04"""
IDLE_GPU = 0.02
"""share of the time in which a kernel ran"""
HOST_CPU = 0.5
"""cores from which a CPU counts as at work for a GPU that idles: an evaluation, advantages, a batch that is prepared"""
SPIN_GPU = 0.9
"""share from which a GPU counts as kept by a kernel; NCCL's that waits for a peer keeps it wholly"""
SPIN_TENSOR = 0.01
"""share of the time in which tensor cores worked, below which they do not"""


@dataclass(slots=True)
class Activity:
    """Of one life. Times are those at which a load said so: silence of the agent moves nothing."""

    at: float | None = None
    """of the newest load"""
    idle_since: float | None = None
    """neither CPU nor GPU has worked since, in all loads without a gap"""
    idle_loads: int = 0
    """loads in a row that say so"""
    dark_since: float | None = None
    """no kernel has run since; of who has no GPU, the same as ``idle_since``. Enough against who tells of tokens"""
    spins_since: float | None = None
    """its GPU has been kept since by kernels that compute nothing"""
    spin_loads: int = 0
    works: bool = False
    """by the newest load: a kernel ran; of who has no GPU, the CPU worked"""
    kernels: bool = False
    """by the newest load, a kernel ran"""
    hosts: bool = False
    """by the newest load, its GPU idled and its CPU did not"""
    runs: bool = False
    """by the newest load, its CPU worked, as that of a stopped process does not, whatever keeps its GPU"""
    kernels_seen: bool = False
    """a kernel has run before"""
    tensor_seen: bool = False
    """its tensor cores have worked before: without that their silence says nothing"""
    tensor_at: float | None = None
    """of the newest load that says that they worked"""

    def add(
        self, cpu: float, gpu: float | None, now: float, tensor: float | None = None, must_show: bool = False
    ) -> None:
        """A load: cores taken, the share of the time (0 to 1) in which a kernel ran and in which tensor cores worked,
        both None where nobody can say; all since the load before. ``must_show``: its work is known to need tensor
        cores, though its own were not seen at work yet."""
        if self.at is None or now - self.at > GAP:
            self.rest()
        since = now if self.at is None else self.at
        idle = cpu < IDLE_CPU and (gpu is None or gpu < IDLE_GPU)
        kept = gpu is not None and gpu >= SPIN_GPU and tensor is not None and tensor < SPIN_TENSOR
        spins = kept and (self.tensor_seen or must_show)
        self.idle_since, self.idle_loads = _run(idle, self.idle_since, self.idle_loads, since)
        dark = idle if gpu is None else gpu < IDLE_GPU
        self.dark_since = (since if self.dark_since is None else self.dark_since) if dark else None
        self.spins_since, self.spin_loads = _run(spins, self.spins_since, self.spin_loads, since)
        self.works = not idle and (gpu is None or gpu >= IDLE_GPU)
        self.kernels = gpu is not None and gpu >= IDLE_GPU
        self.kernels_seen = self.kernels_seen or self.kernels
        self.runs = cpu >= IDLE_CPU
        self.hosts = gpu is not None and gpu < IDLE_GPU and cpu >= HOST_CPU
        if tensor is not None and tensor >= SPIN_TENSOR:
            self.tensor_seen, self.tensor_at = True, now
        self.at = now

    def rest(self) -> None:
        """Nothing is known any more."""
        self.at = self.idle_since = self.dark_since = self.spins_since = self.tensor_at = None
        self.idle_loads = self.spin_loads = 0
        self.works = self.kernels = self.hosts = self.runs = False

    def idle_for(self, since: float) -> float:
        """s that it was seen idle, counted from ``since`` on; below 0: not at all."""
        if self.at is None or self.idle_since is None:
            return -1.0
        return self.at - max(self.idle_since, since)

    def dark_for(self, since: float) -> float:
        if self.at is None or self.dark_since is None:
            return -1.0
        return self.at - max(self.dark_since, since)

    def spins_for(self, since: float) -> float:
        if self.at is None or self.spins_since is None:
            return -1.0
        return self.at - max(self.spins_since, since)


def _run(holds: bool, since: float | None, loads: int, began: float) -> tuple[float | None, int]:
    if not holds:
        return None, 0
    return (began if since is None else since), loads + 1


TRIES = 16
"""questions to a role that waits, after which it counts as one that does not answer then"""


@dataclass(slots=True)
class Probes:
    """Since the replica last moved. Whoever moves needs no probe: ``rest``."""

    asked_at: float | None = None
    """when it was first asked without having answered since"""
    last_asked: float = 0.0
    beats: int = 0
    """beats heard since ``asked_at``: it lives, and could have answered"""
    answered_at: float | None = None
    """when it last answered that it works"""
    answers: int = 0
    """so often in a row, in this standstill"""
    failed: tuple[float, str] | None = None
    """when it said that it does not work, and why"""
    mute: bool = False
    """its role cannot be asked: time alone judges it"""

    def ask(self, now: float) -> None:
        if self.asked_at is None:
            self.asked_at, self.beats = now, 0
        self.last_asked = now

    def answer(self, result: ProbeResult, detail: str, now: float) -> None:
        """Take an answer. A late one, to a probe that is no longer open, only shows whether the role has a handler."""
        if result is ProbeResult.NO_HANDLER:
            self.mute = True
            self.rest()
        elif self.asked_at is None:
            return
        elif result is ProbeResult.WORKS:
            self.asked_at, self.answered_at, self.failed = None, now, None
            self.answers += 1
        else:
            self.asked_at, self.failed = None, (now, detail)

    def rest(self) -> None:
        self.asked_at = self.answered_at = self.failed = None
        self.last_asked, self.beats, self.answers = 0.0, 0, 0


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
