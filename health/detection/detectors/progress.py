"""Detectors by time: replicas that send heartbeats but make no progress, or are slower than their peers.

No progress means that a count does not rise, a phase exceeds its limit, or a wait lasts too long. A deadline is a
multiple of the usual duration, within the bounds of the phase. It decides only where no better evidence exists: a
replica that answers probes is judged by its answers (:mod:`rrl.health.detection.detectors.probing`), and a replica that
must compute is also judged by its CPU and GPU load (:mod:`rrl.health.detection.detectors.idleness`). A straggler gets a
WARN; the job decides whether its node is excluded for that. A *first pass* is the first time that an incarnation goes
through a phase.
"""

from __future__ import annotations

from math import inf

from ....core.run_spec import Limits
from ....core.types import Cause, Remedy, Verdict, role_of
from ..baselines import SLOW_RANK_SHARE, SLOW_ROLLOUT_SHARE, STRAGGLER_ROUNDS, THROUGHPUT_WINDOW_S
from ..records import MAX_LOAD_GAP_S, ReplicaView, is_polling
from .base import MIN_HEARTBEATS, NO_FINDING, SLOWEST_FACTOR, Result, finding_about, is_waiting, is_working

BUSY_DEADLINE_FACTOR = 6.0
"""Multiple of the deadline for a replica whose GPU (CPU, if it has no GPU) works: it is slow, not hung."""
MAX_BLIND_TRAINING_S = 7200.0
"""Deadline (s) up to which a busy GPU extends a training pass whose tensor cores were never observed: a collective that
hangs looks the same, and an evaluation rarely takes longer."""
FIRST_PASS_IDLE_SHARE = 0.25
"""Fraction of ``longest`` for which a replica may be idle in its first pass of a ``_WARMUP_PHASES`` phase without a
baseline (15 min by default)."""
_WARMUP_PHASES = ("publish", "score")
"""Phases whose first pass takes long only because the replica works: compiling and packing use CPU or GPU. In contrast,
a replica may idle during its first checkpoint while it waits for storage."""
ENDLESS_WAIT_FACTOR = 1.25
"""Multiple of ``longest`` of a waiting phase (19 min by default) after which a busy service does not explain a wait."""
_SERVE_PHASE = "serve"


def no_progress(view: ReplicaView, limits: Limits, now: float) -> Result:
    """Find a replica whose ``done`` does not rise in a phase that must progress."""
    if not is_working(view) or is_waiting(view) or not view.declared.progresses:
        return NO_FINDING
    if view.probe.answer_count or (view.probe.pending_since is not None and not view.first_pass):
        return _overdue_despite_answers(view, limits, now)
    return _overdue(view, limits, now, "no_progress", Verdict.FAIL, "no progress within")


def phase_overdue(view: ReplicaView, limits: Limits, now: float) -> Result:
    """Find a replica that does not complete a phase that must end, and shows no progress in it either.

    A phase that neither rrl nor the job declares has no known limit and gives only a warning.
    """
    declared = view.declared
    if is_working(view) and declared.own_work and is_waiting(view):
        return _own_work_overdue(view, limits, now)
    if not is_working(view) or is_waiting(view) or declared.progresses or declared.longest == inf:
        return NO_FINDING
    verdict = Verdict.FAIL if limits.is_known_phase(declared.name) else Verdict.WARN
    return _overdue(view, limits, now, "phase_overdue", verdict, "it has not ended within")


def wait_overdue(view: ReplicaView, limits: Limits, now: float) -> Result:
    """Find a replica that waits too long; ``blame_ends_of_wait_chains`` replaces or drops every such finding.

    The finding is ``wait_endless`` after ``ENDLESS_WAIT_FACTOR`` times the longest time of the phase.
    """
    if not is_working(view) or not is_waiting(view):
        return NO_FINDING
    problem = f"it has waited for {_awaited_name(view)} for more than"
    finding, then = _overdue(view, limits, now, "wait_overdue", Verdict.UNKNOWN, problem)
    due = view.last_change_at + ENDLESS_WAIT_FACTOR * view.declared.longest + _grace(view, limits)
    if finding is None or not is_polling(view) or now < due:
        return finding, min(then, due) if finding is not None and is_polling(view) else then
    text = f"phase {view.phase}: {problem} {due - view.last_change_at:g} s"
    return finding_about(
        view, "wait_endless", Verdict.UNKNOWN, Cause.HANG, Remedy.NONE, view.last_change_at, "worker", text
    ), then


def wait_long(view: ReplicaView, limits: Limits, now: float) -> Result:
    """Find a replica that has waited for longer than ``shortest`` of its phase; input of ``blame_ends_of_wait_chains``.

    So short a wait is evidence only against a service that does nothing. In a phase that may also do work of its own,
    it is not evidence. In a phase that declares no wait, the replica is blocked in a call to a service; then
    ``shortest`` of the service's phase is the limit.
    """
    if not is_working(view) or not is_waiting(view) or view.declared.own_work:
        return NO_FINDING
    least = (view.declared if view.declared.waits_for is not None else limits.phase(_SERVE_PHASE)).shortest
    due = _stalled_since(view) + least
    if now < due:
        return None, due
    if view.heartbeats < MIN_HEARTBEATS:
        return NO_FINDING
    text = f"phase {view.phase}: it has waited for {_awaited_name(view)} for more than {least:g} s"
    return finding_about(
        view, "wait_long", Verdict.UNKNOWN, Cause.HANG, Remedy.NONE, _stalled_since(view), "worker", text
    ), inf


def idle(view: ReplicaView, limits: Limits, now: float) -> Result:
    """Find a service that does nothing, mostly for lack of requests; input of ``blame_ends_of_wait_chains``."""
    if not is_working(view) or is_waiting(view) or view.declared.longest != inf or view.declared.progresses:
        return NO_FINDING
    return _overdue(view, limits, now, "idle", Verdict.UNKNOWN, "it has done nothing for more than")


def _awaited_name(view: ReplicaView) -> str:
    return view.waits_for or f"any {view.declared.waits_for}"


def _own_work_overdue(view: ReplicaView, limits: Limits, now: float) -> Result:
    """Find a replica that exceeds ``longest``, the only limit of a phase in which it may either wait or work itself."""
    due = view.last_change_at + view.declared.longest + _grace(view, limits)
    if now < due:
        return None, due
    if view.heartbeats < MIN_HEARTBEATS:
        return NO_FINDING
    text = f"phase {view.phase}: it has not ended within {due - view.last_change_at:g} s"
    return finding_about(
        view, "phase_overdue", Verdict.FAIL, Cause.HANG, Remedy.RESTART, view.last_change_at, "worker", text
    ), inf


def _stalled_since(view: ReplicaView) -> float:
    """Return the time (s) since which nothing has changed; in a blocked call, not before the start of the call."""
    in_a_call = view.declared.waits_for is None and view.blocked_since is not None
    return max(view.last_change_at, view.blocked_since or 0.0) if in_a_call else view.last_change_at


def _overdue_despite_answers(view: ReplicaView, limits: Limits, now: float) -> Result:
    """Find a probed replica that makes no progress within ``longest``.

    No shorter deadline applies, because the answer to the probe, or its absence, is better evidence.
    """
    longest = view.declared.longest
    due = view.last_change_at + longest + _grace(view, limits)
    if now < due:
        return None, due
    if view.heartbeats < MIN_HEARTBEATS:
        return NO_FINDING
    text = f"phase {view.phase}: no progress within {longest:g} s, the limit of the phase"
    return finding_about(
        view, "no_progress", Verdict.FAIL, Cause.HANG, Remedy.RESTART, view.last_change_at, "worker", text
    ), inf


def _overdue(view: ReplicaView, limits: Limits, now: float, detector: str, verdict: Verdict, problem: str) -> Result:
    """Compare the time without progress with the deadline, which work of CPU or GPU extends.

    Args:
        view: The replica.
        limits: The job's deadlines.
        now: Manager's clock (s).
        detector: Name in the finding.
        verdict: Verdict of the finding; only a FAIL is deferred by work.
        problem: Text of the finding, to which the deadline is appended.
    """
    deadline, how = _deadline(view, limits)
    since = _stalled_since(view)
    due = since + deadline
    if (idle_deadline := _first_pass_idle_deadline(view, limits, since)) is not None and idle_deadline[0] < due:
        due, how = idle_deadline
    if now < due:
        return None, due
    if view.heartbeats < MIN_HEARTBEATS:  # too few observations; the next heartbeat is evaluated again
        return NO_FINDING
    if verdict is Verdict.FAIL and (_busy_at_deadline(view, due) or _cannot_be_probed(view)):
        most = (
            min(view.declared.longest, MAX_BLIND_TRAINING_S)
            if _gpu_busy_without_tensor_signal(view)
            else view.declared.longest
        )
        later = max(due, since + min(BUSY_DEADLINE_FACTOR * deadline, max(deadline, most)))
        if now < later:
            return None, later
    remedy = Remedy.RESTART if verdict is Verdict.FAIL else Remedy.NONE
    text = f"phase {view.phase}: {problem} {how}"
    return finding_about(view, detector, verdict, Cause.HANG, remedy, since, "worker", text), inf


def _gpu_busy_without_tensor_signal(view: ReplicaView) -> bool:
    """Return whether a training replica's running kernels are the only sign of its work."""
    return (
        view.declared.computes
        and not view.declared.progresses
        and not view.loads.uses_tensor_cores
        and not view.loads.cpu_bound
    )


def _busy_at_deadline(view: ReplicaView, due: float) -> bool:
    """Return whether a load measured at most ``MAX_LOAD_GAP_S`` before the deadline, or later, shows work.

    In training, only the tensor cores of a gang's member count, because a collective that waits may occupy its GPU. The
    same holds for a replica without a gang whose tensor cores have been observed at work. The CPU counts only in phases
    that compute, because a busy loop looks the same. With a GPU, the CPU counts only for a replica that trains alone
    (an evaluation, or batch preparation), because ranks that wait in a collective use their CPUs too.
    """
    loads = view.loads
    trains = view.declared.computes and not view.declared.progresses
    if trains and not view.in_gang and loads.cpu_bound:
        works, at = True, loads.latest_at
    elif trains and (view.in_gang or loads.uses_tensor_cores):
        works, at = True, loads.tensor_active_at
    else:
        works, at = loads.working if view.declared.computes else loads.kernel_active, loads.latest_at
    return works and at is not None and at >= due - MAX_LOAD_GAP_S


def _cannot_be_probed(view: ReplicaView) -> bool:
    """Return whether the replica makes tokens and has no probe handler.

    For such a replica, waiting for a tool looks like a hang. If it were killed during healthy work, its replacement
    would be killed at the same place.
    """
    return view.probe.no_probe_handler and view.declared.computes and view.declared.progresses


def _deadline(view: ReplicaView, limits: Limits) -> tuple[float, str]:
    """Return the time (s) without progress that is allowed, and a text with its source."""
    declared = view.declared
    if declared.longest == inf:
        return declared.shortest, f"{declared.shortest:g} s"
    deadline, how = (
        (declared.longest, "no baseline yet") if view.usual_duration is None else _usual_deadline(view, limits)
    )
    if grace := _grace(view, limits):
        deadline, how = deadline + grace, f"{how}; first pass + {grace:g} s"
    return deadline, f"{deadline:.4g} s ({how})"


def _usual_deadline(view: ReplicaView, limits: Limits) -> tuple[float, str]:
    """Return the deadline (s) according to the baseline, within the bounds of the phase, and a text with its source."""
    declared = view.declared
    usual = view.usual_duration or 0.0
    most = max(limits.adaptive * usual, SLOWEST_FACTOR * view.slowest_duration)
    how = f"{limits.adaptive:g} x usual {usual:.3g} s"
    if SLOWEST_FACTOR * view.slowest_duration > limits.adaptive * usual:
        how = f"{SLOWEST_FACTOR:g} x longest {view.slowest_duration:.3g} s"
    how += f", within {declared.shortest:g} to {declared.longest:g} s"
    return min(max(most, declared.shortest), declared.longest), how


def _first_pass_idle_deadline(view: ReplicaView, limits: Limits, since: float) -> tuple[float, str] | None:
    """Return the time (s) from which a replica has been idle for too long in its first pass, and a text with the limit.

    An idle replica gets no first-pass grace, since it neither compiles nor packs. Return None if the phase is not one
    of ``_WARMUP_PHASES`` or not in its first pass, or if recent loads do not show an idle replica.
    """
    declared, loads = view.declared, view.loads
    if (
        not view.first_pass
        or declared.name not in _WARMUP_PHASES
        or loads.idle_since is None
        or loads.latest_at is None
    ):
        return None
    if loads.latest_at < view.last_message_at - MAX_LOAD_GAP_S:
        return None
    if view.usual_duration is None:
        most = max(declared.shortest, FIRST_PASS_IDLE_SHARE * declared.longest)
        how = f"no baseline yet, {FIRST_PASS_IDLE_SHARE:g} of {declared.longest:g} s"
    else:
        most, how = _usual_deadline(view, limits)
    return max(since, loads.idle_since) + most, f"{most:.4g} s of idleness ({how})"


def _grace(view: ReplicaView, limits: Limits) -> float:
    """Return the first-pass grace (s); a replica that only waits has none, since it neither compiles nor warms up."""
    only_waits = is_waiting(view) and not view.declared.own_work
    return limits.first_pass if view.first_pass and not only_waits else 0.0


def straggler(view: ReplicaView, limits: Limits, now: float) -> Result:
    """Find a replica that was slow in ``STRAGGLER_ROUNDS`` consecutive comparisons (:mod:`..baselines`)."""
    if view.throughput.slow_rounds < STRAGGLER_ROUNDS or not is_working(view):
        return NO_FINDING
    role = role_of(view.incarnation.replica)
    if view.throughput.by_tokens:
        text = f"less than {SLOW_ROLLOUT_SHARE:g} of the median tokens per second of the other {role} replicas"
        text += f", in {STRAGGLER_ROUNDS} consecutive rounds of {THROUGHPUT_WINDOW_S:g} s"
    else:
        text = f"the other ranks of its gang need less than {SLOW_RANK_SHARE:g} of its time"
        text += f", in {STRAGGLER_ROUNDS} consecutive training passes"
    remedy = Remedy.EXCLUDE if limits.stragglers == "exclude" else Remedy.NONE
    return finding_about(
        view, "straggler", Verdict.WARN, Cause.NODE, remedy, view.throughput.slow_since, "worker", text
    ), inf
