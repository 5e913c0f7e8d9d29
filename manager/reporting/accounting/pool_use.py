"""What each rollout pool of a run has used and generated. Pure.

The node hours of an elastic pool are those that its budget pays for. Those of any other pool are the time since its
rollouts joined, extras included, times the part of a node that each of them needs. Guests (pool ``guest``) have none:
their nodes are the trainer's.
"""

from __future__ import annotations

from msgspec import Struct

from ....core.phases import ASLEEP
from ....core.run_spec import RoleSpec
from ....core.types import GUEST_ROLE
from ...model.figures.idle_times import RolePoint, phase_times
from ...model.pools import spent_node_s
from ...model.state import State


class PoolUse(Struct, frozen=True):
    """What a rollout pool has used and generated in the whole run, also by rollouts that it no longer has."""

    pool: str
    tokens: int
    node_hours: float
    tokens_per_node_hour: float | None
    """None without node hours."""
    tokens_per_second: float | None
    """Tokens per second of a replica at work; None if none has worked."""
    budget_node_hours: float | None
    """Node hours that the pool may use; None if its number of replicas is fixed."""


def pool_uses(state: State, now: float) -> list[PoolUse]:
    """Return the use of each rollout pool until ``now`` (manager's time, s).

    The list is empty if the run has a single pool, whose number of replicas has never been exceeded by extras, and no
    guests.
    """
    pools = state.job.kind("rollout")
    worked = [id for id in state.idle_times.newest if state.job.traits_of(id).leases_turns]
    guests = [_use_of_guests(state)] if GUEST_ROLE in state.idle_times.now.roles else []
    if len(pools) < 2 and not guests and len(worked) <= sum(role.replicas * role.ranks for role in pools):
        return []
    uses = [_use(state, role, now) for role in pools if state.job.most_replicas(role) or not guests]
    return [*uses, *guests]


def _use_of_guests(state: State) -> PoolUse:
    """Return what the guests have generated; a guest that sleeps is not at work."""
    done = state.idle_times.now.roles[GUEST_ROLE].done
    awake_s = sum(one.ns for one in phase_times(state.idle_times, GUEST_ROLE) if one.phase != ASLEEP) / 1e9
    return PoolUse(GUEST_ROLE, done, 0.0, None, round(done / awake_s, 3) if awake_s else None, None)


def _use(state: State, role: RoleSpec, now: float) -> PoolUse:
    point = state.idle_times.now.roles.get(role.name, RolePoint())
    process_s = point.total_ns / 1e9
    node_s = spent_node_s(state, role.name, now) if role.is_elastic else process_s * _part_of_node(state, role)
    return PoolUse(
        role.name,
        point.done,
        round(node_s / 3600, 4),
        round(point.done / node_s * 3600, 1) if node_s else None,
        round(point.done / process_s * role.ranks, 3) if process_s else None,
        role.node_seconds / 3600 if role.is_elastic else None,
    )


def _part_of_node(state: State, role: RoleSpec) -> float:
    """Return how many nodes a member of a role needs: the share of its replica's nodes, or of the scarcest resource."""
    if role.exclusive:
        return role.nodes / role.ranks
    needs, has = role.per_member, state.job.node_group_of(role.name).node
    pairs = ((needs.cpus, has.cpus), (needs.gpus, has.gpus), (needs.mem, has.mem))
    return max(needed / available for needed, available in pairs if available)
