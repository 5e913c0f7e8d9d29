"""Place replicas on nodes: which replica is launched where, and which orphan steps are stopped.

A gang is launched as a whole and with one incarnation number. It is launched when every member has a node and no
back-off, and the gang's earlier incarnations have released their memory. If the manager fails while it launches a gang,
the next manager launches the missing members with the same number.

All replicas that have a node and no back-off are launched at once. Only planned moves are limited to one replica of a
role at a time (rotation.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from msgspec import Struct

from ....core.launch import tag_of
from ....core.types import (
    AGENT,
    GUEST_ROLE,
    STANDBY_ROLE,
    Incarnation,
    NodeName,
    ReplicaId,
    gang_of,
    replica_id,
    role_of,
)
from ...model.actions import ExternalAction, Launch, StopStep, Why
from ...model.queries import gang, to_launch
from ...model.state import Replica, State, Status
from ..deadlines import NEVER
from .node_fitness import restarts_exhausted
from .nodes import CandidateNode, NodeInventory
from .warm_pool import Occupancy, has_left, occupy, release_deadline, waits_for_release


class Assignment(Struct, frozen=True):
    """Target nodes of replicas, as far as there is capacity.

    Each member of a gang has its own target node, but a gang moves or is retried only if all its members have one.
    """

    targets: dict[ReplicaId, CandidateNode] = {}
    """Target nodes of the replicas to launch. If one member of a gang has no target node, the target nodes of the other
    members stay assigned."""
    moves: dict[ReplicaId, CandidateNode] = {}
    """Nodes to which replicas on expiring nodes move."""
    retries: dict[ReplicaId, CandidateNode] = {}
    """Target nodes of retired replicas whose failures have left the window. These replicas are assigned last."""
    lacking: tuple[Replica, ...] = ()
    """Replicas to launch that fit on no node of the run."""
    unmovable: tuple[Replica, ...] = ()
    """Replicas to move that fit on no other node of the run."""
    blocked_moves: dict[ReplicaId, CandidateNode] = {}
    """Target nodes of members that could move, but whose gang cannot move because another member has no target
    node."""

    @property
    def planned_nodes(self) -> set[NodeName]:
        """Return the nodes that replicas are about to use."""
        planned = (self.targets, self.moves, self.retries, self.blocked_moves)
        return {candidate.node for candidates in planned for candidate in candidates.values()}


def assign(state: State, inventory: NodeInventory, now: float) -> Assignment:
    """Return the target nodes of all replicas that need one.

    Gangs that return to nodes with their standby processes come first, since a rollout may have been preempted for
    them. Replicas in back-off come last.
    """
    if not inventory.may_start:
        return Assignment()
    occupancy, gangs = inventory.occupancy(), inventory.gangs
    targets: dict[ReplicaId, CandidateNode] = {}
    lacking: list[Replica] = []
    wanted = [members for gang in gangs if (members := to_launch(gang))]
    roles = {role.name for role in state.job.roles if waits_for_release(role)}
    returning = {members[0].id for members in wanted if members[0].role in roles and members[0].incarnation_number}
    for members in sorted(wanted, key=lambda members: (_launchable_at(members) > now, members[0].id not in returning)):
        for member in members:
            if (target := inventory.choose_node(member, occupancy)) is None:
                lacking.append(member)
            else:
                targets[member.id] = target
                occupy(occupancy, target.node, member)
    moves, blocked_moves, unmovable = _plan_moves(inventory, gangs, occupancy)
    retries: dict[ReplicaId, CandidateNode] = {}
    for members in gangs:
        if _retry_due(state, members, now):
            retries |= _place_all_or_none(inventory, members, occupancy)
    return Assignment(targets, moves, retries, tuple(lacking), tuple(unmovable), blocked_moves)


def _plan_moves(
    inventory: NodeInventory, gangs: Sequence[list[Replica]], occupancy: Occupancy
) -> tuple[dict[ReplicaId, CandidateNode], dict[ReplicaId, CandidateNode], list[Replica]]:
    """Return the possible moves off expiring nodes, the blocked moves, and the replicas without a target."""
    leaving = {candidate.node for candidate in inventory.usable if candidate.expiring} | inventory.draining
    moves: dict[ReplicaId, CandidateNode] = {}
    blocked_moves: dict[ReplicaId, CandidateNode] = {}
    unmovable: list[Replica] = []
    for members in gangs:
        targets: dict[ReplicaId, CandidateNode] = {}
        without_target: list[Replica] = []
        for member in members:
            if not member.is_current or member.node not in leaving:
                continue
            if (target := inventory.choose_successor(member, occupancy)) is None:
                without_target.append(member)
            else:
                targets[member.id] = target
                occupy(occupancy, target.node, member)
        (blocked_moves if without_target else moves).update(targets)
        unmovable += without_target
    return moves, blocked_moves, unmovable


def _retry_due(state: State, members: list[Replica], now: float) -> bool:
    """Return whether the gang is retired and the failures of all its members have left the recovery window."""
    window = state.job.recovery.window
    retired = any(member.status is Status.RETIRED for member in members) and not any(
        member.is_current for member in members
    )
    return retired and not any(member.recent_failures(window, now) for member in members)


def _place_all_or_none(
    inventory: NodeInventory, members: list[Replica], occupancy: Occupancy
) -> dict[ReplicaId, CandidateNode]:
    """Return nodes for all members, or none; the chosen nodes are added to ``occupancy``."""
    tried = {node: list(occupants) for node, occupants in occupancy.items()} if len(members) > 1 else occupancy
    targets: dict[ReplicaId, CandidateNode] = {}
    for member in members:
        if (target := inventory.choose_node(member, tried)) is None:
            return {}
        targets[member.id] = target
        occupy(tried, target.node, member)
    occupancy.update(tried)
    return targets


def _launchable_at(members: Sequence[Replica]) -> float:
    """Return the manager's time (s) before which none of these members is launched."""
    return max(member.not_before for member in members)


def nodes_for(state: State, lacking: Sequence[Replica]) -> int:
    """Return the number of nodes that these members need.

    Up to ``per_node`` members of a gang share a node. Each gang of an exclusive role has nodes of its own; the gangs of
    all other roles share nodes.
    """
    exclusive = shared = 0
    for gang_id, count in Counter(gang_of(replica.id) for replica in lacking).items():
        role = state.job.role(role_of(gang_id))
        nodes = -(-count // role.per_node)
        if role.exclusive:
            exclusive += nodes
        else:
            shared = max(shared, nodes)
    return exclusive + shared


def place(
    state: State, inventory: NodeInventory, assigned: Assignment, now: float
) -> tuple[list[ExternalAction], float]:
    """Return launches of agents and replicas, stops of orphan steps, and the next wake (manager's time, s)."""
    stops, wake = stop_orphans(state, now, assigned.targets)
    agents, agents_wake = _agent_launches(state, inventory, now)
    actions: list[ExternalAction] = [*stops, *agents]
    retries: list[ExternalAction] = []
    used: set[str] = set()
    for members in inventory.gangs:
        retired = any(member.status is Status.RETIRED for member in members) and not any(
            member.is_current for member in members
        )
        if not (wanted := members if retired else to_launch(members)):
            continue
        targets = assigned.retries if retired else assigned.targets
        launches, launch_wake = _launches(state, inventory, targets, wanted, used, now)
        (retries if retired else actions).extend(launches)
        wake = min(wake, launch_wake)
    return [*actions, *retries], min(wake, agents_wake)


def _launches(
    state: State,
    inventory: NodeInventory,
    targets: dict[ReplicaId, CandidateNode],
    wanted: list[Replica],
    used: set[str],
    now: float,
) -> tuple[list[ExternalAction], float]:
    """Return the launches of all these members of a gang, or no launches and the manager's time (s) to try again.

    ``used`` collects the steps of the standby processes that are promoted.
    """
    retired = any(member.status is Status.RETIRED for member in wanted)
    if not retired and (pause := _launchable_at(wanted)) > now:
        return [], pause
    if any(member.id not in targets for member in wanted):
        return [], _retry_at(state, [member for member in wanted if retired or member.id not in targets], retired, now)
    if (until := release_deadline(state, wanted, [targets[member.id].node for member in wanted])) > now:
        return [], until
    members, role = gang(state, wanted[0].id), state.job.role(wanted[0].role)
    newest = max(member.incarnation_number for member in members)
    number = next((member.incarnation_number for member in members if member.is_current), newest + 1)
    standbys: dict[ReplicaId, Replica] = {}
    for member in wanted if role.warm else ():
        free = (
            ready for ready in inventory.ready_standbys(targets[member.id].node, role.name) if ready.step not in used
        )
        if (standby := next(free, None)) is not None and standby.step is not None:
            standbys[member.id] = standby
            used.add(standby.step)
    launches: list[ExternalAction] = []
    for member in wanted:
        incarnation, target = Incarnation(member.id, number), targets[member.id]
        if (standby := standbys.get(member.id)) is not None and standby.step is not None:
            why = Why(
                (f"{member.id} is wanted and {target.node} has a standby process",),
                expects=f"{standby.incarnation} is promoted to {incarnation}",
                deadline=now + state.job.recovery.promote,
            )
            launches.append(Launch(incarnation, standby.step, target.allocation, target.node, why, standby.incarnation))
        else:
            launches.append(launch(state, incarnation, target))
    return launches, NEVER


def _retry_at(state: State, unplaced: list[Replica], retired: bool, now: float) -> float:
    """Return the manager's time (s) at which the placement of these replicas is tried again.

    Retired replicas are tried again when their newest failure has left the recovery window. Other replicas are tried
    again when their oldest failure has left the window, because the node of this failure may be used again from that
    time on.
    """
    failure_times = sorted(
        failure.at for replica in unplaced for failure in replica.recent_failures(state.job.recovery.window, now)
    )
    return (failure_times[-1] if retired else failure_times[0]) + state.job.recovery.window if failure_times else NEVER


def _agent_launches(state: State, inventory: NodeInventory, now: float) -> tuple[list[ExternalAction], float]:
    """Return the launches of agents on usable nodes, and the manager's time (s) of the next launch."""
    actions: list[ExternalAction] = []
    wake = NEVER
    for candidate in inventory.usable:
        agent = state.replica(replica_id(AGENT, candidate.node))
        due = launch_due_at(state, agent, now)
        if due <= now:
            actions.append(launch(state, Incarnation(agent.id, agent.incarnation_number + 1), candidate))
        else:
            wake = min(wake, due)
    return actions, wake


def launch_due_at(state: State, replica: Replica, now: float) -> float:
    """Return the manager's time (s) at which an agent, standby process or guest is due for launch; inf while it runs.

    A process that failed too often waits until its oldest failure has left the recovery window.
    """
    if restarts_exhausted(state, replica, now):
        window = state.job.recovery.window
        return replica.recent_failures(window, now)[0].at + window
    return replica.not_before if replica.status in (Status.WANTED, Status.RETIRED) else NEVER


def launch(state: State, incarnation: Incarnation, target: CandidateNode) -> Launch:
    """Return the launch of an incarnation in a new step on the target node."""
    why = Why((f"{incarnation.replica} is wanted and {target.node} has capacity",), expects=f"{incarnation} joins")
    return Launch(incarnation, tag_of(state.run, incarnation), target.allocation, target.node, why)


def stop_orphans(
    state: State, now: float, targets: Mapping[ReplicaId, CandidateNode] = MappingProxyType({})
) -> tuple[list[StopStep], float]:
    """Return stops of orphan steps on nodes that may answer, and the next wake (manager's time, s).

    Two kinds of steps get no grace: the steps of standby processes and guests, and the steps that must end before a
    replica is launched. Of a gang, the latter are the steps of its own earlier incarnations (its state is in the
    snapshots), and the steps on the nodes in ``targets``, where it is to be launched. Of another replica, they are the
    steps of rollouts that have left its node to it.
    """
    stops: list[StopStep] = []
    wake = NEVER
    roles = {role.name for role in state.job.roles if waits_for_release(role)}
    awaited = {candidate.node for id, candidate in targets.items() if role_of(id) in roles}
    others = {candidate.node for id, candidate in targets.items() if not state.job.traits_of(id).may_be_displaced}
    for step, orphan in state.orphan_steps.items():
        node = state.nodes.get(orphan.node)
        if orphan.stop_requested or node is None or node.excluded is not None:
            continue
        if orphan.not_before > now:
            wake = min(wake, orphan.not_before)
            continue
        hurried = role_of(orphan.incarnation.replica) in {*roles, STANDBY_ROLE, GUEST_ROLE} or orphan.node in awaited
        hurried = hurried or (orphan.node in others and has_left(state, orphan))
        grace = 0.0 if hurried else state.job.limits.step_grace
        why = Why((f"{orphan.incarnation} is no longer part of the run",))
        stops.append(StopStep(step, orphan.incarnation, grace, why))
    return stops, wake
