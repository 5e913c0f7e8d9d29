"""Request the nodes that the run lacks, give overdue requests up, and release allocations that it does not need."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

import msgspec

from ....core.run_spec import NodeGroup
from ....core.types import NodeName, Outcome, ReplicaId, gang_of, role_of
from ...model.actions import Action, Fence, Finish, LowerRungs, Release, Request, Resize, Rung, Why
from ...model.pools import affordable, elastic_role
from ...model.queries import extras_role, gang, open_requests, place_of, substitutes
from ...model.state import Allocation, Replica, State, Status
from ..deadlines import NEVER, SHUTDOWN_GRACES, rotate_at, unsatisfiable_at
from .allocation_requests import (
    MAX_REJECTIONS,
    await_minimum,
    exhausted_at,
    first_request,
    holds_nothing,
    is_rejected,
    new_requests,
    rejections,
    requests_due_again,
    retry_at,
    unsatisfiable,
)
from .node_fitness import HARDWARE_CAUSES, MAX_NAMED_NODES
from .nodes import NodeInventory
from .placement import Assignment, nodes_for
from .rotation import redundant_allocations


def supply(state: State, inventory: NodeInventory, assigned: Assignment, now: float) -> tuple[list[Action], float]:
    """Return requests and releases, or decisions about unmet requests, and the next wake (manager's time, s)."""
    if state.job.form != "replica" and holds_nothing(state):
        return first_request(state, now), NEVER
    actions, wake = _overdue(state, inventory, assigned, now)
    if actions:
        return actions, wake
    releases, idle_wake = redundant_allocations(state, inventory, assigned, now)
    again, again_at = requests_due_again(state, now)
    actions = [*releases] or again  # a released request is not made again
    wake = min(wake, idle_wake, again_at, inventory.next_change)
    if not inventory.may_start:
        requests, deadline = await_minimum(state, inventory, now)
        return [*actions, *requests], min(wake, deadline)
    begun = state.launched or any(a.running for a in state.allocations.values())
    for node_group in state.job.node_groups:
        if node_group.dedicated and not begun:
            continue  # a further pool would wait for the run's own nodes
        more, again_at = _replacements(state, inventory, assigned, node_group, now)
        actions, wake = [*actions, *more], min(wake, again_at)
    return actions, wake


def _overdue(state: State, inventory: NodeInventory, assigned: Assignment, now: float) -> tuple[list[Action], float]:
    """Return the actions that give up one overdue request, and the next wake (manager's time, s).

    A request is overdue if it was not met by its deadline or can never be met. The replicas that lack the requested
    nodes are retired; if their role cannot spare them, the run ends. The request is released, unless the retired
    replicas could still use nodes that arrive later. Requests of further rollout pools may wait forever, but one of the
    elastic pool is given up as soon as the cluster refuses it for now. Before the run has started, waiting in the queue
    costs nothing, so only requests that can never be met are given up. An allocation that is granted after its request
    was given up is released.
    """
    wake, unsettled = NEVER, open_requests(state)
    for allocation in state.allocations.values():
        if allocation.orphan and not allocation.releasing:
            if now >= allocation.not_before:
                return [
                    Release(allocation.tag, Why((f"{allocation.tag} was granted after it had been given up",)))
                ], now
            wake = min(wake, allocation.not_before)
        if not allocation.pending or allocation.tag in unsettled:
            continue  # an unanswered request is settled first: it may be granted after its release
        unsatisfiable_reason = (
            allocation.status.unsatisfiable_reason if allocation.status and now >= unsatisfiable_at(allocation) else ""
        )
        node_group = state.job.node_group(allocation.request.node_group)
        early = state.running_since is None or not inventory.may_start or _is_idle(state)
        if early and not node_group.dedicated:
            give_up_at = allocation.requested_at + state.job.limits.allocation if allocation.refused else NEVER
            if unsatisfiable_reason or now >= give_up_at:
                return [unsatisfiable(state, allocation)], now
            wake = min(wake, give_up_at, unsatisfiable_at(allocation))
            continue
        if _is_for_spares(state, inventory, assigned, allocation):
            continue
        due = min(_deadline(state, assigned, allocation), unsatisfiable_at(allocation))
        deadline = max(due, allocation.not_before)
        if now < deadline:
            wake = min(wake, deadline)
            continue
        detail = allocation.status.detail if allocation.status else "not listed in the queue"
        text = f"no nodes after {now - allocation.requested_at:.0f} s ({detail})"
        evidence = (f"{allocation.tag}: {unsatisfiable_reason or text}",)
        if elastic_role(state.job, node_group.name):
            return [Release(allocation.tag, Why(evidence))], now
        expected = inventory.expected(node_group.name) - allocation.request.count
        consequences = _handle_no_nodes(state, inventory, assigned, node_group, expected, evidence, now)
        still_useful = (
            bool(consequences)
            and not unsatisfiable_reason
            and all(isinstance(action, Fence) for action in consequences)
        )
        return [*([] if still_useful else [Release(allocation.tag, Why(evidence))]), *consequences], now
    return [], wake


def _is_idle(state: State) -> bool:
    """Return whether nothing is launched and no nodes are held, as if all nodes were lost before a launch."""
    return not state.launched and not any(allocation.running for allocation in state.allocations.values())


def _deadline(state: State, assigned: Assignment, allocation: Allocation) -> float:
    """Return the manager's time (s) by which a request must have been met; inf if there is no deadline.

    The deadline counts from the request, or from the time at which a replica first lacked the nodes if this was later.
    There is no deadline for the successor of an allocation that ends, for the separate job of a replica that is not
    essential, for nodes of a further rollout pool, and for nodes that only retired replicas could use.
    """
    node_group = state.job.node_group(allocation.request.node_group)
    if node_group.dedicated:
        return 0.0 if allocation.refused and elastic_role(state.job, node_group.name) else NEVER
    lacking = [replica for replica in assigned.lacking if replica.role in node_group.roles]
    if not lacking and any(replica.role in node_group.roles for replica in assigned.unmovable):
        return NEVER
    roles = {replica.role for replica in lacking}
    if node_group.separate_jobs and all(
        _remaining(state, role, lacking) >= _min_replicas(state, role, lacking) for role in roles
    ):
        return NEVER
    if not lacking and any(
        replica.status is Status.RETIRED for replica in state.workers if replica.role in node_group.roles
    ):
        return NEVER
    since = max(
        allocation.requested_at, min((replica.down_since for replica in lacking), default=allocation.requested_at)
    )
    return since + state.job.limits.allocation


def _replacements(
    state: State, inventory: NodeInventory, assigned: Assignment, node_group: NodeGroup, now: float
) -> tuple[list[Action], float]:
    """Return requests for the missing nodes of a group, and the next wake (manager's time, s).

    After too many rejections, return the decisions to continue without these nodes, or to end the run.
    """
    recent_rejections = rejections(state, node_group, now)
    window = state.job.recovery.window
    lacking = [replica for replica in (*assigned.lacking, *assigned.unmovable) if replica.role in node_group.roles]
    lacking += [] if recent_rejections or lacking else _retired_to_retry(state, assigned, node_group, now)
    expected = inventory.expected(node_group.name)
    missing = nodes_for(state, lacking) + _missing_spares(state, inventory, assigned, node_group) - expected
    if missing <= 0:
        return [], recent_rejections[-1].at + window if recent_rejections else NEVER
    if elastic_role(state.job, node_group.name):
        over = is_rejected(state, recent_rejections, now)
        allowed = 0 if over else affordable(state, state.job.role(node_group.name), now)[0]
        if surplus := _surplus(state, assigned, node_group, expected + allowed):
            reason = recent_rejections[-1].detail if over else "its budget of node hours is used up"
            return [Resize(node_group.name, (), surplus, Why((reason,), expects="the others continue its work"))], now
        if (missing := min(missing, allowed)) <= 0:
            return [], recent_rejections[-1].at + window if recent_rejections else NEVER
    if now >= (give_up_at := exhausted_at(state, recent_rejections)):
        evidence = tuple(rejected.detail for rejected in recent_rejections)
        consequences = _handle_no_nodes(state, inventory, assigned, node_group, expected, evidence, now)
        return consequences, recent_rejections[-MAX_REJECTIONS:][0].at + window
    if recent_rejections:
        again_at = retry_at(recent_rejections)
        if now < again_at:
            return [], min(again_at, give_up_at)
    names = ", ".join(replica.id for replica in lacking)
    only_moves = all(replica in assigned.unmovable for replica in lacking)
    text = f"the allocation of {names} ends" if only_moves else f"no free node for {names}"
    if not lacking:
        text = f"spare nodes are excluded: {', '.join(_lost_spares(state, node_group))}"
    lower = (LowerRungs((Rung.SPARE,), "a free node in the run"),)
    why = Why((text,), Rung.REPLACEMENT, "a node", now + state.job.limits.allocation, lower)
    requests = new_requests(state, node_group, missing, now)
    if not node_group.separate_jobs:
        kind = "more" if node_group is state.job.node_groups[0] else f"more-{node_group.name}"
        requests = [msgspec.structs.replace(request, tag=f"{state.run}.{kind}-{state.seq}") for request in requests]
    reuses_nodes = any(
        _is_ending(state, allocation, now)
        for allocation in state.allocations.values()
        if allocation.request.node_group == node_group.name
    )
    requests = [
        msgspec.structs.replace(request, comment=f"{request.comment} replacement", may_reuse_own_nodes=reuses_nodes)
        for request in requests
    ]
    return [Request(request, why) for request in requests], NEVER


def _surplus(state: State, assigned: Assignment, node_group: NodeGroup, nodes: int) -> tuple[ReplicaId, ...]:
    """Return the replicas without a node that the elastic pool gives up, because only this many nodes will come."""
    lacking = dict.fromkeys(gang_of(replica.id) for replica in assigned.lacking if replica.role in node_group.roles)
    return tuple(lacking)[nodes // state.job.role(node_group.name).nodes :]


def _is_ending(state: State, allocation: Allocation, now: float) -> bool:
    """Return whether the allocation is ending, reclaimed or due for rotation."""
    return allocation.reclaimed or allocation.ending or rotate_at(state, allocation) <= now


def _missing_spares(state: State, inventory: NodeInventory, assigned: Assignment, node_group: NodeGroup) -> int:
    """Return the number of spare nodes that the pool needs beyond its replicas' nodes; extras leave a node spare.

    If replicas must move off an allocation that ends, all spare nodes of the job are requested again. Otherwise only
    spare nodes that were excluded for their hardware are replaced. A spare node that a replica now uses is not
    replaced.
    """
    if node_group.separate_jobs:
        return 0
    rotates = any(replica.role in node_group.roles for replica in assigned.unmovable)
    lost = len(_lost_spares(state, node_group))
    if not rotates and (not lost or _starts_extras(state, assigned)):
        return 0
    occupied = (inventory.occupied.keys() - inventory.extra_nodes) | {
        candidate.node for candidate in (*assigned.targets.values(), *assigned.moves.values())
    }
    free = sum(
        not candidate.expiring and candidate.node not in occupied for candidate in inventory.candidates(node_group.name)
    )
    missing = max(0, state.job.spares - free)
    return missing if rotates else min(lost, missing)


def _starts_extras(state: State, assigned: Assignment) -> bool:
    """Return whether rollouts are about to be launched on free nodes, which may leave these nodes spare."""
    role = extras_role(state.job)
    ids = (id for id in assigned.targets if role is not None and role_of(id) == role.name)
    return any(place_of(state.replica(id)) is None for id in ids)


def _lost_spares(state: State, node_group: NodeGroup) -> list[NodeName]:
    """Return the nodes of a group that the run excluded for their hardware while no replica but extras was on them.

    A node that is unfit for another reason is not replaced, because the next node would be no better.
    """
    return [
        node.name
        for node in state.nodes.values()
        if node.lost_spare and node.cause in HARDWARE_CAUSES and node.node_group == node_group.name
    ]


def _is_for_spares(state: State, inventory: NodeInventory, assigned: Assignment, allocation: Allocation) -> bool:
    """Return whether a request can only bring spare nodes. Such a request has no deadline."""
    node_group = state.job.node_group(allocation.request.node_group)
    needed = (*assigned.lacking, *assigned.unmovable)
    if any(replica.role in node_group.roles for replica in needed):
        return False
    return _missing_spares(state, inventory, assigned, node_group) > 0


def _retired_to_retry(state: State, assigned: Assignment, node_group: NodeGroup, now: float) -> list[Replica]:
    """Return the retired replicas for which nodes are requested, so that they can be launched again.

    These are the replicas of retired gangs that have no node and no failure within the recovery window. The caller
    requests no nodes for these replicas within the window after a rejection. A request that is already queued stays,
    and is used when granted. The caller also requests no nodes for these replicas while other replicas lack nodes.
    Otherwise each window would bring a new request, and the other replicas would wait forever instead of being retired.
    """
    window = state.job.recovery.window
    return [
        replica
        for members in state.gangs
        if members[0].role in node_group.roles
        and any(member.status is Status.RETIRED for member in members)
        and not any(member.recent_failures(window, now) for member in members)
        for replica in members
        if replica.id not in assigned.retries
    ]


def _handle_no_nodes(
    state: State,
    inventory: NodeInventory,
    assigned: Assignment,
    node_group: NodeGroup,
    expected: int,
    evidence: tuple[str, ...],
    now: float,
) -> list[Action]:
    """Return the decisions that retire the gangs without nodes, or end the run if a role cannot spare them.

    A gang whose own nodes still work is tried there once more before that. ``expected`` is the number of nodes that are
    still to come; the first gangs that lack nodes get these nodes.
    """
    no_node = (
        LowerRungs((Rung.SPARE,), "a free node in the run"),
        LowerRungs((Rung.REPLACEMENT,), "nodes from the cluster in time"),
    )
    actions: list[Action] = []
    wanted = [replica for replica in assigned.lacking if replica.role in node_group.roles]
    lacking = {id: list(members) for id, members in groupby(wanted, lambda member: gang_of(member.id))}
    for target, candidate in assigned.targets.items():
        inventory.reserve(state.replica(target), candidate.node)
    for id, members in list(lacking.items()):
        own = {member.id: node for member in members if (node := inventory.own_node(member)) is not None}
        for member in lacking.pop(id) if len(own) == len(members) else ():
            why = Why(evidence, Rung.IN_PLACE, f"joins again on {own[member.id]}", now + state.job.limits.join, no_node)
            actions.append(Fence(member.incarnation, Rung.IN_PLACE, why, own[member.id], charged=False))
    served: list[Replica] = []
    for members in list(lacking.values()):
        if nodes_for(state, [*served, *members]) > expected:
            break
        served += members
        del lacking[gang_of(members[0].id)]
    unserved = [member for members in lacking.values() for member in members]
    for id, members in lacking.items():
        role = members[0].role
        remaining = _remaining(state, role, unserved)
        if remaining < (least := _min_replicas(state, role, unserved)):
            names = ", ".join(member.id for member in members)
            deadline = now + SHUTDOWN_GRACES * state.job.limits.step_grace
            lines = (*dict.fromkeys(evidence), f"{names} has no node", *_excluded_node_lines(state, node_group))
            needed = f"nodes for {least} replicas of {role}, but only {remaining} would be left"
            few = LowerRungs((Rung.DEGRADED,), needed)
            why = Why(lines, Rung.GIVE_UP, "everything is released", deadline, (*no_node, few))
            return [Finish(Outcome.FAILED, why)]
        deadline = now + state.job.recovery.window
        why = Why(evidence, Rung.DEGRADED, f"{role} continues with {remaining} replicas", deadline, no_node)
        actions += [Fence(member.incarnation, Rung.DEGRADED, why, charged=False) for member in gang(state, id)]
    return actions


def _excluded_node_lines(state: State, node_group: NodeGroup) -> Iterator[str]:
    """Yield why nodes of this group are excluded, as evidence for the end of the run."""
    excluded = [
        node for node in state.nodes.values() if node.excluded is not None and node.node_group in (node_group.name, "")
    ]
    yield from (f"{node.name} is excluded: {node.excluded}" for node in excluded[:MAX_NAMED_NODES])
    if len(excluded) > MAX_NAMED_NODES:
        yield f"and {len(excluded) - MAX_NAMED_NODES} more"


def _remaining(state: State, role: str, lost: list[Replica]) -> int:
    """Return the number of gangs of a role that are not retired, without the gangs of the members in ``lost``."""
    ids = {gang_of(replica.id) for replica in lost}
    remaining = [members for members in state.gangs if members[0].role == role and gang_of(members[0].id) not in ids]
    return sum(all(member.status is not Status.RETIRED for member in members) for members in remaining)


def _min_replicas(state: State, role: str, lost: list[Replica]) -> int:
    """Return the number of replicas of a role below which the run ends for lack of nodes.

    It may be 0 if another rollout pool keeps a replica without the members in ``lost``, or if a guest works.
    """
    others = substitutes(state.job, role) - {role}
    spared = any(_remaining(state, other, lost) for other in others)
    spared = spared or any(guest.role in others and guest.status is Status.JOINED for guest in state.guests)
    return max(0 if spared else 1, state.job.role(role).min_replicas)
