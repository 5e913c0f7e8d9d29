"""Detectors of what a replica does and of whether a node is there: pure functions of one sighting, the limits and now.

Each returns a finding or None, and when it could next change its mind though nothing new is seen (inf: never). Text and
``since`` never carry running seconds, so that an unchanged situation is an equal finding. The tuples are ladders, best
evidence first: of one replica or node, the first that speaks is heard.

What condemns without proof needs time and observations both (docs/sources.md): silence is at least ``_MISSES`` beats
that did not come, standing still at least as many beats that came and showed it.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from signal import Signals

from rrl.health.sightings import FLAP_WINDOW, FLAPS, NodeSighting, ReplicaSighting
from rrl.spec.jobview import Limits
from rrl.spec.launch import ASKED
from rrl.spec.words import Cause, Evidence, Finding, Remedy, Verdict

Judged = tuple[Finding | None, float]
Detector = Callable[[ReplicaSighting, Limits, float], Judged]
NodeDetector = Callable[[NodeSighting, Limits, float], Judged]

_MISSES = 3
_SLOW_START = 5
"""times ``limits.join``: so long may a step take to join of which the agent says that it lives"""
_AGENT_ALONE = 2
"""times the silence of an agent: by then node_lost has judged whether its node went with it"""
_ASKING = 30.0
"""s that a cluster has to say whether a silent node is suspended; one that is away longer hinders no repair"""
_NOTHING: Judged = (None, inf)


# ── proof ────────────────────────────────────────────────────────────────────────────────────────────────────────────
def exit_record(seen: ReplicaSighting, limits: Limits, now: float) -> Judged:
    """Its step ended. When it was asked to stop, only an exit code of its own is worth a warning; else the end is a
    failure, with a goodbye or without: a role works until it is told that it is over."""
    end = seen.exit
    if end is None:
        return _NOTHING
    asked = seen.leaving_at is not None
    if asked and (not end.code or end.why == ASKED):
        return _NOTHING
    if (end.code == 0 or end.why == ASKED) and now < (due := end.at + _patience(limits)):
        return None, due  # that the run is complete may still be on its way, or that the cluster takes the node back
    text = _how_it_ended(end.code, end.signal, end.why) + (f": {end.said}" if end.said else "")
    if asked:
        return _about(seen, "exit_record", Verdict.WARN, Cause.PROCESS, Remedy.NONE, end.at, "step", text), inf
    return _about(seen, "exit_record", Verdict.FAIL, Cause.PROCESS, Remedy.RESTART, end.at, "step", text, True), inf


def step_gone(seen: ReplicaSighting, limits: Limits, now: float) -> Judged:
    """The agent, a witness on the same node, says that the process is no more."""
    at = seen.gone_witnessed_at
    if at is None or seen.exit is not None or seen.leaving_at is not None:
        return _NOTHING
    text = "its process is no more, and left no exit record"
    return _about(seen, "step_gone", Verdict.FAIL, Cause.PROCESS, Remedy.RESTART, at, "agent", text, True), inf


# ── the end that does not come ───────────────────────────────────────────────────────────────────────────────────────
def never_left(seen: ReplicaSighting, limits: Limits, now: float) -> Judged:
    """It said Goodbye, nobody asked it to, and it has not ended: stuck in its own cleaning up, it would be missed by
    every other detector."""
    if seen.goodbye_at is None or seen.leaving_at is not None or seen.ended or seen.home.suspended_at is not None:
        return _NOTHING
    longest = limits.phase("stopping").longest
    due = seen.goodbye_at + longest
    if now < due:
        return None, due
    text = f"it has not ended within {longest:g} s of its goodbye"
    return _about(seen, "never_left", Verdict.FAIL, Cause.HANG, Remedy.RESTART, seen.goodbye_at, "worker", text), inf


# ── silence ──────────────────────────────────────────────────────────────────────────────────────────────────────────
def worker_silence(seen: ReplicaSighting, limits: Limits, now: float) -> Judged:
    """It joined, and is not heard any more. An agent's silence is the node's matter (``node_lost``)."""
    if not _expected_to_speak(seen) or seen.status != "joined" or seen.is_agent:
        return _NOTHING
    due = seen.last_heard + _silence(limits)
    if now < due:
        return None, due
    text = f"no beat for {_silence(limits):g} s after its last one, in phase {seen.phase}"
    return _silent(seen, limits, "worker_silence", seen.last_heard, text), inf


def agent_silence(seen: ReplicaSighting, limits: Limits, now: float) -> Judged:
    """An agent is not heard any more, and for as long again somebody else on its node still is: it is the agent."""
    if not seen.is_agent or not _expected_to_speak(seen) or seen.status != "joined":
        return _NOTHING
    due = seen.last_heard + _AGENT_ALONE * _silence(limits)
    if now < due:
        return None, due
    heard = seen.home.last_heard
    if heard is None or now >= heard + _patience(limits):
        return _NOTHING  # nobody is: node_lost judges that
    silent = _AGENT_ALONE * _silence(limits)
    text = f"no beat for {silent:g} s after its last one, though others on {seen.node} are heard"
    found = _about(seen, "agent_silence", Verdict.FAIL, Cause.PROCESS, Remedy.RESTART, seen.last_heard, "manager", text)
    return found, heard + _patience(limits)


def adopt_overdue(seen: ReplicaSighting, limits: Limits, now: float) -> Judged:
    """A shadow was told to become it, and is not heard as that. It had imported and built everything: it is not slow,
    it is gone or stuck, and whoever waits for it had better take the next one."""
    if seen.shadow is None or not _expected_to_speak(seen) or seen.status != "launched":
        return _NOTHING
    due = seen.launched_at + seen.within
    if now < due:
        return None, due
    text = f"{seen.shadow} on {seen.node} was told to become it, and no Hello came within {seen.within:g} s"
    at = seen.launched_at
    return _about(seen, "adopt_overdue", Verdict.FAIL, Cause.PROCESS, Remedy.RESTART, at, "manager", text), inf


def never_joined(seen: ReplicaSighting, limits: Limits, now: float) -> Judged:
    """It was launched, and never said Hello. As long as the agent says that its step lives, it may just be slow."""
    if not _expected_to_speak(seen) or seen.status != "launched" or seen.shadow is not None:
        return _NOTHING
    since = seen.launched_at
    due = since + limits.join
    if now < due:
        return None, due
    text = f"no Hello within {limits.join:g} s of its launch or of this manager's start"
    if now < (last := _joins_by(seen, limits)):
        text += f"; the agent says that its step lives: it has {_SLOW_START} times as long"
        return _about(seen, "never_joined", Verdict.WARN, Cause.PROCESS, Remedy.NONE, since, "agent", text), last
    return _silent(seen, limits, "never_joined", since, text), inf


def _silent(seen: ReplicaSighting, limits: Limits, detector: str, since: float, text: str) -> Finding:
    """Charged to the process when something else on its node was heard well after it fell silent; else nobody knows.

    "After" means some beats later: when a node dies, the last beats of those on it differ by up to one.
    """
    heard = seen.home.last_heard
    lives = heard is not None and heard >= since + _patience(limits)
    if lives or (seen.is_agent and detector == "never_joined"):
        return _about(seen, detector, Verdict.FAIL, Cause.PROCESS, Remedy.RESTART, since, "manager", text)
    text += f"; nothing else on {seen.node} was heard since"
    return _about(seen, detector, Verdict.UNKNOWN, Cause.NODE, Remedy.NONE, since, "manager", text)


# ── progress ─────────────────────────────────────────────────────────────────────────────────────────────────────────
def no_progress(seen: ReplicaSighting, limits: Limits, now: float) -> Judged:
    """Beats go on, ``done`` does not rise, in a phase that must progress."""
    if not _works(seen) or waits(seen) or not seen.declared.progresses:
        return _NOTHING
    return _stands(seen, limits, now, "no_progress", Verdict.FAIL, "no progress")


def phase_overdue(seen: ReplicaSighting, limits: Limits, now: float) -> Judged:
    """It does not come out of a phase that must end, and shows no progress in it either.

    Of a phase that neither rrl nor the job declares nobody knows how long it may last: a warning, no more.
    """
    declared = seen.declared
    if not _works(seen) or waits(seen) or declared.progresses or declared.longest == inf:
        return _NOTHING
    verdict = Verdict.FAIL if limits.knows(declared.name) else Verdict.WARN
    return _stands(seen, limits, now, "phase_overdue", verdict, "it does not end")


def wait_overdue(seen: ReplicaSighting, limits: Limits, now: float) -> Judged:
    """It waits for too long. Raw material for ``blame.charge``, which never lets it through as it is."""
    if not _works(seen) or not waits(seen):
        return _NOTHING
    whom = seen.waits_for or f"any {seen.declared.waits_for}"
    return _stands(seen, limits, now, "wait_overdue", Verdict.UNKNOWN, f"it waits for {whom}")


def idle(seen: ReplicaSighting, limits: Limits, now: float) -> Judged:
    """A service does nothing: mostly because nobody asks. Raw material for ``blame.charge``, like ``wait_overdue``."""
    if not _works(seen) or waits(seen) or seen.declared.longest != inf or seen.declared.progresses:
        return _NOTHING
    return _stands(seen, limits, now, "idle", Verdict.UNKNOWN, "it does nothing")


def waits(seen: ReplicaSighting) -> bool:
    """Whatever stops it is somebody else's: it says so, or its phase does."""
    return seen.waits_for is not None or seen.declared.waits_for is not None


def _stands(seen: ReplicaSighting, limits: Limits, now: float, detector: str, verdict: Verdict, what: str) -> Judged:
    deadline, how = _deadline(seen, limits)
    due = seen.clock + deadline
    if now < due:
        return None, due
    if seen.beats < _MISSES:  # too few have looked; the next beat will be looked at
        return _NOTHING
    remedy = Remedy.RESTART if verdict is Verdict.FAIL else Remedy.NONE
    text = f"phase {seen.phase}: {what} within {how}"
    return _about(seen, detector, verdict, Cause.HANG, remedy, seen.clock, "worker", text), inf


def _deadline(seen: ReplicaSighting, limits: Limits) -> tuple[float, str]:
    """Seconds that the clock may run, and where the number comes from."""
    declared = seen.declared
    if declared.longest == inf:
        return declared.shortest, f"{declared.shortest:g} s"
    if seen.usual is None:
        deadline, how = declared.longest, "no usual duration yet"
    else:
        deadline = min(max(limits.adaptive * seen.usual, declared.shortest), declared.longest)
        how = f"{limits.adaptive:g} x usual {seen.usual:.3g} s, within {declared.shortest:g} to {declared.longest:g} s"
    if seen.first_pass:
        deadline, how = deadline + limits.first_pass, f"{how}; first pass + {limits.first_pass:g} s"
    return deadline, f"{deadline:.4g} s ({how})"


PROGRESS_DETECTORS: tuple[Detector, ...] = (
    exit_record, step_gone, never_left, adopt_overdue, never_joined, worker_silence, agent_silence, no_progress,
    phase_overdue, wait_overdue, idle,
)  # fmt: skip


# ── nodes ────────────────────────────────────────────────────────────────────────────────────────────────────────────
def node_down(seen: NodeSighting, limits: Limits, now: float) -> Judged:
    """The cluster says that it is down: proof."""
    if seen.down_said is None:
        return _NOTHING
    since, words = seen.down_said
    evidence = (Evidence("cluster", f"down: {words}" if words else "down", since),)
    return _node_finding(seen, "node_down", Verdict.FAIL, Remedy.EXCLUDE, since, evidence, proof=True), inf


def node_lost(seen: NodeSighting, limits: Limits, now: float) -> Judged:
    """Its agent is silent. That alone is a warning; a second witness, the silence of every replica there, condemns it.

    Replicas that never joined have not been heard and so cannot fall silent: they witness only where none joined, and
    once their join deadline has passed. Whoever ended, or left before it fell silent, is no witness.
    """
    agent = seen.agent or seen.former_agent
    if agent is None or not _witness(agent, limits) or seen.suspended_at is not None:
        return _NOTHING
    agent_due = _speaks_by(agent, limits)
    witnesses = [one for one in (*seen.residents.values(), *seen.departed.values()) if _witness(one, limits)]
    joined = [one for one in witnesses if one.status == "joined"]
    dues = [_speaks_by(one, limits) for one in witnesses]
    lost = max(_speaks_by(one, limits) for one in joined) if joined else min(dues, default=inf)
    lost = max(lost, agent_due)
    text = f"agent {agent.life} is silent" if agent.status == "joined" else f"agent {agent.life} never joined"
    evidence = [Evidence("manager", text, agent.last_heard)]
    if now >= lost:
        silent = sorted(str(one.life) for one in (joined or witnesses) if now >= _speaks_by(one, limits))
        since = agent.last_heard if seen.last_heard is None else seen.last_heard
        evidence.append(Evidence("manager", f"silent too: {_few(silent)}", since))
        if seen.looked_at is not None and not seen.asked(limits) and now < lost + _ASKING:
            evidence.append(Evidence("manager", "the cluster is asked first whether it is suspended", lost))
            return _node_finding(seen, "node_lost", Verdict.WARN, Remedy.NONE, since, tuple(evidence)), lost + _ASKING
        return _node_finding(seen, "node_lost", Verdict.FAIL, Remedy.EXCLUDE, since, tuple(evidence)), inf
    if now >= agent_due and agent.status == "joined":
        since = agent.last_heard
        return _node_finding(seen, "node_lost", Verdict.WARN, Remedy.NONE, since, tuple(evidence)), lost
    return None, agent_due if now < agent_due else lost


def node_flaps(seen: NodeSighting, limits: Limits, now: float) -> Judged:
    """The cluster ceases to call it up again and again, however well it looks in between."""
    if len(seen.flaps) < FLAPS or seen.flaps[-1] - seen.flaps[0] > FLAP_WINDOW:
        return _NOTHING
    over = seen.flaps[-1] + FLAP_WINDOW
    if now >= over:
        return _NOTHING
    since = seen.flaps[0]
    text = f"it ceased to be up {len(seen.flaps)} times within {seen.flaps[-1] - since:.0f} s"
    evidence = (Evidence("cluster", text, seen.flaps[-1]),)
    return _node_finding(seen, "node_flaps", Verdict.FAIL, Remedy.EXCLUDE, since, evidence), over


NODE_DETECTORS: tuple[NodeDetector, ...] = (node_down, node_lost, node_flaps)


def _witness(seen: ReplicaSighting, limits: Limits) -> bool:
    """Its silence says something: it did not end, and if it was to leave, it was overdue before that."""
    left = seen.left_at is not None and seen.left_at < _speaks_by(seen, limits)
    return not seen.ended and not left


# ── small change ─────────────────────────────────────────────────────────────────────────────────────────────────────
def _patience(limits: Limits) -> float:
    """``_MISSES`` beats, and one more for the last of them to arrive."""
    return (_MISSES + 1) * limits.beat


def _silence(limits: Limits) -> float:
    return max(limits.silence, _patience(limits))


def _speaks_by(seen: ReplicaSighting, limits: Limits) -> float:
    """When its silence becomes a fact."""
    return _joins_by(seen, limits) if seen.status == "launched" else seen.last_heard + _silence(limits)


def _joins_by(seen: ReplicaSighting, limits: Limits) -> float:
    """``limits.join`` after its launch or its step's last sign of life, but not for ever; of a shadow that was told to
    become it, when that is overdue."""
    if seen.shadow is not None:
        return seen.launched_at + seen.within
    alive_at = seen.launched_at if seen.alive_at is None else seen.alive_at
    return min(max(seen.launched_at, alive_at) + limits.join, seen.launched_at + _SLOW_START * limits.join)


def _expected_to_speak(seen: ReplicaSighting) -> bool:
    return not seen.ended and seen.left_at is None and seen.home.suspended_at is None


def _works(seen: ReplicaSighting) -> bool:
    speaks = _expected_to_speak(seen) and seen.status == "joined" and not seen.is_agent
    return speaks and seen.phase is not None and not seen.held_up


def _how_it_ended(code: int | None, signal: int | None, why: str) -> str:
    if signal is not None:
        name = Signals(signal).name if signal in set(Signals) else "unnamed"
        return f"ended by signal {signal} ({name}); {why}"
    if code is None:
        return why
    return f"exited with code {code}" + (", but nobody asked it to" if code == 0 else "") + f"; {why}"


def _few(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def _about(
    seen: ReplicaSighting, detector: str, verdict: Verdict, cause: Cause, remedy: Remedy, since: float, source: str,
    text: str, proof: bool = False,
) -> Finding:  # fmt: skip
    evidence = (Evidence(source, text, since),)
    return Finding(detector, verdict, cause, remedy, since, evidence, life=seen.life, proof=proof)


def _node_finding(
    seen: NodeSighting, detector: str, verdict: Verdict, remedy: Remedy, since: float, evidence: tuple[Evidence, ...],
    proof: bool = False,
) -> Finding:  # fmt: skip
    return Finding(detector, verdict, Cause.NODE, remedy, since, evidence, node=seen.node, proof=proof)
