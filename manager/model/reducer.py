"""Compute the state after one more event (``fold``). Pure, and defined for every order of events after RunStarted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from msgspec.structs import replace

from ...core.faults import FAULT_TRAITS, TargetKind
from ...core.types import Verdict
from . import events as ev
from .actions import (
    Drain,
    Exclude,
    Finish,
    InjectFault,
    Launch,
    Readmit,
    Release,
    Request,
    Resize,
    RestartAll,
    Shrink,
    StopStep,
    Undrain,
    WithdrawGuests,
    fault_tag,
)
from .figures import idle_times
from .figures.balance import with_sample
from .reduce_commands import members_of, on_command, on_fault_requested, on_resize, on_restart_all, on_resumed
from .reduce_nodes import (
    on_allocation_changed,
    on_exclude,
    on_node_action_settled,
    on_node_changed,
    on_readmit,
    on_release_intended,
    on_release_rejected,
    on_request_intended,
    on_request_rejected,
)
from .reduce_replicas import (
    RETRY_PAUSE_S,
    on_admitted,
    on_agent_joined,
    on_fence,
    on_first_work_done,
    on_joined,
    on_launch_intended,
    on_launch_rejected,
    on_note_changed,
    on_outside_wait_changed,
    on_phase_entered,
    on_step_committed,
    on_step_ended,
    on_stop_done,
    on_stop_intended,
    on_stop_rejected,
    on_version_available,
    on_weights_recorded,
    with_replica,
)
from .state import MAX_EVALUATIONS, Evaluation, PendingIntent, Replica, State
from .table import put, without

_Reducer = Callable[[State, float, Any], State]


def fold(state: State | None, stamped: ev.Stamped) -> State:
    """Return the state after one more event.

    An event about an unknown object changes only ``seq``, ``at`` and ``epoch``.

    Raises:
        ValueError: The first event of a journal is not RunStarted.
    """
    event, at = stamped.event, stamped.at
    if isinstance(event, ev.RunStarted):
        state = _on_run_started(event, at)
    elif state is None:
        raise ValueError(f"the journal starts with {type(event).__name__}, not with RunStarted")
    else:
        state = _REDUCERS[type(event)](state, at, event)
    return replace(state, seq=stamped.seq, at=at, epoch=stamped.epoch)


def _on_run_started(event: ev.RunStarted, at: float) -> State:
    replicas = {id: Replica(id, since=at, down_since=at) for id in members_of(event.job)}
    return State(run=event.run, job=event.job, started=at, replicas=replicas)


def _if_current(reduce_one: _Reducer) -> _Reducer:
    """Wrap a reducer so that it ignores events of incarnations that are not current."""

    def guarded(state: State, at: float, event: Any) -> State:
        return reduce_one(state, at, event) if state.is_current(event.incarnation) else state

    return guarded


def _on_manager_started(state: State, at: float, event: ev.ManagerStarted) -> State:
    return replace(state, host=event.host, managed_since=at)


def _on_intended(state: State, at: float, event: ev.Intended) -> State:
    action = event.action
    state = replace(state, intents=put(state.intents, action.tag, PendingIntent(action, at)))
    if isinstance(action, Request):
        return on_request_intended(state, at, action.request)
    if isinstance(action, Release):
        return on_release_intended(state, at, action.allocation)
    if isinstance(action, Launch):
        return on_launch_intended(state, at, action)
    if isinstance(action, InjectFault):
        return _on_fault_intended(state, action)
    if isinstance(action, Drain | Undrain | Shrink):
        return state
    return on_stop_intended(state, at, action)


def _on_intent_settled(state: State, at: float, event: ev.IntentSettled) -> State:
    intended = state.intents.get(event.tag)
    if intended is None:
        return state
    state = replace(state, intents=without(state.intents, event.tag))
    action = intended.action
    if isinstance(action, Drain | Undrain | Shrink):
        return on_node_action_settled(state, at, action, event.ok, event.detail)
    if event.ok:
        return on_stop_done(state, action) if isinstance(action, StopStep) else state
    if isinstance(action, Request):
        return on_request_rejected(state, at, action.request, event)
    if isinstance(action, Launch):
        return on_launch_rejected(state, at, action, event)
    if isinstance(action, Release):
        return on_release_rejected(state, action.allocation, at + RETRY_PAUSE_S)
    return on_stop_rejected(state, at, action) if isinstance(action, StopStep) else state


def _on_decided(state: State, at: float, event: ev.Decided) -> State:
    action = event.action
    if isinstance(action, Finish):
        return replace(state, finish=action)
    if isinstance(action, Exclude):
        return on_exclude(state, at, action)
    if isinstance(action, Readmit):
        return on_readmit(state, at, action)
    if isinstance(action, RestartAll):
        return on_restart_all(state, at, action)
    if isinstance(action, Resize):
        return on_resize(state, at, action)
    if isinstance(action, WithdrawGuests):
        return replace(state, guests_withdrawn=True)
    return on_fence(state, at, action)


def _on_step_committed(state: State, at: float, event: ev.StepCommitted) -> State:
    """Apply the commit of a current incarnation.

    While the run is ending, the newest incarnation may commit even after it was requested to stop, because it completes
    its training step first.
    """
    newest = (
        event.incarnation.replica in state.replicas
        and state.replica(event.incarnation.replica).incarnation == event.incarnation
    )
    finishing = state.finish is not None and newest
    return on_step_committed(state, at, event) if state.is_current(event.incarnation) or finishing else state


def _on_finding_changed(state: State, at: float, event: ev.FindingChanged) -> State:
    finding = event.finding
    if finding.verdict in (Verdict.OK, Verdict.UNKNOWN):
        return replace(state, findings=without(state.findings, finding.key))
    if finding.incarnation is not None and not state.is_current(finding.incarnation):
        return state
    return replace(state, findings=put(state.findings, finding.key, finding))


def _on_fault_intended(state: State, action: InjectFault) -> State:
    """Record that a fault is being injected, so that it is not injected again, and mark the replicas it hits.

    The mark is removed when the fault has ended, or if it was not injected.
    """
    state = _mark_triggered(state, action.fault.id)
    for replica in state.replicas.values():
        on_node = (
            FAULT_TRAITS[action.fault.kind].target_kind is TargetKind.NODE
            and replica.is_current
            and replica.node == action.node
        )
        if on_node or (replica.incarnation == action.incarnation and replica.is_current):
            state = with_replica(state, replica.id, fault=action.fault.id)
    return state


def _mark_triggered(state: State, fault: str) -> State:
    remaining = tuple(requested for requested in state.requested_faults if requested.id != fault)
    faults = state.triggered_faults if fault in state.triggered_faults else (*state.triggered_faults, fault)
    return replace(state, triggered_faults=faults, requested_faults=remaining)


def _on_fault_injected(state: State, at: float, event: ev.FaultInjected) -> State:
    tag = fault_tag(event.fault)
    state = replace(_mark_triggered(state, event.fault), intents=without(state.intents, tag))
    if event.ended or not (event.ok or event.unknown):
        for replica in state.replicas.values():
            if replica.fault == event.fault:
                state = with_replica(state, replica.id, fault="")
    return state


def _unchanged(state: State, at: float, event: ev.Event) -> State:
    return state


def _on_baselines_learned(state: State, at: float, event: ev.BaselinesLearned) -> State:
    return replace(state, baselines=event.baselines)


def _on_clocks_recorded(state: State, at: float, event: ev.ClocksRecorded) -> State:
    times = idle_times.with_readings(state.idle_times, at, event.readings)
    return replace(state, idle_times=times, balance=with_sample(state.balance, state.job, state.step, times))


def _on_evaluated(state: State, at: float, event: ev.Evaluated) -> State:
    """Record the result of an evaluation. A result of an older step is a repetition, and is ignored."""
    if event.step <= state.evaluated:
        return state
    before = state.evaluations
    if len(before) >= MAX_EVALUATIONS:
        before = (before[0], *before[2:])
    return replace(state, evaluations=(*before, Evaluation(event.step, event.metrics)))


def _on_gpu_use_recorded(state: State, at: float, event: ev.GpuUseRecorded) -> State:
    return replace(state, gpu_use=event.nodes, gpu_use_at=at)


def _on_ettr_estimated(state: State, at: float, event: ev.EttrEstimated) -> State:
    return replace(state, ettr=event.ettr)


def _on_cluster_unknown(state: State, at: float, event: ev.ClusterUnknown) -> State:
    return replace(state, cluster_unknown=event.why, cluster_unknown_since=event.since)


def _on_run_ended(state: State, at: float, event: ev.RunEnded) -> State:
    return replace(state, outcome=event.outcome, why=event.why, ended=at)


_REDUCERS: dict[type, _Reducer] = {
    ev.ManagerStarted: _on_manager_started,
    ev.ManagerStopped: _unchanged,
    ev.Intended: _on_intended,
    ev.IntentSettled: _on_intent_settled,
    ev.Decided: _on_decided,
    ev.AllocationChanged: on_allocation_changed,
    ev.NodeChanged: on_node_changed,
    ev.ClusterUnknown: _on_cluster_unknown,
    ev.AgentJoined: _if_current(on_agent_joined),
    ev.Admitted: _if_current(on_admitted),
    ev.Joined: _if_current(on_joined),
    ev.StepEnded: on_step_ended,
    ev.PhaseEntered: _if_current(on_phase_entered),
    ev.NoteChanged: _if_current(on_note_changed),
    ev.OutsideWaitChanged: _if_current(on_outside_wait_changed),
    ev.FirstWorkDone: _if_current(on_first_work_done),
    ev.VersionAvailable: _if_current(on_version_available),
    ev.StepCommitted: _on_step_committed,
    ev.FindingChanged: _on_finding_changed,
    ev.FaultInjected: _on_fault_injected,
    ev.CommandReceived: on_command,
    ev.FaultRequested: on_fault_requested,
    ev.Resumed: on_resumed,
    ev.TokensCounted: _unchanged,
    ev.StacksCollected: _unchanged,
    ev.BaselinesLearned: _on_baselines_learned,
    ev.ClocksRecorded: _on_clocks_recorded,
    ev.WeightsRecorded: on_weights_recorded,
    ev.Evaluated: _on_evaluated,
    ev.ValuesLogged: _unchanged,
    ev.GpuUseRecorded: _on_gpu_use_recorded,
    ev.EttrEstimated: _on_ettr_estimated,
    ev.RunEnded: _on_run_ended,
}
