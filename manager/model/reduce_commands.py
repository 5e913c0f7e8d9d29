"""Reduce user commands (cancel, restart, drain, resume, faults) and restarts of the whole run into the state. Pure."""

from __future__ import annotations

from msgspec.structs import replace

from ...core.run_spec import JobView
from ...core.types import AGENT, SHADOW, ReplicaId, gang_of, member_id, replica_id
from . import events as ev
from .actions import RestartAll
from .reduce_nodes import DRAIN, UNDRAIN, left, ordered_of_node
from .reduce_replicas import LONGEST_PAUSE, fenced, with_replica
from .state import Allocation, Node, Replica, State, Status


def commanded(state: State, at: float, event: ev.Commanded) -> State:
    state = replace(state, commands=(*state.commands, event.id))
    if event.command == "cancel":
        return replace(state, cancelled_by=event.by, keep=event.keep)
    if event.command in (DRAIN, UNDRAIN):
        return ordered_of_node(state, at, event)
    target = ReplicaId(event.target)
    if event.command == "restart" and target in state.replicas and state.verdict is None:
        return replace(state, restarts={**state.restarts, gang_of(target): event.by})
    return state


def ordered(state: State, at: float, event: ev.Ordered) -> State:
    return replace(state, commands=(*state.commands, event.id), ordered=(*state.ordered, event.fault))


def resumed(state: State, at: float, event: ev.Resumed) -> State:
    """A run that has ended goes on from its last commit: everybody is wanted again, with fresh budgets. What was kept
    of its allocations is used where it fits the job, nodes that it may not use are remembered, and no incarnation is
    used twice. What the nodes could not do for the roles is asked anew: the job may have been corrected."""
    state = replace(state, commands=(*state.commands, event.id))
    if state.outcome is None:
        return state
    known = {**state.past, **{id: replica.incarnation for id, replica in state.replicas.items()}}
    replicas = {id: _anew(state, id, known.get(id, 0), at) for id in members_of(event.job)}
    for id, replica in state.replicas.items():
        if replica.role in (AGENT, SHADOW):
            replicas[id] = Replica(id, Status.RETIRED, replica.incarnation, since=at)
    allocations = {tag: one if _serves(event.job, one) else replace(one, stray=True)
                   for tag, one in state.allocations.items()}  # fmt: skip
    nodes = {name: _asked_anew(node) for name, node in state.nodes.items()}
    for tag, one in allocations.items():
        nodes = left(nodes, tag, ()) if one.stray else nodes
    nodes = {name: node for name, node in nodes.items() if node.allocation or node.excluded is not None}
    held = any(one.running for one in allocations.values())
    return replace(
        state, job=event.job, replicas=replicas, past={id: n for id, n in known.items() if id not in replicas},
        launched=False, ended=None, outcome=None, verdict=None, why="", cancelled_by="", keep=False, asked_since=None,
        running_since=at if held else None, nodes=nodes, allocations=allocations, findings={}, intents={}, refusals=(),
        taken_back={}, emptied=(), lingering={}, ordered=(), restarts={}, marks={}, wholes=(), lessons={},
    )  # fmt: skip


def _serves(job: JobView, allocation: Allocation) -> bool:
    """Its nodes are such as this job would ask for."""
    asked = allocation.ask
    part = next((part for part in job.parts if part.name == asked.part), None)
    return part is not None and (part.node, part.sbatch) == (asked.node, asked.sbatch)


def _asked_anew(node: Node) -> Node:
    """Of the probe, by which it may have been excluded."""
    changes = {"excluded": None, "cause": None} if node.probe and not (node.proved or node.asked_by) else {}
    return replace(node, probe=None, **changes)


def members_of(job: JobView) -> list[ReplicaId]:
    """All that the job asks for, in its order."""
    return [
        member_id(replica_id(role.name, index), rank)
        for role in job.roles for index in range(role.replicas) for rank in range(role.ranks)
    ]  # fmt: skip


def _anew(state: State, id: ReplicaId, incarnation: int, at: float) -> Replica:
    """Whoever has done its work is not started again."""
    held = state.replica(id)
    if held.status is Status.COMPLETED:
        return held
    return Replica(id, incarnation=incarnation, since=at, down_since=at, ever_joined=held.ever_joined)


REQUEUE = "requeue"
"""of ``recovery.policy``: what restarts as a whole does so on nodes that are asked for anew"""
_ROLE = "role"


def restarted_all(state: State, at: float, action: RestartAll) -> State:
    """The planner has said whose lives end, and where each is wanted next; but for those about whom it had just decided
    something else, which stands. Who rests, and is to restart because a person asked, still is."""
    policy = state.job.recovery.policy
    recent = tuple(one for one in state.wholes if at - one < state.job.recovery.window)
    state = replace(state, wholes=(*recent, at))
    for fence in action.fences:
        state = fenced(state, at, fence) if state.believed(fence.life) else state
    if policy == REQUEUE:
        return _given_up(state)
    if policy == _ROLE and action.failed is not None and action.failed.replica in state.replicas:
        # Every smaller repair has failed by now. What is wrong may be an outage that is over in a minute; the last
        # try is not made before that.
        state = with_replica(state, action.failed.replica, not_before=at + LONGEST_PAUSE)
    return state


def _given_up(state: State) -> State:
    """As Slurm's requeue: all nodes are given back, and the first request is made again. What still ends on the old
    ones goes with them; those that are excluded stay known."""
    for tag, allocation in state.allocations.items():
        if allocation.running:
            stray = replace(allocation, stray=True)
            nodes = left(state.nodes, tag, ())
            state = replace(state, allocations={**state.allocations, tag: stray}, nodes=nodes)
    for held in state.replicas.values():
        if held.status is Status.WANTED:
            state = with_replica(state, held.id, prefer=None)
    return replace(state, launched=False, asked_since=None)
