"""Who works, but slower than its peers, for long. A warning; the job says whether its node is left for that."""

from __future__ import annotations

from math import inf

from rrl.health.judged import NOTHING, Judged, about, works
from rrl.health.last_seen import ReplicaSighting
from rrl.health.pace import ROUNDS, SLOW_RANK, SLOW_ROLLOUT, WINDOW
from rrl.spec.jobview import Limits
from rrl.spec.words import Cause, Remedy, Verdict, role_of


def straggler(seen: ReplicaSighting, limits: Limits, now: float) -> Judged:
    """It has been slow in ``ROUNDS`` comparisons in a row (:mod:`rrl.health.pace`)."""
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
