"""Reduce user commands (cancel, restart, drain, resize, resume, faults), resized pools and full restarts. Pure."""

from __future__ import annotations

from msgspec.structs import replace

from ...core.run_spec import RunSpec
from ...core.types import ReplicaId, gang_of, is_support, member_id, replica_id
from . import events as ev
from .actions import Fence, Resize, RestartAll, Rung
from .pools import elastic_role, pool_state
from .reduce_nodes import DRAIN, UNDRAIN, on_node_command, without_departed
from .reduce_replicas import MAX_RESTART_BACKOFF_S, on_fence, with_replica
from .state import Allocation, Node, PoolState, Replica, State, Status
from .table import put, without

RESIZE = "resize"
"""Command of users about a rollout pool."""
_ROLE = "role"
"""Value of ``recovery.policy`` with which the whole run is restarted only if no smaller repair is left."""


def on_command(state: State, at: float, event: ev.CommandReceived) -> State:
    """Record a user's command, so that it is handled only once, and record what it requests."""
    state = replace(state, handled_commands=(*state.handled_commands, event.id))
    if event.command == "cancel":
        return replace(state, cancelled_by=event.by, keep_allocations=event.keep_allocations)
    if event.command in (DRAIN, UNDRAIN):
        return on_node_command(state, at, event)
    if event.command == RESIZE:
        return _on_resize_command(state, event)
    target = ReplicaId(event.target)
    if event.command == "restart" and target in state.replicas and state.finish is None:
        return replace(state, requested_restarts=put(state.requested_restarts, gang_of(target), event.by))
    return state


def _on_resize_command(state: State, event: ev.CommandReceived) -> State:
    """Record the number of replicas that a user sets; a number that the pool cannot have is ignored."""
    role = elastic_role(state.job)
    if role is None or role.name != event.target or state.finish is not None:
        return state
    if event.replicas is not None and not role.replicas <= event.replicas <= (role.max_replicas or 0):
        return state
    pool = replace(pool_state(state, role.name), held=event.replicas, resized_step=-1)
    return replace(state, pools={**state.pools, role.name: pool})


def on_fault_requested(state: State, at: float, event: ev.FaultRequested) -> State:
    """Record a fault that a user requested."""
    return replace(
        state,
        handled_commands=(*state.handled_commands, event.id),
        requested_faults=(*state.requested_faults, event.fault),
    )


def on_resumed(state: State, at: float, event: ev.Resumed) -> State:
    """Restart an ended run from its last commit: all replicas are launched again with new budgets.

    The run uses its remaining allocations if they fit the job. Excluded nodes stay excluded, no incarnation number is
    used twice, and what elastic pools have spent stays spent. The nodes' results of ``[env] probe`` are dropped, since
    the job may have been corrected.
    """
    state = replace(state, handled_commands=(*state.handled_commands, event.id))
    if state.outcome is None:
        return state
    numbers = {**state.past_incarnations, **{id: replica.incarnation_number for id, replica in state.replicas.items()}}
    replicas = {id: _fresh_replica(state, id, numbers.get(id, 0), at) for id in members_of(event.job)}
    for id, replica in state.replicas.items():
        if is_support(replica.id):
            replicas[id] = Replica(id, Status.RETIRED, replica.incarnation_number, since=at)
    allocations = {
        tag: allocation if _matches_job(event.job, allocation) else replace(allocation, orphan=True)
        for tag, allocation in state.allocations.items()
    }
    nodes = {name: _reset_probe(node) for name, node in state.nodes.items()}
    for tag, allocation in allocations.items():
        nodes = without_departed(nodes, tag, ()) if allocation.orphan else nodes
    nodes = {name: node for name, node in nodes.items() if node.allocation or node.excluded is not None}
    elastic = elastic_role(state.job)
    pools = {**({elastic.name: PoolState()} if elastic is not None else {}), **state.pools}
    has_nodes = any(
        allocation.running and not event.job.node_group(allocation.request.node_group).dedicated
        for allocation in allocations.values()
    )
    paused_s = state.paused_s + (0.0 if state.ended is None else at - state.ended)
    return replace(
        state,
        job=event.job,
        replicas=replicas,
        past_incarnations={id: n for id, n in numbers.items() if id not in replicas},
        launched=False,
        ended=None,
        paused_s=paused_s,
        outcome=None,
        finish=None,
        why="",
        cancelled_by="",
        keep_allocations=False,
        requested_since=None,
        running_since=at if has_nodes else None,
        nodes=nodes,
        allocations=allocations,
        findings={},
        intents={},
        rejected_requests=(),
        reclaimed={},
        external_cancellations=(),
        orphan_steps={},
        requested_faults=(),
        requested_restarts={},
        node_commands={},
        full_restarts=(),
        guests_withdrawn=False,
        baselines={},
        balance=(),
        pools={name: PoolState(spent_node_s=pool.spent_node_s) for name, pool in pools.items()},
        commits=(),
        gpu_use={},
    )


def _matches_job(job: RunSpec, allocation: Allocation) -> bool:
    """Return whether the allocation's nodes have the shape that this job requests."""
    request = allocation.request
    wanted = next((group for group in job.node_groups if group.name == request.node_group), None)
    return wanted is not None and (wanted.node, wanted.sbatch) == (request.node, request.sbatch)


def _reset_probe(node: Node) -> Node:
    """Return the node without its result of ``[env] probe``, and without an exclusion for a failed ``[env] probe``."""
    changes = (
        {"excluded": None, "cause": None} if node.probe_error and not (node.proved or node.drain_requested_by) else {}
    )
    return replace(node, probe_error=None, **changes)


def members_of(job: RunSpec) -> list[ReplicaId]:
    """Return the ids of all members of all roles, in the order of the job."""
    return [
        member_id(replica_id(role.name, index), rank)
        for role in job.roles
        for index in range(role.replicas)
        for rank in range(role.ranks)
    ]


def _fresh_replica(state: State, id: ReplicaId, incarnation: int, at: float) -> Replica:
    """Return the replica without its failures and with its full restart budget; a completed replica is unchanged."""
    replica = state.replica(id)
    if replica.status is Status.COMPLETED:
        return replica
    return Replica(id, incarnation_number=incarnation, since=at, down_since=at, ever_joined=replica.ever_joined)


def on_resize(state: State, at: float, action: Resize) -> State:
    """Add replicas to a pool, and remove replicas from it; the steps of the removed ones become orphans.

    A removed replica keeps its incarnation number in ``past_incarnations``, should the pool get it again.
    """
    role, numbers = state.job.role(action.pool), dict(state.past_incarnations)
    for id in (member_id(id, rank) for id in action.stop for rank in range(role.ranks)):
        if (replica := state.replicas.get(id)) is None:
            continue
        if replica.is_current:
            state = on_fence(state, at, Fence(replica.incarnation, Rung.DEGRADED, action.why, charged=False))
        numbers[id] = replica.incarnation_number
        requests = without(state.requested_restarts, id, gang_of(id))
        state = replace(state, replicas=without(state.replicas, id), requested_restarts=requests)
    for id in (member_id(id, rank) for id in action.start for rank in range(role.ranks)):
        if id not in state.replicas:
            replica = Replica(id, incarnation_number=numbers.pop(id, 0), since=at, down_since=at)
            state = replace(state, replicas=put(state.replicas, id, replica))
    pools = state.pools
    if role.is_elastic:
        pools = {**pools, role.name: replace(pool_state(state, role.name), resized_step=state.step)}
    return replace(state, past_incarnations=numbers, pools=pools)


def on_restart_all(state: State, at: float, action: RestartAll) -> State:
    """Fence all incarnations that the action names and that are still current.

    If a user has requested the restart of a retired replica, this request stays open.
    """
    recent = tuple(
        restarted_at for restarted_at in state.full_restarts if at - restarted_at < state.job.recovery.window
    )
    state = replace(state, full_restarts=(*recent, at))
    for fence in action.fences:
        state = on_fence(state, at, fence) if state.is_current(fence.incarnation) else state
    if state.job.recovery.policy == _ROLE and action.failed is not None and action.failed.replica in state.replicas:
        # All smaller repairs have failed. The fault may be an outage of a minute, so the last attempt is delayed.
        state = with_replica(state, action.failed.replica, not_before=at + MAX_RESTART_BACKOFF_S)
    return state
