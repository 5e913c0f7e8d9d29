""":func:`plan`: a pure function from the state and the time to the actions that are due now.

The function reads only the state, so its decisions can be replayed from the journal. An action that is recorded in the
state is not returned again.
"""

from __future__ import annotations

from msgspec import Struct

from ..model.actions import Action, Decision
from ..model.state import State
from .capacity.allocations import supply
from .capacity.elastic import resize
from .capacity.guests import plan_guests, stop_guests
from .capacity.node_lifecycle import drain_actions, lifecycle_decisions
from .capacity.nodes import NodeInventory
from .capacity.placement import assign, place
from .capacity.rotation import preemptions, rotate
from .capacity.spare_rollouts import resize_extras
from .capacity.standbys import plan_standbys
from .deadlines import NEVER
from .planned_faults import due_faults
from .recovery.recover import recover
from .shutdown import plan_shutdown


class Plan(Struct, frozen=True):
    """Actions that are due, and when to plan again."""

    actions: tuple[Action, ...] = ()
    wake_at: float = NEVER
    """Manager's time (s) at which to plan again even if no event arrives."""
    over: bool = False
    """True if the run's end is decided and everything is released."""


def plan(state: State, now: float) -> Plan:
    """Return the actions that are due at ``now`` (manager's time, s).

    Decisions are never returned together with external actions, which depend on the changed state: the caller applies
    the decisions and plans again.
    """
    if state.outcome is not None:  # an earlier manager wrote the run's last record and then failed
        return Plan(over=True)
    ended, ending_wake, over = plan_shutdown(state, now)
    if state.finish is not None or ended:
        return Plan(tuple(ended), ending_wake, over)
    inventory = NodeInventory(state, now)
    if preempted := preemptions(state, inventory, now):
        return Plan(tuple(preempted), now)
    decisions, deferred = recover(state, inventory, now)
    breaker_wake = min((exclusion.until for exclusion in deferred), default=NEVER)
    if decisions:
        return Plan(tuple(decisions), now)
    lifecycle, lifecycle_wake = lifecycle_decisions(state, now)
    if lifecycle:
        return Plan(tuple(lifecycle), now)
    assigned = assign(state, inventory, now)
    if stopped := stop_guests(state, assigned):  # before anything is launched where they are
        return Plan(tuple(stopped), now)
    resized, resize_wake = resize(state, inventory, assigned, now)
    if sized := (*resized, *resize_extras(state, inventory, assigned, now)):
        return Plan(sized, now)
    moves, move_wake = rotate(state, assigned, now)
    if moves:
        return Plan(tuple(moves), now)
    supplied, supply_wake = supply(state, inventory, assigned, now)
    if any(isinstance(action, Decision) for action in supplied):
        return Plan(tuple(supplied), now)
    placed, place_wake = place(state, inventory, assigned, now)
    standbys, standby_wake = plan_standbys(state, inventory, assigned, now)
    guests, guest_wake = plan_guests(state, inventory, now)
    faults, fault_wake = due_faults(state, now)
    wake = min(ending_wake, breaker_wake, lifecycle_wake, resize_wake, move_wake, supply_wake, place_wake)
    wake = min(wake, standby_wake, guest_wake, fault_wake)
    return Plan((*supplied, *placed, *standbys, *guests, *drain_actions(state), *faults), wake)
