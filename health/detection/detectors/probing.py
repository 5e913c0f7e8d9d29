"""Probing: a suspected replica must do a small piece of work, and its answer decides whether it fails.

A healthy rollout may generate no tokens for a while: a tool takes minutes, or a prompt is long. RobustRL waits 60 s and
then checks whether the process is alive. rrl's probe requests work instead, which a dead engine in a live process
cannot do. A probe costs one token, so it is sent early if CPU and GPU are idle or tokens usually come every second. A
replica that reports progress while its GPU is idle is probed too (its report may be false, or its engine may be on
another node). A replica that only waits is probed if its role is known to answer while it waits, because a wait and a
hang look the same from outside.
"""

from __future__ import annotations

from math import inf

from ....core.run_spec import Limits
from ....core.types import Cause, Incarnation, Remedy, Verdict
from ..health_monitor import HealthMonitor
from ..records import MAX_WAIT_PROBES, NodeView, ReplicaView, is_polling
from .base import MIN_HEARTBEATS, NO_FINDING, Result, finding_about, is_service, is_waiting, is_working

EARLY_PROBE_S = 10.0
"""Time (s) without a token after which a rollout is probed if tokens usually come more often, or if CPU and GPU were
idle throughout. It is short, because only the answer decides."""
FIRST_TOKEN_FACTOR = 3.0
"""In a first pass (the incarnation's first time in the phase) the times before a probe are this many times longer,
because engines load and compile."""
SPINNING_FACTOR = 2.0
"""While the GPU of a replica spins, the time without a token before a probe is this many times longer."""
PROMPT_ANSWER_S = 5.0
"""Time (s) after which an unanswered probe gives a ``suspected`` finding."""
IDLE_ANSWER_SHARE = 0.5
"""Share of ``limits.probe`` within which an idle replica must answer, because nothing is queued before the probe."""
BUSY_ANSWER_FACTOR = 10.0
"""Multiple of ``limits.probe`` within which a replica with a working GPU must answer, because the probe may be queued
behind a long prefill. It also applies to a waiting replica whose CPU or GPU works, for example while it writes logs."""
FIRST_PASS_SPINNING_FACTOR = 10.0
"""Multiple of ``limits.probe`` within which a spinning replica must answer in a first pass. Warm-up, graph capture and
kernel tuning use tensor cores occasionally, so they do not look like spinning for so long."""
RESEND_SHARE = 0.25
"""Share of ``limits.probe`` after which an unanswered probe is sent again: it may have been lost."""
MAX_PROBE_INTERVAL_S = 120.0
"""Maximum time (s) between two probes of a replica that answers them. The first interval is ``limits.probe`` / 2; the
interval doubles with each answer."""
_MIN_IDLE_LOADS = 4
"""Number of consecutive loads that must show an idle replica before the replica is suspected because it is idle."""


# ── times of probes ──────────────────────────────────────────────────────────────────────────────────────────────────
def due_probes(monitor: HealthMonitor, limits: Limits, now: float) -> list[Incarnation]:
    """Return the incarnations to probe now, in the order of their names.

    The caller sends the probes and reports each probe by ``HealthMonitor.on_probe_sent``. Only nodes with new
    observations or with a due probe are evaluated. ``detect`` records the time of each node's next probe. The time that
    ``detect`` returns is not later than the next probe, so no probe is missed.
    """
    nodes = monitor.dirty | {node for node, at in monitor.probes_due.items() if at <= now}
    node_views = [monitor.nodes[node] for node in nodes if node in monitor.nodes]
    return sorted(
        view.incarnation
        for node_view in node_views
        for view in node_view.residents.values()
        if next_probe_at(view, limits) <= now
    )


def next_probe_on_node(node_view: NodeView, limits: Limits) -> float:
    """Return the time (s) of the next probe on this node (inf if no probe is needed)."""
    return min((next_probe_at(view, limits) for view in node_view.residents.values()), default=inf)


def next_probe_at(view: ReplicaView, limits: Limits) -> float:
    """Return the time (s) of the replica's next probe (inf if no probe is needed)."""
    probe = view.probe
    if probe.no_probe_handler or probe.failed or (due := suspect_at(view, limits)) == inf:
        return inf
    if probe.pending_since is not None:
        return probe.last_sent_at + RESEND_SHARE * limits.probe
    if probe.answered_at is not None:
        interval_s = min(limits.probe / 2 * 2.0 ** (probe.answer_count - 1), MAX_PROBE_INTERVAL_S)
        return max(due, probe.answered_at + interval_s)
    return due


def suspect_at(view: ReplicaView, limits: Limits) -> float:
    """Return the time (s) from which the replica is suspected (inf if only a new observation can cause a suspicion)."""
    if not _may_be_suspected(view):
        return inf
    if is_service(view):
        return view.last_change_at + EARLY_PROBE_S
    if is_polling(view):
        return view.last_change_at + (EARLY_PROBE_S if view.role.answers_probes else 0.0)
    return min(_no_progress_at(view, limits), _idle_at(view, limits), _false_progress_at(view, limits))


def _may_be_suspected(view: ReplicaView) -> bool:
    """Return whether a probe of the replica can give evidence about it.

    A replica that does not wait is probed in phases that must progress, except where the user's code runs: that code
    may block the thread that answers. A service is probed, because an answer shows that it only has nothing to do. A
    replica that only waits is probed if its role is known to answer probes while it waits. As long as this is not
    known, the replica is probed once in each pass of the waiting phase, until its role has got ``MAX_WAIT_PROBES`` such
    probes.
    """
    if is_polling(view):
        return is_working(view) and (
            view.role.answers_probes
            or (view.role.probes_sent < MAX_WAIT_PROBES and view.probe.last_sent_at < view.last_change_at)
        )
    if is_service(view):
        return True
    return is_working(view) and not is_waiting(view) and view.declared.progresses and not view.declared.calls_services


def _must_answer(view: ReplicaView) -> bool:
    """Return whether the replica must answer probes, so that a missing answer is a failure.

    In a phase that only waits, it must answer if its role has answered probes while waiting. A service need not answer
    in time, because storage may block it; how long it may do nothing is decided by :func:`.progress.idle`.
    """
    return _may_be_suspected(view) and not is_service(view) and (view.role.answers_probes or not is_polling(view))


def _no_progress_at(view: ReplicaView, limits: Limits) -> float:
    """Return the time (s) at which the replica is suspected because its progress count does not rise.

    If the count usually rises quickly, the replica is suspected early. This requires that the node's agent measures the
    replica's load, because without a load a long prefill could not be distinguished from a hang.
    """
    if view.usual_duration is None or view.loads.latest_at is None:
        return _long_no_progress_at(view, limits)
    return min(
        _long_no_progress_at(view, limits),
        view.last_change_at + _first_pass_factor(view) * max(EARLY_PROBE_S, limits.adaptive * view.usual_duration),
    )


def _long_no_progress_at(view: ReplicaView, limits: Limits) -> float:
    """Return the time (s) at which the replica is suspected because its count has not risen for ``limits.suspect``.

    The time may be later if the count usually rises slowly, and it is later in a first pass.
    """
    return view.last_change_at + _first_pass_factor(view) * max(
        limits.suspect, limits.adaptive * (view.usual_duration or 0.0)
    )


def _idle_at(view: ReplicaView, limits: Limits) -> float:
    """Return the time (s) at which the replica is suspected because it generated no token while idle or spinning.

    In a first pass, the time without a token may be ``FIRST_TOKEN_FACTOR`` times as long. ``limits.first_pass`` is not
    added to it, because a replica that compiles uses its CPU and is not idle.
    """
    loads = view.loads
    if not view.declared.computes:
        return inf
    usual = limits.adaptive * (view.usual_duration or 0.0)
    limit_s = _first_pass_factor(view) * min(max(EARLY_PROBE_S, usual), max(EARLY_PROBE_S, limits.suspect))
    if loads.spinning_since is not None:
        limit_s *= SPINNING_FACTOR
        if loads.spinning_for(view.last_change_at) >= limit_s:
            return max(loads.spinning_since, view.last_change_at) + limit_s
    if loads.idle_since is None or loads.idle_loads < _MIN_IDLE_LOADS:
        return inf
    return (
        max(loads.idle_since, view.last_change_at) + limit_s if loads.idle_for(view.last_change_at) >= limit_s else inf
    )


def _false_progress_at(view: ReplicaView, limits: Limits) -> float:
    """Return the time (s) at which the replica is suspected because it reports progress while its GPU is idle."""
    loads = view.loads
    if (
        loads.gpu_idle_since is None
        or not view.declared.computes
        or view.last_change_at < loads.gpu_idle_since + EARLY_PROBE_S
    ):
        return inf
    limit_s = limits.idle * _first_pass_factor(view)
    if loads.gpu_idle_for(view.phase_since) < limit_s:
        return inf
    return max(loads.gpu_idle_since, view.phase_since) + limit_s


def _first_pass_factor(view: ReplicaView) -> float:
    return FIRST_TOKEN_FACTOR if view.first_pass else 1.0


# ── detectors ────────────────────────────────────────────────────────────────────────────────────────────────────────
def engine_dead(view: ReplicaView, limits: Limits, now: float) -> Result:
    """Find a replica that answered a probe with a failure."""
    if view.probe.failed is None or not _must_answer(view):
        return NO_FINDING
    at, detail = view.probe.failed
    text = f"phase {view.phase}: it answered a probe with a failure" + (f": {detail}" if detail else "")
    return finding_about(view, "engine_dead", Verdict.FAIL, Cause.HANG, Remedy.RESTART, at, "worker", text), inf


def no_answer(view: ReplicaView, limits: Limits, now: float) -> Result:
    """Find a replica whose process sends heartbeats but whose engine does not answer a probe."""
    pending_since = view.probe.pending_since
    if pending_since is None or view.probe.no_probe_handler or not _must_answer(view):
        return NO_FINDING
    due = _answer_deadline(view, limits, pending_since)
    if now < due:
        return None, due
    if view.probe.heartbeats < MIN_HEARTBEATS:  # heartbeats are missing, so the probe may be lost too
        return NO_FINDING
    idle = _idle_since_probe(view, pending_since)
    text = f"phase {view.phase}: it sends heartbeats but has not answered a probe within {due - pending_since:g} s"
    text += " while its CPU and GPU are idle" if idle else ""
    return finding_about(
        view, "no_answer", Verdict.FAIL, Cause.HANG, Remedy.RESTART, pending_since, "worker", text
    ), inf


def suspected(view: ReplicaView, limits: Limits, now: float) -> Result:
    """Warn of a suspected replica that has not answered a probe successfully.

    It is suspected because it has made no progress for a long time, because it reports progress while its GPU is idle,
    or because a probe is unanswered. Lack of progress alone gives no warning in two cases. A replica without a probe
    handler has only the deadline of its phase. A replica in a phase that does not compute is probed without a warning.
    """
    probe_at = next_probe_at(view, limits)
    then = probe_at if probe_at > now else inf
    if not _must_answer(view) or view.probe.failed is not None:
        return None, then
    silently = bool(view.probe.answer_count) or view.probe.no_probe_handler or not view.declared.computes
    due = min(
        inf if silently else _long_no_progress_at(view, limits),
        inf if view.probe.answer_count else _false_progress_at(view, limits),
    )
    if view.probe.pending_since is not None:
        due = min(due, view.probe.pending_since + PROMPT_ANSWER_S)
    if now < due:
        return None, min(then, due)
    false_progress = _false_progress_at(view, limits) <= now < _long_no_progress_at(view, limits)
    problem = "it reports progress, but no GPU kernel runs" if false_progress else "no progress"
    probe_text = "it has no probe handler" if view.probe.no_probe_handler else "a probe asks it for work"
    text = f"phase {view.phase}: {problem}; {probe_text}"
    since = view.phase_since if false_progress else view.last_change_at
    return finding_about(view, "suspected", Verdict.WARN, Cause.HANG, Remedy.NONE, since, "worker", text), then


def _answer_deadline(view: ReplicaView, limits: Limits, pending_since: float) -> float:
    """Return the time (s) by which a probe must be answered; inf if only the deadline of the phase applies."""
    loads = view.loads
    load_since_probe = loads.latest_at is not None and loads.latest_at >= pending_since
    if is_polling(view) and load_since_probe and (loads.working or loads.cpu_bound):
        return pending_since + limits.probe * BUSY_ANSWER_FACTOR
    if _idle_since_probe(view, pending_since):  # no extra time for a waiting replica: its role has answered probes
        return pending_since + limits.probe * (1.0 if view.first_pass and not is_polling(view) else IDLE_ANSWER_SHARE)
    if is_polling(view):
        return _answer_deadline_after_work(view, limits, pending_since)
    if load_since_probe and loads.spinning_since is not None:  # a prefill uses tensor cores, which loads show late
        factor = FIRST_PASS_SPINNING_FACTOR if view.first_pass else 1.0
        return max(pending_since, loads.spinning_since) + limits.probe * factor
    if view.first_pass:
        return inf  # the replica loads weights or compiles
    if load_since_probe and loads.working:
        return max(pending_since, _long_no_progress_at(view, limits)) + BUSY_ANSWER_FACTOR * limits.probe
    return _answer_deadline_after_work(view, limits, pending_since)


def _answer_deadline_after_work(view: ReplicaView, limits: Limits, pending_since: float) -> float:
    """Return the deadline (s) of a replica that worked when it was probed: ``limits.probe`` after it became idle.

    It is at most ``BUSY_ANSWER_FACTOR`` times ``limits.probe`` after the probe.
    """
    ceased_at = max(pending_since, view.loads.idle_since or pending_since)
    return min(ceased_at + limits.probe, pending_since + BUSY_ANSWER_FACTOR * limits.probe)


def _idle_since_probe(view: ReplicaView, pending_since: float) -> bool:
    """Return whether loads since the probe show that the replica was idle when it was probed and is still idle."""
    loads = view.loads
    if loads.latest_at is None or loads.idle_since is None:
        return False
    return loads.latest_at >= pending_since >= loads.idle_since
