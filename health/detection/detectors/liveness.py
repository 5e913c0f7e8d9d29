"""Detectors of whether a replica is there at all: its end, its silence, its start and the end that does not come."""

from __future__ import annotations

from collections.abc import Collection
from math import inf
from signal import Signals

from msgspec.structs import replace

from ....core.launch import ExitReason, exit_text
from ....core.run_spec import Limits
from ....core.types import Cause, Finding, Flag, Incarnation, NodeName, Remedy, Verdict
from ..health_monitor import HealthMonitor
from ..records import ReplicaView
from .base import (  # fmt: skip
    NO_FINDING,
    SLOW_START_FACTOR,
    Result,
    expects_heartbeats,
    finding_about,
    heartbeat_slack,
    join_deadline,
    silence_limit,
)

CPU_ACTIVE_SILENCE_FACTOR = 3.0
"""times the silence of a worker of which its node's agent says that its CPU works: what it says may come late, behind
its logs. A stopped process takes no CPU, though a kernel may keep its GPU"""
_AGENT_SILENCE_FACTOR = 2
"""times the silence of an agent: by then node_lost has judged whether its node went with it"""


# ── proof ────────────────────────────────────────────────────────────────────────────────────────────────────────────
def exit_record(view: ReplicaView, limits: Limits, now: float) -> Result:
    """Its step ended. When it was asked to stop, only an exit code of its own is worth a warning; else the end is a
    failure, with a goodbye or without: a role works until it is told that it is over."""
    end = view.exit
    if end is None:
        return NO_FINDING
    stop_requested = view.stop_requested_at is not None
    if stop_requested and (not end.code or end.reason is ExitReason.STOPPED):
        return NO_FINDING
    if (end.code == 0 or end.reason is ExitReason.STOPPED) and now < (due := end.at + heartbeat_slack(limits)):
        return None, due  # that the run is complete may still be on its way, or that the cluster takes the node back
    text = _exit_description(end.code, end.signal, exit_text(end.reason, end.detail))
    text += f": {end.last_line}" if end.last_line else ""
    if stop_requested:
        return finding_about(view, "exit_record", Verdict.WARN, Cause.PROCESS, Remedy.NONE, end.at, "step", text), inf
    found = finding_about(view, "exit_record", Verdict.FAIL, Cause.PROCESS, Remedy.RESTART, end.at, "step", text, True)
    if end.reason is ExitReason.NOT_STARTED:
        found = replace(found, flags=(Flag.NOT_STARTED,))
    return found, inf


def step_gone(view: ReplicaView, limits: Limits, now: float) -> Result:
    """The agent, a witness on the same node, says that the process is no more."""
    at = view.gone_witnessed_at
    if at is None or view.exit is not None or view.stop_requested_at is not None:
        return NO_FINDING
    text = "its process is no more, and left no exit record"
    return finding_about(view, "step_gone", Verdict.FAIL, Cause.PROCESS, Remedy.RESTART, at, "agent", text, True), inf


# ── the end that does not come ───────────────────────────────────────────────────────────────────────────────────────
def stop_overdue(view: ReplicaView, limits: Limits, now: float) -> Result:
    """It said Goodbye, nobody asked it to, and it has not ended: stuck in its own cleaning up, it would be missed by
    every other detector."""
    if (
        view.goodbye_at is None
        or view.stop_requested_at is not None
        or view.ended
        or view.node_view.suspended_at is not None
    ):
        return NO_FINDING
    longest = limits.phase("stopping").longest
    due = view.goodbye_at + longest
    if now < due:
        return None, due
    text = f"it has not ended within {longest:g} s of its goodbye"
    return finding_about(
        view, "stop_overdue", Verdict.FAIL, Cause.HANG, Remedy.RESTART, view.goodbye_at, "worker", text
    ), inf


# ── silence ──────────────────────────────────────────────────────────────────────────────────────────────────────────
def worker_silence(view: ReplicaView, limits: Limits, now: float) -> Result:
    """It joined, and is not heard any more. An agent's silence is the node's matter (``node_lost``)."""
    if not expects_heartbeats(view) or view.status != "joined" or view.is_agent:
        return NO_FINDING
    longest = silence_limit(limits) * (CPU_ACTIVE_SILENCE_FACTOR if _cpu_active(view, limits) else 1.0)
    due = view.last_message_at + longest
    if now < due:
        return None, due
    text = f"no beat for {longest:g} s after its last one, in phase {view.phase}"
    return _silence_finding(view, limits, "worker_silence", view.last_message_at, text), inf


def _cpu_active(view: ReplicaView, limits: Limits) -> bool:
    """By a load that came well after its last beat: it speaks of the time since."""
    at = view.loads.latest_at
    return view.loads.cpu_active and at is not None and at >= view.last_message_at + heartbeat_slack(limits)


def missing_heartbeats(
    findings: Collection[Finding], monitor: HealthMonitor, limits: Limits, now: float
) -> dict[Incarnation, tuple[NodeName, float]]:
    """Workers that have missed some beats though their nodes are heard: where each is, and since when (s). Looked for
    only where the silence of one was found."""
    if all(finding.detector != worker_silence.__name__ for finding in findings):
        return {}
    return {view.incarnation: (view.node, view.last_message_at) for view in monitor.workers()
            if expects_heartbeats(view) and view.status == "joined" and now >= view.last_message_at + heartbeat_slack(limits)
            and _node_responsive(view, limits, view.last_message_at)}  # fmt: skip


def agent_silence(view: ReplicaView, limits: Limits, now: float) -> Result:
    """An agent is not heard any more, and for as long again somebody else on its node still is: it is the agent."""
    if not view.is_agent or not expects_heartbeats(view) or view.status != "joined":
        return NO_FINDING
    due = view.last_message_at + _AGENT_SILENCE_FACTOR * silence_limit(limits)
    if now < due:
        return None, due
    last_message_at = view.node_view.last_message_at
    if last_message_at is None or now >= last_message_at + heartbeat_slack(limits):
        return NO_FINDING  # nobody is: node_lost judges that
    silent = _AGENT_SILENCE_FACTOR * silence_limit(limits)
    text = f"no beat for {silent:g} s after its last one, though others on {view.node} are heard"
    found = finding_about(
        view, "agent_silence", Verdict.FAIL, Cause.PROCESS, Remedy.RESTART, view.last_message_at, "manager", text
    )
    return found, last_message_at + heartbeat_slack(limits)


def promotion_overdue(view: ReplicaView, limits: Limits, now: float) -> Result:
    """A shadow was told to become it, and is not heard as that. It had imported and built everything: it is not slow,
    it is gone or stuck, and whoever waits for it had better take the next one."""
    if view.standby is None or not expects_heartbeats(view) or view.status != "launched":
        return NO_FINDING
    due = view.launched_at + view.join_timeout_s
    if now < due:
        return None, due
    text = f"{view.standby} on {view.node} was told to become it, and no Hello came within {view.join_timeout_s:g} s"
    at = view.launched_at
    return finding_about(
        view, "promotion_overdue", Verdict.FAIL, Cause.PROCESS, Remedy.RESTART, at, "manager", text
    ), inf


def never_joined(view: ReplicaView, limits: Limits, now: float) -> Result:
    """It was launched, and never said Hello. As long as the agent says that its step lives, it may just be slow."""
    if not expects_heartbeats(view) or view.status != "launched" or view.standby is not None:
        return NO_FINDING
    since = view.launched_at
    due = since + limits.join
    if now < due:
        return None, due
    text = f"no Hello within {limits.join:g} s of its launch or of this manager's start"
    if now < (last := join_deadline(view, limits)):
        text += f"; the agent says that its step lives: it has {SLOW_START_FACTOR} times as long"
        return finding_about(view, "never_joined", Verdict.WARN, Cause.PROCESS, Remedy.NONE, since, "agent", text), last
    return _silence_finding(view, limits, "never_joined", since, text), inf


def _silence_finding(view: ReplicaView, limits: Limits, detector: str, since: float, text: str) -> Finding:
    """Charged to the process when something else on its node was heard well after it fell silent; else nobody knows.

    "After" means some beats later: when a node dies, the last beats of those on it differ by up to one.
    """
    if _node_responsive(view, limits, since) or (view.is_agent and detector == "never_joined"):
        return finding_about(view, detector, Verdict.FAIL, Cause.PROCESS, Remedy.RESTART, since, "manager", text)
    text += f"; nothing else on {view.node} was heard since"
    return finding_about(view, detector, Verdict.UNKNOWN, Cause.NODE, Remedy.NONE, since, "manager", text)


def _node_responsive(view: ReplicaView, limits: Limits, since: float) -> bool:
    """Somebody else on its node is, and was well after ``since``."""
    last_message_at = view.node_view.last_message_at
    return last_message_at is not None and last_message_at >= since + heartbeat_slack(limits)


def _exit_description(code: int | None, signal: int | None, reason: str) -> str:
    if signal is not None:
        name = Signals(signal).name if signal in set(Signals) else "unnamed"
        return f"ended by signal {signal} ({name}); {reason}"
    if code is None:
        return reason
    return f"exited with code {code}" + (", but nobody asked it to" if code == 0 else "") + f"; {reason}"
