"""The types of detectors, and the predicates and deadlines that several of them use.

A detector is a pure function of one view, the limits and the time (s). It returns a finding or None, and the time at
which its result may change without a new observation (inf if never). Neither the text nor ``since`` of a finding
contains a time that keeps growing, so that an unchanged situation gives an equal finding.

A FAIL without proof needs both time and observations (docs/sources.md): silence means at least ``MIN_HEARTBEATS``
missed heartbeats, and standstill means as many heartbeats without progress.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf

from ....core.phases import ASLEEP, STANDBY
from ....core.run_spec import Limits
from ....core.types import Cause, Evidence, Finding, Remedy, Verdict
from ..records import NodeView, ReplicaView

Result = tuple[Finding | None, float]
Detector = Callable[[ReplicaView, Limits, float], Result]
NodeDetector = Callable[[NodeView, Limits, float], Result]

MIN_HEARTBEATS = 3
"""Number of heartbeats that must be missed, or received without progress, before a replica fails."""
RECONNECT_S = 8.0
"""Time (s) that a process which works may take to be heard by a new manager: it looks for the manager's address every 5
s, or every second once it has lost the former one, and an attempt to connect may take 2 s (transport/control)."""
SLOW_START_FACTOR = 5
"""Multiple of ``limits.join`` after which a step that has not joined fails even if its agent finds it running."""
SLOWEST_FACTOR = 1.5
"""A deadline is at least this multiple of the longest known duration."""
NO_FINDING: Result = (None, inf)
"""Result of a detector that does not apply; only a new observation changes it."""


def heartbeat_slack(limits: Limits) -> float:
    """Return the time (s) without a message after which at least ``MIN_HEARTBEATS`` heartbeats are missing.

    The time is ``MIN_HEARTBEATS`` heartbeat intervals, plus one interval for the arrival of the last heartbeat.
    """
    return (MIN_HEARTBEATS + 1) * limits.heartbeat


def silence_limit(limits: Limits) -> float:
    """Return the time (s) without a message after which a replica is silent."""
    return max(limits.silence, heartbeat_slack(limits))


def silence_deadline(view: ReplicaView, limits: Limits, factor: float = 1.0) -> float:
    """Return the time (s) from which missing messages count as silence, after ``factor`` times the silence limit.

    An ``awaited`` replica has at least the time that it needs to connect, and is not silent while others that were
    awaited are still heard for the first time.
    """
    if view.status == "launched":
        return join_deadline(view, limits)
    longest = factor * silence_limit(limits)
    if view.status == "joined":
        return view.last_message_at + longest
    return max(view.last_message_at + max(longest, RECONNECT_S), view.run.heard_at + heartbeat_slack(limits))


def join_deadline(view: ReplicaView, limits: Limits) -> float:
    """Return the time (s) by which the incarnation must have sent a Hello.

    It is ``limits.join`` after the launch or the last report that the step runs, but at most ``SLOW_START_FACTOR``
    times ``limits.join`` after the launch. For a promoted standby process it is ``join_timeout_s`` after the promotion.
    """
    if view.standby is not None:
        return view.launched_at + view.join_timeout_s
    alive_at = view.launched_at if view.step_alive_at is None else view.step_alive_at
    return min(max(view.launched_at, alive_at) + limits.join, view.launched_at + SLOW_START_FACTOR * limits.join)


def expects_heartbeats(view: ReplicaView) -> bool:
    """Return whether the incarnation should send heartbeats, because it has not ended, left or been suspended."""
    return not view.ended and view.left_at is None and view.node_view.suspended_at is None


def is_working(view: ReplicaView) -> bool:
    """Return whether progress is expected of the replica.

    It must be a joined worker in a known phase, and no member of its gang may be suspended.
    """
    joined = expects_heartbeats(view) and view.status == "joined" and not view.is_agent
    return joined and view.phase is not None and not view.gang_suspended


def is_waiting(view: ReplicaView) -> bool:
    """Return whether the replica waits for another replica, according to its own report or to its phase."""
    return view.waits_for is not None or view.declared.waits_for is not None


def is_service(view: ReplicaView) -> bool:
    """Return whether the replica is in a phase without a deadline, in which it serves the requests of others."""
    serves = view.declared.longest == inf and not view.declared.progresses and view.phase not in (STANDBY, ASLEEP)
    return serves and is_working(view) and not is_waiting(view)


def finding_about(
    view: ReplicaView,
    detector: str,
    verdict: Verdict,
    cause: Cause,
    remedy: Remedy,
    since: float,
    source: str,
    text: str,
    proof: bool = False,
) -> Finding:
    """Return a finding about an incarnation with one line of evidence."""
    evidence = (Evidence(source, text, since),)
    return Finding(detector, verdict, cause, remedy, since, evidence, incarnation=view.incarnation, proof=proof)
