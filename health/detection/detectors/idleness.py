"""Who must compute and does not: neither its CPU nor its GPU, or its GPU is kept by kernels that compute nothing.

That is seen far sooner than a phase can be overdue. It holds only where nothing else explains it: in phases that
compute (a checkpoint waits for its storage for minutes), not where another replica is waited for, and not of who can be
asked, for a rollout that waits for a tool is idle too (:mod:`rrl.health.detection.detectors.probing`). What comes out
is raw material for :func:`rrl.health.detection.attribution.gangs.judge`, which holds the members of a gang against each
other.
"""

from __future__ import annotations

from math import inf

from ....core.run_spec import Limits
from ....core.types import Cause, Remedy, Verdict
from ..records import ReplicaSighting
from .base import MISSES, NOTHING, SLOWEST, Judged, about, waits, works

STILL = 1.5
"""times ``limits.idle`` may who must compute be idle: less than RobustRL's 300 s by a third, and more than most stalls
of a file system that a step writes its log to"""
FIRST = 2.0
"""times ``limits.idle`` in a first pass: reading what it needs takes neither CPU nor GPU, compiling does"""
LOADS = 2.0
"""times ``limits.idle`` where weights are loaded: reading them may wait for storage, for others of the role alike"""
SPINS = 1.5
"""times ``limits.idle``: kernels without tensor cores do run now and then"""
LIES = 5.0
"""times ``limits.idle`` in one pass may who tells of progress all the while be idle, where its GPU has worked before:
RobustRL's 300 s; where it never has, the work is done elsewhere"""
DOUBT = 3.0
"""times as long where the gang is divided evenly: one of two may work alone while the other waits for it"""
_LOADS = 5
"""loads in a row"""


def must_compute(seen: ReplicaSighting) -> bool:
    return works(seen) and not waits(seen) and seen.declared.computes and not seen.declared.progresses


def at_rest(seen: ReplicaSighting) -> bool:
    """By the newest load, it does nothing that would bring it forward."""
    return seen.activity.idle_since is not None or seen.activity.spins_since is not None


def stands_idle(seen: ReplicaSighting, limits: Limits, now: float) -> Judged:
    """It has done nothing for ``limits.idle``. Raw; ``stands_idle_long``: for ``DOUBT`` times as long."""
    if not must_compute(seen):
        return NOTHING
    if seen.beats < MISSES or seen.done_changed_at > seen.phase_since:
        found, look = _lies(seen, limits)
        if found is not None or seen.beats < MISSES:
            return found, look
    activity, since = seen.activity, seen.clock
    first = FIRST if seen.first_pass else 1.0
    need, need_spins = limits.idle * max(STILL, first), limits.idle * SPINS * first
    idle, spins = activity.idle_for(since), activity.spins_for(since)
    if activity.idle_since is not None and idle >= need and activity.idle_loads >= _LOADS:
        began, long = max(activity.idle_since, since), idle >= DOUBT * need
        text = _idle_text(seen, need)
    elif activity.spins_since is not None and spins >= need_spins and activity.spin_loads >= _LOADS:
        began, long = max(activity.spins_since, since), spins >= DOUBT * need_spins
        text = f"phase {seen.phase}: its GPU is kept, its tensor cores have not worked for {need_spins:g} s and more"
    else:
        return NOTHING
    detector = "stands_idle_long" if long else "stands_idle"
    return about(seen, detector, Verdict.UNKNOWN, Cause.HANG, Remedy.NONE, began, "agent", text), inf


def _lies(seen: ReplicaSighting, limits: Limits) -> Judged:
    """It tells of progress in this pass, and has done nothing for far longer than that could explain."""
    activity = seen.activity
    need = limits.idle * LIES * (FIRST if seen.first_pass else 1.0)
    if not activity.kernels_seen or activity.idle_loads < _LOADS or activity.idle_for(seen.phase_since) < need:
        return NOTHING
    began = max(activity.idle_since or 0.0, seen.phase_since)
    text = f"{_idle_text(seen, need)}, though it tells of progress"
    return about(seen, "stands_idle", Verdict.UNKNOWN, Cause.HANG, Remedy.NONE, began, "agent", text), inf


def loads_idle(seen: ReplicaSighting, limits: Limits, now: float) -> Judged:
    """It loads, which usually takes its role seconds, and has done nothing for long. Raw. What is usual is as of when
    it began; where nobody knew then, as others have shown since."""
    usual = seen.usual or seen.role.slowest_load * (FIRST if seen.first_pass else 1.0)
    if not works(seen) or not seen.declared.own_work or not usual or seen.beats < MISSES:
        return NOTHING
    activity = seen.activity
    need = max(LOADS * limits.idle, limits.adaptive * usual, SLOWEST * seen.role.slowest_load)
    if activity.idle_since is None or activity.idle_loads < _LOADS or activity.idle_for(seen.clock) < need:
        return NOTHING
    began, text = max(activity.idle_since, seen.clock), _idle_text(seen, need)
    return about(seen, "loads_idle", Verdict.UNKNOWN, Cause.HANG, Remedy.NONE, began, "agent", text), inf


def _idle_text(seen: ReplicaSighting, need: float) -> str:
    return f"phase {seen.phase}: neither its CPU nor its GPU works for {need:.4g} s and more"
