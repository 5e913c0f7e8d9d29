"""Detectors by load: replicas that must compute but whose CPU and GPU are idle, or whose GPU only spins.

Idleness shows a hang far sooner than the deadline of a phase, but only if nothing else explains the idleness. It counts
only in phases that compute (a checkpoint may wait for storage for minutes) and only while the replica waits for no
other replica. It does not count for replicas that can be probed, since a rollout that waits for a tool is idle too
(:mod:`rrl.health.detection.detectors.probing`). The findings are input of ``blame_gang_members``
(:mod:`rrl.health.detection.attribution.gangs`), which compares the members of a gang.
"""

from __future__ import annotations

from math import inf

from ....core.run_spec import Limits
from ....core.types import Cause, Remedy, Verdict, rank_of
from ..records import ReplicaView
from .base import MIN_HEARTBEATS, NO_FINDING, SLOWEST_FACTOR, Result, finding_about, is_waiting, is_working

IDLE_FACTOR = 1.5
"""A replica that must compute may be idle for this multiple of ``limits.idle`` (90 s by default). This time is well
below RobustRL's 300 s, and above most stalls of the file system to which a step writes its log."""
FIRST_PASS_FACTOR = 2.0
"""In a first pass (the incarnation's first time in the phase) a replica may be idle for this multiple of
``limits.idle``. A first pass may read files, and then uses neither CPU nor GPU. Compilation needs no extra time,
because it uses the CPU."""
RANK_0_IDLE_FACTOR = 2.5
"""The first member of a gang may be idle for this multiple of ``limits.idle`` (150 s by default). It calls services
outside of the run (metrics, object storage), whose clients may retry for a while (100 s were observed)."""
LOADING_IDLE_FACTOR = 2.0
"""A replica that loads weights may be idle for this multiple of ``limits.idle``, because storage may delay all replicas
of the role."""
SPINNING_FACTOR = 1.5
"""A replica's GPU may spin for this multiple of ``limits.idle``, because some real kernels use no tensor cores."""
FALSE_PROGRESS_FACTOR = 5.0
"""A replica that reports progress may be idle for this multiple of ``limits.idle`` (300 s, RobustRL's value). Only a
replica whose GPU has worked before is judged, because otherwise the work may be done elsewhere."""
EVEN_SPLIT_FACTOR = 3.0
"""If half of the members of a gang are idle, members may idle or spin for this multiple of the usual limits, because in
a gang of two, one member may work while the other waits for it."""
_MIN_IDLE_LOADS = 5
"""Number of consecutive loads that must show an idle or spinning replica before a detector reports it."""


def must_compute(view: ReplicaView) -> bool:
    """Return whether the replica is in a phase that computes but counts no progress, and waits for no other replica."""
    return is_working(view) and not is_waiting(view) and view.declared.computes and not view.declared.progresses


def is_inactive(view: ReplicaView) -> bool:
    """Return whether the newest load shows an idle or spinning replica."""
    return view.loads.idle_since is not None or view.loads.spinning_since is not None


def computes_nothing(view: ReplicaView, limits: Limits, now: float) -> Result:
    """Find a replica that must compute but idles or spins, as input of ``blame_gang_members``.

    After ``EVEN_SPLIT_FACTOR`` times the limit, the finding has the name ``computes_nothing_long``.
    """
    if not must_compute(view):
        return NO_FINDING
    if view.heartbeats < MIN_HEARTBEATS or view.done_changed_at > view.phase_since:
        finding, then = _false_progress(view, limits)
        if finding is not None or view.heartbeats < MIN_HEARTBEATS:
            return finding, then
    loads, since = view.loads, view.last_change_at
    first = FIRST_PASS_FACTOR if view.first_pass else 1.0
    idle_limit_s, spinning_limit_s = limits.idle * max(IDLE_FACTOR, first), limits.idle * SPINNING_FACTOR * first
    even_split_s = EVEN_SPLIT_FACTOR * idle_limit_s
    if view.in_gang and rank_of(view.incarnation.replica) == 0:
        idle_limit_s = max(idle_limit_s, limits.idle * RANK_0_IDLE_FACTOR)
    idle_s, spinning_s = loads.idle_for(since), loads.spinning_for(since)
    if loads.idle_since is not None and idle_s >= idle_limit_s and loads.idle_loads >= _MIN_IDLE_LOADS:
        began, long = max(loads.idle_since, since), idle_s >= even_split_s
        text = _idle_text(view, idle_limit_s)
    elif (
        loads.spinning_since is not None and spinning_s >= spinning_limit_s and loads.spinning_loads >= _MIN_IDLE_LOADS
    ):
        began, long = max(loads.spinning_since, since), spinning_s >= EVEN_SPLIT_FACTOR * spinning_limit_s
        text = f"phase {view.phase}: its GPU is busy, but its tensor cores have not worked for {spinning_limit_s:g} s"
    else:
        return NO_FINDING
    detector = "computes_nothing_long" if long else "computes_nothing"
    return finding_about(view, detector, Verdict.UNKNOWN, Cause.HANG, Remedy.NONE, began, "agent", text), inf


def _false_progress(view: ReplicaView, limits: Limits) -> Result:
    """Find a replica that reports progress in this pass although it has been idle for far too long."""
    loads = view.loads
    limit_s = limits.idle * FALSE_PROGRESS_FACTOR * (FIRST_PASS_FACTOR if view.first_pass else 1.0)
    if not loads.ran_kernel or loads.idle_loads < _MIN_IDLE_LOADS or loads.idle_for(view.phase_since) < limit_s:
        return NO_FINDING
    began = max(loads.idle_since or 0.0, view.phase_since)
    text = f"{_idle_text(view, limit_s)}, although it reports progress"
    return finding_about(view, "computes_nothing", Verdict.UNKNOWN, Cause.HANG, Remedy.NONE, began, "agent", text), inf


def load_stalled(view: ReplicaView, limits: Limits, now: float) -> Result:
    """Find a replica that is loading weights but is idle for far longer than its role usually takes to load.

    The finding is input of ``blame_gang_members``. The baseline is the usual duration that was known at the start of
    the phase. If none was known, the baseline is the longest time that a replica of the role has recently taken to
    load.
    """
    usual = view.usual_duration or view.role.slowest_load * (FIRST_PASS_FACTOR if view.first_pass else 1.0)
    if not is_working(view) or not view.declared.own_work or not usual or view.heartbeats < MIN_HEARTBEATS:
        return NO_FINDING
    if view.storage_stall.stalled:
        return NO_FINDING
    loads, since = view.loads, max(view.last_change_at, view.storage_stall.ended_at)
    limit_s = max(LOADING_IDLE_FACTOR * limits.idle, limits.adaptive * usual, SLOWEST_FACTOR * view.role.slowest_load)
    if loads.idle_since is None or loads.idle_loads < _MIN_IDLE_LOADS or loads.idle_for(since) < limit_s:
        return NO_FINDING
    began, text = max(loads.idle_since, since), _idle_text(view, limit_s)
    return finding_about(view, "load_stalled", Verdict.UNKNOWN, Cause.HANG, Remedy.NONE, began, "agent", text), inf


def _idle_text(view: ReplicaView, limit_s: float) -> str:
    return f"phase {view.phase}: neither its CPU nor its GPU has worked for {limit_s:.4g} s"
