"""Plan on which nodes standby processes wait to be promoted to a member of the trainer.

No standby process counts as a replica. Standby processes share nodes with working replicas and do not count as
occupants. They are started after the current trainer has finished a training step, so that they take no resources from
its recovery, and are stopped only while the trainer works.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from ....core.run_spec import RoleSpec
from ....core.types import AGENT, Incarnation, NodeName, ReplicaId, is_trainer, replica_id, standby_id
from ...model.actions import ExternalAction, StopStep, Why
from ...model.queries import all_joined, has_trained, reached_step
from ...model.state import State, Status
from ..deadlines import NEVER
from .nodes import NodeInventory
from .placement import Assignment, launch, launch_due_at

_StandbyNodes = dict[ReplicaId, NodeName]


def plan_standbys(
    state: State, inventory: NodeInventory, assigned: Assignment, now: float
) -> tuple[list[ExternalAction], float]:
    """Return the launches and stops of standby processes, and the next wake (manager's time, s)."""
    role = next((role for role in state.job.roles if role.warm), None)
    # policy "job" promotes no standby process
    if role is None or state.job.recovery.policy != "role" or not _trainers_stable(state, inventory):
        return [], NEVER
    wanted = _wanted_standbys(state, inventory, assigned, role)
    starts, wake = launches_on_nodes(state, inventory, wanted, now)
    return [*_unneeded(inventory, role, wanted), *starts], wake


def _trainers_stable(state: State, inventory: NodeInventory) -> bool:
    """Return whether every trainer works and its current incarnation has finished a step."""
    trainers = [members for members in inventory.gangs if is_trainer(members[0].id)]
    worked = reached_step(state) > 0
    return worked and all(all_joined(members) and has_trained(state, members[0]) for members in trainers)


def launches_on_nodes(
    state: State, inventory: NodeInventory, wanted: Mapping[ReplicaId, NodeName], now: float
) -> tuple[list[ExternalAction], float]:
    """Return the launches that are due on nodes with an agent, and the manager's time (s) of the next launch."""
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


def _unneeded(inventory: NodeInventory, role: RoleSpec, wanted: _StandbyNodes) -> list[StopStep]:
    """Return the stops of the standby processes that are not wanted, without a grace: they have no state to lose."""
    return [
        StopStep(
            standby.step,
            standby.incarnation,
            0.0,
            Why((f"{role.name} no longer needs a standby process on {standby.node}",), expects="its memory is free"),
        )
        for standby in inventory.standby_processes
        if standby.step is not None and standby.id not in wanted
    ]


def _wanted_standbys(state: State, inventory: NodeInventory, assigned: Assignment, role: RoleSpec) -> _StandbyNodes:
    """Return every wanted standby process, and its node.

    Each member has a standby process on its node. As many other nodes as the trainer has have one for each member that
    the node can host: the spare nodes and nodes of extras, then the nodes of other rollouts, as far as ``[tags]``
    allow. Nodes that already have standby processes are chosen first.
    """
    occupancy, tags = inventory.occupied, state.job.tags
    members = [member for gang_members in inventory.gangs for member in gang_members if member.role == role.name]
    warm = {standby.node for standby in inventory.standby_processes}
    wanted = Counter(member.node for member in members if member.node is not None)
    others = [*_free_spares(state, inventory, assigned, role)] if "train" in tags.spare else []
    others += [
        node
        for node, _ in inventory.nodes_of_rollouts(members[0], occupancy, others="train" in tags.rollout)
        if "train" in tags.spare or node not in inventory.extra_nodes
    ]
    rollouts = {node for node in others if occupancy.get(node) and node not in inventory.extra_nodes}
    others = sorted(
        (node for node in others if node not in wanted), key=lambda node: (node in rollouts, node not in warm)
    )
    wanted |= dict.fromkeys(others[: role.nodes], min(role.ranks, role.per_node))
    numbered = role.per_node > 1
    return {
        standby_id(node, slot if numbered else None): node for node, count in wanted.items() for slot in range(count)
    }


def _free_spares(state: State, inventory: NodeInventory, assigned: Assignment, role: RoleSpec) -> list[NodeName]:
    """Return the nodes that can host the role and that no replica occupies or is about to use."""
    reserved = assigned.planned_nodes
    return [
        candidate.node
        for candidate in inventory.candidates(state.job.node_group_of(role.name).name)
        if not candidate.expiring and candidate.node not in reserved and not inventory.occupied.get(candidate.node)
    ]
