"""Shadows: the nodes on which a process is kept warm that becomes a member of the trainer, or a rollout, at once.

They are started once the trainer has committed a step in its present life, so that they take nothing from it while it
recovers. Those of the trainer wait beside whoever works, take no room, and are ended only while it works. A rollout's
has its engine running and holds all that a rollout takes, on a spare node: it is started while no rollout is on its
way back, and ended as soon as anybody else is to go there, who waits for that (``engines_gone``). Nobody counts
either kind.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from ....core.run_spec import RoleSpec
from ....core.types import AGENT, Incarnation, NodeName, ReplicaId, replica_id, role_of, standby_id, standby_role_of
from ...model.actions import Action, ExternalAction, Launch, StopStep, Why
from ...model.queries import all_joined
from ...model.state import Replica, State, Status
from ..deadlines import NEVER
from .nodes import CandidateNode, NodeInventory
from .placement import Assignment, launch, launch_due_at
from .warm_pool import Occupancy

_StandbyNodes = dict[ReplicaId, NodeName]


def plan_standbys(
    state: State, inventory: NodeInventory, assigned: Assignment, placed: Sequence[Action], now: float
) -> tuple[list[ExternalAction], float]:
    """Shadows that are to be started, and ended, and the next wake. ``placed``: what this plan launches already."""
    roles = [role for role in state.job.roles if role.warm]
    stable = _trainers_stable(state, inventory)
    if (
        not roles or not (stable or inventory.exclusive_standbys) or state.job.recovery.policy != "role"
    ):  # no other takes one over
        return [], NEVER
    occupancy = inventory.occupancy()
    actions: list[ExternalAction] = []
    wake = NEVER
    for role in roles:
        wanted: _StandbyNodes = {}
        if role.standby_shares_node and stable:
            wanted = _trainer_standbys(state, inventory, assigned, occupancy, role)
            actions += _unneeded(inventory, role, wanted)
        elif not role.standby_shares_node:
            actions += _blocking_standbys(inventory, assigned, occupancy, placed, role)
            if stable and not _is_starting(inventory, role):
                wanted = _spare_node_standbys(state, inventory, assigned, occupancy, role)
        starts, retry_at = _launches(state, inventory, wanted, now)
        actions, wake = [*actions, *starts], min(wake, retry_at)
    return actions, wake


def _trainers_stable(state: State, inventory: NodeInventory) -> bool:
    """Every trainer works, and has committed a step in its present life."""
    trainers = {role.name for role in state.job.kind("trainer")}
    trainer_gangs = [members for members in inventory.gangs if members[0].role in trainers]
    return state.step > 0 and all(all_joined(members) and members[0].commits for members in trainer_gangs)


def _is_starting(inventory: NodeInventory, role: RoleSpec) -> bool:
    """One of the role is, or waits for its next start."""
    before = (Status.WANTED, Status.LAUNCHING, Status.STARTING)
    return any(one.status in before for members in inventory.gangs if members[0].role == role.name for one in members)


def _launches(
    state: State, inventory: NodeInventory, wanted: _StandbyNodes, now: float
) -> tuple[list[ExternalAction], float]:
    actions: list[ExternalAction] = []
    wake = NEVER
    for id, node in wanted.items():
        standby, candidate = state.replica(id), inventory.candidate(node)
        if (
            candidate is None
            or standby.is_current
            or state.replica(replica_id(AGENT, node)).status is not Status.JOINED
        ):
            continue
        due = launch_due_at(state, standby, now)
        if due <= now:
            actions.append(launch(state, Incarnation(id, standby.incarnation_number + 1), candidate))
        else:
            wake = min(wake, due)
    return actions, wake


def _stop_standby(standby: Replica, evidence: str) -> StopStep:
    """Without grace: it holds nothing that could be lost."""
    return StopStep(standby.step or "", standby.incarnation, 0.0, Why((evidence,), expects="its memory is free"))


# ── beside whoever works: the trainer's ──────────────────────────────────────────────────────────────────────────────
def _unneeded(inventory: NodeInventory, role: RoleSpec, wanted: _StandbyNodes) -> list[StopStep]:
    return [_stop_standby(standby, f"{role.name} does not need a shadow on {standby.node} any more") for standby in inventory.standby_processes
            if standby_role_of(standby.id) == role.name and standby.step is not None and standby.id not in wanted]  # fmt: skip


def _trainer_standbys(
    state: State, inventory: NodeInventory, assigned: Assignment, occupancy: Occupancy, role: RoleSpec
) -> _StandbyNodes:
    """Every shadow that there is to be, and its node: one for each member where it is, and as many as share a node on
    others that it may go to. Those that are kept warm already come first."""
    members = [one for whole in inventory.gangs for one in whole if one.role == role.name]
    warm = {standby.node for standby in inventory.standby_processes if standby_role_of(standby.id) == role.name}
    member_counts = Counter(member.node for member in members if member.node is not None)
    spares = [candidate.node for candidate in _free_spares(state, inventory, assigned, occupancy, role)]
    donor_nodes = [
        one.node
        for one in inventory.donors(members[0], occupancy)
        if one.node is not None and one.node not in member_counts
    ]
    per_node = min(role.ranks, role.per_node)
    wanted = dict(member_counts)
    for nodes, limit in ((spares, role.nodes), (donor_nodes, role.donor_rollouts)):
        chosen = sorted(dict.fromkeys(nodes), key=lambda node: node not in warm)[:limit]
        wanted |= dict.fromkeys(chosen, per_node)
    return {id: node for node, count in wanted.items() for id in _standby_ids(role, node, count, role.per_node > 1)}


def _standby_ids(role: RoleSpec, node: NodeName, count: int, several: bool) -> list[ReplicaId]:
    return [standby_id(role.name, node, slot if several else None) for slot in range(count)]


def _free_spares(
    state: State, inventory: NodeInventory, assigned: Assignment, occupancy: Occupancy, role: RoleSpec
) -> list[CandidateNode]:
    """Nodes for the role on which nobody works, and to which nobody is to go."""
    reserved = {node for node, _ in _planned_nodes(assigned)}
    return [candidate for candidate in inventory.candidates(state.job.node_group_of(role.name).name)
            if not candidate.expiring and candidate.node not in reserved and not occupancy.get(candidate.node)]  # fmt: skip


def _planned_nodes(assigned: Assignment) -> Iterator[tuple[NodeName, ReplicaId]]:
    """Who is to go where."""
    for candidates in (assigned.targets, assigned.moves, assigned.retries, assigned.blocked_moves):
        for id, candidate in candidates.items():
            yield candidate.node, id


# ── on spare nodes: a rollout's ──────────────────────────────────────────────────────────────────────────────────────
def _spare_node_standbys(
    state: State, inventory: NodeInventory, assigned: Assignment, occupancy: Occupancy, role: RoleSpec
) -> _StandbyNodes:
    """As many on each spare node as it carries, but on no more nodes than there are replicas; where nothing of anybody
    is ending any more."""
    ending = {one.node for one in state.orphan_steps.values()}
    warm = {standby.node for standby in inventory.exclusive_standbys}
    spares = sorted(
        _free_spares(state, inventory, assigned, occupancy, role), key=lambda candidate: candidate.node not in warm
    )
    chosen = [candidate.node for candidate in spares[: role.replicas] if candidate.node not in ending]
    count = role.replicas_fitting(state.job.node_group_of(role.name).node)
    return {id: node for node in chosen for id in _standby_ids(role, node, count, not role.exclusive)}


def _blocking_standbys(
    inventory: NodeInventory, assigned: Assignment, occupancy: Occupancy, placed: Sequence[Action], role: RoleSpec
) -> list[StopStep]:
    """Engines on nodes where anybody works or is to go, but for ready ones that are taken over, or are going to be."""
    if not inventory.exclusive_standbys:
        return []
    promoted = {action.standby for action in placed if isinstance(action, Launch)}
    planned: dict[NodeName, set[ReplicaId]] = {}
    for node, id in _planned_nodes(assigned):
        planned.setdefault(node, set()).add(id)
    for node, there in occupancy.items():
        for one in there:
            if not one.is_current:
                planned.setdefault(node, set()).add(one.id)
    stops: list[StopStep] = []
    for one in inventory.exclusive_standbys:
        if one.node is None or standby_role_of(one.id) != role.name or one.incarnation in promoted:
            continue
        ids, candidate = planned.get(one.node, set()), inventory.candidate(one.node)
        alone = not ids and not occupancy.get(one.node) and candidate is not None and not candidate.expiring
        awaited = {role_of(id) for id in ids} == {role.name} and one in inventory.ready_standbys(one.node, role.name)
        if not (alone or awaited):
            who = ", ".join(sorted(ids or {other.id for other in occupancy.get(one.node, ())}))
            stops.append(
                _stop_standby(one, f"{one.node} is for {who}" if who else f"{one.node} is no spare node any more")
            )
    return stops
