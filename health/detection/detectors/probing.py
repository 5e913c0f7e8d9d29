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
from ....core.types import Cause, Life, Remedy, Verdict
from ..records import TRIES, NodeSighting, ReplicaSighting, loops
from ..watch import Watch
from .base import MISSES, NOTHING, Judged, about, waits, works

EARLY = 10.0
"""s without a token after which it is asked, where they usually come more often or CPU and GPU have been idle all the
time. What it answers decides, so that this may be short"""
FIRST = 3.0
"""times as long before the first token of a life: engines load and compile then"""
SPINS = 2.0
"""times as long where its GPU is kept by kernels that compute nothing"""
PROMPT = 5.0
"""s within which an answer is nothing worth telling: no finding before that"""
IDLE_SHARE = 0.5
"""of ``limits.probe`` has who is asked while idle: nothing lies before its question"""
AT_WORK = 10.0
"""times ``limits.probe`` has who is asked while its GPU works: the question lies behind a long prefill; as long has who
merely waits while its CPU or GPU works, as it writes its logs or cleans up first"""
SPINS_FIRST = 10.0
"""times ``limits.probe`` has who is asked in a first pass while its GPU spins: what warms up, captures or tunes kernels
uses tensor cores now and then"""
AGAIN = 0.25
"""of ``limits.probe`` after which an unanswered question is put again: it may have been lost"""
RESTS = 120.0
"""s, the longest pause between two questions to who answers them; the first is ``limits.probe`` / 2, and each is twice
the last"""
_LOADS = 4
"""loads in a row that show it idle"""


# ── for who asks ─────────────────────────────────────────────────────────────────────────────────────────────────────
def to_probe(watch: Watch, limits: Limits, now: float) -> list[Life]:
    """Whom to ask now, in the order of their names. Whoever asks says so by ``Watch.asked``, and is not told the same
    again until it is time to.

    ``detect`` keeps when somebody on each node is to be asked, so that only what is due or new is looked at, and
    names the next moment at which this can change."""
    nodes = watch.touched | {node for node, at in watch.asks.items() if at <= now}
    homes = [watch.nodes[node] for node in nodes if node in watch.nodes]
    return sorted(seen.life for home in homes for seen in home.residents.values() if ask_at(seen, limits) <= now)


def next_ask(home: NodeSighting, limits: Limits) -> float:
    """When somebody on this node is to be asked."""
    return min((ask_at(seen, limits) for seen in home.residents.values()), default=inf)


def ask_at(seen: ReplicaSighting, limits: Limits) -> float:
    """When it is to be asked next; inf: there is no reason to."""
    probes = seen.probes
    if probes.mute or probes.failed or (due := suspect_at(seen, limits)) == inf:
        return inf
    if probes.asked_at is not None:
        return probes.last_asked + AGAIN * limits.probe
    if probes.answered_at is not None:
        return max(due, probes.answered_at + min(limits.probe / 2 * 2.0 ** (probes.answers - 1), RESTS))
    return due


def suspect_at(seen: ReplicaSighting, limits: Limits) -> float:
    """When it comes under suspicion, or came; inf: never, if nothing new is seen."""
    if not _can_be(seen):
        return inf
    if loops(seen):
        return seen.clock + (EARLY if seen.role.answers else 0.0)
    return min(_silent_at(seen, limits), _idle_at(seen, limits), _lies_at(seen, limits))


def _can_be(seen: ReplicaSighting) -> bool:
    if loops(seen):
        return works(seen) and (seen.role.answers or (seen.role.tries < TRIES and seen.probes.last_asked < seen.clock))
    return works(seen) and not waits(seen) and seen.declared.progresses


def _must_answer(seen: ReplicaSighting) -> bool:
    """Without an answer it has failed: not who is asked only to find out whether its role answers while it waits."""
    return _can_be(seen) and (seen.role.answers or not loops(seen))


def _silent_at(seen: ReplicaSighting, limits: Limits) -> float:
    """By time alone: much sooner where tokens usually come by the second. Not where nobody tells loads: nothing could
    then tell a long prefill, which answers late, from a hang."""
    if seen.usual is None or seen.activity.at is None:
        return _long_silent_at(seen, limits)
    return min(_long_silent_at(seen, limits), seen.clock + _pass(seen) * max(EARLY, limits.adaptive * seen.usual))


def _long_silent_at(seen: ReplicaSighting, limits: Limits) -> float:
    return seen.clock + _pass(seen) * max(limits.suspect, limits.adaptive * (seen.usual or 0.0))


def _idle_at(seen: ReplicaSighting, limits: Limits) -> float:
    """It has made no token, and neither CPU nor GPU has worked, or its GPU spins, for a while. Compiling takes the CPU:
    who is idle in a first pass need not wait for its grace."""
    activity = seen.activity
    if not seen.declared.computes:
        return inf
    usual = limits.adaptive * (seen.usual or 0.0)
    need = _pass(seen) * min(max(EARLY, usual), max(EARLY, limits.suspect))
    if activity.spins_since is not None and activity.spins_for(seen.clock) >= (need := need * SPINS):
        return max(activity.spins_since, seen.clock) + need
    if activity.idle_since is None or activity.idle_loads < _LOADS:
        return inf
    return max(activity.idle_since, seen.clock) + need if activity.idle_for(seen.clock) >= need else inf


def _lies_at(seen: ReplicaSighting, limits: Limits) -> float:
    """It has told of progress well after its GPU ceased to work, which it has not for long."""
    activity = seen.activity
    if activity.dark_since is None or not seen.declared.computes or seen.clock < activity.dark_since + EARLY:
        return inf
    need = limits.idle * _pass(seen)
    return max(activity.dark_since, seen.phase_since) + need if activity.dark_for(seen.phase_since) >= need else inf


def _pass(seen: ReplicaSighting) -> float:
    return FIRST if seen.first_pass else 1.0


# ── detectors ────────────────────────────────────────────────────────────────────────────────────────────────────────
def engine_dead(seen: ReplicaSighting, limits: Limits, now: float) -> Judged:
    """Asked for work, it said that it cannot."""
    if seen.probes.failed is None or not _must_answer(seen):
        return NOTHING
    at, why = seen.probes.failed
    text = f"phase {seen.phase}: asked for work, it says that it cannot" + (f": {why}" if why else "")
    return about(seen, "engine_dead", Verdict.FAIL, Cause.HANG, Remedy.RESTART, at, "worker", text), inf


def no_answer(seen: ReplicaSighting, limits: Limits, now: float) -> Judged:
    """Asked for work, it beats on and does not answer: the process lives, its engine does not."""
    asked_at = seen.probes.asked_at
    if asked_at is None or seen.probes.mute or not _must_answer(seen):
        return NOTHING
    due = _answers_by(seen, limits, asked_at)
    if now < due:
        return None, due
    if seen.probes.beats < MISSES:  # it may not have been reached
        return NOTHING
    idle = _idle_since(seen, asked_at)
    text = f"phase {seen.phase}: asked for work, it beats and does not answer"
    text += f" within {due - asked_at:g} s" + (", its CPU and GPU idle" if idle else "")
    return about(seen, "no_answer", Verdict.FAIL, Cause.HANG, Remedy.RESTART, asked_at, "worker", text), inf


def suspected(seen: ReplicaSighting, limits: Limits, now: float) -> Judged:
    """Worth telling: it has been silent for long and did not say that it works, or leaves a question unanswered. Not
    the silence of who cannot be asked, or computes nothing: that is asked quietly, or left to its deadline."""
    ask = ask_at(seen, limits)
    look = ask if ask > now else inf
    if not _must_answer(seen) or seen.probes.failed is not None:
        return None, look
    quietly = bool(seen.probes.answers) or seen.probes.mute or not seen.declared.computes
    due = min(inf if quietly else _long_silent_at(seen, limits), inf if seen.probes.answers else _lies_at(seen, limits))
    if seen.probes.asked_at is not None:
        due = min(due, seen.probes.asked_at + PROMPT)
    if now < due:
        return None, min(look, due)
    lies = _lies_at(seen, limits) <= now < _long_silent_at(seen, limits)
    what = "it tells of progress, and no kernel runs" if lies else "no progress"
    asked = "it cannot be asked for work" if seen.probes.mute else "it is asked for work"
    text = f"phase {seen.phase}: {what}; {asked}"
    since = seen.phase_since if lies else seen.clock
    return about(seen, "suspected", Verdict.WARN, Cause.HANG, Remedy.NONE, since, "worker", text), look


def _answers_by(seen: ReplicaSighting, limits: Limits, asked_at: float) -> float:
    activity = seen.activity
    told = activity.at is not None and activity.at >= asked_at
    if loops(seen) and told and (activity.works or activity.hosts):
        return asked_at + limits.probe * AT_WORK
    if _idle_since(seen, asked_at):  # who merely waits has answered so before, be it its first pass or not
        return asked_at + limits.probe * (1.0 if seen.first_pass and not loops(seen) else IDLE_SHARE)
    if loops(seen):
        return _after_work(seen, limits, asked_at)
    if told and activity.spins_since is not None:  # a prefill works its tensor cores, of which one hears late
        return max(asked_at, activity.spins_since) + limits.probe * (SPINS_FIRST if seen.first_pass else 1.0)
    if seen.first_pass:
        return inf  # it loads, or compiles: time judges that
    if told and activity.works:
        return max(asked_at, _long_silent_at(seen, limits)) + AT_WORK * limits.probe
    return _after_work(seen, limits, asked_at)


def _after_work(seen: ReplicaSighting, limits: Limits, asked_at: float) -> float:
    """Who was at work when it was asked answers once it has ceased; not later than who is at work all the time."""
    ceased = max(asked_at, seen.activity.idle_since or asked_at)
    return min(ceased + limits.probe, asked_at + AT_WORK * limits.probe)


def _idle_since(seen: ReplicaSighting, asked_at: float) -> bool:
    """Loads that came since it was asked say that it has done nothing since before that."""
    activity = seen.activity
    if activity.at is None or activity.idle_since is None:
        return False
    return activity.at >= asked_at >= activity.idle_since
