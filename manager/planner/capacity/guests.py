"""Plan on which nodes guests run: rollouts that generate while the trainer lends them the GPUs of its nodes.

Only that guests exist is decided here. When they work is up to the trainer. They are launched once all members of the
trainer have joined, and stay while it restarts on its nodes: its leaders take the GPUs back before any member uses them
(:mod:`rrl.roles.lending`). They are stopped without a grace as soon as the trainer leaves their node, and before
anything else is launched there. Until then the cluster would give their GPUs to others as well.
"""

from __future__ import annotations

from ....core.types import Finding, NodeName, ReplicaId, guest_id, is_trainer
from ...model.actions import ExternalAction, StopStep, Why
from ...model.queries import all_joined, finding_about, is_crowded, trainer_nodes
from ...model.state import State
from ..deadlines import NEVER
from .nodes import NodeInventory
from .placement import Assignment
from .standbys import launches_on_nodes

CROWDED_TO_WITHDRAW = 2
"""Number of times within the window that the trainer may find too little memory on GPUs that it shares with guests."""


def plan_guests(state: State, inventory: NodeInventory, now: float) -> tuple[list[ExternalAction], float]:
    """Return the launches of guests that are due, and the manager's time (s) of the next launch."""
    if not state.job.guests_on_node:
        return [], NEVER
    if not all(all_joined(members) for members in inventory.gangs if is_trainer(members[0].id)):
        return [], NEVER
    return launches_on_nodes(state, inventory, _wanted_guests(state, trainer_nodes(state)), now)


def stop_guests(state: State, assigned: Assignment) -> list[StopStep]:
    """Return the stops of the guests on nodes that the trainer neither uses nor is about to use."""
    if not state.guests:
        return []
    targets = {node.node for id, node in assigned.targets.items() if is_trainer(id)}
    wanted = _wanted_guests(state, trainer_nodes(state) | targets)
    left = "the run goes on without guests" if state.guests_withdrawn else "the trainer does not use {node}"
    return [
        StopStep(
            guest.step,
            guest.incarnation,
            0.0,
            Why((left.format(node=guest.node),), expects="its memory and its GPUs are free"),
        )
        for guest in state.guests
        if guest.is_current and guest.step is not None and guest.id not in wanted
    ]


def crowded_again(state: State, now: float) -> Finding | None:
    """Return the finding about a trainer that again found too little memory on GPUs that it shares; None if not.

    One such failure may be bad luck: the memory of a killed guest is free only some time after its end.
    """
    if state.guests_withdrawn or not state.guests:
        return None
    for members in (members for members in state.gangs if is_trainer(members[0].id)):
        found = (finding_about(state, member.incarnation) for member in members if member.is_current)
        finding = next((one for one in found if is_crowded(state, members[0], one)), None)
        recent = (failure for member in members for failure in member.recent_failures(state.job.recovery.window, now))
        if finding is not None and 1 + sum(failure.crowded for failure in recent) >= CROWDED_TO_WITHDRAW:
            return finding
    return None


def _wanted_guests(state: State, nodes: set[NodeName]) -> dict[ReplicaId, NodeName]:
    """Return the guests that run on these nodes of the trainer, each with its node."""
    count = 0 if state.guests_withdrawn else state.job.guests_on_node
    return {guest_id(node, slot if count > 1 else None): node for node in sorted(nodes) for slot in range(count)}
