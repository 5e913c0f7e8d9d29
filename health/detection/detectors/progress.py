"""Detectors by time: replicas that send heartbeats but make no progress, or are slower than their peers.

No progress means that a count does not rise, a phase exceeds its deadline (:mod:`.pass_deadlines`), or a wait lasts too
long. A deadline decides only where no better evidence exists. A replica that answers probes is judged by its answers
(:mod:`.probing`). A replica that must compute is also judged by its CPU and GPU load (:mod:`.idleness`). A straggler
gets a WARN; the job decides whether its node is excluded for that.
"""

from __future__ import annotations

from math import inf

from ....core.run_spec import Limits
from ....core.types import Cause, Remedy, Verdict, role_of
from ..baselines import SLOW_RANK_SHARE, SLOW_ROLLOUT_SHARE, STRAGGLER_ROUNDS, THROUGHPUT_WINDOW_S
from ..records import MAX_LOAD_GAP_S, ReplicaView, is_polling
from .base import MIN_HEARTBEATS, NO_FINDING, Result, finding_about, is_service, is_waiting, is_working
from .pass_deadlines import deadline, extended_by_storage, first_pass_grace, idle_due, service_wait_due
from .probing import next_probe_at
from .stack_samples import stands_still, trains

ENDLESS_WAIT_FACTOR = 1.25
"""Multiple of ``longest``, the upper limit of a waiting phase, after which a busy service no longer explains a wait
(after 19 min by default)."""
_SERVE_PHASE = "serve"


def no_progress(view: ReplicaView, limits: Limits, now: float) -> Result:
    """Find a replica whose progress count ``done`` does not rise in a phase that must progress."""
    if not is_working(view) or is_waiting(view) or not view.declared.progresses:
        return NO_FINDING
    if view.probe.answer_count or (view.probe.pending_since is not None and not view.first_pass):
        return _overdue_despite_answers(view, limits, now)
    return _overdue(view, limits, now, "no_progress", Verdict.FAIL, "no progress within")


def phase_overdue(view: ReplicaView, limits: Limits, now: float) -> Result:
    """Find a replica that neither completes a phase that must end nor shows progress in it.

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

    The finding is ``wait_endless`` after ``ENDLESS_WAIT_FACTOR`` times ``longest`` of the phase.
    """
    if not is_working(view) or not is_waiting(view):
        return NO_FINDING
    problem = f"it has waited for {_awaited_name(view)} for more than"
    finding, then = _overdue(view, limits, now, "wait_overdue", Verdict.UNKNOWN, problem)
    due = endless_wait_due(view, limits)
    if finding is None or not is_polling(view) or now < due:
        return finding, min(then, due) if finding is not None and is_polling(view) else then
    since = stalled_since(view)
    text = f"phase {view.phase}: {problem} {due - since:g} s"
    return finding_about(view, "wait_endless", Verdict.UNKNOWN, Cause.HANG, Remedy.NONE, since, "worker", text), then


def endless_wait_due(view: ReplicaView, limits: Limits) -> float:
    """Return the time (s) from which a replica that polls has waited endlessly."""
    return stalled_since(view) + ENDLESS_WAIT_FACTOR * view.declared.longest + first_pass_grace(view, limits)


def wait_long(view: ReplicaView, limits: Limits, now: float) -> Result:
    """Find a replica that has waited for longer than ``shortest``, the lower limit of its phase.

    The finding is input of ``blame_ends_of_wait_chains``, and is evidence only against a service that does nothing. A
    phase in which the replica may also work itself gives no finding. In a phase that declares no wait, the replica is
    blocked in a call to a service, and ``shortest`` of the service's phase applies.
    """
    if not is_working(view) or not is_waiting(view) or view.declared.own_work:
        return NO_FINDING
    least = (view.declared if view.declared.waits_for is not None else limits.phase(_SERVE_PHASE)).shortest
    due = stalled_since(view) + least
    if now < due:
        return None, due
    if view.heartbeats < MIN_HEARTBEATS:
        return NO_FINDING
    text = f"phase {view.phase}: it has waited for {_awaited_name(view)} for more than {least:g} s"
    return finding_about(
        view, "wait_long", Verdict.UNKNOWN, Cause.HANG, Remedy.NONE, stalled_since(view), "worker", text
    ), inf


def idle(view: ReplicaView, limits: Limits, now: float) -> Result:
    """Find a service that does nothing, as input of ``blame_ends_of_wait_chains``.

    A service that answers probes has nothing to do. It is idle only once an answer is missing.
    """
    if not is_service(view) or (view.probe.answered_at is not None and view.probe.pending_since is None):
        return NO_FINDING
    finding, then = _overdue(view, limits, now, "idle", Verdict.UNKNOWN, "it has done nothing for more than")
    probe_at = next_probe_at(view, limits)
    return finding, min(then, probe_at if probe_at > now else inf)


def _awaited_name(view: ReplicaView) -> str:
    return view.waits_for or f"any {view.declared.waits_for}"


def _own_work_overdue(view: ReplicaView, limits: Limits, now: float) -> Result:
    """Find a replica that exceeds ``longest``, the upper limit of a phase in which it may wait or work itself.

    A first pass has extra time (`first_pass_grace`); an idle replica may fail earlier (`idle_due`).
    """
    since = view.last_change_at
    due = since + view.declared.longest + first_pass_grace(view, limits)
    source = f"{due - since:g} s"
    if (idle := idle_due(view, limits, since)) is not None and idle[0] < due:
        due, source = idle
    due = extended_by_storage(view, limits, since, due)
    if now < due:
        return None, due
    if view.heartbeats < MIN_HEARTBEATS:
        return NO_FINDING
    text = f"phase {view.phase}: it has not ended within {source}"
    return finding_about(
        view, "phase_overdue", Verdict.FAIL, Cause.HANG, Remedy.RESTART, view.last_change_at, "worker", text
    ), inf


def stalled_since(view: ReplicaView) -> float:
    """Return the time (s) of the last progress, or the later time at which another reason for standing still ended.

    Such a reason is the beginning of the call that blocks the replica now. For replicas that wait, and for services, it
    is also a wait of the whole run for somebody outside. For a service it is also its last answer to a probe.
    """
    since = view.last_change_at
    if view.declared.waits_for is None and view.blocked_since is not None:
        since = max(since, view.blocked_since)
    if is_service(view):
        since = max(since, view.probe.answered_at or since)
    elif not is_waiting(view) or view.declared.own_work:
        return since
    return max(since, view.run.outside_until)


def _overdue_despite_answers(view: ReplicaView, limits: Limits, now: float) -> Result:
    """Find a probed replica that makes no progress within ``longest``, the upper limit of its phase.

    No shorter deadline applies, because an answered or unanswered probe is better evidence.
    """
    longest = view.declared.longest
    due = view.last_change_at + longest + first_pass_grace(view, limits)
    if now < due:
        return None, due
    if view.heartbeats < MIN_HEARTBEATS:
        return NO_FINDING
    text = f"phase {view.phase}: no progress within {longest:g} s, the limit of the phase"
    return finding_about(
        view, "no_progress", Verdict.FAIL, Cause.HANG, Remedy.RESTART, view.last_change_at, "worker", text
    ), inf


def _overdue(view: ReplicaView, limits: Limits, now: float, detector: str, verdict: Verdict, problem: str) -> Result:
    """Compare the time without progress with the deadline. CPU work, GPU work and storage stalls extend the deadline.

    Args:
        view: The replica.
        limits: The job's deadlines.
        now: Manager's clock (s).
        detector: Name in the finding.
        verdict: Verdict of the finding; work of CPU or GPU defers only a FAIL.
        problem: Text of the finding, to which the deadline is appended.
    """
    allowed, since = deadline(view, limits), stalled_since(view)
    due, source = since + allowed.seconds, allowed.source
    if (idle := idle_due(view, limits, since)) is not None and idle[0] < due:
        due, source = idle
    if (wait := service_wait_due(view, since)) is not None and wait[0] > due:
        due, source = wait
    due = extended_by_storage(view, limits, since, due)
    if now < due:
        return None, due
    if view.heartbeats < MIN_HEARTBEATS:  # too few observations: the next heartbeat causes another evaluation
        return NO_FINDING
    if verdict is Verdict.FAIL and (_busy_at_deadline(view, due) or _cannot_be_probed(view)):
        later = max(due, since + allowed.busy_seconds)
        if now < later:
            return None, later
    remedy = Remedy.RESTART if verdict is Verdict.FAIL else Remedy.NONE
    text = f"phase {view.phase}: {problem} {source}"
    return finding_about(view, detector, verdict, Cause.HANG, remedy, since, "worker", text), inf


def _busy_at_deadline(view: ReplicaView, due: float) -> bool:
    """Return whether a load from at most ``MAX_LOAD_GAP_S`` before the deadline ``due``, or later, shows work.

    The first of these cases that applies decides what counts as work:

    1. The replica trains without a gang, and its CPU works beside an idle GPU (an evaluation, or batch preparation).
       The CPU counts. It does not count in a gang, because ranks that wait in a collective use their CPUs too.
    2. The replica trains, and tensor cores of its role have been observed at work. Only tensor cores count, because a
       waiting collective may occupy the GPU.
    3. The replica trains in a gang. A running kernel counts while the stacks of the gang move, or are not known.
    4. The phase computes. A running kernel counts or, without a GPU, the CPU.
    5. In any other phase a running kernel counts, but not the CPU, because a busy loop uses the CPU too.
    """
    loads = view.loads
    if trains(view) and not view.in_gang and loads.cpu_bound:
        works, at = True, loads.latest_at
    elif trains(view) and (loads.uses_tensor_cores or (view.in_gang and view.role.uses_tensor_cores)):
        works, at = True, loads.tensor_active_at
    elif trains(view) and view.in_gang:
        works, at = loads.kernel_active and not stands_still(view), loads.latest_at
    else:
        works, at = loads.working if view.declared.computes else loads.kernel_active, loads.latest_at
    return works and at is not None and at >= due - MAX_LOAD_GAP_S


def _cannot_be_probed(view: ReplicaView) -> bool:
    """Return whether the replica generates tokens and has no probe handler.

    For such a replica, a wait for a tool looks like a hang. If it were killed during such a wait, its replacement would
    be killed in the same way.
    """
    return view.probe.no_probe_handler and view.declared.computes and view.declared.progresses


def straggler(view: ReplicaView, limits: Limits, now: float) -> Result:
    """Find a replica that was slow in ``STRAGGLER_ROUNDS`` consecutive comparisons (:mod:`..baselines`)."""
    if view.throughput.slow_rounds < STRAGGLER_ROUNDS or not is_working(view):
        return NO_FINDING
    role = role_of(view.incarnation.replica)
    if view.throughput.by_tokens:
        text = f"it makes less than {SLOW_ROLLOUT_SHARE:g} of the median tokens per second of the other {role} replicas"
        text += f", in {STRAGGLER_ROUNDS} consecutive rounds of {THROUGHPUT_WINDOW_S:g} s"
    else:
        text = f"the other ranks of its gang need less than {SLOW_RANK_SHARE:g} of its time"
        text += f", in {STRAGGLER_ROUNDS} consecutive training passes"
    remedy = Remedy.EXCLUDE if limits.stragglers == "exclude" else Remedy.NONE
    return finding_about(
        view, "straggler", Verdict.WARN, Cause.NODE, remedy, view.throughput.slow_since, "worker", text
    ), inf
