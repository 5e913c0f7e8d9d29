"""What detectors are, and what they share: who is expected to speak, who is at work, and by when.

A detector is a pure function of one sighting, the limits and now. It returns a finding or None, and when it could next
change its mind though nothing new is seen (inf: never). Text and ``since`` never carry running seconds, so that an
unchanged situation is an equal finding.

What condemns without proof needs time and observations both (docs/sources.md): silence is at least ``MISSES`` beats
that did not come, standing still at least as many beats that came and showed it.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf

from ....core.run_spec import Limits
from ....core.types import Cause, Evidence, Finding, Remedy, Verdict
from ..records import NodeView, ReplicaView

Result = tuple[Finding | None, float]
Detector = Callable[[ReplicaView, Limits, float], Result]
NodeDetector = Callable[[NodeView, Limits, float], Result]

MIN_HEARTBEATS = 3
SLOW_START_FACTOR = 5
"""times ``limits.join``: so long may a step take to join of which the agent says that it lives"""
SLOWEST_FACTOR = 1.5
"""times the longest that was ever seen: no less is a deadline"""
NO_FINDING: Result = (None, inf)


def heartbeat_slack(limits: Limits) -> float:
    """``MISSES`` beats, and one more for the last of them to arrive."""
    return (MIN_HEARTBEATS + 1) * limits.heartbeat


def silence_limit(limits: Limits) -> float:
    return max(limits.silence, heartbeat_slack(limits))


def silence_deadline(view: ReplicaView, limits: Limits) -> float:
    """When its silence becomes a fact."""
    return join_deadline(view, limits) if view.status == "launched" else view.last_message_at + silence_limit(limits)


def join_deadline(view: ReplicaView, limits: Limits) -> float:
    """``limits.join`` after its launch or its step's last sign of life, but not for ever; of a shadow that was told to
    become it, when that is overdue."""
    if view.standby is not None:
        return view.launched_at + view.join_timeout_s
    alive_at = view.launched_at if view.step_alive_at is None else view.step_alive_at
    return min(max(view.launched_at, alive_at) + limits.join, view.launched_at + SLOW_START_FACTOR * limits.join)


def expects_heartbeats(view: ReplicaView) -> bool:
    return not view.ended and view.left_at is None and view.node_view.suspended_at is None


def is_working(view: ReplicaView) -> bool:
    expected = expects_heartbeats(view) and view.status == "joined" and not view.is_agent
    return expected and view.phase is not None and not view.gang_suspended


def is_waiting(view: ReplicaView) -> bool:
    """Whatever stops it is somebody else's: it says so, or its phase does."""
    return view.waits_for is not None or view.declared.waits_for is not None


def finding_about(
    view: ReplicaView, detector: str, verdict: Verdict, cause: Cause, remedy: Remedy, since: float, source: str,
    text: str, proof: bool = False,
) -> Finding:  # fmt: skip
    evidence = (Evidence(source, text, since),)
    return Finding(detector, verdict, cause, remedy, since, evidence, incarnation=view.incarnation, proof=proof)
