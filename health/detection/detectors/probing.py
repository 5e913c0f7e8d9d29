"""Suspicion in two stages: who makes no tokens is asked for one first, and fails by its answer, not by its silence.

Rollouts fall silent for good reasons: a tool takes minutes, a prompt is long. RobustRL waits 60 s and then asks whether
the process lives. We ask for work, which a dead engine in a living process cannot do, and ask early where neither CPU
nor GPU does anything, or tokens usually come by the second: a question costs one token. The same for who claims
progress and does nothing (a lie, or an engine elsewhere): it is asked too. And who merely waits, where its role has
proved that it answers then: it looks idle and well whether it waits or hangs.
"""

from __future__ import annotations

from math import inf

from ....core.run_spec import Limits
from ....core.types import Cause, Incarnation, Remedy, Verdict
from ..health_monitor import HealthMonitor
from ..records import MAX_WAIT_PROBES, NodeView, ReplicaView, is_polling
from .base import MIN_HEARTBEATS, NO_FINDING, Result, finding_about, is_waiting, is_working

EARLY_PROBE_S = 10.0
"""s without a token after which it is asked, where they usually come more often or CPU and GPU have been idle all the
time. What it answers decides, so that this may be short"""
FIRST_TOKEN_FACTOR = 3.0
"""times as long before the first token of a life: engines load and compile then"""
SPINNING_FACTOR = 2.0
"""times as long where its GPU is kept by kernels that compute nothing"""
PROMPT_ANSWER_S = 5.0
"""s within which an answer is nothing worth telling: no finding before that"""
IDLE_ANSWER_SHARE = 0.5
"""of ``limits.probe`` has who is asked while idle: nothing lies before its question"""
BUSY_ANSWER_FACTOR = 10.0
"""times ``limits.probe`` has who is asked while its GPU works: the question lies behind a long prefill; as long has who
merely waits while its CPU or GPU works, as it writes its logs or cleans up first"""
FIRST_PASS_SPINNING_FACTOR = 10.0
"""times ``limits.probe`` has who is asked in a first pass while its GPU spins: what warms up, captures or tunes kernels
uses tensor cores now and then"""
RESEND_SHARE = 0.25
"""of ``limits.probe`` after which an unanswered question is put again: it may have been lost"""
MAX_PROBE_INTERVAL_S = 120.0
"""s, the longest pause between two questions to who answers them; the first is ``limits.probe`` / 2, and each is twice
the last"""
_MIN_IDLE_LOADS = 4
"""loads in a row that show it idle"""


# ── for who asks ─────────────────────────────────────────────────────────────────────────────────────────────────────
def due_probes(monitor: HealthMonitor, limits: Limits, now: float) -> list[Incarnation]:
    """Whom to ask now, in the order of their names. Whoever asks says so by ``Watch.asked``, and is not told the same
    again until it is time to.

    ``detect`` keeps when somebody on each node is to be asked, so that only what is due or new is looked at, and
    names the next moment at which this can change."""
    nodes = monitor.dirty | {node for node, at in monitor.probes_due.items() if at <= now}
    node_views = [monitor.nodes[node] for node in nodes if node in monitor.nodes]
    return sorted(
        view.incarnation
        for node_view in node_views
        for view in node_view.residents.values()
        if next_probe_at(view, limits) <= now
    )


def next_probe_on_node(node_view: NodeView, limits: Limits) -> float:
    """When somebody on this node is to be asked."""
    return min((next_probe_at(view, limits) for view in node_view.residents.values()), default=inf)


def next_probe_at(view: ReplicaView, limits: Limits) -> float:
    """When it is to be asked next; inf: there is no reason to."""
    probes = view.probe
    if probes.no_probe_handler or probes.failed or (due := suspect_at(view, limits)) == inf:
        return inf
    if probes.pending_since is not None:
        return probes.last_sent_at + RESEND_SHARE * limits.probe
    if probes.answered_at is not None:
        return max(
            due, probes.answered_at + min(limits.probe / 2 * 2.0 ** (probes.answer_count - 1), MAX_PROBE_INTERVAL_S)
        )
    return due


def suspect_at(view: ReplicaView, limits: Limits) -> float:
    """When it comes under suspicion, or came; inf: never, if nothing new is seen."""
    if not _may_be_suspected(view):
        return inf
    if is_polling(view):
        return view.last_change_at + (EARLY_PROBE_S if view.role.answers_probes else 0.0)
    return min(_no_progress_at(view, limits), _idle_at(view, limits), _false_progress_at(view, limits))


def _may_be_suspected(view: ReplicaView) -> bool:
    if is_polling(view):
        return is_working(view) and (
            view.role.answers_probes
            or (view.role.probes_sent < MAX_WAIT_PROBES and view.probe.last_sent_at < view.last_change_at)
        )
    return is_working(view) and not is_waiting(view) and view.declared.progresses


def _must_answer(view: ReplicaView) -> bool:
    """Without an answer it has failed: not who is asked only to find out whether its role answers while it waits."""
    return _may_be_suspected(view) and (view.role.answers_probes or not is_polling(view))


def _no_progress_at(view: ReplicaView, limits: Limits) -> float:
    """By time alone: much sooner where tokens usually come by the second. Not where nobody tells loads: nothing could
    then tell a long prefill, which answers late, from a hang."""
    if view.usual_duration is None or view.loads.latest_at is None:
        return _long_no_progress_at(view, limits)
    return min(
        _long_no_progress_at(view, limits),
        view.last_change_at + _first_pass_factor(view) * max(EARLY_PROBE_S, limits.adaptive * view.usual_duration),
    )


def _long_no_progress_at(view: ReplicaView, limits: Limits) -> float:
    return view.last_change_at + _first_pass_factor(view) * max(
        limits.suspect, limits.adaptive * (view.usual_duration or 0.0)
    )


def _idle_at(view: ReplicaView, limits: Limits) -> float:
    """It has made no token, and neither CPU nor GPU has worked, or its GPU spins, for a while. Compiling takes the CPU:
    who is idle in a first pass need not wait for its grace."""
    activity = view.loads
    if not view.declared.computes:
        return inf
    usual = limits.adaptive * (view.usual_duration or 0.0)
    need = _first_pass_factor(view) * min(max(EARLY_PROBE_S, usual), max(EARLY_PROBE_S, limits.suspect))
    if activity.spinning_since is not None and activity.spinning_for(view.last_change_at) >= (
        need := need * SPINNING_FACTOR
    ):
        return max(activity.spinning_since, view.last_change_at) + need
    if activity.idle_since is None or activity.idle_loads < _MIN_IDLE_LOADS:
        return inf
    return (
        max(activity.idle_since, view.last_change_at) + need if activity.idle_for(view.last_change_at) >= need else inf
    )


def _false_progress_at(view: ReplicaView, limits: Limits) -> float:
    """It has told of progress well after its GPU ceased to work, which it has not for long."""
    activity = view.loads
    if (
        activity.gpu_idle_since is None
        or not view.declared.computes
        or view.last_change_at < activity.gpu_idle_since + EARLY_PROBE_S
    ):
        return inf
    need = limits.idle * _first_pass_factor(view)
    return (
        max(activity.gpu_idle_since, view.phase_since) + need
        if activity.gpu_idle_for(view.phase_since) >= need
        else inf
    )


def _first_pass_factor(view: ReplicaView) -> float:
    return FIRST_TOKEN_FACTOR if view.first_pass else 1.0


# ── detectors ────────────────────────────────────────────────────────────────────────────────────────────────────────
def engine_dead(view: ReplicaView, limits: Limits, now: float) -> Result:
    """Asked for work, it said that it cannot."""
    if view.probe.failed is None or not _must_answer(view):
        return NO_FINDING
    at, why = view.probe.failed
    text = f"phase {view.phase}: asked for work, it says that it cannot" + (f": {why}" if why else "")
    return finding_about(view, "engine_dead", Verdict.FAIL, Cause.HANG, Remedy.RESTART, at, "worker", text), inf


def no_answer(view: ReplicaView, limits: Limits, now: float) -> Result:
    """Asked for work, it beats on and does not answer: the process lives, its engine does not."""
    pending_since = view.probe.pending_since
    if pending_since is None or view.probe.no_probe_handler or not _must_answer(view):
        return NO_FINDING
    due = _answer_deadline(view, limits, pending_since)
    if now < due:
        return None, due
    if view.probe.heartbeats < MIN_HEARTBEATS:  # it may not have been reached
        return NO_FINDING
    idle = _idle_since_probe(view, pending_since)
    text = f"phase {view.phase}: asked for work, it beats and does not answer"
    text += f" within {due - pending_since:g} s" + (", its CPU and GPU idle" if idle else "")
    return finding_about(
        view, "no_answer", Verdict.FAIL, Cause.HANG, Remedy.RESTART, pending_since, "worker", text
    ), inf


def suspected(view: ReplicaView, limits: Limits, now: float) -> Result:
    """Worth telling: it has been silent for long and did not say that it works, or leaves a question unanswered. Not
    the silence of who cannot be asked, or computes nothing: that is asked quietly, or left to its deadline."""
    probe_at = next_probe_at(view, limits)
    look = probe_at if probe_at > now else inf
    if not _must_answer(view) or view.probe.failed is not None:
        return None, look
    quietly = bool(view.probe.answer_count) or view.probe.no_probe_handler or not view.declared.computes
    due = min(
        inf if quietly else _long_no_progress_at(view, limits),
        inf if view.probe.answer_count else _false_progress_at(view, limits),
    )
    if view.probe.pending_since is not None:
        due = min(due, view.probe.pending_since + PROMPT_ANSWER_S)
    if now < due:
        return None, min(look, due)
    false_progress = _false_progress_at(view, limits) <= now < _long_no_progress_at(view, limits)
    problem = "it tells of progress, and no kernel runs" if false_progress else "no progress"
    probe_text = "it cannot be asked for work" if view.probe.no_probe_handler else "it is asked for work"
    text = f"phase {view.phase}: {problem}; {probe_text}"
    since = view.phase_since if false_progress else view.last_change_at
    return finding_about(view, "suspected", Verdict.WARN, Cause.HANG, Remedy.NONE, since, "worker", text), look


def _answer_deadline(view: ReplicaView, limits: Limits, pending_since: float) -> float:
    activity = view.loads
    load_since_probe = activity.latest_at is not None and activity.latest_at >= pending_since
    if is_polling(view) and load_since_probe and (activity.working or activity.cpu_bound):
        return pending_since + limits.probe * BUSY_ANSWER_FACTOR
    if _idle_since_probe(view, pending_since):  # who merely waits has answered so before, be it its first pass or not
        return pending_since + limits.probe * (1.0 if view.first_pass and not is_polling(view) else IDLE_ANSWER_SHARE)
    if is_polling(view):
        return _answer_deadline_after_work(view, limits, pending_since)
    if (
        load_since_probe and activity.spinning_since is not None
    ):  # a prefill works its tensor cores, of which one hears late
        return max(pending_since, activity.spinning_since) + limits.probe * (
            FIRST_PASS_SPINNING_FACTOR if view.first_pass else 1.0
        )
    if view.first_pass:
        return inf  # it loads, or compiles: time judges that
    if load_since_probe and activity.working:
        return max(pending_since, _long_no_progress_at(view, limits)) + BUSY_ANSWER_FACTOR * limits.probe
    return _answer_deadline_after_work(view, limits, pending_since)


def _answer_deadline_after_work(view: ReplicaView, limits: Limits, pending_since: float) -> float:
    """Who was at work when it was asked answers once it has ceased; not later than who is at work all the time."""
    ceased = max(pending_since, view.loads.idle_since or pending_since)
    return min(ceased + limits.probe, pending_since + BUSY_ANSWER_FACTOR * limits.probe)


def _idle_since_probe(view: ReplicaView, pending_since: float) -> bool:
    """Loads that came since it was asked say that it has done nothing since before that."""
    activity = view.loads
    if activity.latest_at is None or activity.idle_since is None:
        return False
    return activity.latest_at >= pending_since >= activity.idle_since
