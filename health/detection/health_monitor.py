"""The last thing seen of each replica and each node: what the detectors look at.

Volatile, and rebuilt by listening: silence is not in the journal; a new manager counts it anew. Plain values: health
knows neither messages nor the cluster seam. ``now`` is always the manager's clock (s) at receipt; other hosts' times
never get here. Lives that the manager did not launch or welcome are ignored, and so is an older life of any replica.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from ...core.launch import ExitReason
from ...core.run_spec import Limits
from ...core.types import AGENT, STANDBY_ROLE, Incarnation, NodeName, ProbeResult, ReplicaId, gang_of, role_of
from .baselines import PhaseDurations, RoleBaseline, ThroughputRounds
from .records import (  # fmt: skip
    FLAP_COUNT,
    FLAP_WINDOW_S,
    SUSPEND_CHECK_HEARTBEATS,
    NodeView,
    ReplicaView,
    RoleView,
    StepEnd,
    is_polling,
)

__all__ = [
    "SUSPEND_CHECK_HEARTBEATS",
    "FLAP_COUNT",
    "FLAP_WINDOW_S",
    "NodeView",
    "ReplicaView",
    "StepEnd",
    "HealthMonitor",
]

STARTING = "starting"
"""what a worker says before its first phase; how long that took says nothing of the next start, on another node"""

_IGNORED_REASONS = frozenset({ExitReason.NOT_ADMITTED, ExitReason.FENCED})
"""ends of steps that were not, or are no longer, the one that counts"""


class HealthMonitor:
    """Everything seen, by replica and by node. Whoever hears something tells it here; detectors only read."""

    def __init__(self) -> None:
        self.replicas: dict[ReplicaId, ReplicaView] = {}
        self.nodes: dict[NodeName, NodeView] = {}
        self.dirty: set[NodeName] = set()
        """nodes where anything was seen since the last ``detect``, which empties it"""
        self.probes_due: dict[NodeName, float] = {}
        """when somebody there is to be asked for work (``probing.to_probe``); kept by ``detect``"""
        self.memo: object = None
        """``detect`` remembers here what it concluded; nobody else reads it"""
        self._limits = Limits()
        self._durations = PhaseDurations()
        self._throughput = ThroughputRounds()
        self._roles: dict[str, RoleView] = {}
        self._removed: dict[ReplicaId, int] = {}
        self._gangs: set[ReplicaId] = set()
        """of more than one member"""
        self._suspended: set[ReplicaId] = set()
        """gangs of which a member is on a suspended node"""

    def set_limits(self, limits: Limits) -> None:
        """Judge phases as this job has them. ``detect`` calls it; what was heard before stays as it was kept."""
        self._limits = limits
        for view in self.replicas.values():
            if view.phase is not None:
                view.declared = limits.phase(view.phase)

    # ── for the next manager ─────────────────────────────────────────────────────────────────────────────────────────
    def baselines(self) -> dict[str, RoleBaseline]:
        """What was learned of the roles, whoever of them lives."""
        stats = self._durations.stats()
        learned = {
            name: RoleBaseline(stats.get(name, {}), role.uses_tensor_cores, role.answers_probes, role.slowest_load)
            for name, role in self._roles.items()
        }
        return {name: baseline for name, baseline in learned.items() if baseline != RoleBaseline()}

    def restore_baselines(self, baselines: Mapping[str, RoleBaseline]) -> None:
        """What an earlier watch had learned; before anything is heard."""
        for name, baseline in baselines.items():
            role = self._roles.setdefault(name, RoleView())
            role.uses_tensor_cores, role.answers_probes, role.slowest_load = (
                baseline.uses_tensor_cores,
                baseline.answers_probes,
                baseline.slowest_load,
            )
            for phase, stats in baseline.phases.items():
                self._durations.restore(name, phase, stats)

    # ── told by the manager ──────────────────────────────────────────────────────────────────────────────────────────
    def on_launched(
        self,
        incarnation: Incarnation,
        node: NodeName,
        now: float,
        standby: Incarnation | None = None,
        join_timeout_s: float = 0.0,
    ) -> None:
        """It was started, or is believed to run since before this manager. Its join deadline counts from here.

        ``shadow``: nothing was started: this one, which stood by on the node, was told to become the life, and is to be
        heard as that ``within`` so many s."""
        if standby is not None:
            self.remove(standby)
        if (view := self._ensure_view(incarnation, node, now)) is not None and standby is not None:
            view.standby, view.join_timeout_s = standby, join_timeout_s

    def restore_passed_phases(self, incarnation: Incarnation, passed: Collection[str]) -> None:
        """It was launched under an earlier manager, and has been through these phases: they are no first ones. One that
        progresses shows by its count whether it was."""
        if view := self._view_of(incarnation):
            view.passed_phases.update(name for name in passed if not self._limits.phase(name).progresses)
            if view.role.uses_tensor_cores and any(self._limits.phase(name).computes for name in view.passed_phases):
                view.loads.uses_tensor_cores = True

    def delay_join_deadline(self, incarnation: Incarnation, now: float) -> None:
        """Whoever was to start it is away: its join deadline counts from now, if nothing of it was heard yet."""
        if (view := self._view_of(incarnation)) and view.status == "launched" and view.standby is None:
            view.launched_at = now

    def on_stop_requested(self, incarnation: Incarnation, now: float) -> None:
        """The manager asks it to stop: its end is what the manager wants."""
        if (view := self._view_of(incarnation)) and view.stop_requested_at is None:
            view.stop_requested_at = now

    def on_goodbye(self, incarnation: Incarnation, now: float) -> None:
        """It said Goodbye. It need not be heard any more, but unless it is asked to stop, its end is a failure."""
        if (view := self._view_of(incarnation)) and view.goodbye_at is None:
            view.goodbye_at = now

    def remove(self, incarnation: Incarnation) -> None:
        """It is not believed any more; what it may still say is ignored."""
        replica = incarnation.replica
        self._removed[replica] = max(incarnation.number, self._removed.get(replica, -1))
        view = self.replicas.get(replica)
        if view is not None and view.incarnation <= incarnation:
            self._detach(view)
            del self.replicas[replica]
            self._throughput.remove(view.incarnation, view.incarnation.gang)

    def remove_node(self, node: NodeName) -> None:
        """It was given back: nothing about it, nor about who was still there, is judged any more."""
        if (node_view := self.nodes.get(node)) is None:
            return
        for view in [*node_view.residents.values(), *([node_view.agent] if node_view.agent else [])]:
            self.remove(view.incarnation)
        del self.nodes[node]
        self.dirty.add(node)

    def restart(self, now: float) -> None:
        """A new manager, or one that was paused: everything counts anew from here, as if launched now.

        Proof stays (an exit record, a witnessed end), and so do usual durations; silence from before is not judged.
        """
        self._throughput.reset()
        for view in self.replicas.values():
            _reset(view, now)
        for node_view in self.nodes.values():
            node_view.suspended_at = node_view.suspension_checked_at = None
            node_view.last_message_at = node_view.state = node_view.reported_down = None
            node_view.detail, node_view.since, node_view.observations = "", now, 0
            node_view.departed.clear()
            node_view.former_agent = None
            self.dirty.add(node_view.node)

    # ── heard from replicas ──────────────────────────────────────────────────────────────────────────────────────────
    def on_hello(self, incarnation: Incarnation, node: NodeName, phase: str, now: float) -> None:
        """A Hello, first or repeated. It tells where the life really runs."""
        if (view := self._ensure_view(incarnation, node, now)) is None:
            return
        if view.node != node and not view.is_agent:
            view.node_view.residents.pop(incarnation, None)
            self.dirty.add(view.node)
            view.node_view = self._node(node)
            view.node_view.residents[incarnation] = view
        self._on_message(view, "hello", now)
        if view.phase != phase:
            self._begin_phase(view, phase, now)

    def on_heartbeat(
        self, incarnation: Incarnation, phase: str, done: int, waits_for: ReplicaId | None, now: float
    ) -> None:
        """A beat. A phase that is news (its ``entered`` was lost) begins now."""
        if view := self._view_of(incarnation):
            self._on_message(view, "heartbeat", now)
            view.heartbeats += 1
            view.probe.heartbeats += 1
            if view.waits_for is not None and waits_for is None:
                self._on_unblocked(view, now)
            self._update_pace(view, done, now)
            self._advance(view, done, now)
            if view.phase != phase:
                self._begin_phase(view, phase, now)
            elif view.waits_for is None and waits_for is not None and view.declared.waits_for is None:
                view.start_observed = False  # what another replica takes of its time is not usual
            _set_blocked_by(view, waits_for, now)

    def on_phase(
        self, incarnation: Incarnation, phase: str, done: int, waits_for: ReplicaId | None, now: float
    ) -> None:
        """A phase begins: a new pass, even of the phase that it was in."""
        if view := self._view_of(incarnation):
            self._on_message(view, "entered", now)
            self._advance(view, done, now)
            self._begin_phase(view, phase, now)
            _set_blocked_by(view, waits_for, now)

    # ── heard of replicas ────────────────────────────────────────────────────────────────────────────────────────────
    def on_load(
        self, incarnation: Incarnation, cpu: float, gpu: float | None, now: float, tensor: float | None = None
    ) -> None:
        """What its node's agent saw it take: cores, and the shares of the time in which a kernel ran and in which
        tensor cores worked (None: nobody can say)."""
        if view := self._view_of(incarnation):
            # beyond a first pass its own tensor cores must have been seen: some nodes' say nothing, and read 0
            view.loads.add(cpu, gpu, now, tensor, needs_tensor_cores=view.role.uses_tensor_cores and view.first_pass)
            view.role.uses_tensor_cores = view.role.uses_tensor_cores or view.loads.uses_tensor_cores
            if view.loads.gpu_idle_since is None and view.probe.last_sent_at < view.last_change_at:
                view.probe.reset()  # it moved since it was asked, and works

    def on_probe_sent(self, incarnation: Incarnation, now: float) -> None:
        """A probe was sent to it (``probing.to_probe``)."""
        if view := self._view_of(incarnation):
            view.probe.sent(now)
            view.role.probes_sent += not view.role.answers_probes and is_polling(view)

    def on_probe_answered(self, incarnation: Incarnation, result: ProbeResult, detail: str, now: float) -> None:
        """Take the answer to a probe; ``detail`` is for people."""
        if view := self._view_of(incarnation):
            if result is ProbeResult.WORKS and view.probe.pending_since is not None and is_polling(view):
                self._mark_answers_probes(view)
            view.probe.answered(result, detail, now)

    def on_step_ended(
        self, incarnation: Incarnation, code: int | None, signal: int | None, reason: ExitReason, now: float, last_line: str = "",
        detail: str = "",
    ) -> None:  # fmt: skip
        """Take the exit record of a step; the first one counts. The record of a step that was not admitted, or was
        fenced, is ignored: it may be the second step of its tag, and says nothing about the first."""
        if (view := self._view_of(incarnation)) and view.exit is None and reason not in _IGNORED_REASONS:
            view.exit = StepEnd(code, signal, reason, now, last_line, detail)

    def on_step_gone(self, incarnation: Incarnation, now: float) -> None:
        """The agent witnessed that its first process is no more, without an exit record."""
        if (view := self._view_of(incarnation)) and view.gone_witnessed_at is None:
            view.gone_witnessed_at = now

    def on_step_alive(self, incarnation: Incarnation, now: float) -> None:
        """The agent says that its first process lives. That is no Hello, but a slow start is not a lost one."""
        if view := self._view_of(incarnation):
            view.step_alive_at = now

    # ── heard about nodes ────────────────────────────────────────────────────────────────────────────────────────────
    def on_agent_message(self, node: NodeName, incarnation: Incarnation, now: float, boot_id: str = "") -> None:
        """A node's agent spoke: Hello (with its boot id) or beat."""
        if view := self._ensure_view(incarnation, node, now):
            self._on_message(view, "agent", now)
            view.node_view.boot_id = boot_id or view.node_view.boot_id

    def on_job_status(self, node: NodeName, suspended: bool, polled_at: float, now: float) -> None:
        """The cluster said whether the job that has this node is suspended; ``asked_at``: when it was asked. Deadlines
        of everything there rest meanwhile, and count anew from when it goes on."""
        node_view = self._node(node)
        node_view.suspension_checked_at = polled_at
        if not suspended:
            self._resume_node(node_view, now)
        elif node_view.suspended_at is None and (
            node_view.last_message_at is None or node_view.last_message_at < polled_at
        ):
            node_view.suspended_at = polled_at
            self._suspend_gangs(now)

    def needs_suspend_check(self, limits: Limits, now: float) -> bool:
        """A node is silent, and the cluster was not asked since whether it is suspended: before it is condemned, it
        shall be."""
        return any(
            node_view.suspension_checked_at is not None and node_view.suspended_at is None and node_view.last_message_at is not None
            and now - node_view.last_message_at > limits.silence / 2 and not node_view.suspension_checked(limits)
            for node_view in self.nodes.values() if node_view.agent is not None
        )  # fmt: skip

    def on_node_status(self, node: NodeName, state: str, detail: str, now: float, isolated: bool = True) -> None:
        """One reading of the cluster. ``unknown`` says neither healthy nor gone, but if it was called up before and not
        most others cease to be at once (``alone``), it counts as a flap, as ``down`` does."""
        node_view = self._node(node)
        if node_view.reported_up and isolated and state in ("down", "unknown"):
            node_view.flaps.append(now)
        node_view.reported_up = state == "up" or (node_view.reported_up and not isolated)
        if state == "unknown":
            return
        if node_view.state != state:
            node_view.state, node_view.detail, node_view.since, node_view.observations = state, detail, now, 0
            if state == "down" and node_view.reported_down is None:
                node_view.reported_down = (now, detail)
        node_view.observations += 1
        if state != "down" and node_view.observations >= 2:  # docs/sources.md: two good readings to trust again
            node_view.reported_down = None

    def workers(self) -> Iterator[ReplicaView]:
        """Every replica but the agents and the shadows, which nobody waits for."""
        return (
            view for view in self.replicas.values() if role_of(view.incarnation.replica) not in (AGENT, STANDBY_ROLE)
        )

    def incarnations_on(self, node: NodeName) -> list[Incarnation]:
        """Whoever was launched on this node or says that it is there, and is still believed; agents left out."""
        node_view = self.nodes.get(node)
        return [] if node_view is None else list(node_view.residents)

    # ── inside ───────────────────────────────────────────────────────────────────────────────────────────────────────
    def _node(self, node: NodeName) -> NodeView:
        self.dirty.add(node)
        return self.nodes.setdefault(node, NodeView(node))

    def _view_of(self, incarnation: Incarnation) -> ReplicaView | None:
        view = self.replicas.get(incarnation.replica)
        if view is None or view.incarnation != incarnation:
            return None
        self.dirty.add(view.node)
        return view

    def _ensure_view(self, incarnation: Incarnation, node: NodeName, now: float) -> ReplicaView | None:
        """The sighting of this life, made when it is newer than what is known; None when it is not believed."""
        old = self.replicas.get(incarnation.replica)
        if old is not None and old.incarnation == incarnation:
            self.dirty.add(old.node)
            return old
        if (old is not None and old.incarnation > incarnation) or incarnation.number <= self._removed.get(
            incarnation.replica, -1
        ):
            return None
        if old is not None:
            self._detach(old)
            self._throughput.remove(old.incarnation, old.incarnation.gang)
        node_view = self._node(node)
        view = ReplicaView(incarnation, node_view, launched_at=now, last_message_at=now, done_changed_at=now)
        view.gang_suspended = gang_of(incarnation.replica) in self._suspended
        view.role = self._roles.setdefault(role_of(incarnation.replica), view.role)
        self.replicas[incarnation.replica] = view
        self._link_gang(view)
        if view.is_agent:
            node_view.agent, node_view.former_agent = view, None
        else:
            node_view.residents[incarnation] = view
        return view

    def _mark_answers_probes(self, view: ReplicaView) -> None:
        """Its role answers while it waits."""
        if not view.role.answers_probes:
            view.role.answers_probes = True
            self.dirty.update(one.node for one in self.replicas.values() if one.role is view.role)

    def _set_slowest_load(self, role: RoleView, longest: float) -> None:
        if role.slowest_load != longest:
            role.slowest_load = longest
            self.dirty.update(one.node for one in self.replicas.values() if one.role is role)

    def _link_gang(self, view: ReplicaView) -> None:
        gang = gang_of(view.incarnation.replica)
        if gang != view.incarnation.replica:
            self._gangs.add(gang)
            if (first := self.replicas.get(gang)) is not None and not first.in_gang:
                first.in_gang = True
                self.dirty.add(first.node)
        view.in_gang = gang in self._gangs

    def _resume_node(self, node_view: NodeView, now: float) -> None:
        """Nothing on it is suspended any more: everything there counts anew."""
        if node_view.suspended_at is None:
            return
        node_view.suspended_at, node_view.last_message_at = None, None
        node_view.departed.clear()
        node_view.former_agent = None
        for view in (*node_view.residents.values(), *([node_view.agent] if node_view.agent else [])):
            _restart_clocks(view, now)
        self._suspend_gangs(now)

    def _suspend_gangs(self, now: float) -> None:
        """Who waits for a suspended member of its gang makes no progress, and cannot."""
        suspended = [node_view for node_view in self.nodes.values() if node_view.suspended_at is not None]
        self.dirty.update(node_view.node for node_view in suspended)
        self._suspended = {
            gang_of(incarnation.replica) for node_view in suspended for incarnation in node_view.residents
        }
        for view in self.replicas.values():
            gang_suspended = gang_of(view.incarnation.replica) in self._suspended
            if view.gang_suspended and not gang_suspended:
                view.phase_since, view.heartbeats, view.start_observed = now, 0, False
                view.loads.reset()
                view.probe.reset()
            if view.gang_suspended != gang_suspended:
                view.gang_suspended = gang_suspended
                self.dirty.add(view.node)

    def _detach(self, view: ReplicaView) -> None:
        node_view = view.node_view
        self.dirty.add(node_view.node)
        if node_view.agent is view:
            node_view.agent, node_view.former_agent = None, view
        elif node_view.residents.pop(view.incarnation, None):
            node_view.departed[view.incarnation] = view

    def _on_message(self, view: ReplicaView, source: str, now: float) -> None:
        self._resume_node(view.node_view, now)  # who is suspended says nothing
        if view.status == "launched":
            view.status, view.joined_at, view.standby = "joined", now, None
        view.last_message_at, view.last_message = now, source
        node_view = view.node_view
        node_view.last_message_at, node_view.former_agent = now, None
        node_view.departed.clear()

    def _update_pace(self, view: ReplicaView, done: int, now: float) -> None:
        """Of who makes tokens. An idle one waits for something, a tool perhaps: that time is not its own."""
        if not (view.declared.progresses and view.declared.computes):
            return
        rise = 0 if view.done is None else max(0, done - view.done)
        working = view.waits_for is None and view.loads.idle_since is None and not view.first_pass
        role = role_of(view.incarnation.replica)
        self._mark_dirty(self._throughput.add(role, view.incarnation, view.throughput, rise, working, now))

    def _mark_dirty(self, incarnations: list[Incarnation]) -> None:
        self.dirty.update(
            self.replicas[incarnation.replica].node
            for incarnation in incarnations
            if incarnation.replica in self.replicas
        )

    def _advance(self, view: ReplicaView, done: int, now: float) -> None:
        """``done`` as told: a rise restarts the clock. What is told first after a silence is only where it stands."""
        before, view.done = view.done, done if view.done is None else max(done, view.done)
        if before is None:
            view.worked_before = done > 0
        if before is None or done <= before:
            return
        if view.phase is not None and view.declared.progresses:
            self._record_duration(view, now)
            view.start_observed = True
            view.passed_phases.add(view.phase)
            self._freeze_baseline(view)
        view.done_changed_at = now
        view.heartbeats = 0
        if view.loads.gpu_idle_since is None:  # else: how can it?
            view.probe.reset()

    def _begin_phase(self, view: ReplicaView, phase: str, now: float) -> None:
        if view.phase is not None and not view.declared.progresses:
            self._record_duration(view, now)
            view.passed_phases.add(view.phase)
            if view.declared.own_work:
                view.role.newest_load_began = max(view.role.newest_load_began, view.phase_since)
        view.start_observed = view.phase is not None  # of the first phase heard of, the beginning was not seen
        view.phase, view.phase_since, view.heartbeats = phase, now, 0
        view.declared = self._limits.phase(phase)
        view.probe.reset()
        view.probe.no_probe_handler = False  # a role may get its handler later than its first question
        view.throughput.last_added_at = None
        self._freeze_baseline(view)

    def _freeze_baseline(self, view: ReplicaView) -> None:
        typical = self._durations.typical(role_of(view.incarnation.replica), view.phase or "")
        view.usual_duration, view.slowest_duration = typical.median, typical.longest

    def _on_unblocked(self, view: ReplicaView, now: float) -> None:
        """It goes on after another replica, mostly the store, kept it: that time was not its own. A phase that waits
        by itself goes on waiting: between two questions to the store nobody is asked for a moment."""
        if view.declared.waits_for is None:
            view.phase_since, view.heartbeats, view.start_observed = now, 0, False
            view.probe.reset()

    def _record_duration(self, view: ReplicaView, now: float) -> None:
        """Remember how long this took: a pass of a phase, or where progress counts the gap between two rises."""
        assert view.phase is not None
        if (
            view.phase == STARTING or not view.start_observed or view.first_pass
        ):  # a first pass compiles and warms up: not usual
            return
        since = view.last_change_at if view.declared.progresses else view.phase_since
        self._durations.add(role_of(view.incarnation.replica), view.phase, now - since)
        if view.declared.own_work:
            self._set_slowest_load(
                view.role, self._durations.typical(role_of(view.incarnation.replica), view.phase).longest
            )
        if view.declared.computes and not view.declared.progresses:
            rose = view.done_changed_at > view.phase_since
            worked = (view.done_changed_at if rose else now) - view.phase_since
            self._mark_dirty(
                self._throughput.on_pass(view.incarnation.gang, view.incarnation, view.throughput, worked, now)
            )


def _reset(view: ReplicaView, now: float) -> None:
    """As if launched now, for all that is known of it."""
    view.status, view.joined_at, view.last_message = "launched", None, "restart"
    _restart_clocks(view, now)


def _restart_clocks(view: ReplicaView, now: float) -> None:
    """Its time begins now: silence and standing still from before are not judged; proof stays."""
    view.launched_at = view.last_message_at = view.phase_since = view.done_changed_at = now
    view.heartbeats, view.start_observed = 0, False
    view.blocked_since = None if view.waits_for is None else now
    view.loads.reset()
    view.probe.reset()
    view.throughput.work, view.throughput.seconds, view.throughput.last_added_at, view.throughput.slow_rounds = (
        0,
        0.0,
        None,
        0,
    )
    if view.goodbye_at is not None:
        view.goodbye_at = now


def _set_blocked_by(view: ReplicaView, by: ReplicaId | None, now: float) -> None:
    if by is None:
        view.blocked_since = None
    elif view.waits_for is None or view.blocked_since is None:
        view.blocked_since = now
    view.waits_for = by
