"""What is believed of exclusions, of drains, of single nodes given back and of people's orders about nodes, after one
more event."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from rrl.manager import events as ev
from rrl.manager.actions import Drain, Exclude, Readmit, Shrink, Undrain
from rrl.manager.state import Node, State
from rrl.spec.words import NodeName, Verdict

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
