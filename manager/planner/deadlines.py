"""When a run and its allocations end, and from when on an allocation that ends first is to be succeeded."""

from __future__ import annotations

from ..model.state import Allocation, State

NEVER = float("inf")
MIN_WALLTIME_MARGIN_S = 60.0
"""s before the end of the walltime, at least, that the run is ended in order"""
TRAINER_SHUTDOWN_GRACES = 2
"""graces that the trainer of a run that fails has to finish and commit what is in hand"""
SHUTDOWN_GRACES = 8
"""That an orderly end takes at most: for each of its stages (the trainer, then the other roles and the shadows, then
the agents) what it is granted, and as long again to hear that it is over."""

UNSATISFIABLE_AFTER_S = 180.0
"""s for which the cluster must say of a request that it can never be met: while slurmdbd is away, or partitions are
being changed, it says so of any"""


def unsatisfiable_at(allocation: Allocation) -> float:
    """Manager's time (s) from which a request counts as one that can never be met; inf while the cluster says no such
    thing."""
    return NEVER if allocation.unsatisfiable_since is None else allocation.unsatisfiable_since + UNSATISFIABLE_AFTER_S


def shutdown_at(state: State) -> float:
    """Manager's time (s) at which the run is ended in order, so that this is over before its walltime is.

    What an orderly end takes; that the nodes were there may have been seen a poll late. Never more than half of the
    walltime: of a short one something is to be had, too."""
    limits = state.job.limits
    margin = max(MIN_WALLTIME_MARGIN_S, SHUTDOWN_GRACES * limits.step_grace) + limits.poll
    return state.ends_at - min(margin, state.job.walltime / 2)


def rotate_at(state: State, allocation: Allocation) -> float:
    """Manager's time (s) from which this allocation is to be succeeded by another; inf where it outlives the run."""
    if not allocation.running or allocation.ends_at >= shutdown_at(state):
        return NEVER
    return allocation.ends_at - _lead_time(state, allocation)


def rotation_urgent_at(state: State, allocation: Allocation) -> float:
    """Half of that time is over: who moves does not wait any more for others that fail again and again."""
    return allocation.ends_at - _lead_time(state, allocation) / 2


def _lead_time(state: State, allocation: Allocation) -> float:
    return min(state.job.limits.rotate, allocation.request.walltime / 2)
