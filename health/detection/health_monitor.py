"""The observation table: the last observed state of every replica and node, from which the detectors judge.

The table is volatile. The journal does not record heartbeats or silence, so a new manager builds the table from the
messages that it receives and counts silence from its own start, also that of replicas that joined an earlier manager.
Callers pass plain values: this package knows neither messages nor clusters. ``now`` is always the manager's clock (s)
at receipt; timestamps of other hosts are never used. Messages of incarnations that the manager neither launched nor
admitted, and of older incarnations, are ignored.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping

from ...core.launch import ExitReason
from ...core.phases import ASLEEP, STOPPING
from ...core.run_spec import Limits, RoleSpec
from ...core.types import (
    GUEST_ROLE,
    STORE,
    DataReport,
    Incarnation,
    NodeName,
    ProbeResult,
    RaisedException,
    ReplicaId,
    gang_of,
    is_support,
    role_of,
)
from .baselines import RoleBaseline
from .progress_tracker import ProgressTracker, restart_clocks, set_blocked_by
from .records import NodeView, ReplicaView, RunView, StackSample, StepEnd, StorageStall, is_polling

_IGNORED_REASONS = frozenset({ExitReason.NOT_ADMITTED, ExitReason.FENCED})
"""Exit reasons whose exit records are ignored: the step was not admitted as its incarnation, or was fenced."""
_NO_REPORT = DataReport()


class HealthMonitor:
    """The last observed state of a run's replicas and nodes.

    The manager reports every observation by an ``on_…`` method; detectors only read.
    """

    def __init__(self) -> None:
        self.replicas: dict[ReplicaId, ReplicaView] = {}
        self.nodes: dict[NodeName, NodeView] = {}
        self.dirty: set[NodeName] = set()
        """Nodes with an observation since the last ``detect``; ``detect`` empties the set."""
        self.probes_due: dict[NodeName, float] = {}
        """Time of the next probe on each node (``probing.due_probes``); written by ``detect``."""
        self._progress = ProgressTracker(self.replicas, self.dirty)
        self.run = RunView()
        """What the store reports about the whole run."""
        self._removed: dict[ReplicaId, int] = {}
        """Highest incarnation number removed, by replica."""
        self._gangs: set[ReplicaId] = set()
        """Gangs with more than one member."""
        self._suspended: set[ReplicaId] = set()
        """Gangs with a member on a suspended node."""
        self._storage_stalls: dict[ReplicaId, StorageStall] = {}
        """Storage stall of the nodes of a gang's members, by gang; gangs without a stall are left out."""

    def set_roles(self, roles: Iterable[RoleSpec]) -> None:
        """Set the roles of the job, before any replica or baseline of theirs is known."""
        self._progress.set_roles(roles)

    def set_limits(self, limits: Limits) -> None:
        """Set the job's limits, by which phases are judged. Called by ``detect``; learned durations are kept."""
        self._progress.set_limits(limits)

    # ── baselines for the next manager ───────────────────────────────────────────────────────────────────────────────
    def baselines(self) -> dict[str, RoleBaseline]:
        """Return the baselines of each role."""
        return self._progress.baselines()

    def restore_baselines(self, baselines: Mapping[str, RoleBaseline]) -> None:
        """Set the baselines of an earlier manager. Must be called before the first observation."""
        self._progress.restore_baselines(baselines)

    # ── decisions of the manager ─────────────────────────────────────────────────────────────────────────────────────
    def on_launched(
        self,
        incarnation: Incarnation,
        node: NodeName,
        now: float,
        standby: Incarnation | None = None,
        join_timeout_s: float = 0.0,
    ) -> None:
        """Add an incarnation that was launched or that an earlier manager left running; its join deadline starts.

        Args:
            incarnation: The current incarnation.
            node: The node that it was placed on.
            now: Manager's clock (s).
            standby: The standby process that was promoted to this incarnation; None if the incarnation was launched.
            join_timeout_s: Time (s) within which a promoted standby process must send a Hello as the incarnation.
        """
        if standby is not None:
            self.remove(standby)
        if (view := self._ensure_view(incarnation, node, now)) is not None and standby is not None:
            view.standby, view.join_timeout_s = standby, join_timeout_s

    def restore_joined(self, incarnation: Incarnation, passed: Collection[str]) -> None:
        """Await a message of an incarnation that joined an earlier manager; its first pass of ``passed`` is over."""
        if view := self._view_of(incarnation):
            view.status = "awaited"
            self._progress.restore_passed_phases(view, passed)

    def delay_join_deadline(self, incarnation: Incarnation, now: float) -> None:
        """Restart the join deadline of an incarnation that an unresponsive cluster may not have launched yet."""
        if (view := self._view_of(incarnation)) and view.status == "launched" and view.standby is None:
            view.launched_at = now

    def on_stop_requested(self, incarnation: Incarnation, now: float) -> None:
        """Record that the manager requested the incarnation to stop, so that its end is expected."""
        if (view := self._view_of(incarnation)) and view.stop_requested_at is None:
            view.stop_requested_at = now

    def on_goodbye(self, incarnation: Incarnation, now: float) -> None:
        """Record a Goodbye: heartbeats are no longer expected, but without a stop request the end is a failure."""
        if (view := self._view_of(incarnation)) and view.goodbye_at is None:
            view.goodbye_at = now

    def remove(self, incarnation: Incarnation) -> None:
        """Forget an incarnation that is no longer current; its later messages are ignored."""
        replica = incarnation.replica
        self._removed[replica] = max(incarnation.number, self._removed.get(replica, -1))
        view = self.replicas.get(replica)
        if view is not None and view.incarnation <= incarnation:
            self._detach(view)
            del self.replicas[replica]
            self._progress.remove(view.incarnation)

    def remove_node(self, node: NodeName) -> None:
        """Forget a released node and every incarnation on it."""
        if (node_view := self.nodes.get(node)) is None:
            return
        for view in node_view.all_replicas():
            self.remove(view.incarnation)
        del self.nodes[node]
        self.dirty.add(node)

    def restart(self, now: float) -> None:
        """Restart all deadlines at ``now``: those of silence, and of the join for incarnations that have not joined.

        Called by a manager that begins to listen, also after it was itself stopped for a while. Earlier silence is
        ignored. Proof (exit records, witnessed ends) and baselines are kept.
        """
        self._progress.reset_throughput()
        for view in self.replicas.values():
            restart_clocks(view, now)
        for node_view in self.nodes.values():
            node_view.suspended_at = node_view.suspension_checked_at = None
            node_view.last_message_at = node_view.state = node_view.reported_down = None
            node_view.detail, node_view.since, node_view.observations = "", now, 0
            node_view.forget_departed()
            self.dirty.add(node_view.node)

    # ── messages of replicas ─────────────────────────────────────────────────────────────────────────────────────────
    def on_hello(self, incarnation: Incarnation, node: NodeName, phase: str, now: float) -> None:
        """Record a first or repeated Hello, which names the node on which the incarnation actually runs."""
        if (view := self._ensure_view(incarnation, node, now)) is None:
            return
        if view.node != node and not view.is_agent:
            view.node_view.residents.pop(incarnation, None)
            self.dirty.add(view.node)
            view.node_view = self._node(node)
            view.node_view.residents[incarnation] = view
            self._update_storage_stalls(view)
        self._on_message(view, now)
        # An earlier manager may have got its Goodbye. In another phase, the command has started another worker process.
        view.goodbye_at = (view.goodbye_at or now) if phase == STOPPING else None
        if view.phase != phase:
            self._progress.begin_phase(view, phase, now)

    def on_heartbeat(
        self,
        incarnation: Incarnation,
        phase: str,
        done: int,
        waits_for: ReplicaId | None,
        now: float,
        data: DataReport = _NO_REPORT,
    ) -> None:
        """Record a heartbeat, in which ``data`` is a report of the store.

        If the message that announced its phase was lost, the phase begins now.
        """
        if view := self._view_of(incarnation):
            self._on_message(view, now)
            view.heartbeats += 1
            view.probe.heartbeats += 1
            if view.waits_for is not None and waits_for is None:
                self._progress.on_unblocked(view, now)
            self._progress.update_throughput(view, done, now)
            self._progress.advance(view, done, now)
            if view.phase != phase:
                self._progress.begin_phase(view, phase, now)
            elif view.waits_for is None and waits_for is not None and view.declared.waits_for is None:
                view.start_observed = False  # another replica caused part of this time, so it is not a usual duration
            set_blocked_by(view, waits_for, now)
            if not data.untaken:
                view.data_untaken_since = None
            elif view.data_untaken_since is None:
                view.data_untaken_since = now
            if incarnation.replica == STORE:
                self._on_data_report(data, now)

    def _on_data_report(self, data: DataReport, now: float) -> None:
        """Record what the run waits for outside of itself, and who holds what the data of the trainer lack."""
        run = self.run
        if data.outside is not None:
            run.outside_until = now
            run.outside_since = now if run.outside is None else run.outside_since
        holders = data.holders if data.only_holders else None
        if (run.outside is None) != (data.outside is None) or run.holders != holders:
            self.dirty.update(self.nodes)  # the deadlines of all waits change
        run.outside, run.holders = data.outside, holders

    def on_phase(
        self, incarnation: Incarnation, phase: str, done: int, waits_for: ReplicaId | None, now: float
    ) -> None:
        """Begin a phase, or another pass of the same phase."""
        if view := self._view_of(incarnation):
            self._on_message(view, now)
            self._progress.advance(view, done, now)
            self._progress.begin_phase(view, phase, now)
            set_blocked_by(view, waits_for, now)

    # ── reports about replicas ───────────────────────────────────────────────────────────────────────────────────────
    def on_load(
        self,
        incarnation: Incarnation,
        cpu: float,
        gpu: float | None,
        now: float,
        tensor: float | None = None,
        stopped: bool = False,
    ) -> None:
        """Record the load that the node's agent measured.

        Args:
            incarnation: The incarnation whose processes were measured.
            cpu: CPU cores in use.
            gpu: Share of the time (0 to 1) in which a kernel ran; None if it cannot be measured.
            now: Manager's clock (s).
            tensor: Share of the time (0 to 1) in which tensor cores worked; None if it cannot be measured.
            stopped: Whether one of the processes was stopped, by SIGSTOP or by a tracer.
        """
        if view := self._view_of(incarnation):
            # After the first pass, idle tensor cores are evidence only if the incarnation's own tensor cores have been
            # observed at work, because some GPUs do not report them and always read 0.
            needs_tensor_cores = view.role.uses_tensor_cores and view.first_pass
            view.loads.add(cpu, gpu, now, tensor, needs_tensor_cores, stopped)
            view.role.uses_tensor_cores = view.role.uses_tensor_cores or view.loads.uses_tensor_cores
            if view.loads.gpu_idle_since is None and view.probe.last_sent_at < view.last_change_at:
                view.probe.reset()  # the replica has made progress since the probe, and its GPU works

    def on_probe_sent(self, incarnation: Incarnation, now: float) -> None:
        """Record that a probe was sent (``probing.due_probes``)."""
        if view := self._view_of(incarnation):
            view.probe.sent(now)
            view.role.probes_sent += not view.role.answers_probes and is_polling(view)

    def on_probe_answered(self, incarnation: Incarnation, result: ProbeResult, detail: str, now: float) -> None:
        """Record the answer to a probe; ``detail`` is a text for people."""
        if view := self._view_of(incarnation):
            if result is ProbeResult.WORKS and view.probe.pending_since is not None and is_polling(view):
                self._progress.mark_answers_probes(view.role)
            view.probe.answered(result, detail, now)

    def on_stacks(self, gang: Incarnation, sample: StackSample | None, now: float) -> None:
        """Record a sample of the stacks of a gang (:func:`.detectors.stack_samples.due_stack_samples`).

        ``sample`` is None if the stack of a member is not known.
        """
        for view in self.replicas.values():
            if view.incarnation.gang == gang:
                view.stacks.add(sample, now)
                self.dirty.add(view.node)

    def on_step_ended(
        self,
        incarnation: Incarnation,
        code: int | None,
        signal: int | None,
        reason: ExitReason,
        now: float,
        last_line: str = "",
        detail: str = "",
        exception: RaisedException | None = None,
    ) -> None:
        """Record the exit record of a step; only the first record of an incarnation counts.

        The record of a step that was not admitted or was fenced is ignored, because it may come from a second step with
        the same tag.
        """
        if (view := self._view_of(incarnation)) and view.exit is None and reason not in _IGNORED_REASONS:
            view.exit = StepEnd(code, signal, reason, now, last_line, detail, exception)

    def on_step_gone(self, incarnation: Incarnation, now: float) -> None:
        """Record that the agent found the step's first process gone, without an exit record."""
        if (view := self._view_of(incarnation)) and view.gone_witnessed_at is None:
            view.gone_witnessed_at = now

    def on_step_unlisted(self, incarnation: Incarnation, now: float) -> None:
        """Record that the cluster no longer lists the step of an incarnation whose node is silent."""
        if (view := self._view_of(incarnation)) and view.unlisted_at is None:
            view.unlisted_at = now

    def on_step_alive(self, incarnation: Incarnation, now: float) -> None:
        """Record that the agent found the step's first process running, which extends the join deadline."""
        if view := self._view_of(incarnation):
            view.step_alive_at = now

    # ── reports about nodes ──────────────────────────────────────────────────────────────────────────────────────────
    def on_agent_message(self, node: NodeName, incarnation: Incarnation, now: float, boot_id: str = "") -> None:
        """Record a Hello (with the node's boot id) or a heartbeat of the node's agent."""
        if view := self._ensure_view(incarnation, node, now):
            self._on_message(view, now)
            view.node_view.boot_id = boot_id or view.node_view.boot_id

    def on_job_status(self, node: NodeName, suspended: bool, polled_at: float, now: float) -> None:
        """Record whether the cluster reported at ``polled_at`` (s) that the job of this node is suspended.

        While the job is suspended, no deadline on the node runs; when the job resumes, all these deadlines restart.
        """
        node_view = self._node(node)
        node_view.suspension_checked_at = polled_at
        if not suspended:
            self._resume_node(node_view, now)
        elif node_view.suspended_at is None and (
            node_view.last_message_at is None or node_view.last_message_at < polled_at
        ):
            node_view.suspended_at = polled_at
            self._update_suspended_gangs(now)

    def on_storage_report(self, node: NodeName, stalled: bool, now: float) -> None:
        """Record whether the findings of the node's agent report stalled storage."""
        before = self.nodes[node].storage_stall if node in self.nodes else StorageStall()
        if stalled != before.stalled:
            self._node(node).storage_stall = StorageStall(stalled, before.ended_at if stalled else now)
            self._update_storage_stalls()

    def needs_suspend_check(self, limits: Limits, now: float) -> bool:
        """Return whether the cluster must be polled because the job of a silent node may be suspended.

        A poll is needed only if the cluster has not reported, since this node fell silent, whether the node's job is
        suspended (:meth:`.records.NodeView.suspension_checked`). The poll must precede the exclusion of the node.
        """
        return any(
            node_view.agent is not None
            and node_view.suspension_checked_at is not None
            and node_view.suspended_at is None
            and node_view.last_message_at is not None
            and now - node_view.last_message_at > limits.silence / 2
            and not node_view.suspension_checked(limits)
            for node_view in self.nodes.values()
        )

    def on_node_status(self, node: NodeName, state: str, detail: str, now: float, isolated: bool = True) -> None:
        """Record the state of a node in one poll of the cluster.

        Args:
            node: The node.
            state: ``up``, ``draining``, ``down`` or ``unknown``. ``unknown`` is evidence neither of health nor of
                failure.
            detail: The cluster's reason, a text for people.
            now: Manager's clock (s).
            isolated: Whether most other nodes kept their state. Only then does the loss of the state ``up`` count as a
                flap of this node.
        """
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
        if state != "down" and node_view.observations >= 2:  # docs/sources.md: trust a node after two good readings
            node_view.reported_down = None

    # ── queries ──────────────────────────────────────────────────────────────────────────────────────────────────────
    def workers(self) -> Iterator[ReplicaView]:
        """Return all replicas for which others may wait: no agents, no standby processes, and only guests at work."""
        return (
            view
            for view in self.replicas.values()
            if not is_support(view.incarnation.replica)
            or (role_of(view.incarnation.replica) == GUEST_ROLE and view.phase not in (None, ASLEEP))
        )

    def incarnations_on(self, node: NodeName) -> list[Incarnation]:
        """Return the current incarnations on a node, without its agent."""
        node_view = self.nodes.get(node)
        return [] if node_view is None else list(node_view.residents)

    # ── internals ────────────────────────────────────────────────────────────────────────────────────────────────────
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
        """Return the view of an incarnation, or None if the incarnation is not current. Create the view if needed."""
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
            self._progress.remove(old.incarnation)
        node_view = self._node(node)
        view = ReplicaView(incarnation, node_view, launched_at=now, last_message_at=now, done_changed_at=now)
        view.gang_suspended = gang_of(incarnation.replica) in self._suspended
        view.role, view.run = self._progress.role_view(incarnation.replica), self.run
        self.replicas[incarnation.replica] = view
        self._link_gang(view)
        self._update_storage_stalls(view)
        if view.is_agent:
            node_view.agent, node_view.former_agent = view, None
        else:
            node_view.residents[incarnation] = view
        return view

    def _link_gang(self, view: ReplicaView) -> None:
        """Record that a gang has several members once its second member appears."""
        gang = gang_of(view.incarnation.replica)
        if gang != view.incarnation.replica:
            self._gangs.add(gang)
            if (first := self.replicas.get(gang)) is not None and not first.in_gang:
                first.in_gang = True
                self.dirty.add(first.node)
        view.in_gang = gang in self._gangs

    def _resume_node(self, node_view: NodeView, now: float) -> None:
        """End the suspension of a node, if it is suspended, and restart all deadlines on it."""
        if node_view.suspended_at is None:
            return
        node_view.suspended_at, node_view.last_message_at = None, None
        node_view.forget_departed()
        for view in node_view.all_replicas():
            restart_clocks(view, now)
        self._update_suspended_gangs(now)

    def _update_suspended_gangs(self, now: float) -> None:
        """Mark all members of gangs with a suspended member, since none of them can make progress."""
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

    def _update_storage_stalls(self, placed: ReplicaView | None = None) -> None:
        """Give each replica the storage stall of its gang's nodes.

        ``placed`` is a replica that was just placed on a node. Do nothing if neither this node nor the replica's gang
        has a stall.
        """
        none = StorageStall()
        if (
            placed is not None
            and placed.node_view.storage_stall == none
            and gang_of(placed.incarnation.replica) not in self._storage_stalls
        ):
            return
        self._storage_stalls.clear()
        for view in self.replicas.values():
            if (stall := view.node_view.storage_stall) != none:
                gang = gang_of(view.incarnation.replica)
                known = self._storage_stalls.get(gang, none)
                merged = StorageStall(known.stalled or stall.stalled, max(known.ended_at, stall.ended_at))
                self._storage_stalls[gang] = merged
        for view in self.replicas.values():
            stall = self._storage_stalls.get(gang_of(view.incarnation.replica), none)
            if view.storage_stall != stall:
                view.storage_stall = stall
                self.dirty.add(view.node)

    def _detach(self, view: ReplicaView) -> None:
        """Move a view from its node's present replicas to the node's departed replicas."""
        node_view = view.node_view
        self.dirty.add(node_view.node)
        if node_view.agent is view:
            node_view.agent, node_view.former_agent = None, view
        elif node_view.residents.pop(view.incarnation, None):
            node_view.departed[view.incarnation] = view

    def _on_message(self, view: ReplicaView, now: float) -> None:
        self._resume_node(view.node_view, now)  # a suspended process sends nothing
        if view.status == "awaited":
            self.run.heard_at = now
        view.status, view.standby = "joined", None
        view.last_message_at, view.unlisted_at = now, None
        view.node_view.last_message_at = now
        view.node_view.forget_departed()
