"""Let spare nodes generate: start further rollouts there, and stop them when their nodes are needed. Pure.

An extra is any rollout of the pool beyond the ``replicas`` of ``[roles.rollout]``. Extras are a number, not certain
replicas: if a rollout loses its node while an extra works, the pool has as many rollouts as the job asks for without
it, and it leaves the run. A rollout that fails is repaired like any other; while it is retired, no other rollout is
started in its place.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import count, islice

from ....core.run_spec import RoleSpec
from ....core.types import TRAINER, NodeName, ReplicaId, natural_sort_key, replica_id
from ...model.actions import Decision, Fence, Resize, Rung, Why, every_lower
from ...model.queries import extras_role, reached_step
from ...model.state import Replica, State, Status
from .nodes import NodeInventory
from .placement import Assignment
from .warm_pool import occupy

_STARTING_STATES = (Status.WANTED, Status.LAUNCHING, Status.STARTING)


def resize_extras(state: State, inventory: NodeInventory, assigned: Assignment, now: float) -> list[Decision]:
    """Return the decisions that start or stop extras; ``now`` is the manager's time (s)."""
    if (role := extras_role(state.job)) is None or not inventory.may_start:
        return []
    rollouts = [replica for replica in state.workers if replica.role == role.name]
    if len(rollouts) > role.replicas and (
        stops := _displaced(state, inventory, assigned, role)
        or _without_node(state, inventory, assigned, role, rollouts, now)
    ):
        return stops
    return _starts(state, inventory, assigned, role, rollouts)


# ── extras that leave ────────────────────────────────────────────────────────────────────────────────────────────────
def _displaced(state: State, inventory: NodeInventory, assigned: Assignment, role: RoleSpec) -> list[Decision]:
    """Return the stop of the extras whose nodes other roles need: each of these has a replica without a node."""
    lacking = [one for one in (*assigned.lacking, *assigned.unmovable) if not _is_rollout(state, one)]
    if not lacking or not inventory.extras:
        return []
    occupancy = inventory.occupancy()
    for id, candidate in (*assigned.targets.items(), *assigned.moves.items()):
        occupy(occupancy, candidate.node, state.replica(id))
    stop: list[ReplicaId] = []
    evidence: list[str] = []
    vacated: list[NodeName] = []
    for member in lacking:
        if (
            node := next((node for node in vacated if inventory.fits_beside(member, node, occupancy)), None)
        ) is not None:
            occupy(occupancy, node, member)
            continue
        nodes = inventory.nodes_of_rollouts(member, occupancy, others=False)
        for node, leaving in islice((pair for pair in nodes if not inventory.is_expiring(pair[0])), 1):
            evidence.append(f"no free node for {member.id}, and {_names(leaving)} on {node} can be spared")
            stop += [rollout.id for rollout in leaving]
            vacated.append(node)
            occupancy[node] = [one for one in occupancy[node] if one not in leaving] + [member]
    why = Why(tuple(evidence), expects=f"{', '.join(vacated)} free for another role")
    return [Resize(role.name, (), tuple(stop), why)] if stop else []


def _without_node(
    state: State, inventory: NodeInventory, assigned: Assignment, role: RoleSpec, rollouts: list[Replica], now: float
) -> list[Decision]:
    """Return the stop of rollouts that have no node or must leave it, as many as the job does not ask for.

    A rollout that lacks a node because it keeps failing on the free ones is retired instead: a new rollout in its place
    would fail there again.
    """
    with_node, others = _split(inventory, assigned, rollouts)
    lacking = [one for one in others if one.status is Status.WANTED]
    fail_everywhere = [one for one in lacking if inventory.avoids_usable_nodes(one)]
    surplus, window = len(with_node) - role.replicas, state.job.recovery.window
    if retire := _last(fail_everywhere, surplus + len(lacking)):
        evidence = f"no node on which it works, and {len(with_node)} others of {role.replicas} rollouts have nodes"
        lower = every_lower("a free node on which it has not failed too often")
        why = Why((evidence,), Rung.DEGRADED, "generation continues without it", now + window, lower)
        return [Fence(one.incarnation, Rung.DEGRADED, why, charged=False) for one in retire]
    unmovable = {one.id for one in assigned.unmovable}
    leaving = [one for one in with_node if one.id in unmovable]
    stop = [*_last(lacking, surplus + len(lacking)), *_last(leaving, surplus)]
    retired = [one for one in others if one.status is Status.RETIRED and not one.recent_failures(window, now)]
    stop += _last(retired, len(rollouts) - role.replicas - len(stop))
    if not stop:
        return []
    evidence = f"no node for {_names(stop)}: {len(rollouts)} rollouts, and the job asks for {role.replicas}"
    why = Why((evidence,), expects=f"{len(rollouts) - len(stop)} rollouts")
    return [Resize(role.name, (), tuple(one.id for one in stop), why)]


def _last(rollouts: list[Replica], most: int) -> list[Replica]:
    """Return at most this many of the rollouts, the last ones."""
    return sorted(rollouts, key=lambda one: natural_sort_key(one.id))[max(0, len(rollouts) - max(0, most)) :]


# ── new extras ───────────────────────────────────────────────────────────────────────────────────────────────────────
def _starts(
    state: State, inventory: NodeInventory, assigned: Assignment, role: RoleSpec, rollouts: list[Replica]
) -> list[Decision]:
    """Return the start of as many extras as the free nodes can host, less the rollouts that have no node."""
    pool = state.job.node_group_of(role.name)
    reserved = assigned.planned_nodes | inventory.failing_nodes | inventory.occupied.keys()
    free = [
        candidate.node
        for candidate in inventory.candidates(pool.name)
        if candidate.node not in reserved and not candidate.expiring and inventory.is_clear(candidate.node)
    ]
    if not free or not _is_settled(state, assigned):
        return []
    waiting = len(_split(inventory, assigned, rollouts)[1])
    taken = {one.id for one in rollouts}
    unused = (id for index in count() if (id := replica_id(role.name, index)) not in taken)
    start = tuple(islice(unused, max(0, len(free) * role.replicas_fitting(pool.node) - waiting)))
    if not start:
        return []
    why = Why((f"{len(free)} spare nodes are free: {', '.join(free)}",), expects=f"{len(start)} more rollouts generate")
    return [Resize(role.name, start, (), why)]


def _is_settled(state: State, assigned: Assignment) -> bool:
    """Return whether the run can spare the resources that starting extras take: all of its roles work.

    Replicas on nodes of their own jobs do not count, since these may wait in the queue for hours.
    """
    ours = {role for group in state.job.node_groups if not group.dedicated for role in group.roles}
    workers = [one for one in state.workers if one.role in ours]
    if any(one.status in _STARTING_STATES for one in workers) or any(one.role in ours for one in assigned.unmovable):
        return False
    rollouts = [one for one in state.workers if _is_rollout(state, one) and one.is_current]
    holders = rollouts or [state.replica(TRAINER)]
    return reached_step(state) > 0 or any(one.weight_version is not None for one in holders)


def _split(
    inventory: NodeInventory, assigned: Assignment, rollouts: list[Replica]
) -> tuple[list[Replica], list[Replica]]:
    """Return the rollouts that have a node or are about to get one, and the others."""
    placed = {one.id for occupants in inventory.occupied.values() for one in occupants}
    placed |= assigned.targets.keys() | assigned.retries.keys()
    return [one for one in rollouts if one.id in placed], [one for one in rollouts if one.id not in placed]


def _is_rollout(state: State, replica: Replica) -> bool:
    return state.job.traits_of(replica.id).may_be_displaced


def _names(rollouts: Iterable[Replica]) -> str:
    return ", ".join(one.id for one in rollouts)
