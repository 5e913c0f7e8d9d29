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
from ..baselines import ROUNDS, SLOW_RANK, SLOW_ROLLOUT, WINDOW
from ..records import GAP, ReplicaSighting, loops
from .base import MISSES, NOTHING, SLOWEST, Judged, about, waits, works

AT_WORK = 6.0
"""times its deadline has whose GPU (without one: CPU) is seen at work: it is slow, not hung"""
BLIND = 7200.0
"""s, the most to which work of a GPU raises a deadline in training where nobody has seen its tensor cores: a collective
that waits for ever looks the same, and an evaluation rarely lasts longer"""
IDLE_FIRST = 0.25
"""of ``longest`` may who is idle be in a first pass of ``_WARMED``, where nothing usual is known: 15 min by default"""
_WARMED = ("publish", "score")
"""phases whose first pass takes long only at work: compiling and packing take CPU or GPU. A first checkpoint may wait
for storage, and idle then"""
ENDLESS = 1.25
"""times ``longest`` of a phase that waits (19 min by default), after which services at work explain no wait"""
_SERVE = "serve"


def no_progress(seen: ReplicaSighting, limits: Limits, now: float) -> Judged:
    """Beats go on, ``done`` does not rise, in a phase that must progress."""
    if not works(seen) or waits(seen) or not seen.declared.progresses:
        return NOTHING
    if seen.probes.answers or (seen.probes.asked_at is not None and not seen.first_pass):
        return _answers(seen, limits, now)
    return _stands(seen, limits, now, "no_progress", Verdict.FAIL, "no progress")


def phase_overdue(seen: ReplicaSighting, limits: Limits, now: float) -> Judged:
    """It does not come out of a phase that must end, and shows no progress in it either.

    Of a phase that neither rrl nor the job declares nobody knows how long it may last: a warning, no more.
    """
    declared = seen.declared
    if works(seen) and declared.own_work and waits(seen):
        return _own_work_overdue(seen, limits, now)
    if not works(seen) or waits(seen) or declared.progresses or declared.longest == inf:
        return NOTHING
    verdict = Verdict.FAIL if limits.knows(declared.name) else Verdict.WARN
    return _stands(seen, limits, now, "phase_overdue", verdict, "it does not end")


def wait_overdue(seen: ReplicaSighting, limits: Limits, now: float) -> Judged:
    """It waits for too long; ``wait_endless``: for ``ENDLESS`` times the longest. For ``wait_chains.charge``,
    which never lets it through as it is."""
    if not works(seen) or not waits(seen):
        return NOTHING
    found, look = _stands(seen, limits, now, "wait_overdue", Verdict.UNKNOWN, f"it waits for {_whom(seen)}")
    due = seen.clock + ENDLESS * seen.declared.longest + _grace(seen, limits)
    if found is None or not loops(seen) or now < due:
        return found, min(look, due) if found is not None and loops(seen) else look
    text = f"phase {seen.phase}: it waits for {_whom(seen)}, for {due - seen.clock:g} s and more"
    return about(seen, "wait_endless", Verdict.UNKNOWN, Cause.HANG, Remedy.NONE, seen.clock, "worker", text), look


def wait_long(seen: ReplicaSighting, limits: Limits, now: float) -> Judged:
    """It waits, and has for longer than the least that its phase allows. For ``wait_chains.charge``: enough
    against a service that all wait for. Where the phase means work of its own too, its wait says nothing yet; where the
    phase by itself waits for nobody, a call is stuck, and the service has as long as services may stand still."""
    if not works(seen) or not waits(seen) or seen.declared.own_work:
        return NOTHING
    least = (seen.declared if seen.declared.waits_for is not None else limits.phase(_SERVE)).shortest
    due = _stands_since(seen) + least
    if now < due:
        return None, due
    if seen.beats < MISSES:
        return NOTHING
    text = f"phase {seen.phase}: it waits for {_whom(seen)}, for {least:g} s and more"
    return about(seen, "wait_long", Verdict.UNKNOWN, Cause.HANG, Remedy.NONE, _stands_since(seen), "worker", text), inf


def idle(seen: ReplicaSighting, limits: Limits, now: float) -> Judged:
    """A service does nothing: mostly because nobody asks. For ``wait_chains.charge``, like ``wait_overdue``."""
    if not works(seen) or waits(seen) or seen.declared.longest != inf or seen.declared.progresses:
        return NOTHING
    return _stands(seen, limits, now, "idle", Verdict.UNKNOWN, "it does nothing")


def _whom(seen: ReplicaSighting) -> str:
    return seen.waits_for or f"any {seen.declared.waits_for}"


def _own_work_overdue(seen: ReplicaSighting, limits: Limits, now: float) -> Judged:
    """It may wait for another or be at work itself: only the longest that the phase may last speaks against it."""
    due = seen.clock + seen.declared.longest + _grace(seen, limits)
    if now < due:
        return None, due
    if seen.beats < MISSES:
        return NOTHING
    text = f"phase {seen.phase}: it does not end within {due - seen.clock:g} s"
    return about(seen, "phase_overdue", Verdict.FAIL, Cause.HANG, Remedy.RESTART, seen.clock, "worker", text), inf


def _stands_since(seen: ReplicaSighting) -> float:
    """Nothing has moved since; in a call, not since before that."""
    in_a_call = seen.declared.waits_for is None and seen.blocked_since is not None
    return max(seen.clock, seen.blocked_since or 0.0) if in_a_call else seen.clock


def _answers(seen: ReplicaSighting, limits: Limits, now: float) -> Judged:
    """It was asked, and what it answers or not says more than time does; but no phase lasts for ever."""
    longest = seen.declared.longest
    due = seen.clock + longest + _grace(seen, limits)
    if now < due:
        return None, due
    if seen.beats < MISSES:
        return NOTHING
    text = f"phase {seen.phase}: no progress within {longest:g} s, though it answers"
    return about(seen, "no_progress", Verdict.FAIL, Cause.HANG, Remedy.RESTART, seen.clock, "worker", text), inf


def _stands(seen: ReplicaSighting, limits: Limits, now: float, detector: str, verdict: Verdict, what: str) -> Judged:
    deadline, how = _deadline(seen, limits)
    since = _stands_since(seen)
    due = since + deadline
    if (idles := _idles_in_first_pass(seen, limits, since)) is not None and idles[0] < due:
        due, how = idles
    if now < due:
        return None, due
    if seen.beats < MISSES:  # too few have looked; the next beat will be looked at
        return NOTHING
    if verdict is Verdict.FAIL and (_seen_at_work(seen, due) or _never_says(seen)):
        most = min(seen.declared.longest, BLIND) if _trains_blind(seen) else seen.declared.longest
        later = max(due, since + min(AT_WORK * deadline, max(deadline, most)))
        if now < later:
            return None, later
    remedy = Remedy.RESTART if verdict is Verdict.FAIL else Remedy.NONE
    text = f"phase {seen.phase}: {what} within {how}"
    return about(seen, detector, verdict, Cause.HANG, remedy, since, "worker", text), inf


def _trains_blind(seen: ReplicaSighting) -> bool:
    """All that is known of its work is that kernels keep its GPU."""
    activity = seen.activity
    return seen.declared.computes and not seen.declared.progresses and not activity.tensor_seen and not activity.hosts


def _seen_at_work(seen: ReplicaSighting, due: float) -> bool:
    """By a load that came no longer than ``GAP`` before its deadline, or since. The GPU of a gang's member that trains
    may be kept by a collective that waits: only tensor cores say that it works, and so they do where they can be seen.
    A CPU says so only in phases that compute, for one that loops looks the same; beside a GPU only of who trains alone:
    an evaluation, or a batch that is prepared. (Ranks that wait in a collective keep their CPUs too.)"""
    activity = seen.activity
    trains = seen.declared.computes and not seen.declared.progresses
    if trains and not seen.ganged and activity.hosts:
        works_now, at = True, activity.at
    elif trains and (seen.ganged or activity.tensor_seen):
        works_now, at = True, activity.tensor_at
    else:
        works_now, at = activity.works if seen.declared.computes else activity.kernels, activity.at
    return works_now and at is not None and at >= due - GAP


def _never_says(seen: ReplicaSighting) -> bool:
    """It makes tokens and has nothing that could be asked: a tool that it waits for looks like a hang, and who is
    killed at healthy work is killed again at the same place."""
    return seen.probes.mute and seen.declared.computes and seen.declared.progresses


def _deadline(seen: ReplicaSighting, limits: Limits) -> tuple[float, str]:
    """Seconds that the clock may run, and where the number comes from."""
    declared = seen.declared
    if declared.longest == inf:
        return declared.shortest, f"{declared.shortest:g} s"
    deadline, how = (declared.longest, "no usual duration yet") if seen.usual is None else _usual(seen, limits)
    if grace := _grace(seen, limits):
        deadline, how = deadline + grace, f"{how}; first pass + {grace:g} s"
    return deadline, f"{deadline:.4g} s ({how})"


def _usual(seen: ReplicaSighting, limits: Limits) -> tuple[float, str]:
    declared = seen.declared
    usual = seen.usual or 0.0
    most = max(limits.adaptive * usual, SLOWEST * seen.slowest)
    how = f"{limits.adaptive:g} x usual {usual:.3g} s"
    if SLOWEST * seen.slowest > limits.adaptive * usual:
        how = f"{SLOWEST:g} x the longest yet, {seen.slowest:.3g} s"
    how += f", within {declared.shortest:g} to {declared.longest:g} s"
    return min(max(most, declared.shortest), declared.longest), how


def _idles_in_first_pass(seen: ReplicaSighting, limits: Limits, since: float) -> tuple[float, str] | None:
    """When that has lasted too long, and how: there is no grace for who neither compiles nor packs. Only as long as
    loads say so."""
    declared, activity = seen.declared, seen.activity
    if not seen.first_pass or declared.name not in _WARMED or activity.idle_since is None or activity.at is None:
        return None
    if activity.at < seen.last_heard - GAP:
        return None
    if seen.usual is None:
        most = max(declared.shortest, IDLE_FIRST * declared.longest)
        how = f"no usual duration yet, {IDLE_FIRST:g} of {declared.longest:g} s"
    else:
        most, how = _usual(seen, limits)
    return max(since, activity.idle_since) + most, f"{most:.4g} s of idleness ({how})"


def _grace(seen: ReplicaSighting, limits: Limits) -> float:
    """Who merely waits compiles nothing and warms nothing up, be it the first time or not."""
    merely = waits(seen) and not seen.declared.own_work
    return limits.first_pass if seen.first_pass and not merely else 0.0


def straggler(seen: ReplicaSighting, limits: Limits, now: float) -> Judged:
    """It has been slow in ``ROUNDS`` comparisons in a row (:mod:`rrl.health.detection.baselines`)."""
    if seen.pace.slow < ROUNDS or not works(seen):
        return NOTHING
    peers = role_of(seen.life.replica)
    if seen.pace.by_tokens:
        text = f"fewer than {SLOW_ROLLOUT:g} of the tokens per second of the other {peers}s"
        text += f", in {ROUNDS} spans of {WINDOW:g} s in a row"
    else:
        text = f"the others of its gang need less than {SLOW_RANK:g} of its time, in {ROUNDS} passes in a row"
    remedy = Remedy.EXCLUDE if limits.stragglers == "exclude" else Remedy.NONE
    return about(seen, "straggler", Verdict.WARN, Cause.NODE, remedy, seen.pace.slow_since, "worker", text), inf
