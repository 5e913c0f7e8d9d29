"""Faults on demand, planned by the job or ordered by people: set off once, when they are due and their target is there.

A planned one waits until its target works, so that there is something to recover; one that is ordered without a moment
hits its target as it is.
"""

from __future__ import annotations

from msgspec import Struct

from ...core.faults import MANAGER, TRAITS, At, Fault, Hits
from ...core.phases import PHASES
from ...core.types import AGENT, SHADOW, Life, NodeName, ReplicaId, replica_id
from ..model.actions import Outside, Perform, Why
from ..model.state import Replica, State, Status
from .deadlines import NEVER


class _Hit(Struct, frozen=True):
    """What the fault's target is now."""

    step: str = ""
    node: NodeName = NodeName("")
    life: Life | None = None


def drill(state: State, now: float) -> tuple[list[Outside], float]:
    """Faults that are due, and when the next one may be though nothing happens."""
    due: list[Outside] = []
    wake, set_off = NEVER, set(state.faults)
    for fault in (*state.job.faults, *state.ordered):
        if fault.id in set_off:
            continue
        since = _since(state, fault.at)
        if since > now:
            wake = min(wake, since)
        elif (hit := _target(state, fault)) is not None:
            whose = f"ordered by {fault.by}" if fault.by else "planned"
            why = Why((f"fault {fault.id} at {fault.at}, {whose}",), expects="detection and recovery")
            due.append(Perform(fault, hit.step, hit.node, why, hit.life))
    return due, wake


def _since(state: State, at: At) -> float:
    """Manager's time (s) from which on it is due; NEVER while that is not known."""
    if at.step is not None:
        return 0.0 if state.step >= at.step else NEVER
    if at.time is not None:
        return NEVER if state.running_since is None else state.running_since + at.time
    return 0.0


def _target(state: State, fault: Fault) -> _Hit | None:
    """None: not there, or not in the state to be hit."""
    hits = TRAITS[fault.kind].hits
    if hits is Hits.RUN or fault.target == MANAGER:
        return _Hit()
    replica = state.replicas.get(ReplicaId(fault.target))
    if hits is Hits.NODE and replica is None:
        node = state.nodes.get(NodeName(fault.target))
        return _Hit(node=node.name) if node is not None and node.allocation else None
    if replica is None or replica.node is None or not replica.step or not _ready(state, replica, fault.at):
        return None
    if hits is Hits.NODE:
        return _Hit(node=replica.node)
    agent = state.replica(replica_id(AGENT, replica.node))
    if TRAITS[fault.kind].processes and agent.status is not Status.JOINED:
        return None
    return _Hit(replica.step, replica.node, replica.life)


def _ready(state: State, replica: Replica, at: At) -> bool:
    if replica.status is not Status.JOINED:
        return False
    if at.phase is not None:
        return replica.phase == at.phase
    if at == At() or replica.role in (AGENT, SHADOW) or state.job.role(replica.role).kind == "command":
        return True
    declared = PHASES.get(replica.phase)  # of a phase of its own nobody knows what it is worth
    return declared.useful if declared is not None else bool(replica.phase)
