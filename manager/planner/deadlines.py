"""Deadlines of a run and of its allocations: when the run shuts down, and when an allocation needs a successor."""

from __future__ import annotations

from ..model.pools import elastic_role
from ..model.state import Allocation, State

NEVER = float("inf")
"""Manager's time (s) that is never reached."""
MIN_WALLTIME_MARGIN_S = 60.0
"""Minimum time (s) before the end of the walltime at which the run begins to shut down."""
TRAINER_SHUTDOWN_GRACES = 2
"""Number of grace periods in which the trainer of a run that ends early may finish and commit its step."""
SHUTDOWN_GRACES = 8
"""Maximum duration of a shutdown in grace periods.

The three stages are: the trainer; the other roles and the standby processes; the agents. A stage may last for twice the
grace of its steps, because their ends are reported later."""

ELASTIC_STOP_GRACES = 2
"""Number of grace periods before the end of an allocation of the elastic pool in which its replica is stopped."""
UNSATISFIABLE_AFTER_S = 180.0
"""rrl gives up a request if the cluster has reported for this many seconds that the request can never be met. A request
is not given up at once, because Slurm reports this for every request while slurmdbd is down or partitions are being
changed."""


def unsatisfiable_at(allocation: Allocation) -> float:
    """Return the manager's time (s) from which a request counts as impossible to meet; inf if it may be met."""
    return NEVER if allocation.unsatisfiable_since is None else allocation.unsatisfiable_since + UNSATISFIABLE_AFTER_S


def shutdown_at(state: State) -> float:
    """Return the manager's time (s) at which a run begins to shut down, so that it ends within its walltime.

    The margin is the maximum duration of a shutdown plus one poll interval, because the manager may notice the start of
    the walltime up to one poll too late. The margin is at most half of the walltime, so that a short run gets some work
    done.
    """
    limits = state.job.limits
    margin = max(MIN_WALLTIME_MARGIN_S, SHUTDOWN_GRACES * limits.step_grace) + limits.poll
    return state.ends_at - min(margin, state.job.walltime / 2)


def rotate_at(state: State, allocation: Allocation) -> float:
    """Return the manager's time (s) from which the allocation needs a successor; inf if it outlasts the run."""
    if not allocation.running or allocation.ends_at >= shutdown_at(state):
        return NEVER
    return allocation.ends_at - _lead_time(state, allocation)


def rotation_urgent_at(state: State, allocation: Allocation) -> float:
    """Return the manager's time (s) from which replicas leave the allocation even while other replicas are failing.

    This time is the middle of the rotation. Before it, a move waits until no replica is failing.
    """
    return allocation.ends_at - _lead_time(state, allocation) / 2


def elastic_stops(state: State) -> dict[str, float]:
    """Return the manager's time (s) at which the elastic pool's replica leaves each running allocation, by tag.

    It is a while before the end of the allocation, which the pool's budget may have shortened, or ``limits.silence``
    after the cluster has suspended it, since the trainer would wait for the trajectories of a suspended rollout.
    """
    if (role := elastic_role(state.job)) is None:
        return {}
    limits = state.job.limits
    return {
        a.tag: a.ends_at - ELASTIC_STOP_GRACES * limits.step_grace
        if a.suspended_since is None
        else a.suspended_since + limits.silence
        for a in state.allocations.values()
        if a.running and a.request.node_group == role.name
    }


def _lead_time(state: State, allocation: Allocation) -> float:
    """Return the time (s) before an allocation's end at which its rotation begins."""
    return min(state.job.limits.rotate, allocation.request.walltime / 2)
