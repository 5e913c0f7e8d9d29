"""Inject faults that the job plans or a user requests: once, when they are due and their target exists.

A planned fault waits until its target works, so that a recovery can be observed. A fault that a user requests without a
time is injected at once, whatever the phase of its target.
"""

from __future__ import annotations

from msgspec import Struct

from ...core.faults import FAULT_TRAITS, MANAGER, Fault, FaultTrigger, TargetKind
from ...core.phases import PHASES
from ...core.types import AGENT, Incarnation, NodeName, ReplicaId, is_support, replica_id
from ..model.actions import ExternalAction, InjectFault, Why
from ..model.state import Replica, State, Status
from .deadlines import NEVER


class _Target(Struct, frozen=True):
    """Current step, node and incarnation of a fault's target."""

    step: str = ""
    node: NodeName = NodeName("")
    incarnation: Incarnation | None = None


def due_faults(state: State, now: float) -> tuple[list[ExternalAction], float]:
    """Return the injections that are due, and the manager's time (s) at which the next injection may be due."""
    due: list[ExternalAction] = []
    wake, triggered = NEVER, set(state.triggered_faults)
    for fault in (*state.job.faults, *state.requested_faults):
        if fault.id in triggered:
            continue
        since = _due_at(state, fault.at)
        if since > now:
            wake = min(wake, since)
        elif (target := _find_target(state, fault)) is not None:
            origin = f"requested by {fault.by}" if fault.by else "planned"
            why = Why((f"fault {fault.id} at {fault.at}, {origin}",), expects="detection and recovery")
            due.append(InjectFault(fault, target.step, target.node, why, target.incarnation))
    return due, wake


def _due_at(state: State, at: FaultTrigger) -> float:
    """Return the manager's time (s) from which a fault is due; NEVER while this time is unknown."""
    if at.step is not None:
        return 0.0 if state.step >= at.step else NEVER
    if at.time is not None:
        return NEVER if state.running_since is None else state.running_since + at.time
    return 0.0


def _find_target(state: State, fault: Fault) -> _Target | None:
    """Return the fault's current target; None if it does not exist or if the fault cannot be injected into it now."""
    hits = FAULT_TRAITS[fault.kind].target_kind
    if hits is TargetKind.RUN or fault.target == MANAGER:
        return _Target()
    replica = state.replicas.get(ReplicaId(fault.target))
    if hits is TargetKind.NODE and replica is None:
        node = state.nodes.get(NodeName(fault.target))
        return _Target(node=node.name) if node is not None and node.allocation else None
    if replica is None or replica.node is None or not replica.step or not _ready(state, replica, fault.at):
        return None
    if hits is TargetKind.NODE:
        return _Target(node=replica.node)
    agent = state.replica(replica_id(AGENT, replica.node))
    if FAULT_TRAITS[fault.kind].by_signals and agent.status is not Status.JOINED:
        return None
    return _Target(replica.step, replica.node, replica.incarnation)


def _ready(state: State, replica: Replica, at: FaultTrigger) -> bool:
    """Return whether the replica has joined, and is in a phase in which this trigger allows the fault.

    If the trigger names a phase, the replica must be in that phase. If the trigger names a step or a time, any phase of
    useful work suffices. Agents, standby processes and commands report no phase, so they only need to have joined.
    """
    if replica.status is not Status.JOINED:
        return False
    if at.phase is not None:
        return replica.phase == at.phase
    if at == FaultTrigger() or is_support(replica.id) or state.job.role(replica.role).kind == "command":
        return True
    declared = PHASES.get(replica.phase)  # a phase that only the user's code defines counts as work
    return declared.useful if declared is not None else bool(replica.phase)
