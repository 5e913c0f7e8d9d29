"""What is believed after a person's order: cancel, restart, drain, resume, faults."""

from __future__ import annotations

from typing import Any

import msgspec

from rrl.manager import events as ev
from rrl.manager.state import State


def commanded(state: State, at: float, event: ev.Commanded) -> State:
    state = _with(state, commands=(*state.commands, event.id))
    return _with(state, cancelled_by=event.by, keep=event.keep) if event.command == "cancel" else state


def ordered(state: State, at: float, event: ev.Ordered) -> State:
    return _with(state, commands=(*state.commands, event.id), ordered=(*state.ordered, event.fault))


def resumed(state: State, at: float, event: ev.Resumed) -> State:
    return state


def _with(state: State, **changes: Any) -> State:
    return msgspec.structs.replace(state, **changes)
