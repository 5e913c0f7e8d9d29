"""What is kept of one replica and of one node: written by :class:`rrl.health.detection.health_monitor.Watch`, read by detectors.

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
from ...core.types import AGENT, Incarnation, NodeName, ProbeResult, ReplicaId, role_of
from .baselines import Throughput

MAX_LOAD_GAP_S = 15.0
"""s between two loads after which nobody knows what was in between; the agent tells some every 2 s"""
IDLE_CPU_CORES = 0.05
"""cores: who does nothing but beat takes less than 0.01 (measured), an idle engine of several processes 0.02 to 0.04"""
IDLE_GPU_SHARE = 0.02
"""share of the time in which a kernel ran"""
HOST_WORK_CPU_CORES = 0.5
"""cores from which a CPU counts as at work for a GPU that idles: an evaluation, advantages, a batch that is prepared"""
SPIN_GPU_SHARE = 0.9
"""share from which a GPU counts as kept by a kernel; NCCL's that waits for a peer keeps it wholly"""
SPIN_TENSOR_SHARE = 0.01
"""share of the time in which tensor cores worked, below which they do not"""


@dataclass(slots=True)
class LoadHistory:
    """Of one life. Times are those at which a load said so: silence of the agent moves nothing."""

    latest_at: float | None = None
    """of the newest load"""
    idle_since: float | None = None
    """neither CPU nor GPU has worked since, in all loads without a gap"""
    idle_loads: int = 0
    """loads in a row that say so"""
    gpu_idle_since: float | None = None
    """no kernel has run since; of who has no GPU, the same as ``idle_since``. Enough against who tells of tokens"""
    spinning_since: float | None = None
    """its GPU has been kept since by kernels that compute nothing"""
    spinning_loads: int = 0
    working: bool = False
    """by the newest load: a kernel ran; of who has no GPU, the CPU worked"""
    kernel_active: bool = False
    """by the newest load, a kernel ran"""
    cpu_bound: bool = False
    """by the newest load, its GPU idled and its CPU did not"""
    cpu_active: bool = False
    """by the newest load, its CPU worked, as that of a stopped process does not, whatever keeps its GPU"""
    ran_kernel: bool = False
    """a kernel has run before"""
    uses_tensor_cores: bool = False
    """its tensor cores have worked before: without that their silence says nothing"""
    tensor_active_at: float | None = None
    """of the newest load that says that they worked"""

    def add(
        self, cpu: float, gpu: float | None, now: float, tensor: float | None = None, needs_tensor_cores: bool = False
    ) -> None:
        """A load: cores taken, the share of the time (0 to 1) in which a kernel ran and in which tensor cores worked,
        both None where nobody can say; all since the load before. ``must_show``: its work is known to need tensor
        cores, though its own were not seen at work yet."""
        if self.latest_at is None or now - self.latest_at > MAX_LOAD_GAP_S:
            self.reset()
        since = now if self.latest_at is None else self.latest_at
        idle = cpu < IDLE_CPU_CORES and (gpu is None or gpu < IDLE_GPU_SHARE)
        gpu_busy = gpu is not None and gpu >= SPIN_GPU_SHARE and tensor is not None and tensor < SPIN_TENSOR_SHARE
        spinning = gpu_busy and (self.uses_tensor_cores or needs_tensor_cores)
        self.idle_since, self.idle_loads = _extend_run(idle, self.idle_since, self.idle_loads, since)
        gpu_idle = idle if gpu is None else gpu < IDLE_GPU_SHARE
        self.gpu_idle_since = (since if self.gpu_idle_since is None else self.gpu_idle_since) if gpu_idle else None
        self.spinning_since, self.spinning_loads = _extend_run(
            spinning, self.spinning_since, self.spinning_loads, since
        )
        self.working = not idle and (gpu is None or gpu >= IDLE_GPU_SHARE)
        self.kernel_active = gpu is not None and gpu >= IDLE_GPU_SHARE
        self.ran_kernel = self.ran_kernel or self.kernel_active
        self.cpu_active = cpu >= IDLE_CPU_CORES
        self.cpu_bound = gpu is not None and gpu < IDLE_GPU_SHARE and cpu >= HOST_WORK_CPU_CORES
        if tensor is not None and tensor >= SPIN_TENSOR_SHARE:
            self.uses_tensor_cores, self.tensor_active_at = True, now
        self.latest_at = now

    def reset(self) -> None:
        """Nothing is known any more."""
        self.latest_at = self.idle_since = self.gpu_idle_since = self.spinning_since = self.tensor_active_at = None
        self.idle_loads = self.spinning_loads = 0
        self.working = self.kernel_active = self.cpu_bound = self.cpu_active = False

    def idle_for(self, since: float) -> float:
        """s that it was seen idle, counted from ``since`` on; below 0: not at all."""
        if self.latest_at is None or self.idle_since is None:
            return -1.0
        return self.latest_at - max(self.idle_since, since)

    def gpu_idle_for(self, since: float) -> float:
        if self.latest_at is None or self.gpu_idle_since is None:
            return -1.0
        return self.latest_at - max(self.gpu_idle_since, since)

    def spinning_for(self, since: float) -> float:
        if self.latest_at is None or self.spinning_since is None:
            return -1.0
        return self.latest_at - max(self.spinning_since, since)


def _extend_run(condition: bool, since: float | None, loads: int, began: float) -> tuple[float | None, int]:
    if not condition:
        return None, 0
    return (began if since is None else since), loads + 1


MAX_WAIT_PROBES = 16
"""questions to a role that waits, after which it counts as one that does not answer then"""


@dataclass(slots=True)
class ProbeState:
    """Since the replica last moved. Whoever moves needs no probe: ``rest``."""

    pending_since: float | None = None
    """when it was first asked without having answered since"""
    last_sent_at: float = 0.0
    heartbeats: int = 0
    """beats heard since ``asked_at``: it lives, and could have answered"""
    answered_at: float | None = None
    """when it last answered that it works"""
    answer_count: int = 0
    """so often in a row, in this standstill"""
    failed: tuple[float, str] | None = None
    """when it said that it does not work, and why"""
    no_probe_handler: bool = False
    """its role cannot be asked: time alone judges it"""

    def sent(self, now: float) -> None:
        if self.pending_since is None:
            self.pending_since, self.heartbeats = now, 0
        self.last_sent_at = now

    def answered(self, result: ProbeResult, detail: str, now: float) -> None:
        """Take an answer. A late one, to a probe that is no longer open, only shows whether the role has a handler."""
        if result is ProbeResult.NO_HANDLER:
            self.no_probe_handler = True
            self.reset()
        elif self.pending_since is None:
            return
        elif result is ProbeResult.WORKS:
            self.pending_since, self.answered_at, self.failed = None, now, None
            self.answer_count += 1
        else:
            self.pending_since, self.failed = None, (now, detail)

    def reset(self) -> None:
        self.pending_since = self.answered_at = self.failed = None
        self.last_sent_at, self.heartbeats, self.answer_count = 0.0, 0, 0


SUSPEND_CHECK_HEARTBEATS = 4
"""beats without a word after which the cluster surely tells a job as suspended, if it is: at once (measured)"""
FLAP_COUNT = 4
"""Times that the cluster must cease to call a node up within ``FLAP_WINDOW`` before it counts as one that flaps: what a
restart of slurmd or of slurmctld does to it once or twice is not that."""
FLAP_WINDOW_S = 600.0
"""s, as ``recovery.window`` is by default"""
_NO_PHASE = Phase("")


class StepEnd(Struct, frozen=True):
    """How the step of a life ended; ``at`` is when the manager learned it."""

    code: int | None
    signal: int | None
    reason: ExitReason
    at: float
    last_line: str = ""
    """its command's last line"""
    detail: str = ""
    """more about ``reason``, for people"""


@dataclass(slots=True, eq=False)
class RoleView:
    """What one replica of a role teaches of all."""

    answers_probes: bool = False
    """The thread that waits for work is the one that answers probes. A program may well wait in another one: then its
    silence means nothing, however long. It is asked now and then, until an answer proves it."""
    probes_sent: int = 0
    """so often it was asked for that"""
    slowest_load: float = 0.0
    """s: the longest that such a phase lately took"""
    uses_tensor_cores: bool = False
    """tensor cores of one of it have worked: its work needs them"""
    newest_load_began: float = -inf
    """when the newest pass of a phase of its own work (weights are loaded) began that came to its end"""


@dataclass(slots=True, eq=False)
class ReplicaView:
    """One life of one replica (an agent is one too), as last seen."""

    incarnation: Incarnation
    node_view: NodeView = field(repr=False)
    launched_at: float
    """or when this manager began to listen, if that is later"""
    last_message_at: float
    last_message: str = "launch"
    status: Literal["launched", "joined"] = "launched"
    joined_at: float | None = None
    standby: Incarnation | None = None
    """it has not been launched, but was told to become this life, and has not been heard as such since"""
    join_timeout_s: float = 0.0
    """s for that"""
    phase: str | None = None
    declared: Phase = _NO_PHASE
    """what the job says of ``phase``"""
    phase_since: float = 0.0
    """or since when it is not blocked by another replica any more, if that is later"""
    done: int | None = None
    done_changed_at: float = 0.0
    """when ``done`` last rose"""
    waits_for: ReplicaId | None = None
    heartbeats: int = 0
    """beats heard since ``clock``: so many observations say that it stands still"""
    blocked_since: float | None = None
    """since when ``waits_for`` names somebody"""
    worked_before: bool = False
    """when it was first heard it had made progress already: under an earlier manager it has had its first pass"""
    usual_duration: float | None = None
    """robust usual duration of this phase (s), frozen when ``clock`` started: a running deadline never moves"""
    slowest_duration: float = 0.0
    """the longest of the durations that ``usual`` is of (s)"""
    passed_phases: set[str] = field(default_factory=set)
    """phases that this life has been through once: their first-pass grace is spent"""
    start_observed: bool = False
    """the beginning of what ``clock`` measures was seen, so that its duration means something"""
    exit: StepEnd | None = None
    gone_witnessed_at: float | None = None
    step_alive_at: float | None = None
    """when its node's agent last said that its step lives"""
    goodbye_at: float | None = None
    """it said Goodbye: its silence is expected; its end is not, for nobody asked for it"""
    stop_requested_at: float | None = None
    """it was asked to stop: from then on its end and its silence are expected"""
    gang_suspended: bool = False
    """a member of its gang is suspended: none of them can go on"""
    in_gang: bool = False
    """its gang has other members"""
    loads: LoadHistory = field(default_factory=LoadHistory, repr=False)
    probe: ProbeState = field(default_factory=ProbeState, repr=False)
    role: RoleView = field(default_factory=RoleView, repr=False)
    """all replicas of a role share it"""
    throughput: Throughput = field(default_factory=Throughput, repr=False)

    @property
    def node(self) -> NodeName:
        return self.node_view.node

    @property
    def is_agent(self) -> bool:
        return role_of(self.incarnation.replica) == AGENT

    @property
    def ended(self) -> bool:
        return self.exit is not None or self.gone_witnessed_at is not None

    @property
    def left_at(self) -> float | None:
        """Since when nothing need be heard of it."""
        if self.goodbye_at is None or self.stop_requested_at is None:
            return self.goodbye_at if self.stop_requested_at is None else self.stop_requested_at
        return min(self.goodbye_at, self.stop_requested_at)

    @property
    def last_change_at(self) -> float:
        """Since when nothing has moved: the phase began, ``done`` last rose, or another replica last blocked it."""
        return max(self.phase_since, self.done_changed_at)

    @property
    def first_pass(self) -> bool:
        return self.phase not in self.passed_phases and not (self.worked_before and self.declared.progresses)


def is_polling(view: ReplicaView) -> bool:
    """It is in a phase in which it merely waits for others, and asks again and again whether they are ready."""
    return view.declared.waits_for is not None and not view.declared.own_work


@dataclass(slots=True, eq=False)
class NodeView:
    """One node: who lives there, when anything there was last heard, and what the cluster says of it."""

    node: NodeName
    agent: ReplicaView | None = None
    former_agent: ReplicaView | None = field(default=None, repr=False)
    """forgotten since anything here was last heard, like ``departed``"""
    boot_id: str = ""
    last_message_at: float | None = None
    """of anything on it, agent or replica"""
    residents: dict[Incarnation, ReplicaView] = field(default_factory=dict, repr=False)
    departed: dict[Incarnation, ReplicaView] = field(default_factory=dict, repr=False)
    """replaced or forgotten since anything here was last heard. Without them a lost node would look well as soon as its
    replicas are started elsewhere"""
    state: str | None = None
    """the cluster's last word; None = it has not spoken yet"""
    detail: str = ""
    """its words when it first said so"""
    since: float = 0.0
    observations: int = 0
    """readings in a row that said so"""
    reported_down: tuple[float, str] | None = None
    """since when, and with which words, it was last called down"""
    suspended_at: float | None = None
    """the cluster said that everything on it is suspended, and nothing was heard of it since"""
    suspension_checked_at: float | None = None
    """when the cluster was last asked what becomes of it, and answered; None: it never has"""
    reported_up: bool = False
    """by the newest reading"""
    flaps: deque[float] = field(default_factory=lambda: deque(maxlen=FLAP_COUNT), repr=False)
    """when the cluster last ceased to call it up"""

    def suspension_checked(self, limits: Limits) -> bool:
        """The cluster has said, since everything here fell silent, what becomes of its job."""
        since = (
            self.last_message_at
            if self.last_message_at is not None
            else self.agent.last_message_at
            if self.agent
            else 0.0
        )
        return (
            self.suspension_checked_at is not None
            and self.suspension_checked_at >= since + SUSPEND_CHECK_HEARTBEATS * limits.heartbeat
        )
