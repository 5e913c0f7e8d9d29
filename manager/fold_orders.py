"""What is believed after a person's order: cancel, restart, drain, resume, faults."""

from __future__ import annotations

from typing import Any

import msgspec

from rrl.manager import events as ev
from rrl.manager.fold_marks import DRAIN, UNDRAIN, ordered_of_node
from rrl.manager.state import Replica, State, Status
from rrl.spec.jobview import JobView
from rrl.spec.words import AGENT, SHADOW, ReplicaId, gang_of, member_id, replica_id


def commanded(state: State, at: float, event: ev.Commanded) -> State:
    state = _with(state, commands=(*state.commands, event.id))
    if event.command == "cancel":
        return _with(state, cancelled_by=event.by, keep=event.keep)
    if event.command in (DRAIN, UNDRAIN):
        return ordered_of_node(state, at, event)
    target = ReplicaId(event.target)
    if event.command == "restart" and target in state.replicas and state.verdict is None:
        return _with(state, restarts={**state.restarts, gang_of(target): event.by})
    return state


def ordered(state: State, at: float, event: ev.Ordered) -> State:
    return _with(state, commands=(*state.commands, event.id), ordered=(*state.ordered, event.fault))


def resumed(state: State, at: float, event: ev.Resumed) -> State:
    """A run that has ended goes on from its last commit: everybody is wanted again, with fresh budgets. What was kept
    of its allocations is used, nodes that it may not use are remembered, and no incarnation is used twice."""
    state = _with(state, commands=(*state.commands, event.id))
    if state.outcome is None:
        return state
    known = {**state.past, **{id: replica.incarnation for id, replica in state.replicas.items()}}
    replicas = {id: _anew(state, id, known.get(id, 0), at) for id in _members(event.job)}
    for id, replica in state.replicas.items():
        if replica.role in (AGENT, SHADOW):
            replicas[id] = Replica(id, Status.RETIRED, replica.incarnation, since=at)
    held = any(one.running for one in state.allocations.values())
    nodes = {name: node for name, node in state.nodes.items() if node.allocation or node.excluded is not None}
    return _with(
        state, job=event.job, replicas=replicas, past={id: n for id, n in known.items() if id not in replicas},
        launched=False, ended=None, outcome=None, verdict=None, why="", cancelled_by="", keep=False, asked_since=None,
        running_since=at if held else None, nodes=nodes,
        findings={}, intents={}, refusals=(), lingering={}, ordered=(), restarts={}, marks={}, wholes=(),
    )  # fmt: skip


def _members(job: JobView) -> list[ReplicaId]:
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


def _with(state: State, **changes: Any) -> State:
    return msgspec.structs.replace(state, **changes)
