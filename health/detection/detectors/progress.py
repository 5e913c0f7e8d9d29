"""Detectors by time: replicas that send heartbeats but make no progress, exceed a phase's limit, wait too long, or are
slower than their peers.

A deadline is a multiple of the usual duration, within the bounds of the phase. It decides only where nothing better is
known: a replica that answers probes is judged by its answers (:mod:`rrl.health.detection.detectors.probing`), one that
must compute also by its CPU and GPU load (:mod:`rrl.health.detection.detectors.idleness`). A straggler gets a WARN; the
job decides whether its node is left for that.
"""

from __future__ import annotations

from math import inf

from ....core.run_spec import Limits
from ....core.types import Cause, Remedy, Verdict, role_of
from ..baselines import SLOW_RANK_SHARE, SLOW_ROLLOUT_SHARE, STRAGGLER_ROUNDS, THROUGHPUT_WINDOW_S
from ..records import MAX_LOAD_GAP_S, ReplicaView, is_polling
from .base import MIN_HEARTBEATS, NO_FINDING, SLOWEST_FACTOR, Result, finding_about, is_waiting, is_working

BUSY_DEADLINE_FACTOR = 6.0
"""times its deadline has whose GPU (without one: CPU) is seen at work: it is slow, not hung"""
MAX_BLIND_TRAINING_S = 7200.0
"""s, the most to which work of a GPU raises a deadline in training where nobody has seen its tensor cores: a collective
that waits for ever looks the same, and an evaluation rarely lasts longer"""
FIRST_PASS_IDLE_SHARE = 0.25
"""of ``longest`` may who is idle be in a first pass of ``_WARMED``, where nothing usual is known: 15 min by default"""
_WARMUP_PHASES = ("publish", "score")
"""phases whose first pass takes long only at work: compiling and packing take CPU or GPU. A first checkpoint may wait
for storage, and idle then"""
ENDLESS_WAIT_FACTOR = 1.25
"""times ``longest`` of a phase that waits (19 min by default), after which services at work explain no wait"""
_SERVE_PHASE = "serve"


def no_progress(view: ReplicaView, limits: Limits, now: float) -> Result:
    """Beats go on, ``done`` does not rise, in a phase that must progress."""
    if not is_working(view) or is_waiting(view) or not view.declared.progresses:
        return NO_FINDING
    if view.probe.answer_count or (view.probe.pending_since is not None and not view.first_pass):
        return _overdue_despite_answers(view, limits, now)
    return _overdue(view, limits, now, "no_progress", Verdict.FAIL, "no progress")


def phase_overdue(view: ReplicaView, limits: Limits, now: float) -> Result:
    """It does not come out of a phase that must end, and shows no progress in it either.

    Of a phase that neither rrl nor the job declares nobody knows how long it may last: a warning, no more.
    """
    declared = view.declared
    if is_working(view) and declared.own_work and is_waiting(view):
        return _own_work_overdue(view, limits, now)
    if not is_working(view) or is_waiting(view) or declared.progresses or declared.longest == inf:
        return NO_FINDING
    verdict = Verdict.FAIL if limits.is_known_phase(declared.name) else Verdict.WARN
    return _overdue(view, limits, now, "phase_overdue", verdict, "it does not end")


def wait_overdue(view: ReplicaView, limits: Limits, now: float) -> Result:
    """It waits for too long; ``wait_endless``: for ``ENDLESS`` times the longest. For ``wait_chains.charge``,
    which never lets it through as it is."""
    if not is_working(view) or not is_waiting(view):
        return NO_FINDING
    found, look = _overdue(view, limits, now, "wait_overdue", Verdict.UNKNOWN, f"it waits for {_awaited_name(view)}")
    due = view.last_change_at + ENDLESS_WAIT_FACTOR * view.declared.longest + _grace(view, limits)
    if found is None or not is_polling(view) or now < due:
        return found, min(look, due) if found is not None and is_polling(view) else look
    text = f"phase {view.phase}: it waits for {_awaited_name(view)}, for {due - view.last_change_at:g} s and more"
    return finding_about(
        view, "wait_endless", Verdict.UNKNOWN, Cause.HANG, Remedy.NONE, view.last_change_at, "worker", text
    ), look


def wait_long(view: ReplicaView, limits: Limits, now: float) -> Result:
    """It waits, and has for longer than the least that its phase allows. For ``wait_chains.charge``: enough
    against a service that all wait for. Where the phase means work of its own too, its wait says nothing yet; where the
    phase by itself waits for nobody, a call is stuck, and the service has as long as services may stand still."""
    if not is_working(view) or not is_waiting(view) or view.declared.own_work:
        return NO_FINDING
    least = (view.declared if view.declared.waits_for is not None else limits.phase(_SERVE_PHASE)).shortest
    due = _stalled_since(view) + least
    if now < due:
        return None, due
    if view.heartbeats < MIN_HEARTBEATS:
        return NO_FINDING
    text = f"phase {view.phase}: it waits for {_awaited_name(view)}, for {least:g} s and more"
    return finding_about(
        view, "wait_long", Verdict.UNKNOWN, Cause.HANG, Remedy.NONE, _stalled_since(view), "worker", text
    ), inf


def idle(view: ReplicaView, limits: Limits, now: float) -> Result:
    """A service does nothing: mostly because nobody asks. For ``wait_chains.charge``, like ``wait_overdue``."""
    if not is_working(view) or is_waiting(view) or view.declared.longest != inf or view.declared.progresses:
        return NO_FINDING
    return _overdue(view, limits, now, "idle", Verdict.UNKNOWN, "it does nothing")


def _awaited_name(view: ReplicaView) -> str:
    return view.waits_for or f"any {view.declared.waits_for}"


def _own_work_overdue(view: ReplicaView, limits: Limits, now: float) -> Result:
    """It may wait for another or be at work itself: only the longest that the phase may last speaks against it."""
    due = view.last_change_at + view.declared.longest + _grace(view, limits)
    if now < due:
        return None, due
    if view.heartbeats < MIN_HEARTBEATS:
        return NO_FINDING
    text = f"phase {view.phase}: it does not end within {due - view.last_change_at:g} s"
    return finding_about(
        view, "phase_overdue", Verdict.FAIL, Cause.HANG, Remedy.RESTART, view.last_change_at, "worker", text
    ), inf


def _stalled_since(view: ReplicaView) -> float:
    """Nothing has moved since; in a call, not since before that."""
    in_a_call = view.declared.waits_for is None and view.blocked_since is not None
    return max(view.last_change_at, view.blocked_since or 0.0) if in_a_call else view.last_change_at


def _overdue_despite_answers(view: ReplicaView, limits: Limits, now: float) -> Result:
    """It was asked, and what it answers or not says more than time does; but no phase lasts for ever."""
    longest = view.declared.longest
    due = view.last_change_at + longest + _grace(view, limits)
    if now < due:
        return None, due
    if view.heartbeats < MIN_HEARTBEATS:
        return NO_FINDING
    text = f"phase {view.phase}: no progress within {longest:g} s, though it answers"
    return finding_about(
        view, "no_progress", Verdict.FAIL, Cause.HANG, Remedy.RESTART, view.last_change_at, "worker", text
    ), inf


def _overdue(view: ReplicaView, limits: Limits, now: float, detector: str, verdict: Verdict, problem: str) -> Result:
    deadline, how = _deadline(view, limits)
    since = _stalled_since(view)
    due = since + deadline
    if (idle_deadline := _first_pass_idle_deadline(view, limits, since)) is not None and idle_deadline[0] < due:
        due, how = idle_deadline
    if now < due:
        return None, due
    if view.heartbeats < MIN_HEARTBEATS:  # too few have looked; the next beat will be looked at
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
    text = f"phase {view.phase}: {problem} within {how}"
    return finding_about(view, detector, verdict, Cause.HANG, remedy, since, "worker", text), inf


def _gpu_busy_without_tensor_signal(view: ReplicaView) -> bool:
    """All that is known of its work is that kernels keep its GPU."""
    activity = view.loads
    return (
        view.declared.computes
        and not view.declared.progresses
        and not activity.uses_tensor_cores
        and not activity.cpu_bound
    )


def _busy_at_deadline(view: ReplicaView, due: float) -> bool:
    """By a load that came no longer than ``GAP`` before its deadline, or since. The GPU of a gang's member that trains
    may be kept by a collective that waits: only tensor cores say that it works, and so they do where they can be seen.
    A CPU says so only in phases that compute, for one that loops looks the same; beside a GPU only of who trains alone:
    an evaluation, or a batch that is prepared. (Ranks that wait in a collective keep their CPUs too.)"""
    activity = view.loads
    trains = view.declared.computes and not view.declared.progresses
    if trains and not view.in_gang and activity.cpu_bound:
        works_now, at = True, activity.latest_at
    elif trains and (view.in_gang or activity.uses_tensor_cores):
        works_now, at = True, activity.tensor_active_at
    else:
        works_now, at = activity.working if view.declared.computes else activity.kernel_active, activity.latest_at
    return works_now and at is not None and at >= due - MAX_LOAD_GAP_S


def _cannot_be_probed(view: ReplicaView) -> bool:
    """It makes tokens and has nothing that could be asked: a tool that it waits for looks like a hang, and who is
    killed at healthy work is killed again at the same place."""
    return view.probe.no_probe_handler and view.declared.computes and view.declared.progresses


def _deadline(view: ReplicaView, limits: Limits) -> tuple[float, str]:
    """Seconds that the clock may run, and where the number comes from."""
    declared = view.declared
    if declared.longest == inf:
        return declared.shortest, f"{declared.shortest:g} s"
    deadline, how = (
        (declared.longest, "no usual duration yet") if view.usual_duration is None else _usual_deadline(view, limits)
    )
    if grace := _grace(view, limits):
        deadline, how = deadline + grace, f"{how}; first pass + {grace:g} s"
    return deadline, f"{deadline:.4g} s ({how})"


def _usual_deadline(view: ReplicaView, limits: Limits) -> tuple[float, str]:
    declared = view.declared
    usual = view.usual_duration or 0.0
    most = max(limits.adaptive * usual, SLOWEST_FACTOR * view.slowest_duration)
    how = f"{limits.adaptive:g} x usual {usual:.3g} s"
    if SLOWEST_FACTOR * view.slowest_duration > limits.adaptive * usual:
        how = f"{SLOWEST_FACTOR:g} x the longest yet, {view.slowest_duration:.3g} s"
    how += f", within {declared.shortest:g} to {declared.longest:g} s"
    return min(max(most, declared.shortest), declared.longest), how


def _first_pass_idle_deadline(view: ReplicaView, limits: Limits, since: float) -> tuple[float, str] | None:
    """When that has lasted too long, and how: there is no grace for who neither compiles nor packs. Only as long as
    loads say so."""
    declared, activity = view.declared, view.loads
    if (
        not view.first_pass
        or declared.name not in _WARMUP_PHASES
        or activity.idle_since is None
        or activity.latest_at is None
    ):
        return None
    if activity.latest_at < view.last_message_at - MAX_LOAD_GAP_S:
        return None
    if view.usual_duration is None:
        most = max(declared.shortest, FIRST_PASS_IDLE_SHARE * declared.longest)
        how = f"no usual duration yet, {FIRST_PASS_IDLE_SHARE:g} of {declared.longest:g} s"
    else:
        most, how = _usual_deadline(view, limits)
    return max(since, activity.idle_since) + most, f"{most:.4g} s of idleness ({how})"


def _grace(view: ReplicaView, limits: Limits) -> float:
    """Who merely waits compiles nothing and warms nothing up, be it the first time or not."""
    merely = is_waiting(view) and not view.declared.own_work
    return limits.first_pass if view.first_pass and not merely else 0.0


def straggler(view: ReplicaView, limits: Limits, now: float) -> Result:
    """It has been slow in ``ROUNDS`` comparisons in a row (:mod:`rrl.health.detection.baselines`)."""
    if view.throughput.slow_rounds < STRAGGLER_ROUNDS or not is_working(view):
        return NO_FINDING
    peers = role_of(view.incarnation.replica)
    if view.throughput.by_tokens:
        text = f"fewer than {SLOW_ROLLOUT_SHARE:g} of the tokens per second of the other {peers}s"
        text += f", in {STRAGGLER_ROUNDS} spans of {THROUGHPUT_WINDOW_S:g} s in a row"
    else:
        text = f"the others of its gang need less than {SLOW_RANK_SHARE:g} of its time, in {STRAGGLER_ROUNDS} passes in a row"
    remedy = Remedy.EXCLUDE if limits.stragglers == "exclude" else Remedy.NONE
    return finding_about(
        view, "straggler", Verdict.WARN, Cause.NODE, remedy, view.throughput.slow_since, "worker", text
    ), inf
