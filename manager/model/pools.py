"""What an elastic rollout pool has, wants, has spent and may still spend; which rollouts are extras; guests. Pure."""

from __future__ import annotations

from msgspec import Struct

from ...core.run_spec import RoleSpec, RunSpec
from ...core.types import GUEST_ROLE, TRAINER, Incarnation, member_id, role_of
from .actions import Resize
from .figures.idle_times import START, RolePoint, lent_share
from .state import Allocation, PoolState, State, Status

LEND_COST = "lend_cost_s"
"""Metric of a step: the time (s) that lending the GPUs and taking them back cost together, learned by the trainer."""
MIN_WALLTIME_S = 60.0
"""Minimum walltime (s) of a request. Slurm counts whole minutes."""


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
    used = sum(a.used_s(now) * a.request.count for a in _allocations(state, pool))
    return pool_state(state, pool).spent_node_s + used


def affordable(state: State, role: RoleSpec, now: float, together: int = 1) -> tuple[int, float]:
    """Return how many more requests the budget of an elastic pool allows, and the walltime (s) of each, at most.

    Each allocation and each request reserves its whole walltime until it ends. What is not reserved is shared among the
    requests that the pool may still make, so that the first ones leave something for the last. ``together`` requests
    are made at once.
    """
    made = _allocations(state, role.name)
    reserved = sum(max(a.used_s(now), a.request.walltime) * a.request.count for a in made)
    free = role.node_seconds - pool_state(state, role.name).spent_node_s - reserved
    share = free / max(together, (role.max_replicas or 0) * role.nodes - len(made))
    return int(max(0.0, free) // MIN_WALLTIME_S), max(MIN_WALLTIME_S, share // MIN_WALLTIME_S * MIN_WALLTIME_S)


def elastic_role(job: RunSpec, node_group: str | None = None) -> RoleSpec | None:
    """Return the elastic pool of a job; None if it has none, or another ``node_group``. A job has at most one."""
    return next((role for role in job.roles if role.is_elastic and node_group in (None, role.name)), None)


def ended_by(state: State, resize: Resize) -> list[Incarnation]:
    """Return the current incarnations that a resize ends."""
    ranks = state.job.role(resize.pool).ranks
    members = (state.replica(member_id(id, rank)) for id in resize.stop for rank in range(ranks))
    return [member.incarnation for member in members if member.is_current]


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


class LendingFigures(Struct, frozen=True):
    """How much the trainer lends its GPUs to the guests, in the last minutes or in a whole run that has ended."""

    lent: float
    """Share of the trainer's time (0 to 1)."""
    hand_over_s: float | None
    """Time (s) that lending and taking back cost together, as of the newest step; None if it is not known yet."""
    guests_at_work: int
    """Guests that have joined, asleep or not; in a run that has ended, those that ever had."""
    guests: int
    """Guests that the run has if all of them exist; 0 if it goes on without guests."""
    guest_tokens: float
    """Share of the generated tokens that guests generated (0 to 1)."""


def lending_figures(state: State) -> LendingFigures | None:
    """Return the figures of lending; None if the job does not lend."""
    if not state.job.guests:
        return None
    now, before = state.idle_times.now, state.idle_times.before if state.outcome is None else START
    names = (GUEST_ROLE, *(role.name for role in state.job.kind("rollout")))
    done = [now.roles.get(name, RolePoint()).done - before.roles.get(name, RolePoint()).done for name in names]
    ever = sum(role_of(id) == GUEST_ROLE for id in state.idle_times.newest)
    return LendingFigures(
        round(lent_share(now, before, role_of(TRAINER)), 4),
        state.metrics.get(LEND_COST),
        sum(one.status is Status.JOINED for one in state.guests) if state.outcome is None else ever,
        0 if state.guests_withdrawn else state.job.guests,
        round(done[0] / sum(done), 4) if sum(done) else 0.0,
    )


def _allocations(state: State, node_group: str) -> list[Allocation]:
    return [a for a in state.allocations.values() if a.request.node_group == node_group]
