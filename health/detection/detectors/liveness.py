"""Detectors of whether a replica is there at all: its end, its silence, its start and the end that does not come."""

from __future__ import annotations

from collections.abc import Collection
from math import inf
from signal import Signals

from msgspec.structs import replace

from ....core.launch import ExitReason, exit_text
from ....core.run_spec import Limits
from ....core.types import Cause, Finding, Flag, Life, NodeName, Remedy, Verdict
from ..records import ReplicaSighting
from ..watch import Watch
from .base import NOTHING, SLOW_START, Judged, about, expected_to_speak, joins_by, patience, silence  # fmt: skip

RUNNING = 3.0
"""times the silence of a worker of which its node's agent says that its CPU works: what it says may come late, behind
its logs. A stopped process takes no CPU, though a kernel may keep its GPU"""
_AGENT_ALONE = 2
"""times the silence of an agent: by then node_lost has judged whether its node went with it"""


# ── proof ────────────────────────────────────────────────────────────────────────────────────────────────────────────
def exit_record(seen: ReplicaSighting, limits: Limits, now: float) -> Judged:
    """Its step ended. When it was asked to stop, only an exit code of its own is worth a warning; else the end is a
    failure, with a goodbye or without: a role works until it is told that it is over."""
    end = seen.exit
    if end is None:
        return NOTHING
    asked = seen.leaving_at is not None
    if asked and (not end.code or end.reason is ExitReason.STOPPED):
        return NOTHING
    if (end.code == 0 or end.reason is ExitReason.STOPPED) and now < (due := end.at + patience(limits)):
        return None, due  # that the run is complete may still be on its way, or that the cluster takes the node back
    text = _how_it_ended(end.code, end.signal, exit_text(end.reason, end.detail))
    text += f": {end.said}" if end.said else ""
    if asked:
        return about(seen, "exit_record", Verdict.WARN, Cause.PROCESS, Remedy.NONE, end.at, "step", text), inf
    found = about(seen, "exit_record", Verdict.FAIL, Cause.PROCESS, Remedy.RESTART, end.at, "step", text, True)
    if end.reason is ExitReason.NOT_STARTED:
        found = replace(found, flags=(Flag.NOT_STARTED,))
    return found, inf


def step_gone(seen: ReplicaSighting, limits: Limits, now: float) -> Judged:
    """The agent, a witness on the same node, says that the process is no more."""
    at = seen.gone_witnessed_at
    if at is None or seen.exit is not None or seen.leaving_at is not None:
        return NOTHING
    text = "its process is no more, and left no exit record"
    return about(seen, "step_gone", Verdict.FAIL, Cause.PROCESS, Remedy.RESTART, at, "agent", text, True), inf


# ── the end that does not come ───────────────────────────────────────────────────────────────────────────────────────
def never_left(seen: ReplicaSighting, limits: Limits, now: float) -> Judged:
    """It said Goodbye, nobody asked it to, and it has not ended: stuck in its own cleaning up, it would be missed by
    every other detector."""
    if seen.goodbye_at is None or seen.leaving_at is not None or seen.ended or seen.home.suspended_at is not None:
        return NOTHING
    longest = limits.phase("stopping").longest
    due = seen.goodbye_at + longest
    if now < due:
        return None, due
    text = f"it has not ended within {longest:g} s of its goodbye"
    return about(seen, "never_left", Verdict.FAIL, Cause.HANG, Remedy.RESTART, seen.goodbye_at, "worker", text), inf


# ── silence ──────────────────────────────────────────────────────────────────────────────────────────────────────────
def worker_silence(seen: ReplicaSighting, limits: Limits, now: float) -> Judged:
    """It joined, and is not heard any more. An agent's silence is the node's matter (``node_lost``)."""
    if not expected_to_speak(seen) or seen.status != "joined" or seen.is_agent:
        return NOTHING
    longest = silence(limits) * (RUNNING if _runs(seen, limits) else 1.0)
    due = seen.last_heard + longest
    if now < due:
        return None, due
    text = f"no beat for {longest:g} s after its last one, in phase {seen.phase}"
    return _silent(seen, limits, "worker_silence", seen.last_heard, text), inf


def _runs(seen: ReplicaSighting, limits: Limits) -> bool:
    """By a load that came well after its last beat: it speaks of the time since."""
    at = seen.activity.at
    return seen.activity.runs and at is not None and at >= seen.last_heard + patience(limits)


def unheard(found: Collection[Finding], watch: Watch, limits: Limits, now: float) -> dict[Life, tuple[NodeName, float]]:
    """Workers that have missed some beats though their nodes are heard: where each is, and since when (s). Looked for
    only where the silence of one was found."""
    if all(finding.detector != worker_silence.__name__ for finding in found):
        return {}
    return {seen.life: (seen.node, seen.last_heard) for seen in watch.workers()
            if expected_to_speak(seen) and seen.status == "joined" and now >= seen.last_heard + patience(limits)
            and _is_heard(seen, limits, seen.last_heard)}  # fmt: skip


def agent_silence(seen: ReplicaSighting, limits: Limits, now: float) -> Judged:
    """An agent is not heard any more, and for as long again somebody else on its node still is: it is the agent."""
    if not seen.is_agent or not expected_to_speak(seen) or seen.status != "joined":
        return NOTHING
    due = seen.last_heard + _AGENT_ALONE * silence(limits)
    if now < due:
        return None, due
    heard = seen.home.last_heard
    if heard is None or now >= heard + patience(limits):
        return NOTHING  # nobody is: node_lost judges that
    silent = _AGENT_ALONE * silence(limits)
    text = f"no beat for {silent:g} s after its last one, though others on {seen.node} are heard"
    found = about(seen, "agent_silence", Verdict.FAIL, Cause.PROCESS, Remedy.RESTART, seen.last_heard, "manager", text)
    return found, heard + patience(limits)


def adopt_overdue(seen: ReplicaSighting, limits: Limits, now: float) -> Judged:
    """A shadow was told to become it, and is not heard as that. It had imported and built everything: it is not slow,
    it is gone or stuck, and whoever waits for it had better take the next one."""
    if seen.shadow is None or not expected_to_speak(seen) or seen.status != "launched":
        return NOTHING
    due = seen.launched_at + seen.within
    if now < due:
        return None, due
    text = f"{seen.shadow} on {seen.node} was told to become it, and no Hello came within {seen.within:g} s"
    at = seen.launched_at
    return about(seen, "adopt_overdue", Verdict.FAIL, Cause.PROCESS, Remedy.RESTART, at, "manager", text), inf


def never_joined(seen: ReplicaSighting, limits: Limits, now: float) -> Judged:
    """It was launched, and never said Hello. As long as the agent says that its step lives, it may just be slow."""
    if not expected_to_speak(seen) or seen.status != "launched" or seen.shadow is not None:
        return NOTHING
    since = seen.launched_at
    due = since + limits.join
    if now < due:
        return None, due
    text = f"no Hello within {limits.join:g} s of its launch or of this manager's start"
    if now < (last := joins_by(seen, limits)):
        text += f"; the agent says that its step lives: it has {SLOW_START} times as long"
        return about(seen, "never_joined", Verdict.WARN, Cause.PROCESS, Remedy.NONE, since, "agent", text), last
    return _silent(seen, limits, "never_joined", since, text), inf


def _silent(seen: ReplicaSighting, limits: Limits, detector: str, since: float, text: str) -> Finding:
    """Charged to the process when something else on its node was heard well after it fell silent; else nobody knows.

    "After" means some beats later: when a node dies, the last beats of those on it differ by up to one.
    """
    if _is_heard(seen, limits, since) or (seen.is_agent and detector == "never_joined"):
        return about(seen, detector, Verdict.FAIL, Cause.PROCESS, Remedy.RESTART, since, "manager", text)
    text += f"; nothing else on {seen.node} was heard since"
    return about(seen, detector, Verdict.UNKNOWN, Cause.NODE, Remedy.NONE, since, "manager", text)


def _is_heard(seen: ReplicaSighting, limits: Limits, since: float) -> bool:
    """Somebody else on its node is, and was well after ``since``."""
    heard = seen.home.last_heard
    return heard is not None and heard >= since + patience(limits)


def _how_it_ended(code: int | None, signal: int | None, why: str) -> str:
    if signal is not None:
        name = Signals(signal).name if signal in set(Signals) else "unnamed"
        return f"ended by signal {signal} ({name}); {why}"
    if code is None:
        return why
    return f"exited with code {code}" + (", but nobody asked it to" if code == 0 else "") + f"; {why}"
