"""Follow phases and progress of replicas, and learn how long each phase of a role usually takes.

:class:`ProgressTracker` updates the progress fields of a :class:`~.records.ReplicaView` when a phase begins or ``done``
rises, and feeds the baselines of :mod:`rrl.health.detection.baselines`. A duration is learned only if its beginning was
observed, and if no other replica blocked the replica during it. The duration of a *first pass* (the incarnation's first
time in the phase) is learned separately, because it may include compilation and warm-up. Times are the manager's clock
(s).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from ...core.run_spec import GUEST_TRAITS, Limits, RoleSpec
from ...core.types import GUEST_ROLE, Incarnation, NodeName, ReplicaId, role_of
from .baselines import PhaseDurations, RoleBaseline, ThroughputRounds
from .records import ReplicaView, RoleView

STARTING = "starting"
"""Phase that a worker reports before the first phase of its role. Its duration is not learned, because the next start
may be on another node."""


class ProgressTracker:
    """Tracker of the phases and progress of all replicas, which also learns the baselines of their roles.

    Args:
        replicas: The table of the health monitor; the monitor adds and removes entries.
        dirty: Nodes that ``detect`` must evaluate again; this class adds to it.
    """

    def __init__(self, replicas: Mapping[ReplicaId, ReplicaView], dirty: set[NodeName]) -> None:
        self._replicas = replicas
        self._dirty = dirty
        self._limits = Limits()
        self._durations = PhaseDurations()
        self._throughput = ThroughputRounds()
        self._roles: dict[str, RoleView] = {}

    def set_roles(self, roles: Iterable[RoleSpec]) -> None:
        """Set the roles of the job, before any replica or baseline of theirs is known."""
        self._roles = {role.name: RoleView(role.traits, role.awaited_as) for role in roles}
        self._roles[GUEST_ROLE] = RoleView(GUEST_TRAITS, "rollout")

    def set_limits(self, limits: Limits) -> None:
        """Use the phases that this job declares, also for replicas that have already entered one of these phases."""
        self._limits = limits
        for view in self._replicas.values():
            if view.phase is not None:
                view.declared = limits.phase(view.phase)

    # ── baselines ────────────────────────────────────────────────────────────────────────────────────────────────────
    def baselines(self) -> dict[str, RoleBaseline]:
        """Return the baselines by role; roles without baselines are left out."""
        stats = self._durations.stats()
        learned = {
            name: RoleBaseline(stats.get(name, {}), role.uses_tensor_cores, role.answers_probes, role.slowest_load)
            for name, role in self._roles.items()
        }
        return {name: baseline for name, baseline in learned.items() if baseline != RoleBaseline()}

    def restore_baselines(self, baselines: Mapping[str, RoleBaseline]) -> None:
        """Set the baselines of an earlier manager."""
        for name, baseline in baselines.items():
            role = self._role(name)
            role.uses_tensor_cores = baseline.uses_tensor_cores
            role.answers_probes = baseline.answers_probes
            role.slowest_load = baseline.slowest_load
            for phase, stats in baseline.phases.items():
                self._durations.restore(name, phase, stats)

    def role_view(self, replica: ReplicaId) -> RoleView:
        """Return the record that all replicas of this replica's role share."""
        return self._role(role_of(replica))

    def _role(self, name: str) -> RoleView:
        return self._roles.setdefault(name, RoleView(awaited_as=name))

    def mark_answers_probes(self, role: RoleView) -> None:
        """Record that replicas of this role answer probes while they wait."""
        if not role.answers_probes:
            role.answers_probes = True
            self._mark_role_dirty(role)

    # ── clocks ───────────────────────────────────────────────────────────────────────────────────────────────────────
    def restore_passed_phases(self, view: ReplicaView, phases: Collection[str]) -> None:
        """Mark the phases that the incarnation completed under an earlier manager, so that their first pass is over.

        A phase that counts progress is left out: its first reported count shows whether the first pass is over.
        """
        view.passed_phases.update(name for name in phases if not self._limits.phase(name).progresses)
        if view.role.uses_tensor_cores and any(self._limits.phase(name).computes for name in view.passed_phases):
            view.loads.uses_tensor_cores = True

    def begin_phase(self, view: ReplicaView, phase: str, now: float) -> None:
        """Record that a phase, or another pass of it, begins; the phase or pass before is complete."""
        if view.phase is not None and not view.declared.progresses:
            self._record_duration(view, now)
            view.passed_phases.add(view.phase)
            if view.declared.own_work:
                view.role.newest_load_began = max(view.role.newest_load_began, view.phase_since)
        view.start_observed = view.phase is not None  # the first reported phase began before its report
        view.phase, view.phase_since, view.heartbeats = phase, now, 0
        view.declared = self._limits.phase(phase)
        view.stacks.reset()
        view.probe.reset()
        view.probe.no_probe_handler = False  # a role may install its probe handler after the first probe
        view.throughput.last_added_at = None
        self._freeze_baseline(view)

    def advance(self, view: ReplicaView, done: int, now: float) -> None:
        """Record the reported count ``done``. After a rise, the time without progress counts from ``now``.

        The first reported count is only a starting point, because the time of its last rise is not known.
        """
        before, view.done = view.done, done if view.done is None else max(done, view.done)
        if before is None:
            view.worked_before = done > 0
        if before is None or done <= before:
            return
        first_pass = view.first_pass
        if view.phase is not None and view.declared.progresses:
            self._record_duration(view, now)
            view.start_observed = True
            view.passed_phases.add(view.phase)
            self._freeze_baseline(view)
        view.done_changed_at = now
        view.stacks.reset()
        view.heartbeats = 0
        # A replica with an idle GPU may report false progress, so its open probe is kept. A probe of a first pass is
        # dropped: it has no deadline while the replica compiles, and would be overdue as soon as this pass is over.
        if first_pass or view.loads.gpu_idle_since is None:
            view.probe.reset()

    def update_throughput(self, view: ReplicaView, done: int, now: float) -> None:
        """Add the work of a replica that generates tokens to the round of its role (:class:`ThroughputRounds`).

        Time in which the replica is idle or blocked does not count, since it waits (for a tool, for example).
        """
        if not (view.declared.progresses and view.declared.computes):
            return
        rise = 0 if view.done is None else max(0, done - view.done)
        working = view.waits_for is None and view.loads.idle_since is None and not view.first_pass
        role = role_of(view.incarnation.replica)
        self._mark_dirty(self._throughput.add(role, view.incarnation, view.throughput, rise, working, now))

    def on_unblocked(self, view: ReplicaView, now: float) -> None:
        """Restart the deadline of a replica that is no longer blocked by another replica (usually the store).

        In a phase that declares a wait the deadline is not restarted: between two requests to the store, a replica in
        such a phase briefly reports that no replica blocks it.
        """
        if view.declared.waits_for is None:
            view.phase_since, view.heartbeats, view.start_observed = now, 0, False
            view.probe.reset()

    def remove(self, incarnation: Incarnation) -> None:
        """Remove an incarnation from the comparisons of throughput."""
        self._throughput.remove(incarnation, incarnation.gang)

    def reset_throughput(self) -> None:
        """Begin all comparisons of throughput again."""
        self._throughput.reset()

    # ── internals ────────────────────────────────────────────────────────────────────────────────────────────────────
    def _freeze_baseline(self, view: ReplicaView) -> None:
        """Copy the usual durations of the phase into the view, so that a running deadline does not change."""
        typical = self._durations.typical(role_of(view.incarnation.replica), view.phase or "")
        view.usual_duration, view.slowest_duration = typical.median, typical.longest
        view.longest_pass = typical.longest_pass

    def _record_duration(self, view: ReplicaView, now: float) -> None:
        """Learn the duration of a pass or, in a phase that counts progress, the time between two rises of the count."""
        assert view.phase is not None
        if view.phase == STARTING or not view.start_observed:
            return
        role = role_of(view.incarnation.replica)
        since = view.last_change_at if view.declared.progresses else view.phase_since
        if view.first_pass:
            self._durations.add_first_pass(role, view.phase, now - since)
            return
        self._durations.add(role, view.phase, now - since)
        if view.declared.own_work:
            self._set_slowest_load(view.role, self._durations.typical(role, view.phase).longest)
        if view.declared.computes and not view.declared.progresses:
            rose = view.done_changed_at > view.phase_since
            worked_s = (view.done_changed_at if rose else now) - view.phase_since
            self._mark_dirty(
                self._throughput.on_pass(view.incarnation.gang, view.incarnation, view.throughput, worked_s, now)
            )

    def _set_slowest_load(self, role: RoleView, longest_s: float) -> None:
        if role.slowest_load != longest_s:
            role.slowest_load = longest_s
            self._mark_role_dirty(role)

    def _mark_role_dirty(self, role: RoleView) -> None:
        self._dirty.update(view.node for view in self._replicas.values() if view.role is role)

    def _mark_dirty(self, incarnations: Iterable[Incarnation]) -> None:
        replicas = (incarnation.replica for incarnation in incarnations)
        self._dirty.update(self._replicas[replica].node for replica in replicas if replica in self._replicas)


def restart_clocks(view: ReplicaView, now: float) -> None:
    """Restart all deadlines of a replica at ``now``, so that earlier silence and lack of progress are ignored.

    If it had joined, a message is awaited. Proof, such as an exit record, is kept.
    """
    view.status = "launched" if view.status == "launched" else "awaited"
    view.launched_at = view.last_message_at = view.phase_since = view.done_changed_at = now
    view.heartbeats, view.start_observed = 0, False
    view.blocked_since = None if view.waits_for is None else now
    view.data_untaken_since = None
    view.stacks.reset()
    view.loads.reset()
    view.probe.reset()
    pace = view.throughput
    pace.work, pace.seconds, pace.last_added_at, pace.slow_rounds = 0, 0.0, None, 0
    if view.goodbye_at is not None:
        view.goodbye_at = now


def set_blocked_by(view: ReplicaView, replica: ReplicaId | None, now: float) -> None:
    """Record that ``replica`` blocks the replica of ``view``, and since when. None means that no replica blocks it."""
    if replica is None:
        view.blocked_since = None
    elif view.waits_for is None or view.blocked_since is None:
        view.blocked_since = now
    view.waits_for = replica
