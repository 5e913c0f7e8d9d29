"""What an elastic rollout pool has, wants and has spent, and which rollouts are extras. Pure."""

from __future__ import annotations

from msgspec import Struct

from ...core.run_spec import RoleSpec
from .state import Allocation, PoolState, State, Status


class PoolFigures(Struct, frozen=True):
    """A rollout pool at one moment. All counts are of replicas, unless stated otherwise."""

    at_work: int
    """Replicas of which all members have joined."""
    wanted: int
    queued_nodes: int
    """Nodes that are requested and not granted."""
    held: int | None
    """Number that a user has set; None if the planner chooses it, or the pool is not elastic."""
    spent_node_s: float
    budget_node_s: float
    """Node seconds that the pool may use; 0 if it is not elastic."""


def pool_figures(state: State, role: RoleSpec, now: float) -> PoolFigures:
    """Return the figures of a rollout pool at ``now`` (manager's time, s)."""
    gangs = [members for members in state.gangs if members[0].role == role.name]
    group = state.job.node_group_of(role.name)
    return PoolFigures(
        at_work=sum(all(member.status is Status.JOINED for member in members) for members in gangs),
        wanted=len(gangs),
        queued_nodes=sum(a.request.count for a in _allocations(state, group.name) if a.pending),
        held=pool_state(state, role.name).held,
        spent_node_s=spent_node_s(state, role.name, now),
        budget_node_s=role.node_seconds,
    )


def pool_state(state: State, pool: str) -> PoolState:
    """Return the record of an elastic pool."""
    return state.pools.get(pool) or PoolState()


def spent_node_s(state: State, pool: str, now: float) -> float:
    """Return the node seconds that the allocations of a further pool have used until ``now`` (manager's time, s)."""
    running = (a for a in _allocations(state, pool) if a.running_since is not None)
    used = sum((now - a.running_since) * a.request.count for a in running if a.running_since is not None)
    return pool_state(state, pool).spent_node_s + used


def extras(state: State) -> int:
    """Return the number of rollouts that work beyond the ``replicas`` of pools with a fixed number: those on spares."""
    fixed = [role for role in state.job.kind("rollout") if not role.is_elastic]
    working = [
        role.name
        for role in fixed
        for members in state.gangs
        if members[0].role == role.name and all(member.status is Status.JOINED for member in members)
    ]
    return sum(max(0, working.count(role.name) - role.replicas) for role in fixed)


def _allocations(state: State, node_group: str) -> list[Allocation]:
    return [a for a in state.allocations.values() if a.request.node_group == node_group]
