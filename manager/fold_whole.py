"""What a restart of the whole run does to what is believed: nobody's life is, and everybody is wanted again."""

from __future__ import annotations

from msgspec.structs import replace

from rrl.manager.actions import RestartAll
from rrl.manager.fold_lives import LONGEST_PAUSE, fenced, with_replica
from rrl.manager.fold_nodes import left
from rrl.manager.state import State, Status

REQUEUE = "requeue"
"""of ``recovery.policy``: what restarts as a whole does so on nodes that are asked for anew"""
_ROLE = "role"


def restarted_all(state: State, at: float, action: RestartAll) -> State:
    """The planner has said whose lives end, and where each is wanted next; but for those about whom it had just decided
    something else, which stands. Who rests, and is to restart because a person asked, still is."""
    policy = state.job.recovery.policy
    recent = tuple(one for one in state.wholes if at - one < state.job.recovery.window)
    state = replace(state, wholes=(*recent, at))
    for fence in action.fences:
        state = fenced(state, at, fence) if state.believed(fence.life) else state
    if policy == REQUEUE:
        return _given_up(state)
    if policy == _ROLE and action.failed is not None and action.failed.replica in state.replicas:
        # Every smaller repair has failed by now. What is wrong may be an outage that is over in a minute; the last
        # try is not made before that.
        state = with_replica(state, action.failed.replica, not_before=at + LONGEST_PAUSE)
    return state


def _given_up(state: State) -> State:
    """As Slurm's requeue: all nodes are given back, and the first request is made again. What still ends on the old
    ones goes with them; those that are excluded stay known."""
    for tag, allocation in state.allocations.items():
        if allocation.running:
            stray = replace(allocation, stray=True)
            nodes = left(state.nodes, tag, ())
            state = replace(state, allocations={**state.allocations, tag: stray}, nodes=nodes)
    for held in state.replicas.values():
        if held.status is Status.WANTED:
            state = with_replica(state, held.id, prefer=None)
    return replace(state, launched=False, asked_since=None)
