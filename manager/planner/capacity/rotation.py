"""Move replicas off allocations that end before the run does, and off nodes that people drain or the cluster reclaims.

Replicas move to successor allocations, one replica of a role at a time. Replicas on nodes that the cluster takes back
early (preemption, cancellation, walltime) are stopped with a grace, within the time that the cluster allows. Such a
move is not a failure of the replica, so it does not count against the restart budget.
"""

from __future__ import annotations

from itertools import groupby

from ....core.run_spec import NodeGroup
from ....core.types import NodeName, ReplicaId, gang_of, role_of
from ...model.actions import Decision, Fence, LowerRungs, Release, Resize, Rung, Why, every_lower
from ...model.pools import elastic_role
from ...model.queries import to_launch
from ...model.state import Allocation, Replica, State, Status
from ..deadlines import NEVER, rotate_at, rotation_urgent_at
from .node_lifecycle import should_drain
from .nodes import NodeInventory
from .placement import Assignment, nodes_for

CANCELLATIONS_TO_END_RUN = 2
"""Number of times that somebody must cancel all allocations of a run to end the run. One time is not enough, because it
may be a mistake or maintenance."""
_STARTING_STATES = (Status.WANTED, Status.LAUNCHING, Status.STARTING)


def rotate(state: State, assigned: Assignment, now: float) -> tuple[list[Decision], float]:
    """Return the moves that are due now, and the next wake (manager's time, s).

    A replica is not moved while another replica of its role is to be launched or is starting. An urgent move
    (:func:`rotation_urgent_at`) does not wait for a replica that keeps failing. All members of a gang on expiring nodes
    move together, since each move restarts the whole gang.
    """
    decisions: list[Decision] = []
    moving: set[str] = set()
    wake = NEVER
    for gang, members in groupby(assigned.moves, gang_of):
        role = role_of(gang)
        if role in moving:
            continue
        ids = list(members)
        allocations = [state.allocations[_allocation_of(state, id)] for id in ids]
        urgent_at = min(rotation_urgent_at(state, allocation) for allocation in allocations)
        if any(_is_awaited(state, other, now >= urgent_at, now) for other in state.workers if other.role == role):
            wake = min(wake, urgent_at if now < urgent_at else NEVER)
            continue
        moving.add(role)
        for id, allocation in zip(ids, allocations, strict=True):
            target, deadline = assigned.moves[id].node, now + state.job.limits.join
            evidence, lower = (_move_reason(state, id, allocation, now),), every_lower("its node to stay in the run")
            why = Why(evidence, Rung.REPLACEMENT, f"joins again on {target}", deadline, lower)
            decisions.append(
                Fence(state.replica(id).incarnation, Rung.REPLACEMENT, why, target_node=target, charged=False)
            )
    return decisions, wake


def _move_reason(state: State, id: ReplicaId, allocation: Allocation, now: float) -> str:
    """Return why the replica moves, as evidence."""
    node = state.replica(id).node or NodeName("")
    if node in state.node_commands:
        return f"{node} is to be drained, requested by {state.node_commands[node][1]}"
    return f"its allocation {allocation.tag} ends in {allocation.ends_at - now:.0f} s"


def _allocation_of(state: State, id: ReplicaId) -> str:
    """Return the tag of the allocation that the replica's node is in."""
    return state.nodes[state.replica(id).node or NodeName("")].allocation


def _is_awaited(state: State, replica: Replica, urgent: bool, now: float) -> bool:
    """Return whether moves wait for this replica to work; urgent moves do not wait for a replica that keeps failing."""
    failing = bool(replica.recent_failures(state.job.recovery.window, now))
    return replica.status in _STARTING_STATES and not (urgent and failing)


def redundant_allocations(
    state: State, inventory: NodeInventory, assigned: Assignment, now: float
) -> tuple[list[Release], float]:
    """Return releases of allocations that no replica needs, and the next wake (manager's time, s).

    An allocation is redundant if all replicas have moved off it, if none of its nodes may be used, or if its replicas
    are completed. Spare nodes of a pool are kept. An allocation of the elastic pool whose budget is over, or which is
    suspended, does not wait for the end of its steps.
    """
    releases: list[Release] = []
    wake = NEVER
    occupied = {node for node, occupants in inventory.occupied.items() if occupants}
    occupied |= assigned.planned_nodes
    for node_group in state.job.node_groups:
        empty = [
            a
            for a in state.allocations.values()
            if a.request.node_group == node_group.name
            and (
                _is_empty(inventory, a, occupied)
                or (a.tag in inventory.stops and _is_over(state, a, inventory.stops[a.tag], now))
            )
        ]
        for allocation, reason in _redundant(state, inventory, node_group, empty, assigned, now):
            if allocation.not_before > now:
                wake = min(wake, allocation.not_before)
            else:
                releases.append(Release(allocation.tag, Why((f"{allocation.tag}: {reason}",))))
    return releases, wake


def _is_empty(inventory: NodeInventory, allocation: Allocation, occupied: set[NodeName]) -> bool:
    """Return whether no replica occupies or is about to use the allocation."""
    if allocation.running:
        return all(node not in occupied and inventory.is_clear(node) for node in _nodes_of(allocation))
    return allocation.pending and allocation.status is not None


def _is_over(state: State, allocation: Allocation, stop_at: float, now: float) -> bool:
    """Return whether the elastic pool has left an allocation that has ended by now, or is suspended."""
    over = now >= (stop_at if allocation.suspended else allocation.ends_at)
    return over and state.occupied.isdisjoint(_nodes_of(allocation))


def _redundant(
    state: State,
    inventory: NodeInventory,
    node_group: NodeGroup,
    empty: list[Allocation],
    assigned: Assignment,
    now: float,
) -> list[tuple[Allocation, str]]:
    """Return the empty allocations of a node group that are redundant, each with the reason.

    Enough allocations are kept for the replicas without a node and for the retired replicas of a pool of fixed size.
    Pending allocations are also kept for replicas that must move.
    """
    redundant: list[tuple[Allocation, str]] = []
    usable: list[Allocation] = []
    for allocation in (allocation for allocation in empty if allocation.running):
        if rotate_at(state, allocation) <= now:
            redundant.append((allocation, f"it ends in {allocation.ends_at - now:.0f} s, and no replica is on it"))
        elif not _must_stay(state, node_group, allocation) and not any(
            inventory.is_usable(node) for node in _nodes_of(allocation)
        ):
            redundant.append((allocation, "none of its nodes is usable"))
        elif any(candidate.allocation == allocation.tag for candidate in inventory.candidates(node_group.name)):
            usable.append(allocation)
    if not node_group.separate_jobs:
        return redundant
    gangs = [members for members in inventory.gangs if members[0].role in node_group.roles]
    wanted = [member for members in gangs for member in to_launch(members) if member.id not in assigned.targets]
    retired = [
        member
        for members in gangs
        if any(member.status is Status.RETIRED for member in members) and not state.job.role(members[0].role).is_elastic
        for member in members
        if member.id not in assigned.retries
    ]
    unmovable = [replica for replica in assigned.unmovable if replica.role in node_group.roles]
    lacking, retired_nodes, unmovable_nodes = (
        nodes_for(state, wanted),
        nodes_for(state, retired),
        nodes_for(state, unmovable),
    )
    queued = [allocation for allocation in empty if allocation.pending]
    for allocations, needed in ((usable, lacking + retired_nodes), (queued, lacking + retired_nodes + unmovable_nodes)):
        redundant += [(allocation, "no replica needs it") for allocation in allocations[needed:]]
    return redundant


def _must_stay(state: State, node_group: NodeGroup, allocation: Allocation) -> bool:
    """Return whether an allocation without usable nodes is kept.

    It is kept if one of its nodes must be drained. It is also kept if it is the first allocation of a node group whose
    nodes belong to one job, such as the pool, because the manager may run in it, or because it may be a component of a
    heterogeneous job, whose other components would end with it.
    """
    if any(
        should_drain(state, state.nodes[node]) or f"{node}!drain" in state.intents
        for node in _nodes_of(allocation)
        if node in state.nodes
    ):
        return True
    return not node_group.separate_jobs and allocation.tag == f"{state.run}.{node_group.name}"


def _nodes_of(allocation: Allocation) -> tuple[NodeName, ...]:
    """Return the nodes that the cluster reports for the allocation."""
    return allocation.status.nodes if allocation.status is not None else ()


def preemptions(state: State, inventory: NodeInventory, now: float) -> list[Decision]:
    """Return the fences of the replicas whose allocation is ending or reclaimed. ``now`` is the manager's time (s).

    The elastic pool gives these replicas up instead. It also gives up a replica whose allocation is suspended, or ends
    without a successor. While its successor is queued, the replica is fenced and takes the successor.
    """
    fences: list[Decision] = []
    stops: dict[ReplicaId, str] = {}
    limits, elastic = state.job.limits, elastic_role(state.job)
    queued = 0 if elastic is None else inventory.expected(elastic.name) - _without_node(state, elastic.name)
    for replica in state.workers:
        if not replica.is_current:
            continue
        evidence = _preemption_evidence(state, replica, now)
        if elastic is not None and elastic.name == replica.role:
            if evidence := evidence or _loss_evidence(state, replica):
                stops[gang_of(replica.id)] = evidence
                continue
            if now >= inventory.stops.get(replica.allocation or "", NEVER):
                evidence = _end_evidence(state.allocations[replica.allocation or ""], now)
                if queued <= 0:
                    stops[gang_of(replica.id)] = evidence
                    continue
                queued -= 1
        if not evidence:
            continue
        in_place = LowerRungs((Rung.IN_PLACE,), "its node to stay in the run")
        spare = LowerRungs((Rung.SPARE,), f"another free node that can host {replica.id}")
        rung, expects, time_limit = Rung.REPLACEMENT, "joins again once it has a node", limits.allocation + limits.join
        lower: tuple[LowerRungs, ...] = (in_place, spare)
        if inventory.can_place(replica):
            rung, expects, time_limit = Rung.SPARE, "joins again on a spare node", limits.join
            lower = (in_place,)
        why = Why((evidence,), rung, expects, now + time_limit, lower)
        fences.append(Fence(replica.incarnation, rung, why, charged=False))
    if elastic is not None and stops:
        why = Why(tuple(f"{id}: {evidence}" for id, evidence in stops.items()), expects="the others continue its work")
        fences.append(Resize(elastic.name, (), tuple(stops), why))
    return fences


def _without_node(state: State, role: str) -> int:
    """Return the number of members of a role that are to be launched."""
    return sum(member.role == role and member.status is Status.WANTED for member in state.workers)


def _preemption_evidence(state: State, replica: Replica, now: float) -> str:
    """Return why the replica's allocation can no longer be used; empty if it can be used."""
    tag = replica.allocation or ""
    allocation = state.allocations.get(tag)
    if allocation is None:
        return f"its allocation {tag} was taken back: {state.reclaimed[tag]}" if tag in state.reclaimed else ""
    if allocation.ending:
        return f"its allocation {tag} ends: {allocation.status.detail if allocation.status else ''}"
    if allocation.running and now >= allocation.ends_at and replica.step is None:
        return f"the walltime of its allocation {tag} is over, and its process has ended"
    if not allocation.reclaimed:
        return ""
    return f"its allocation {tag} is preempted, and ends in {max(0.0, allocation.ends_at - now):.0f} s"


def _loss_evidence(state: State, replica: Replica) -> str:
    """Return why the node of a replica of the elastic pool is lost; empty if it is not."""
    node = state.nodes.get(replica.node or NodeName(""))
    if node is None or replica.allocation not in state.allocations:
        return f"{replica.node} is no longer in an allocation of this run"
    if node.name in state.node_commands:
        return f"{node.name} is to be drained, requested by {state.node_commands[node.name][1]}"
    return "" if node.excluded is None else f"{node.name} is excluded: {node.excluded}"


def _end_evidence(allocation: Allocation, now: float) -> str:
    """Return why a replica of the elastic pool leaves its allocation, as evidence."""
    if allocation.suspended_since is not None:
        return f"its allocation {allocation.tag} has been suspended for {now - allocation.suspended_since:.0f} s"
    return f"its allocation {allocation.tag} ends in {allocation.ends_at - now:.0f} s"


def cancelled_externally(state: State) -> str:
    """Return the evidence that a person ends the run without an rrl command; empty if there is none."""
    times = len(state.external_cancellations)
    if times < CANCELLATIONS_TO_END_RUN:
        return ""
    return f"all allocations of the run were cancelled {times} times within an hour, and not by rrl cancel"
