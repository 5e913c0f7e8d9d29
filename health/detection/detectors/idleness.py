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
from ..records import ReplicaView
from .base import MIN_HEARTBEATS, NO_FINDING, SLOWEST_FACTOR, Result, finding_about, is_waiting, is_working

IDLE_FACTOR = 1.5
"""times ``limits.idle`` may who must compute be idle: less than RobustRL's 300 s by a third, and more than most stalls
of a file system that a step writes its log to"""
FIRST_PASS_FACTOR = 2.0
"""times ``limits.idle`` in a first pass: reading what it needs takes neither CPU nor GPU, compiling does"""
LOADING_IDLE_FACTOR = 2.0
"""times ``limits.idle`` where weights are loaded: reading them may wait for storage, for others of the role alike"""
SPINNING_FACTOR = 1.5
"""times ``limits.idle``: kernels without tensor cores do run now and then"""
FALSE_PROGRESS_FACTOR = 5.0
"""times ``limits.idle`` in one pass may who tells of progress all the while be idle, where its GPU has worked before:
RobustRL's 300 s; where it never has, the work is done elsewhere"""
EVEN_SPLIT_FACTOR = 3.0
"""times as long where the gang is divided evenly: one of two may work alone while the other waits for it"""
_MIN_IDLE_LOADS = 5
"""loads in a row"""


def must_compute(view: ReplicaView) -> bool:
    return is_working(view) and not is_waiting(view) and view.declared.computes and not view.declared.progresses


def is_inactive(view: ReplicaView) -> bool:
    """By the newest load, it does nothing that would bring it forward."""
    return view.loads.idle_since is not None or view.loads.spinning_since is not None


def computes_nothing(view: ReplicaView, limits: Limits, now: float) -> Result:
    """It has done nothing for ``limits.idle``. Raw; ``stands_idle_long``: for ``DOUBT`` times as long."""
    if not must_compute(view):
        return NO_FINDING
    if view.heartbeats < MIN_HEARTBEATS or view.done_changed_at > view.phase_since:
        found, look = _false_progress(view, limits)
        if found is not None or view.heartbeats < MIN_HEARTBEATS:
            return found, look
    activity, since = view.loads, view.last_change_at
    first = FIRST_PASS_FACTOR if view.first_pass else 1.0
    need, need_spinning = limits.idle * max(IDLE_FACTOR, first), limits.idle * SPINNING_FACTOR * first
    idle, spinning_s = activity.idle_for(since), activity.spinning_for(since)
    if activity.idle_since is not None and idle >= need and activity.idle_loads >= _MIN_IDLE_LOADS:
        began, long = max(activity.idle_since, since), idle >= EVEN_SPLIT_FACTOR * need
        text = _idle_text(view, need)
    elif (
        activity.spinning_since is not None
        and spinning_s >= need_spinning
        and activity.spinning_loads >= _MIN_IDLE_LOADS
    ):
        began, long = max(activity.spinning_since, since), spinning_s >= EVEN_SPLIT_FACTOR * need_spinning
        text = f"phase {view.phase}: its GPU is kept, its tensor cores have not worked for {need_spinning:g} s and more"
    else:
        return NO_FINDING
    detector = "computes_nothing_long" if long else "computes_nothing"
    return finding_about(view, detector, Verdict.UNKNOWN, Cause.HANG, Remedy.NONE, began, "agent", text), inf


def _false_progress(view: ReplicaView, limits: Limits) -> Result:
    """It tells of progress in this pass, and has done nothing for far longer than that could explain."""
    activity = view.loads
    need = limits.idle * FALSE_PROGRESS_FACTOR * (FIRST_PASS_FACTOR if view.first_pass else 1.0)
    if not activity.ran_kernel or activity.idle_loads < _MIN_IDLE_LOADS or activity.idle_for(view.phase_since) < need:
        return NO_FINDING
    began = max(activity.idle_since or 0.0, view.phase_since)
    text = f"{_idle_text(view, need)}, though it tells of progress"
    return finding_about(view, "computes_nothing", Verdict.UNKNOWN, Cause.HANG, Remedy.NONE, began, "agent", text), inf


def load_stalled(view: ReplicaView, limits: Limits, now: float) -> Result:
    """It loads, which usually takes its role seconds, and has done nothing for long. Raw. What is usual is as of when
    it began; where nobody knew then, as others have shown since."""
    usual = view.usual_duration or view.role.slowest_load * (FIRST_PASS_FACTOR if view.first_pass else 1.0)
    if not is_working(view) or not view.declared.own_work or not usual or view.heartbeats < MIN_HEARTBEATS:
        return NO_FINDING
    activity = view.loads
    need = max(LOADING_IDLE_FACTOR * limits.idle, limits.adaptive * usual, SLOWEST_FACTOR * view.role.slowest_load)
    if (
        activity.idle_since is None
        or activity.idle_loads < _MIN_IDLE_LOADS
        or activity.idle_for(view.last_change_at) < need
    ):
        return NO_FINDING
    began, text = max(activity.idle_since, view.last_change_at), _idle_text(view, need)
    return finding_about(view, "load_stalled", Verdict.UNKNOWN, Cause.HANG, Remedy.NONE, began, "agent", text), inf


def _idle_text(view: ReplicaView, need: float) -> str:
    return f"phase {view.phase}: neither its CPU nor its GPU works for {need:.4g} s and more"
