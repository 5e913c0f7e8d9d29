"""Planned faults of the run's own making: set off once, when their time has come and their target works."""

from __future__ import annotations

from rrl.manager.actions import Outside, Perform, Why
from rrl.manager.state import State, Status
from rrl.spec.phases import phase
from rrl.spec.words import AGENT, ReplicaId, replica_id


def drill(state: State) -> list[Outside]:
    due: list[Outside] = []
    for fault in state.job.faults:
        if fault.id in state.faults or state.step < fault.at_step:
            continue
        target = state.replica(ReplicaId(fault.target))
        agent = state.replica(replica_id(AGENT, target.node or ""))
        works = target.status is Status.JOINED and phase(target.phase).useful
        if works and target.step and target.node and agent.status is Status.JOINED:
            why = Why((f"planned fault {fault.id} at step {fault.at_step}",), expects="detection and recovery")
            due.append(Perform(fault, target.step, target.node, why))
    return due
