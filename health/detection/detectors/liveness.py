"""Detectors that judge whether a replica runs at all, by its end, an overdue end, silence, and an overdue start."""

from __future__ import annotations

from collections.abc import Collection
from math import inf
from signal import Signals

from msgspec.structs import replace

from ....core.launch import ExitReason, exit_text
from ....core.phases import STOPPING
from ....core.run_spec import Limits
from ....core.types import Cause, Finding, Flag, Incarnation, NodeName, Remedy, Verdict
from ..health_monitor import HealthMonitor
from ..records import ReplicaView, StepEnd
from .base import (
    NO_FINDING,
    SLOW_START_FACTOR,
    Result,
    expects_heartbeats,
    finding_about,
    heartbeat_slack,
    join_deadline,
    silence_deadline,
    silence_limit,
)

CPU_ACTIVE_SILENCE_FACTOR = 3.0
"""A worker whose CPU works, according to the load that the node's agent measures, may be silent for this multiple of
the silence limit, because a flood of its log lines may delay its messages."""
STOPPED_SILENCE_FACTOR = 3.0
"""A worker with a stopped process, according to the node's agent, may be silent for this multiple of the silence
limit. py-spy, gdb or gcore stop a process for some seconds (10.1 s by py-spy were observed); a debugger that stays
attached stops it forever."""
_EXIT_FLAGS = {
    ExitReason.NOT_STARTED: (Flag.NOT_STARTED,),
    ExitReason.INVALID_CONFIG: (Flag.INVALID_CONFIG,),
    ExitReason.INPUT_CHANGED: (Flag.INPUT_CHANGED,),
}
"""Flags of the finding about a step's end, by the reason of the end."""
_AGENT_SILENCE_FACTOR = 2
"""An agent may be silent for this multiple of the silence limit. The multiple is above 1, because ``node_lost`` decides
first, after the silence limit, whether the whole node is silent."""
_LONE_AGENT_SILENCE_FACTOR = 6
"""An agent without other processes on its node (a spare node) may be silent for this multiple of the silence limit.
Only a restart of this agent can show whether the node failed. The restart is not urgent, and a network failure of a
minute must not cause it."""


# ── proof ────────────────────────────────────────────────────────────────────────────────────────────────────────────
def exit_record(view: ReplicaView, limits: Limits, now: float) -> Result:
    """Find a step that ended.

    Without a stop request the end is a failure, even after a Goodbye: a role works until the manager stops it. After a
    stop request only an exit code other than 0 gives a warning.
    """
    end = view.exit
    if end is None:
        return NO_FINDING
    stop_requested = view.stop_requested_at is not None
    if stop_requested and (not end.code or end.reason is ExitReason.STOPPED):
        return NO_FINDING
    if (end.code == 0 or end.reason is ExitReason.STOPPED) and now < (due := end.at + heartbeat_slack(limits)):
        return None, due  # a report that the run is complete or the node was reclaimed may still arrive
    text = _exit_description(end, view.phase)
    if stop_requested:
        return finding_about(view, "exit_record", Verdict.WARN, Cause.PROCESS, Remedy.NONE, end.at, "step", text), inf
    finding = finding_about(
        view, "exit_record", Verdict.FAIL, Cause.PROCESS, Remedy.RESTART, end.at, "step", text, True
    )
    return replace(finding, flags=exit_flags(end.reason, end.code), exception=end.exception), inf


def exit_flags(reason: ExitReason, code: int | None) -> tuple[Flag, ...]:
    """Return the flags of the finding about a step's end with this reason and exit code.

    The code is None if a signal killed the step.
    """
    if reason is ExitReason.EXITED and code == 0:
        return (Flag.CLEAN_EXIT,)
    return _EXIT_FLAGS.get(reason, ())


def step_gone(view: ReplicaView, limits: Limits, now: float) -> Result:
    """Find a step that has ended without an exit record.

    The witness is the agent of the step's node or, if no message arrives from this node, the cluster's list of steps.
    The cluster does not report when the step ended. So a finding from the cluster's list has the time of the
    incarnation's last message as ``since``.
    """
    if view.exit is not None or view.stop_requested_at is not None:
        return NO_FINDING
    if (at := view.gone_witnessed_at) is not None:
        source, text = "agent", "its process is gone and left no exit record"
    elif view.unlisted_at is not None:
        at, source = view.last_message_at, "cluster"
        text = f"its step is no longer listed, and {view.node} sends no messages"
    else:
        return NO_FINDING
    return finding_about(view, "step_gone", Verdict.FAIL, Cause.PROCESS, Remedy.RESTART, at, source, text, True), inf


# ── overdue stop ─────────────────────────────────────────────────────────────────────────────────────────────────────
def stop_overdue(view: ReplicaView, limits: Limits, now: float) -> Result:
    """Find a replica that sent a Goodbye without a stop request and does not end.

    No other detector finds such a replica, because no heartbeats are expected after a Goodbye.
    """
    if (
        view.goodbye_at is None
        or view.stop_requested_at is not None
        or view.ended
        or view.node_view.suspended_at is not None
    ):
        return NO_FINDING
    longest = limits.phase(STOPPING).longest
    due = view.goodbye_at + longest
    if now < due:
        return None, due
    text = f"its process has not ended within {longest:g} s of its Goodbye"
    return finding_about(
        view, "stop_overdue", Verdict.FAIL, Cause.HANG, Remedy.RESTART, view.goodbye_at, "worker", text
    ), inf


# ── silence ──────────────────────────────────────────────────────────────────────────────────────────────────────────
def worker_silence(view: ReplicaView, limits: Limits, now: float) -> Result:
    """Find a joined worker that sends no messages.

    A silent agent is found by ``agent_silence`` if other processes on its node send messages, else by ``node_lost``.
    """
    if not expects_heartbeats(view) or view.status == "launched" or view.is_agent:
        return NO_FINDING
    factor = _silence_factor(view, limits)
    due = silence_deadline(view, limits, factor)
    if now < due:
        return None, due
    since = (
        f", in phase {view.phase}" if view.status == "joined" else " since this manager's start, stall or suspension"
    )
    text = f"no heartbeat for {factor * silence_limit(limits):g} s{since}"
    if view.loads.stopped:
        text += "; one of its processes is stopped (SIGSTOP, or a tracer)"
    return _silence_finding(view, limits, "worker_silence", view.last_message_at, text), inf


def _silence_factor(view: ReplicaView, limits: Limits) -> float:
    """Return the factor by which the silence limit of a worker is extended.

    The factor is 1 unless the agent measured the worker's load clearly later than the worker's last message. A worker
    that is stopped or uses CPU is not dead, so it gets more time. Use of the GPU does not count, because a kernel may
    occupy the GPU of a stopped process.
    """
    at = view.loads.latest_at
    if at is None or at < view.last_message_at + heartbeat_slack(limits):
        return 1.0
    if view.loads.stopped:
        return STOPPED_SILENCE_FACTOR
    return CPU_ACTIVE_SILENCE_FACTOR if view.loads.cpu_active else 1.0


def missing_heartbeats(
    findings: Collection[Finding], monitor: HealthMonitor, limits: Limits, now: float
) -> dict[Incarnation, tuple[NodeName, float]]:
    """Return all workers whose heartbeats are overdue although other messages from their nodes arrive.

    Returns:
        Incarnation → its node and the time (s) of its last message; empty unless at least one worker has been silent
        for long enough for a ``worker_silence`` finding.
    """
    if all(finding.detector != worker_silence.__name__ for finding in findings):
        return {}
    return {
        view.incarnation: (view.node, view.last_message_at)
        for view in monitor.workers()
        if expects_heartbeats(view)
        and view.status != "launched"
        and now >= view.last_message_at + heartbeat_slack(limits)
        and _node_responsive(view, limits, view.last_message_at)
    }


def agent_silence(view: ReplicaView, limits: Limits, now: float) -> Result:
    """Find a silent agent whose node has other processes that still send messages, or has no other processes.

    On a node without other processes, either the agent or the node may have failed. The agent is restarted. If the next
    agent does not join either, the planner excludes the node.
    """
    if not view.is_agent or not expects_heartbeats(view) or view.status == "launched":
        return NO_FINDING
    lone = not (view.node_view.residents or view.node_view.departed)
    factor = _LONE_AGENT_SILENCE_FACTOR if lone else _AGENT_SILENCE_FACTOR
    due = silence_deadline(view, limits, factor)
    if now < due:
        return None, due
    then = inf if lone else (view.node_view.last_message_at or 0.0) + heartbeat_slack(limits)
    if now >= then:
        return NO_FINDING  # if the whole node is silent, node_lost judges it
    state = (
        f"and {view.node} has no other process" if lone else f"although other processes on {view.node} send messages"
    )
    text = f"no heartbeat for {factor * silence_limit(limits):g} s, {state}"
    return finding_about(
        view, "agent_silence", Verdict.FAIL, Cause.PROCESS, Remedy.RESTART, view.last_message_at, "manager", text
    ), then


def promotion_overdue(view: ReplicaView, limits: Limits, now: float) -> Result:
    """Find a standby process that was promoted to an incarnation but sends no Hello as this incarnation.

    A standby process has imported and built everything before its promotion. Without a Hello, it is gone or hangs, so
    it is replaced early.
    """
    if view.standby is None or not expects_heartbeats(view) or view.status != "launched":
        return NO_FINDING
    due = view.launched_at + view.join_timeout_s
    if now < due:
        return None, due
    text = f"{view.standby} on {view.node} was promoted to it, but sent no Hello within {view.join_timeout_s:g} s"
    at = view.launched_at
    return finding_about(
        view, "promotion_overdue", Verdict.FAIL, Cause.PROCESS, Remedy.RESTART, at, "manager", text
    ), inf


def never_joined(view: ReplicaView, limits: Limits, now: float) -> Result:
    """Find a launched incarnation without a Hello; only warn while its agent reports that its step runs.

    The limit of a standby process is ``SLOW_START_FACTOR`` times as long, and there is no warning. A standby process
    starts at low priority beside the roles, which may take most of the CPU time, and no replica waits for it.
    """
    if not expects_heartbeats(view) or view.status != "launched" or view.standby is not None:
        return NO_FINDING
    since = view.launched_at
    limit = limits.join * (SLOW_START_FACTOR if view.is_standby_process else 1)
    due = since + limit
    if now < due:
        return None, due
    text = f"no Hello within {limit:g} s of its launch or of this manager's start"
    if now < (last := join_deadline(view, limits)):
        text += f"; the agent reports that the step runs, so the limit is {SLOW_START_FACTOR} times as long"
        return finding_about(view, "never_joined", Verdict.WARN, Cause.PROCESS, Remedy.NONE, since, "agent", text), last
    return _silence_finding(view, limits, "never_joined", since, text), inf


def _silence_finding(view: ReplicaView, limits: Limits, detector: str, since: float, text: str) -> Finding:
    """Return a FAIL if another process on the node sent a message well after ``since``, else an UNKNOWN.

    "Well after" means several heartbeat intervals: when a node fails, the last heartbeats of its processes differ by up
    to one interval.
    """
    if _node_responsive(view, limits, since) or (view.is_agent and detector == "never_joined"):
        return finding_about(view, detector, Verdict.FAIL, Cause.PROCESS, Remedy.RESTART, since, "manager", text)
    text += f"; no other message from {view.node} has arrived since"
    return finding_about(view, detector, Verdict.UNKNOWN, Cause.NODE, Remedy.NONE, since, "manager", text)


def _node_responsive(view: ReplicaView, limits: Limits, since: float) -> bool:
    """Return whether another process on the replica's node sent a message well after ``since``."""
    last_message_at = view.node_view.last_message_at
    return last_message_at is not None and last_message_at >= since + heartbeat_slack(limits)


def _exit_description(end: StepEnd, phase: str | None) -> str:
    """Return a text about the end of a step: code or signal, reason, and the exception or the last line of output."""
    if end.reason in (ExitReason.INVALID_CONFIG, ExitReason.INPUT_CHANGED):
        return end.detail
    reason = exit_text(end.reason, end.detail)
    if end.signal is not None:
        name = Signals(end.signal).name if end.signal in set(Signals) else "unnamed"
        text = f"ended by signal {end.signal} ({name})"
    elif end.code is not None:
        text = f"exited with code {end.code}" + (" without a stop request" if end.code == 0 else "")
    else:
        text = ""
    repeats_the_code = end.reason in (ExitReason.EXITED, ExitReason.SIGNALED) and not end.detail
    if not text or not repeats_the_code:
        text = f"{text}; {reason}" if text else reason
    if phase == "score" and end.exception is None and end.reason in (ExitReason.EXITED, ExitReason.SIGNALED):
        text += " while it scored an answer"
    cause = str(end.exception) if end.exception is not None else end.last_line
    return f"{text}: {cause}" if cause else text
