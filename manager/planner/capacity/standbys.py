"""Plan on which nodes standby processes wait to be promoted to a trainer member or a rollout.

No standby process counts as a replica. Standby processes are started after the current trainer has finished a training
step, so that they take no resources from its recovery. There are two kinds:

* Standby processes of the trainer share nodes with working replicas, do not count as occupants, and are stopped only
  while the trainer works.
* A standby process of a rollout has its engine running and takes a rollout's whole resources, on a spare node. It is
  started once all rollouts that have a node have started. It is stopped as soon as another replica is to use the node;
  this replica is launched once the standby process has ended (``standbys_released_at``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence

from ....core.run_spec import RoleSpec
from ....core.types import (
    AGENT,
    Incarnation,
    NodeName,
    ReplicaId,
    gang_of,
    is_trainer,
    replica_id,
    role_of,
    standby_id,
    standby_role_of,
)
from ...model.actions import Action, ExternalAction, Launch, StopStep, Why
from ...model.queries import all_joined, has_trained, reached_step
from ...model.state import Replica, State, Status
from ..deadlines import NEVER
from .nodes import CandidateNode, NodeInventory
from .placement import Assignment, launch, launch_due_at
from .warm_pool import Occupancy

_StandbyNodes = dict[ReplicaId, NodeName]


def plan_standbys(
    state: State, inventory: NodeInventory, assigned: Assignment, placed: Sequence[Action], now: float
) -> tuple[list[ExternalAction], float]:
    """Return the launches and stops of standby processes, and the next wake (manager's time, s).

    ``placed`` are the actions of this plan that launch replicas.
    """
    roles = [role for role in state.job.roles if role.warm]
    stable = _trainers_stable(state, inventory)
    if state.job.recovery.policy != "role":  # policy "job" promotes no standby process
        return [], NEVER
    if not roles or not (stable or inventory.exclusive_standbys):
        return [], NEVER
    occupancy = inventory.occupied
    actions: list[ExternalAction] = []
    wake = NEVER
    taken: set[NodeName] = set()  # spare nodes for the standby processes of earlier roles
    for role in roles:
        wanted: _StandbyNodes = {}
        if role.standby_shares_node and stable:
            wanted = _trainer_standbys(state, inventory, assigned, occupancy, role)
            actions += _unneeded(inventory, role, wanted)
        elif not role.standby_shares_node:
            actions += _blocking_standbys(inventory, assigned, occupancy, placed, role)
            if stable and not _is_starting(inventory, assigned, role):
                wanted = _spare_node_standbys(state, inventory, assigned, occupancy, role, taken)
                taken.update(wanted.values())
        starts, retry_at = _launches(state, inventory, wanted, now)
        actions, wake = [*actions, *starts], min(wake, retry_at)
    return actions, wake


def _trainers_stable(state: State, inventory: NodeInventory) -> bool:
    """Return whether every trainer works and its current incarnation has finished a step."""
    trainers = [members for members in inventory.gangs if is_trainer(members[0].id)]
    worked = reached_step(state) > 0
    return worked and all(all_joined(members) and has_trained(state, members[0]) for members in trainers)


def _is_starting(inventory: NodeInventory, assigned: Assignment, role: RoleSpec) -> bool:
    """Return whether a replica of the role is starting, or waits for its next start on a node that it has.

    A replica that waits for a node does not count: it may wait for hours, and the other replicas need standby processes
    during this time. Nor does a gang count if one of its members lacks a node, because all members are launched
    together.
    """
    lacking = {gang_of(member.id) for member in assigned.lacking}
    return any(
        member.status in (Status.LAUNCHING, Status.STARTING)
        or (member.status is Status.WANTED and gang_of(member.id) not in lacking)
        for members in inventory.gangs
        if members[0].role == role.name
        for member in members
    )


def _launches(
    state: State, inventory: NodeInventory, wanted: _StandbyNodes, now: float
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


def _stop_standby(standby: Replica, evidence: str) -> StopStep:
    """Return the stop of a standby process, which gets no grace because it has no state to lose."""
    return StopStep(standby.step or "", standby.incarnation, 0.0, Why((evidence,), expects="its memory is free"))


# ── the trainer's standby processes, on nodes with working replicas ──────────────────────────────────────────────────
def _unneeded(inventory: NodeInventory, role: RoleSpec, wanted: _StandbyNodes) -> list[StopStep]:
    """Return the stops of the role's standby processes that are not wanted."""
    return [
        _stop_standby(standby, f"{role.name} no longer needs a standby process on {standby.node}")
        for standby in inventory.standby_processes
        if standby_role_of(standby.id) == role.name and standby.step is not None and standby.id not in wanted
    ]


def _trainer_standbys(
    state: State, inventory: NodeInventory, assigned: Assignment, occupancy: Occupancy, role: RoleSpec
) -> _StandbyNodes:
    """Return every wanted standby process of the trainer, and its node.

    Each member has a standby process on its node. A limited number of spare nodes and of nodes with donor rollouts have
    one standby process for each member that the node can host. Nodes that already have standby processes are chosen
    first.
    """
    members = [member for gang_members in inventory.gangs for member in gang_members if member.role == role.name]
    warm = {standby.node for standby in inventory.standby_processes if standby_role_of(standby.id) == role.name}
    member_counts = Counter(member.node for member in members if member.node is not None)
    spares = [candidate.node for candidate in _free_spares(state, inventory, assigned, occupancy, role)]
    donor_nodes = [
        rollout.node
        for rollout in inventory.donors(members[0], occupancy)
        if rollout.node is not None and rollout.node not in member_counts
    ]
    per_node = min(role.ranks, role.per_node)
    wanted = dict(member_counts)
    for nodes, limit in ((spares, role.nodes), (donor_nodes, role.donor_rollouts)):
        chosen = sorted(dict.fromkeys(nodes), key=lambda node: node not in warm)[:limit]
        wanted |= dict.fromkeys(chosen, per_node)
    return {id: node for node, count in wanted.items() for id in _standby_ids(role, node, count, role.per_node > 1)}


def _standby_ids(role: RoleSpec, node: NodeName, count: int, several: bool) -> list[ReplicaId]:
    """Return the ids of a node's standby processes, numbered if there may be several."""
    return [standby_id(role.name, node, slot if several else None) for slot in range(count)]


def _free_spares(
    state: State, inventory: NodeInventory, assigned: Assignment, occupancy: Occupancy, role: RoleSpec
) -> list[CandidateNode]:
    """Return the nodes that can host the role and that no replica occupies or is about to use."""
    reserved = {node for node, _ in _planned_nodes(assigned)}
    return [
        candidate
        for candidate in inventory.candidates(state.job.node_group_of(role.name).name)
        if not candidate.expiring and candidate.node not in reserved and not occupancy.get(candidate.node)
    ]


def _planned_nodes(assigned: Assignment) -> Iterator[tuple[NodeName, ReplicaId]]:
    """Yield each planned node with the replica that is to use it."""
    for candidates in (assigned.targets, assigned.moves, assigned.retries, assigned.blocked_moves):
        for id, candidate in candidates.items():
            yield candidate.node, id


# ── a rollout's standby processes, on spare nodes ────────────────────────────────────────────────────────────────────
def _spare_node_standbys(
    state: State,
    inventory: NodeInventory,
    assigned: Assignment,
    occupancy: Occupancy,
    role: RoleSpec,
    taken: Collection[NodeName],
) -> _StandbyNodes:
    """Return the wanted standby processes on spare nodes: as many per node as fit, on up to ``role.replicas`` nodes.

    A node on which a step is still ending gets no standby process yet. A node that is ``taken``, or has standby
    processes of another role, gets none.
    """
    ending = {orphan.node for orphan in state.orphan_steps.values()}
    warm = {standby.node: standby_role_of(standby.id) for standby in inventory.exclusive_standbys}
    spares = [
        candidate.node
        for candidate in _free_spares(state, inventory, assigned, occupancy, role)
        if candidate.node not in taken and warm.get(candidate.node, role.name) == role.name
    ]
    spares.sort(key=lambda node: node not in warm)
    chosen = [node for node in spares[: role.replicas] if node not in ending]
    count = role.replicas_fitting(state.job.node_group_of(role.name).node)
    return {id: node for node in chosen for id in _standby_ids(role, node, count, not role.exclusive)}


def _blocking_standbys(
    inventory: NodeInventory, assigned: Assignment, occupancy: Occupancy, placed: Sequence[Action], role: RoleSpec
) -> list[StopStep]:
    """Return the stops of exclusive standby processes on nodes that replicas use or are about to use.

    A standby process that is being promoted is kept. A ready standby process is also kept if only replicas of its role
    use the node.
    """
    if not inventory.exclusive_standbys:
        return []
    promoted = {action.standby for action in placed if isinstance(action, Launch)}
    planned: dict[NodeName, set[ReplicaId]] = {}
    for node, id in _planned_nodes(assigned):
        planned.setdefault(node, set()).add(id)
    for node, occupants in occupancy.items():
        for occupant in occupants:
            if not occupant.is_current:
                planned.setdefault(node, set()).add(occupant.id)
    stops: list[StopStep] = []
    for standby in inventory.exclusive_standbys:
        if standby.node is None or standby_role_of(standby.id) != role.name or standby.incarnation in promoted:
            continue
        ids, candidate = planned.get(standby.node, set()), inventory.candidate(standby.node)
        alone = not ids and not occupancy.get(standby.node) and candidate is not None and not candidate.expiring
        awaited = {role_of(id) for id in ids} == {role.name} and standby in inventory.ready_standbys(
            standby.node, role.name
        )
        if not (alone or awaited):
            users = ", ".join(sorted(ids or {other.id for other in occupancy.get(standby.node, ())}))
            reason = f"{standby.node} is needed for {users}" if users else f"{standby.node} is no longer a spare node"
            stops.append(_stop_standby(standby, reason))
    return stops
