"""The observation table's entries: the last observed state of one replica, of one role and of one node.

:class:`rrl.health.detection.health_monitor.HealthMonitor` writes them, detectors read them. Times are the manager's
clock (s) at receipt. The node's agent measures CPU and GPU loads every few seconds. Loads are evidence only while they
arrive without a gap: an agent that is silent or cannot measure proves nothing about idleness. A busy GPU does not prove
progress, because a collective that waits for a peer spins on it. A probe requests a small piece of real work; its
answer is stronger evidence than a heartbeat, which a separate thread sends.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from math import inf
from typing import Literal

from msgspec import Struct

from ...core.launch import ExitReason
from ...core.phases import Phase
from ...core.run_spec import NO_TRAITS, Limits, RoleTraits
from ...core.types import (
    AGENT,
    STANDBY_ROLE,
    Incarnation,
    NodeName,
    OutsideWait,
    ProbeResult,
    RaisedException,
    ReplicaId,
    role_of,
)
from .baselines import Throughput

MAX_LOAD_GAP_S = 15.0
"""Maximum time (s) from one load to the next. A longer time is a gap, about which nothing is known. Agents send loads
every 2 s."""
IDLE_CPU_CORES = 0.05
"""Number of used CPU cores below which a replica is idle. A process that only sends heartbeats uses less than 0.01
(measured); an idle engine of several processes uses 0.02 to 0.04."""
IDLE_GPU_SHARE = 0.02
"""A GPU is idle if a kernel ran for less than this share of the time."""
HOST_WORK_CPU_CORES = 0.5
"""Number of used CPU cores from which a replica with an idle GPU counts as working on its CPU (evaluation, advantages,
batch preparation)."""
SPIN_GPU_SHARE = 0.9
"""A GPU may be spinning if a kernel ran for at least this share of the time, because an NCCL kernel that waits for a
peer does not return."""
SPIN_TENSOR_SHARE = 0.01
"""Tensor cores count as idle if they worked for less than this share of the time."""


@dataclass(slots=True)
class LoadHistory:
    """The CPU and GPU loads of one incarnation.

    All times (s) are the times of loads, so that no interval grows while the agent is silent.
    """

    latest_at: float | None = None
    """Time of the newest load."""
    idle_since: float | None = None
    """Time since which neither CPU nor GPU has worked; None if one of them works. After a gap between two loads
    (``MAX_LOAD_GAP_S``), only the time after the gap counts."""
    idle_loads: int = 0
    """Number of consecutive loads in which neither CPU nor GPU worked; 0 if the newest load shows work."""
    gpu_idle_since: float | None = None
    """Time since which no kernel has run; without a GPU the same as ``idle_since``. Tokens that are reported after this
    time are doubtful, because this GPU has not generated them."""
    spinning_since: float | None = None
    """Time since which only kernels that compute nothing have occupied the GPU (busy-waiting collectives)."""
    spinning_loads: int = 0
    """Number of consecutive loads in which the GPU was spinning; 0 if it was not in the newest load."""
    working: bool = False
    """Whether the newest load shows a running kernel; without a GPU, whether it shows a working CPU."""
    kernel_active: bool = False
    """Whether the newest load shows a running kernel."""
    gpu_full: bool = False
    """Whether the newest load shows a GPU that is never idle (``SPIN_GPU_SHARE``), whatever its kernels compute."""
    cpu_bound: bool = False
    """Whether the newest load shows an idle GPU and a CPU at work (``HOST_WORK_CPU_CORES``)."""
    cpu_working_loads: int = 0
    """Number of consecutive loads that show a CPU at work (``HOST_WORK_CPU_CORES``), with an idle or a busy GPU."""
    cpu_active: bool = False
    """Whether the newest load shows any CPU use. A stopped process uses no CPU, even if a kernel occupies its GPU."""
    stopped: bool = False
    """Whether the newest load shows a stopped process."""
    ran_kernel: bool = False
    """Whether any load has shown a running kernel."""
    uses_tensor_cores: bool = False
    """Whether any load has shown working tensor cores. Otherwise their idleness proves nothing."""
    tensor_active_at: float | None = None
    """Time of the newest load that shows working tensor cores."""

    def add(
        self,
        cpu: float,
        gpu: float | None,
        now: float,
        tensor: float | None = None,
        needs_tensor_cores: bool = False,
        stopped: bool = False,
    ) -> None:
        """Add one load, measured since the previous one.

        Args:
            cpu: CPU cores in use.
            gpu: Share of the time (0 to 1) in which a kernel ran; None if it cannot be measured.
            now: Manager's clock (s).
            tensor: Share of the time (0 to 1) in which tensor cores worked; None if it cannot be measured.
            needs_tensor_cores: Whether the role's work is known to use tensor cores. If so, idle tensor cores are
                evidence even before this incarnation has used them.
            stopped: Whether one of the processes was stopped, by SIGSTOP or by a tracer.
        """
        if self.latest_at is None or now - self.latest_at > MAX_LOAD_GAP_S:
            self.reset()
        since = now if self.latest_at is None else self.latest_at
        idle = cpu < IDLE_CPU_CORES and (gpu is None or gpu < IDLE_GPU_SHARE)
        self.gpu_full = gpu is not None and gpu >= SPIN_GPU_SHARE
        computes_nothing = tensor is not None and tensor < SPIN_TENSOR_SHARE
        spinning = self.gpu_full and computes_nothing and (self.uses_tensor_cores or needs_tensor_cores)
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
        self.cpu_working_loads = self.cpu_working_loads + 1 if cpu >= HOST_WORK_CPU_CORES else 0
        self.stopped = stopped
        self.cpu_bound = gpu is not None and gpu < IDLE_GPU_SHARE and cpu >= HOST_WORK_CPU_CORES
        if tensor is not None and tensor >= SPIN_TENSOR_SHARE:
            self.uses_tensor_cores, self.tensor_active_at = True, now
        self.latest_at = now

    def reset(self) -> None:
        """Discard the intervals and the newest load, but not whether kernels and tensor cores were ever at work."""
        self.latest_at = self.idle_since = self.gpu_idle_since = self.spinning_since = self.tensor_active_at = None
        self.idle_loads = self.spinning_loads = self.cpu_working_loads = 0
        self.working = self.kernel_active = self.gpu_full = self.cpu_bound = self.cpu_active = self.stopped = False

    def idle_for(self, since: float) -> float:
        """Return for how many seconds CPU and GPU have been idle, counted from ``since`` on; negative if they work."""
        return self._lasts(self.idle_since, since)

    def gpu_idle_for(self, since: float) -> float:
        """Return for how many seconds no kernel has run, counted from ``since`` on; negative if a kernel runs."""
        return self._lasts(self.gpu_idle_since, since)

    def spinning_for(self, since: float) -> float:
        """Return for how many seconds the GPU has been spinning, counted from ``since`` on; negative if it is not."""
        return self._lasts(self.spinning_since, since)

    def _lasts(self, began: float | None, since: float) -> float:
        return -1.0 if self.latest_at is None or began is None else self.latest_at - max(began, since)


def _extend_run(condition: bool, since: float | None, loads: int, began: float) -> tuple[float | None, int]:
    if not condition:
        return None, 0
    return (began if since is None else since), loads + 1


MAX_WAIT_PROBES = 16
"""Number of unanswered probes to waiting replicas of a role after which the role is assumed not to answer while it
waits."""


@dataclass(slots=True)
class ProbeState:
    """Probes of one replica since it last made progress; progress resets it."""

    pending_since: float | None = None
    """Time (s) of the first unanswered probe."""
    last_sent_at: float = 0.0
    heartbeats: int = 0
    """Number of heartbeats since ``pending_since``, which show that the process runs and could have answered."""
    answered_at: float | None = None
    """Time (s) of the last successful answer."""
    answer_count: int = 0
    """Number of consecutive successful answers since the last progress."""
    failed: tuple[float, str] | None = None
    """Time (s) and text of an answer that reported a failure."""
    no_probe_handler: bool = False
    """Whether the role has no probe handler, so that only deadlines apply to it."""

    def sent(self, now: float) -> None:
        """Record a probe that was sent."""
        if self.pending_since is None:
            self.pending_since, self.heartbeats = now, 0
        self.last_sent_at = now

    def answered(self, result: ProbeResult, detail: str, now: float) -> None:
        """Record an answer. An answer to a probe that is no longer open only shows whether the role has a handler."""
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
        """Discard open probes and answers."""
        self.pending_since = self.answered_at = self.failed = None
        self.last_sent_at, self.heartbeats, self.answer_count = 0.0, 0, 0


class StackSample(Struct, frozen=True):
    """The stacks of all members of a gang at one time: the Python stacks of the main threads."""

    stacks: str
    """Text of all stacks with line numbers. It is the same in two samples exactly if no member has moved."""
    functions: str
    """The same without line numbers: equal while every member stays within one function."""
    alike: bool
    """Whether all members have the same stack."""


@dataclass(slots=True)
class StackSamples:
    """The newest consecutive equal samples of the stacks of a replica's gang."""

    sample: StackSample | None = None
    """The newest sample; None if it failed, or if there is none."""
    latest_at: float = -inf
    """Time (s) of the newest sample; -inf if there is none."""
    still_since: float = inf
    """Time (s) of the first of the newest samples with equal stacks; inf if the newest sample failed."""
    same_functions_since: float = inf
    """Time (s) of the first of the newest samples with equal functions; inf if the newest sample failed."""

    def add(self, sample: StackSample | None, now: float) -> None:
        """Add a sample; None stands for a sample that failed."""
        before, self.sample, self.latest_at = self.sample, sample, now
        if sample is None:
            self.still_since = self.same_functions_since = inf
            return
        if before is None or sample.stacks != before.stacks:
            self.still_since = now
        if before is None or sample.functions != before.functions:
            self.same_functions_since = now

    def reset(self) -> None:
        """Discard all samples."""
        self.sample, self.latest_at, self.still_since, self.same_functions_since = None, -inf, inf, inf


SUSPEND_CHECK_HEARTBEATS = 4
"""Number of missed heartbeats after which the cluster certainly reports a suspended job as suspended (measured:
immediately)."""
FLAP_COUNT = 4
"""If the state of a node changes from ``up`` to ``down`` or ``unknown`` this often within ``FLAP_WINDOW_S``, the node
counts as flapping. A restart of slurmd or slurmctld causes one or two such changes."""
FLAP_WINDOW_S = 600.0
"""Time (s) within which flaps are counted; equal to the default of ``recovery.window``."""
_NO_PHASE = Phase("")


class StorageStall(Struct, frozen=True):
    """Whether a node's agent reports that storage does not answer, according to ``Flag.STORAGE_STALLS``."""

    stalled: bool = False
    """Whether storage stalls now, according to a current finding."""
    ended_at: float = -inf
    """Time (s) at which the newest stall ended; -inf if there was none."""


_NO_STALL = StorageStall()


class StepEnd(Struct, frozen=True):
    """The end of an incarnation's step; ``at`` is the time (s) at which the manager learned of it."""

    code: int | None
    signal: int | None
    reason: ExitReason
    at: float
    last_line: str = ""
    """Last line of output of the command."""
    detail: str = ""
    """Details of ``reason``, for people."""
    exception: RaisedException | None = None
    """Exception that ended the command, if the command reported one."""


@dataclass(slots=True, eq=False)
class RoleView:
    """What is known about a role: its job's settings, and what was learned from all its replicas, which share it."""

    traits: RoleTraits = NO_TRAITS
    awaited_as: str = ""
    """Name by which phases name the role if they wait for it (``RoleSpec.awaited_as``)."""
    answers_probes: bool = False
    """True once a waiting replica has answered a probe, which shows that the waiting thread also answers probes.
    Otherwise a missing answer proves nothing."""
    probes_sent: int = 0
    """Number of probes sent to learn whether the role ``answers_probes`` (at most ``MAX_WAIT_PROBES``)."""
    slowest_load: float = 0.0
    """Longest recent duration (s) of a phase in which weights are loaded (``Phase.own_work``)."""
    uses_tensor_cores: bool = False
    """Whether tensor cores of any replica of the role have worked, so that the role's work needs them."""
    newest_load_began: float = -inf
    """Start (s) of the newest completed pass of a phase in which weights are loaded."""


@dataclass(slots=True, eq=False)
class RunView:
    """What is known about the whole run, from the store's reports, and shared by all replicas."""

    outside: OutsideWait | None = None
    """What the run waits for outside of itself; None if it waits for nobody outside."""
    outside_since: float = 0.0
    """Time (s) since which every report has named such a wait; without meaning if the newest one names none."""
    outside_until: float = -inf
    """Time (s) of the newest report that the run waits for somebody outside. Until then nobody in the run was at fault
    for a wait."""
    holders: frozenset[ReplicaId] | None = None
    """The only replicas whose work can complete the data that the trainer needs next; None if this is not known."""
    heard_at: float = -inf
    """Time (s) at which an ``awaited`` replica was last heard. While they return one after the other, as those of a
    large run do, the missing ones may still come."""


@dataclass(slots=True, eq=False)
class ReplicaView:
    """The last observed state of one incarnation of a replica; agents are replicas too."""

    incarnation: Incarnation
    node_view: NodeView = field(repr=False)
    launched_at: float
    """Time of the launch, or of the start of this manager if that is later."""
    last_message_at: float
    """Time of the last message. Before the first one: of the launch or, if it is ``awaited``, since when it is."""
    status: Literal["launched", "awaited", "joined"] = "launched"
    """``awaited``: it had joined before this manager started or was stalled, or before its node was suspended, and has
    not been heard since."""
    standby: Incarnation | None = None
    """Standby process that was promoted to this incarnation and has not sent a Hello as the incarnation."""
    join_timeout_s: float = 0.0
    """Time (s) within which the promoted standby process must send its first Hello as the incarnation."""
    phase: str | None = None
    declared: Phase = _NO_PHASE
    """Limits and traits of ``phase`` in this job, such as the role for which it waits."""
    phase_since: float = 0.0
    """Start of the phase, or the time at which another replica stopped blocking this replica if that is later."""
    done: int | None = None
    """Progress reported by the replica (tokens, samples or steps, by phase)."""
    done_changed_at: float = 0.0
    """Time when ``done`` last rose."""
    waits_for: ReplicaId | None = None
    """Replica that blocks this one, according to its own report."""
    heartbeats: int = 0
    """Number of heartbeats received since ``last_change_at``; they show no progress."""
    blocked_since: float | None = None
    """Time since which ``waits_for`` has named a replica."""
    data_untaken_since: float | None = None
    """Time since which the store's heartbeats report data that the trainer does not request; None if the newest
    heartbeat reports none."""
    worked_before: bool = False
    """Whether the first report already showed progress, which was made under an earlier manager."""
    usual_duration: float | None = None
    """Usual duration (s) of this phase; None if unknown. It is fixed at ``last_change_at``, so that no running deadline
    moves."""
    slowest_duration: float = 0.0
    """Longest (s) of the durations from which ``usual_duration`` is computed."""
    longest_pass: float | None = None
    """Longest completed pass (s) of this phase by any incarnation of the role, first passes included; None if no pass
    is known. It is fixed at ``last_change_at``."""
    passed_phases: set[str] = field(default_factory=set)
    """Phases that this incarnation has completed once. The extra time of a first pass no longer applies to them."""
    start_observed: bool = False
    """Whether the start of the current pass was observed, so that its duration can be learned."""
    exit: StepEnd | None = None
    """Exit record of the incarnation's step."""
    gone_witnessed_at: float | None = None
    """Time when the agent found the step's first process gone, without an exit record."""
    unlisted_at: float | None = None
    """Time when the step was found gone because the cluster no longer lists it and its node is silent. A later message
    of the incarnation clears it."""
    step_alive_at: float | None = None
    """Time when the agent last found the step's first process running."""
    goodbye_at: float | None = None
    """Time of the incarnation's Goodbye. Silence is then expected, but an end without a stop request is a failure."""
    stop_requested_at: float | None = None
    """Time of the manager's stop request. Silence and the end of the process are then expected."""
    gang_suspended: bool = False
    """Whether a member of the gang is suspended, so that no member can make progress."""
    in_gang: bool = False
    """Whether the replica's gang has other members."""
    storage_stall: StorageStall = _NO_STALL
    """Storage stall of the replica's node or, in a gang, of any member's node, because the members wait for each
    other."""
    loads: LoadHistory = field(default_factory=LoadHistory, repr=False)
    probe: ProbeState = field(default_factory=ProbeState, repr=False)
    stacks: StackSamples = field(default_factory=StackSamples, repr=False)
    """Samples of the gang's stacks in this pass."""
    role: RoleView = field(default_factory=RoleView, repr=False)
    """View of the role, shared by all its replicas."""
    run: RunView = field(default_factory=RunView, repr=False)
    """View of the run, shared by all replicas."""
    throughput: Throughput = field(default_factory=Throughput, repr=False)

    @property
    def node(self) -> NodeName:
        """Node on which the incarnation runs."""
        return self.node_view.node

    @property
    def is_agent(self) -> bool:
        """Whether this is a node's agent."""
        return role_of(self.incarnation.replica) == AGENT

    @property
    def is_standby_process(self) -> bool:
        """Whether this is a standby process that has not been promoted."""
        return role_of(self.incarnation.replica) == STANDBY_ROLE

    @property
    def ended(self) -> bool:
        """Whether the process has ended, according to its exit record, the agent of its node, or the cluster."""
        return self.exit is not None or self.gone_witnessed_at is not None or self.unlisted_at is not None

    @property
    def left_at(self) -> float | None:
        """Time since which no heartbeats are expected; None if heartbeats are expected."""
        if self.goodbye_at is None or self.stop_requested_at is None:
            return self.goodbye_at if self.stop_requested_at is None else self.stop_requested_at
        return min(self.goodbye_at, self.stop_requested_at)

    @property
    def last_change_at(self) -> float:
        """Time of the last progress: start of the phase, last rise of ``done``, or end of a blocked call."""
        return max(self.phase_since, self.done_changed_at)

    @property
    def first_pass(self) -> bool:
        """Whether the incarnation is in its first pass of this phase."""
        return self.phase not in self.passed_phases and not (self.worked_before and self.declared.progresses)


def is_polling(view: ReplicaView) -> bool:
    """Return whether the replica's phase only waits for other replicas and polls whether they are ready."""
    return view.declared.waits_for is not None and not view.declared.own_work


@dataclass(slots=True, eq=False)
class NodeView:
    """The last observed state of one node: its replicas, its last message, and its state in the cluster."""

    node: NodeName
    agent: ReplicaView | None = None
    former_agent: ReplicaView | None = field(default=None, repr=False)
    """Agent that was removed since the last message from this node. Its silence, too, shows that the node may be
    lost."""
    boot_id: str = ""
    last_message_at: float | None = None
    """Time of the last message from the node's agent or any of its replicas."""
    residents: dict[Incarnation, ReplicaView] = field(default_factory=dict, repr=False)
    departed: dict[Incarnation, ReplicaView] = field(default_factory=dict, repr=False)
    """Incarnations that were replaced or removed since the last message from this node. Without them a lost node would
    look healthy as soon as its replicas are started elsewhere."""
    state: str | None = None
    """State last reported by the cluster; None if no state was reported."""
    detail: str = ""
    """Reason that the cluster gave when it first reported this state."""
    since: float = 0.0
    """Time since which the cluster has reported this state."""
    observations: int = 0
    """Number of consecutive polls with this state."""
    reported_down: tuple[float, str] | None = None
    """Time since which the cluster reports the node as down, and the reason; cleared after two polls with another
    state."""
    suspended_at: float | None = None
    """Time of the poll that reported the node's job as suspended; cleared by any message from the node."""
    suspension_checked_at: float | None = None
    """Time of the last poll that reported whether the job of the node is suspended; None if there was no such poll."""
    reported_up: bool = False
    """Whether the node was ``up`` in the last poll, not counting polls in which most nodes were lost at the same
    time."""
    flaps: deque[float] = field(default_factory=lambda: deque(maxlen=FLAP_COUNT), repr=False)
    """Times of the node's last flaps: polls that no longer reported it as ``up``, although most other nodes kept their
    state."""
    storage_stall: StorageStall = _NO_STALL
    """Storage stall that the node's agent reports."""

    def all_replicas(self) -> list[ReplicaView]:
        """Return the views of all replicas on the node and of its agent."""
        return [*self.residents.values(), *([self.agent] if self.agent else [])]

    def forget_departed(self) -> None:
        """Drop departed incarnations, whose silence is no longer evidence that the node is silent."""
        self.departed.clear()
        self.former_agent = None

    @property
    def silent_since(self) -> float:
        """Time (s) of the last message or, before the first one, from which the agent was awaited (0.0: no agent)."""
        agent = self.agent or self.former_agent
        return self.last_message_at or (agent.last_message_at if agent else 0.0)

    def suspension_checked(self, limits: Limits) -> bool:
        """Return whether the cluster has reported, since the node fell silent, whether the node's job is suspended.

        Only a poll at least ``SUSPEND_CHECK_HEARTBEATS`` heartbeat intervals after the node's last message counts.
        """
        checked_at = self.suspension_checked_at
        return checked_at is not None and checked_at >= self.silent_since + SUSPEND_CHECK_HEARTBEATS * limits.heartbeat
