"""What is believed of drains, of exclusions that are over, and of single nodes given back, after one more event."""

from __future__ import annotations

from typing import Any

import msgspec

from rrl.manager.actions import Drain, Readmit, Shrink, Undrain
from rrl.manager.state import State


def marking(state: State, at: float, action: Drain | Undrain | Shrink) -> State:
    """It is intended."""
    return state


def marked(state: State, at: float, action: Drain | Undrain | Shrink, ok: bool, detail: str) -> State:
    """It is settled: ``ok``, or certainly not done."""
    if ok and isinstance(action, Drain):
        return _node(state, action.node, drained=action.reason)
    if ok and isinstance(action, Undrain):
        return _node(state, action.node, drained="")
    return state


def readmitted(state: State, at: float, action: Readmit) -> State:
    return _node(state, action.node, excluded=None)


def _node(state: State, name: Any, **changes: Any) -> State:
    held = state.nodes.get(name)
    if held is None:
        return state
    return msgspec.structs.replace(state, nodes={**state.nodes, name: msgspec.structs.replace(held, **changes)})
