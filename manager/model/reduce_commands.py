"""Reduce user commands (cancel, restart, drain, resume, faults) and restarts of the whole run into the state. Pure."""

from __future__ import annotations

from msgspec.structs import replace

from ...core.run_spec import RunSpec
from ...core.types import AGENT, STANDBY_ROLE, ReplicaId, gang_of, member_id, replica_id
from . import events as ev
from .actions import RestartAll
from .reduce_nodes import DRAIN, UNDRAIN, on_node_command, without_departed
from .reduce_replicas import MAX_RESTART_BACKOFF_S, on_fence, with_replica
from .state import Allocation, Node, Replica, State, Status


def on_command(state: State, at: float, event: ev.CommandReceived) -> State:
    state = replace(state, handled_commands=(*state.handled_commands, event.id))
    if event.command == "cancel":
        return replace(state, cancelled_by=event.by, keep_allocations=event.keep_allocations)
    if event.command in (DRAIN, UNDRAIN):
        return on_node_command(state, at, event)
    target = ReplicaId(event.target)
    if event.command == "restart" and target in state.replicas and state.finish is None:
        return replace(state, requested_restarts={**state.requested_restarts, gang_of(target): event.by})
    return state


def on_fault_requested(state: State, at: float, event: ev.FaultRequested) -> State:
    return replace(
        state,
        handled_commands=(*state.handled_commands, event.id),
        requested_faults=(*state.requested_faults, event.fault),
    )


def on_resumed(state: State, at: float, event: ev.Resumed) -> State:
    """A run that has ended goes on from its last commit: everybody is wanted again, with fresh budgets. What was kept
    of its allocations is used where it fits the job, nodes that it may not use are remembered, and no incarnation is
    used twice. What the nodes could not do for the roles is asked anew: the job may have been corrected."""
    state = replace(state, handled_commands=(*state.handled_commands, event.id))
    if state.outcome is None:
        return state
    numbers = {**state.past_incarnations, **{id: replica.incarnation_number for id, replica in state.replicas.items()}}
    replicas = {id: _fresh_replica(state, id, numbers.get(id, 0), at) for id in members_of(event.job)}
    for id, replica in state.replicas.items():
        if replica.role in (AGENT, STANDBY_ROLE):
            replicas[id] = Replica(id, Status.RETIRED, replica.incarnation_number, since=at)
    allocations = {tag: one if _matches_job(event.job, one) else replace(one, orphan=True)
                   for tag, one in state.allocations.items()}  # fmt: skip
    nodes = {name: _reset_probe(node) for name, node in state.nodes.items()}
    for tag, one in allocations.items():
        nodes = without_departed(nodes, tag, ()) if one.orphan else nodes
    nodes = {name: node for name, node in nodes.items() if node.allocation or node.excluded is not None}
    has_nodes = any(one.running for one in allocations.values())
    return replace(
        state, job=event.job, replicas=replicas, past_incarnations={id: n for id, n in numbers.items() if id not in replicas},
        launched=False, ended=None, outcome=None, finish=None, why="", cancelled_by="", keep_allocations=False, requested_since=None,
        running_since=at if has_nodes else None, nodes=nodes, allocations=allocations, findings={}, intents={}, rejected_requests=(),
        reclaimed={}, external_cancellations=(), orphan_steps={}, requested_faults=(), requested_restarts={}, node_commands={}, full_restarts=(), baselines={},
    )  # fmt: skip


def _matches_job(job: RunSpec, allocation: Allocation) -> bool:
    """Its nodes are such as this job would ask for."""
    request = allocation.request
    node_group = next((node_group for node_group in job.node_groups if node_group.name == request.node_group), None)
    return node_group is not None and (node_group.node, node_group.sbatch) == (request.node, request.sbatch)


def _reset_probe(node: Node) -> Node:
    """Of the probe, by which it may have been excluded."""
    changes = (
        {"excluded": None, "cause": None} if node.probe_error and not (node.proved or node.drain_requested_by) else {}
    )
    return replace(node, probe_error=None, **changes)


def members_of(job: RunSpec) -> list[ReplicaId]:
    """All that the job asks for, in its order."""
    return [
        member_id(replica_id(role.name, index), rank)
        for role in job.roles for index in range(role.replicas) for rank in range(role.ranks)
    ]  # fmt: skip


def _fresh_replica(state: State, id: ReplicaId, incarnation: int, at: float) -> Replica:
    """Whoever has done its work is not started again."""
    replica = state.replica(id)
    if replica.status is Status.COMPLETED:
        return replica
    return Replica(id, incarnation_number=incarnation, since=at, down_since=at, ever_joined=replica.ever_joined)


REQUEUE = "requeue"
"""of ``recovery.policy``: what restarts as a whole does so on nodes that are asked for anew"""
_ROLE = "role"


def on_restart_all(state: State, at: float, action: RestartAll) -> State:
    """The planner has said whose lives end, and where each is wanted next; but for those about whom it had just decided
    something else, which stands. Who rests, and is to restart because a person asked, still is."""
    policy = state.job.recovery.policy
    recent = tuple(one for one in state.full_restarts if at - one < state.job.recovery.window)
    state = replace(state, full_restarts=(*recent, at))
    for fence in action.fences:
        state = on_fence(state, at, fence) if state.is_current(fence.incarnation) else state
    if policy == REQUEUE:
        return _release_allocations(state)
    if policy == _ROLE and action.failed is not None and action.failed.replica in state.replicas:
        # Every smaller repair has failed by now. What is wrong may be an outage that is over in a minute; the last
        # try is not made before that.
        state = with_replica(state, action.failed.replica, not_before=at + MAX_RESTART_BACKOFF_S)
    return state


def _release_allocations(state: State) -> State:
    """As Slurm's requeue: all nodes are given back, and the first request is made again. What still ends on the old
    ones goes with them; those that are excluded stay known."""
    for tag, allocation in state.allocations.items():
        if allocation.running:
            orphan = replace(allocation, orphan=True)
            nodes = without_departed(state.nodes, tag, ())
            state = replace(state, allocations={**state.allocations, tag: orphan}, nodes=nodes)
    for replica in state.replicas.values():
        if replica.status is Status.WANTED:
            state = with_replica(state, replica.id, preferred_node=None)
    return replace(state, launched=False, requested_since=None)
