"""``plan``: what to do now, from what is believed. Pure: no clock, no chance, no I/O.

The concerns in order; the first that decides something about a thing has it. A plan is at its fixpoint once its
decisions and intents are folded in: planning again gives nothing new.
"""

from __future__ import annotations

from msgspec import Struct

from ..model.actions import Action, Decision
from ..model.state import State
from .capacity.allocations import supply
from .capacity.node_lifecycle import mark, renew
from .capacity.nodes import Rooms
from .capacity.placement import assign, place
from .capacity.rotation import evict, rotate
from .capacity.standbys import stand_by
from .deadlines import NEVER
from .planned_faults import drill
from .recovery.node_exclusion import brake
from .recovery.recover import recover
from .shutdown import finish


class Plan(Struct, frozen=True):
    actions: tuple[Action, ...] = ()
    wake: float = NEVER
    """manager's time (s) at which to plan again though nothing happened"""
    over: bool = False
    """the run's end is decided and everything is given back"""


def plan(state: State, now: float) -> Plan:
    """Decisions first: they change what the other concerns see, so the caller folds them in and plans again."""
    if state.outcome is not None:  # its manager died over the last record
        return Plan(over=True)
    ended, ending_wake, over = finish(state, now)
    if state.verdict is not None or ended:
        return Plan(tuple(ended), ending_wake, over)
    rooms = Rooms(state, now)
    if evicted := evict(state, rooms, now):
        return Plan(tuple(evicted), now)
    decisions, held = brake(state, recover(state, rooms, now), now)
    brake_wake = min((one.until for one in held), default=NEVER)
    if decisions:
        return Plan(tuple(decisions), now)
    renewed, renew_wake = renew(state, now)
    if renewed:
        return Plan(tuple(renewed), now)
    assigned = assign(state, rooms, now)
    moves, move_wake = rotate(state, assigned, now)
    if moves:
        return Plan(tuple(moves), now)
    wanted, supply_wake = supply(state, rooms, assigned, now)
    if any(isinstance(action, Decision) for action in wanted):
        return Plan(tuple(wanted), now)
    placed, place_wake = place(state, rooms, assigned, now)
    shadows, shadow_wake = stand_by(state, rooms, assigned, placed, now)
    drills, drill_wake = drill(state, now)
    wake = min(ending_wake, brake_wake, renew_wake, move_wake, supply_wake, place_wake, shadow_wake, drill_wake)
    return Plan((*wanted, *placed, *shadows, *mark(state), *drills), wake)
