"""What is believed of allocations and nodes after one more event: the part of ``fold`` that the cluster speaks of."""

from __future__ import annotations

from typing import Any

import msgspec

from rrl.manager import events as ev
from rrl.manager.actions import Launch, Outside
from rrl.manager.cluster import AllocationState, Ask
from rrl.manager.state import Allocation, Node, Refusal, State
from rrl.spec.jobview import Resources
from rrl.spec.words import NodeName


def requested(state: State, at: float, ask: Ask) -> State:
    """One allocation for each component."""
    asks = (ask, *ask.more)
    asked = dict(state.asked)
    for one in asks:
        asked[one.part] = asked.get(one.part, 0) + 1
    allocations = state.allocations | {one.tag: Allocation(one.tag, one, at) for one in asks}
    since = at if state.asked_since is None else state.asked_since
    return _with(state, allocations=allocations, asked=asked, asked_since=since)


def given_back(state: State, at: float, tag: str) -> State:
    """A request that could never have been met counts as refused, so that it is not made for ever."""
    held = state.allocations.get(tag)
    if held is not None and held.pending and held.seen is not None and held.seen.hopeless:
        state = _refused(state, Refusal(tag, at, f"{tag}: {held.seen.hopeless}", part=held.ask.part))
    return _allocation(state, tag, releasing=True)


def kept(state: State, tag: str, until: float) -> State:
    """Its give-back was refused, and is not asked for again before then."""
    return _allocation(state, tag, releasing=False, not_before=until)


def not_requested(state: State, at: float, ask: Ask, detail: str, unheard: bool) -> State:
    """Certainly not done: nothing of it exists."""
    state = _refused(state, Refusal(ask.tag, at, detail, unheard, ask.part))
    gone = {one.tag for one in (ask, *ask.more)}
    return _with(state, allocations={tag: one for tag, one in state.allocations.items() if tag not in gone})


def allocation_changed(state: State, at: float, event: ev.AllocationChanged) -> State:
    held = state.allocations.get(event.tag)
    over = event.seen is None or event.seen.state is AllocationState.ENDED
    if held is None:
        return state if over else _with(state, allocations={**state.allocations, event.tag: _stray(state, at, event)})
    if event.seen is None or over:
        if not (held.releasing or held.stray) and (held.seen is None or held.seen.state is AllocationState.PENDING):
            detail = (event.seen.detail if event.seen else "") or "no longer in the queue"  # and it has never run
            state = _refused(state, Refusal(event.tag, at, f"{event.tag}: {detail}", True, held.ask.part))
        return _with(
            state,
            allocations={tag: one for tag, one in state.allocations.items() if tag != event.tag},
            nodes=_left(state.nodes, event.tag, ()),
            lingering={tag: one for tag, one in state.lingering.items() if one.allocation != event.tag},
            intents={tag: one for tag, one in state.intents.items() if not _launches_into(one.action, event.tag)},
        )
    held = msgspec.structs.replace(held, seen=event.seen)
    since = held.running_since if held.running_since is not None else at  # one that is queued again begins anew
    held = msgspec.structs.replace(held, running_since=since if held.running else None)
    if held.stray:
        return _with(state, allocations={**state.allocations, event.tag: held})
    nodes = _left(state.nodes, event.tag, event.seen.nodes)
    for name in event.seen.nodes:
        node = nodes.get(name) or Node(name, event.tag)
        if node.allocation != event.tag:
            node = msgspec.structs.replace(node, allocation=event.tag, seen=None)
        nodes[name] = msgspec.structs.replace(node, part=held.ask.part)
    began = at if state.running_since is None and held.running else state.running_since
    return _with(state, allocations={**state.allocations, event.tag: held}, nodes=nodes, running_since=began)


def _stray(state: State, at: float, event: ev.AllocationChanged) -> Allocation:
    return Allocation(event.tag, Ask(event.tag, 0, Resources(), 0.0), at, event.seen, stray=True)


def _launches_into(action: Outside, allocation: str) -> bool:
    return isinstance(action, Launch) and action.allocation == allocation


def _left(nodes: dict[NodeName, Node], tag: str, present: tuple[NodeName, ...]) -> dict[NodeName, Node]:
    """``nodes`` after all but the ``present`` ones left the allocation. That a node is excluded is not forgotten: the
    next request must not bring it back."""
    still: dict[NodeName, Node] = {}
    for name, node in nodes.items():
        if node.allocation != tag or name in present:
            still[name] = node
        elif node.excluded is not None:
            still[name] = msgspec.structs.replace(node, allocation="", seen=None)
    return still


def node_changed(state: State, at: float, event: ev.NodeChanged) -> State:
    if event.node not in state.nodes:
        return state
    node = msgspec.structs.replace(state.nodes[event.node], seen=event.seen)
    return _with(state, nodes={**state.nodes, event.node: node})


def _refused(state: State, refusal: Refusal) -> State:
    recent = tuple(r for r in state.refusals if refusal.at - r.at < state.job.recovery.window)
    return _with(state, refusals=(*recent, refusal))


def _allocation(state: State, tag: str, **changes: Any) -> State:
    held = state.allocations.get(tag)
    if held is None:
        return state
    return _with(state, allocations={**state.allocations, tag: msgspec.structs.replace(held, **changes)})


def _with(state: State, **changes: Any) -> State:
    return msgspec.structs.replace(state, **changes)
