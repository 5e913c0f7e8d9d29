"""Reduce events about allocations and nodes into the state: what the cluster reports, exclusions, drains and commands
about nodes. Pure.
"""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from ...core.run_spec import Resources
from ...core.types import AGENT, SHADOW, NodeName, Verdict
from ..cluster.base import AllocationSeen, AllocationState, Ask
from . import events as ev
from .actions import Drain, Exclude, Launch, Outside, Readmit, Shrink, Undrain
from .reduce_replicas import with_replica
from .state import Allocation, Node, Refusal, State

REMEMBERED = 3600.0
"""s for which it counts that somebody cancelled all that the run had: who does so again within an hour means it"""

STILLBORN = 60.0
"""s: an allocation that ends sooner, and from whose nodes nothing ever spoke, counts as refused: it is not asked for
without end"""
LATE = 60.0
"""s before its end as we know it from which an allocation that ends has come to the end of its time: when it began was
seen a poll late, and Slurm counts whole minutes"""


def requested(state: State, at: float, ask: Ask) -> State:
    """One allocation for each component."""
    asks = (ask, *ask.more)
    asked = dict(state.asked)
    for one in asks:
        asked[one.part] = asked.get(one.part, 0) + 1
    allocations = state.allocations | {one.tag: Allocation(one.tag, one, at) for one in asks}
    since = at if state.asked_since is None else state.asked_since
    return replace(state, allocations=allocations, asked=asked, asked_since=since)


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
    return replace(state, allocations={tag: one for tag, one in state.allocations.items() if tag not in gone})


def allocation_changed(state: State, at: float, event: ev.AllocationChanged) -> State:
    held = state.allocations.get(event.tag)
    over = event.seen is None or event.seen.state is AllocationState.ENDED
    if held is None:
        return state if over else replace(state, allocations={**state.allocations, event.tag: _stray(state, at, event)})
    if event.seen is None or over:
        state = _taken_back(_cancelled(state, at, held, event.seen), at, held, event.seen)
        if not (held.releasing or held.stray) and held.running_since is None:
            detail = (event.seen.detail if event.seen else "") or "no longer in the queue"  # and it has never run
            state = _refused(state, Refusal(event.tag, at, f"{event.tag}: {detail}", True, held.ask.part))
        elif _stillborn(state, at, held):  # asking again and again would get no further
            detail = f"it ended {at - (held.running_since or at):.0f} s after it began" + _words(event.seen)
            state = _refused(state, Refusal(event.tag, at, f"{event.tag}: {detail}", True, held.ask.part))
        return replace(
            state,
            allocations={tag: one for tag, one in state.allocations.items() if tag != event.tag},
            nodes=left(state.nodes, event.tag, ()),
            lingering={tag: one for tag, one in state.lingering.items() if one.allocation != event.tag},
            intents={tag: one for tag, one in state.intents.items() if not _launches_into(one.action, event.tag)},
        )
    never = held.hopeless_since if held.hopeless_since is not None else at
    held = replace(held, seen=event.seen, seen_at=at, hopeless_since=never if event.seen.hopeless else None)
    since = held.running_since
    if held.running or held.pending:  # one that is queued again begins anew
        since = (at if since is None else since) if held.running else None
    ending = (at if held.ending_since is None else held.ending_since) if held.ending else None
    held = replace(held, running_since=since, ending_since=ending)
    if held.stray:
        return replace(state, allocations={**state.allocations, event.tag: held})
    nodes = left(state.nodes, event.tag, event.seen.nodes)
    state = _helpers_anew(state, at, {name for name in event.seen.nodes if not _is_in(nodes, name, event.tag)})
    for name in event.seen.nodes:
        node = nodes.get(name) or Node(name, event.tag)
        if node.allocation != event.tag:
            node = replace(node, allocation=event.tag, seen=None, stays="")
        nodes[name] = replace(node, part=held.ask.part)
    began = at if state.running_since is None and held.running else state.running_since
    lingering = {tag: one for tag, one in state.lingering.items()
                 if one.allocation != event.tag or one.node in event.seen.nodes}  # fmt: skip
    return replace(
        state, allocations={**state.allocations, event.tag: held}, nodes=nodes, running_since=began, lingering=lingering
    )


def _is_in(nodes: dict[NodeName, Node], name: NodeName, tag: str) -> bool:
    """Whether a node is known as one of this allocation."""
    return name in nodes and nodes[name].allocation == tag


def _helpers_anew(state: State, at: float, entered: set[NodeName]) -> State:
    """Forget how the agents and shadows of these nodes ended in an earlier allocation: that it was cancelled or ran out
    of time says nothing about what the nodes can do now, and until their agents report the run must not take the nodes
    for useless and ask for others."""
    for held in state.replicas.values():
        if held.role in (AGENT, SHADOW) and held.node in entered and held.failures:
            state = with_replica(state, held.id, failures=(), not_before=at)
    return state


def _stillborn(state: State, at: float, held: Allocation) -> bool:
    """It ended by itself before anything spoke from its nodes: a prolog fails, or they do."""
    began = held.running_since
    ran = not (held.releasing or held.stray) and began is not None and at - began < STILLBORN
    spoke = any(one.allocation == held.tag and one.first is not None for one in state.replicas.values())
    return ran and not spoke and held.tag not in state.taken_back


def _taken_back(state: State, at: float, held: Allocation, seen: AllocationSeen | None) -> State:
    """Who is on it has not failed: it was preempted, cancelled, or its time was over."""
    over = held.running and at >= held.ends - LATE
    taken = held.taken or (seen is not None and (seen.taken or seen.cancelled)) or over
    there = {replica.allocation for replica in state.replicas.values() if replica.believed}
    kept = {tag: words for tag, words in state.taken_back.items() if tag in there}
    if taken and not held.releasing:
        kept[held.tag] = _words(seen).removeprefix(": ") or "its time is over"
    return replace(state, taken_back=kept)


def _words(seen: AllocationSeen | None) -> str:
    return f": {seen.detail}" if seen is not None and seen.detail else ""


def _cancelled(state: State, at: float, held: Allocation, seen: AllocationSeen | None) -> State:
    """Somebody else than us ended it, and nothing else was left: who does that to all that a run has means the run.

    Its last word comes some time after its end: what was asked for meanwhile does not count as left, and of several
    that ended together only the first is counted."""
    if held.releasing or held.stray or seen is None or not seen.cancelled:
        return state
    ended_at = at if held.ending_since is None else held.ending_since
    others = [one for one in state.allocations.values() if one.tag != held.tag and not (one.releasing or one.stray)]
    if any(one.at < ended_at and not one.ending for one in others) or held.at < max(state.emptied, default=0.0):
        return state
    return replace(state, emptied=(*(since for since in state.emptied if at - since < REMEMBERED), ended_at))


def _stray(state: State, at: float, event: ev.AllocationChanged) -> Allocation:
    return Allocation(event.tag, Ask(event.tag, 0, Resources(), 0.0), at, event.seen, stray=True)


def _launches_into(action: Outside, allocation: str) -> bool:
    return isinstance(action, Launch) and action.allocation == allocation


def left(nodes: dict[NodeName, Node], tag: str, present: tuple[NodeName, ...]) -> dict[NodeName, Node]:
    """``nodes`` after all but the ``present`` ones left the allocation. That a node is excluded is not forgotten: the
    next request must not bring it back."""
    still: dict[NodeName, Node] = {}
    for name, node in nodes.items():
        if node.allocation != tag or name in present:
            still[name] = node
        elif node.excluded is not None:
            still[name] = replace(node, allocation="", seen=None)
    return still


def node_changed(state: State, at: float, event: ev.NodeChanged) -> State:
    if event.node not in state.nodes:
        return state
    node = replace(state.nodes[event.node], seen=event.seen)
    return replace(state, nodes={**state.nodes, event.node: node})


def _refused(state: State, refusal: Refusal) -> State:
    recent = tuple(r for r in state.refusals if refusal.at - r.at < state.job.recovery.window)
    return replace(state, refusals=(*recent, refusal))


def _allocation(state: State, tag: str, **changes: Any) -> State:
    held = state.allocations.get(tag)
    if held is None:
        return state
    return replace(state, allocations={**state.allocations, tag: replace(held, **changes)})


DRAIN, UNDRAIN = "drain", "undrain"
"""what people order of a node"""
GIVEN_BACK = "it is given back"


def ordered_of_node(state: State, at: float, event: ev.Commanded) -> State:
    """A person wants it drained, or used again. What is so already is no order."""
    name = NodeName(event.target)
    node, mark = state.nodes.get(name), state.marks.get(name)
    if node is None or state.verdict is not None:
        return state
    by = f"{event.by}: {event.reason}" if event.reason else event.by
    if event.command == UNDRAIN:
        if node.excluded is None and not node.drained:
            return _node(_unmarked(state, name), name, asked_at=0.0) if mark else state
        return replace(state, marks={**state.marks, name: (UNDRAIN, by)})
    if node.excluded is not None:  # nobody is left there: it is drained, or that is tried again
        return _node(_unmarked(state, name), name, asked_by=by, asked_at=at, not_drained="")
    if not node.allocation or mark is not None:
        return state
    return _node(replace(state, marks={**state.marks, name: (DRAIN, by)}), name, asked_at=at)


def excluded(state: State, at: float, action: Exclude) -> State:
    node = state.nodes.get(action.node) or Node(action.node, "")
    if not action.by:  # else the order stands, whatever else is found
        action = replace(action, by=state.marks.get(action.node, ("", ""))[1])
    why = "; ".join(action.why.evidence) or "excluded"
    node = replace(
        node, excluded=why, excluded_at=at, exclusions=node.exclusions + 1, cause=action.cause, proved=action.proof,
        asked_by=action.by, not_drained="", stays="",
    )  # fmt: skip
    return replace(_unmarked(state, node.name), nodes={**state.nodes, node.name: node})


def readmitted(state: State, at: float, action: Readmit) -> State:
    """It has yet to show what it can do: its agent is started anew. What was found without proof is forgotten, since
    nobody is left there to disprove it; where a person says that it is well, so is a proof."""
    order, _ = state.marks.get(action.node, ("", ""))
    kept = {
        key: one for key, one in state.findings.items()
        if one.node != action.node or one.verdict is not Verdict.FAIL or (one.proof and order != UNDRAIN)
    }  # fmt: skip
    state = replace(state, findings=kept)
    node = state.nodes.get(action.node)
    stays = GIVEN_BACK if node is not None and node.stays == GIVEN_BACK else ""
    state = _node(
        state, action.node, excluded=None, cause=None, proved=False, asked_by="", asked_at=0.0, not_drained="",
        stays=stays, probe=None,
    )  # fmt: skip
    return state if node is not None and node.drained else _unmarked(state, action.node)


def marked(state: State, at: float, action: Drain | Undrain | Shrink, ok: bool, detail: str) -> State:
    """It is settled: ``ok``, or certainly not done."""
    if isinstance(action, Drain):
        changes = {"drained": action.reason} if ok else {"not_drained": detail or "refused"}
        return _node(state, action.node, **changes)
    if isinstance(action, Undrain):  # refused: it is not our drain any more
        return _node(_unmarked(state, action.node), action.node, drained="")
    for name in action.nodes:
        state = _node(state, name, stays=GIVEN_BACK if ok else detail or "refused")
    return state


def _unmarked(state: State, name: NodeName) -> State:
    return replace(state, marks={node: mark for node, mark in state.marks.items() if node != name})


def _node(state: State, name: NodeName, **changes: Any) -> State:
    held = state.nodes.get(name)
    if held is None:
        return state
    return replace(state, nodes={**state.nodes, name: replace(held, **changes)})
