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
from ..records import NodeSighting, ReplicaSighting

Judged = tuple[Finding | None, float]
Detector = Callable[[ReplicaSighting, Limits, float], Judged]
NodeDetector = Callable[[NodeSighting, Limits, float], Judged]

MISSES = 3
SLOW_START = 5
"""times ``limits.join``: so long may a step take to join of which the agent says that it lives"""
SLOWEST = 1.5
"""times the longest that was ever seen: no less is a deadline"""
NOTHING: Judged = (None, inf)


def patience(limits: Limits) -> float:
    """``MISSES`` beats, and one more for the last of them to arrive."""
    return (MISSES + 1) * limits.beat


def silence(limits: Limits) -> float:
    return max(limits.silence, patience(limits))


def speaks_by(seen: ReplicaSighting, limits: Limits) -> float:
    """When its silence becomes a fact."""
    return joins_by(seen, limits) if seen.status == "launched" else seen.last_heard + silence(limits)


def joins_by(seen: ReplicaSighting, limits: Limits) -> float:
    """``limits.join`` after its launch or its step's last sign of life, but not for ever; of a shadow that was told to
    become it, when that is overdue."""
    if seen.shadow is not None:
        return seen.launched_at + seen.within
    alive_at = seen.launched_at if seen.alive_at is None else seen.alive_at
    return min(max(seen.launched_at, alive_at) + limits.join, seen.launched_at + SLOW_START * limits.join)


def expected_to_speak(seen: ReplicaSighting) -> bool:
    return not seen.ended and seen.left_at is None and seen.home.suspended_at is None


def works(seen: ReplicaSighting) -> bool:
    speaks = expected_to_speak(seen) and seen.status == "joined" and not seen.is_agent
    return speaks and seen.phase is not None and not seen.held_up


def waits(seen: ReplicaSighting) -> bool:
    """Whatever stops it is somebody else's: it says so, or its phase does."""
    return seen.waits_for is not None or seen.declared.waits_for is not None


def about(
    seen: ReplicaSighting, detector: str, verdict: Verdict, cause: Cause, remedy: Remedy, since: float, source: str,
    text: str, proof: bool = False,
) -> Finding:  # fmt: skip
    evidence = (Evidence(source, text, since),)
    return Finding(detector, verdict, cause, remedy, since, evidence, life=seen.life, proof=proof)
