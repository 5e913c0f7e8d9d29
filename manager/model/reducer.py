"""``fold``: what is believed after one more event. Pure, and total over every order of events."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from msgspec.structs import replace

from ...core.faults import TRAITS, Hits
from ...core.types import Verdict
from . import events as ev
from .actions import (
    Drain,
    Exclude,
    Finish,
    Launch,
    Perform,
    Readmit,
    Release,
    Request,
    RestartAll,
    Shrink,
    StopStep,
    Undrain,
)
from .reduce_commands import commanded, members_of, ordered, restarted_all, resumed
from .reduce_nodes import (
    allocation_changed,
    excluded,
    given_back,
    kept,
    marked,
    node_changed,
    not_requested,
    readmitted,
    requested,
)
from .reduce_replicas import (
    RETURN_PAUSE,
    admitted,
    agent_joined,
    fenced,
    joined,
    launched,
    not_launched,
    not_stopped,
    noted,
    phase_entered,
    step_committed,
    step_ended,
    stopped,
    stopping,
    version_held,
    with_replica,
    without,
)
from .state import Open, Replica, State

_Fold = Callable[[State, float, Any], State]


def fold(state: State | None, stamped: ev.Stamped) -> State:
    """The state after one more event. Total: an event about something unknown changes nothing but the sequence."""
    event, at = stamped.event, stamped.at
    if isinstance(event, ev.RunStarted):
        state = _run_started(event, at)
    elif state is None:
        raise ValueError(f"the journal starts with {type(event).__name__}, not with RunStarted")
    else:
        state = _FOLD[type(event)](state, at, event)
    return replace(state, seq=stamped.seq, at=at, epoch=stamped.epoch)


def _run_started(event: ev.RunStarted, at: float) -> State:
    replicas = {id: Replica(id, since=at, down_since=at) for id in members_of(event.job)}
    return State(run=event.run, job=event.job, started=at, replicas=replicas)


def _about(fold_one: _Fold) -> _Fold:
    """For events about a life: one that is not believed changes nothing."""

    def guarded(state: State, at: float, event: Any) -> State:
        return fold_one(state, at, event) if state.believed(event.life) else state

    return guarded


def _manager_started(state: State, at: float, event: ev.ManagerStarted) -> State:
    return replace(state, host=event.host, managed_since=at)


def _manager_stopped(state: State, at: float, event: ev.ManagerStopped) -> State:
    return state


def _intended(state: State, at: float, event: ev.Intended) -> State:
    action = event.action
    state = replace(state, intents={**state.intents, action.tag: Open(action, at)})
    if isinstance(action, Request):
        return requested(state, at, action.ask)
    if isinstance(action, Release):
        return given_back(state, at, action.allocation)
    if isinstance(action, Launch):
        return launched(state, at, action)
    if isinstance(action, Perform):
        return _performing(state, action)
    if isinstance(action, Drain | Undrain | Shrink):
        return state
    return stopping(state, at, action)


def _done(state: State, at: float, event: ev.Done) -> State:
    intended = state.intents.get(event.tag)
    if intended is None:
        return state
    state = replace(state, intents=without(state.intents, event.tag))
    action = intended.action
    if isinstance(action, Drain | Undrain | Shrink):
        return marked(state, at, action, event.ok, event.detail)
    if event.ok:
        return stopped(state, action) if isinstance(action, StopStep) else state
    if isinstance(action, Request):  # certainly not done: nothing of it exists
        return not_requested(state, at, action.ask, event.detail, event.unheard)
    if isinstance(action, Launch):
        return not_launched(state, at, action, event)
    if isinstance(action, Release):
        return kept(state, action.allocation, at + RETURN_PAUSE)
    return not_stopped(state, at, action) if isinstance(action, StopStep) else state


def _decided(state: State, at: float, event: ev.Decided) -> State:
    action = event.action
    if isinstance(action, Finish):
        return replace(state, verdict=action)
    if isinstance(action, Exclude):
        return excluded(state, at, action)
    if isinstance(action, Readmit):
        return readmitted(state, at, action)
    if isinstance(action, RestartAll):
        return restarted_all(state, at, action)
    return fenced(state, at, action)


def _step_committed(state: State, at: float, event: ev.StepCommitted) -> State:
    """Of a believed life; while the run ends also of the newest one, which was asked to finish what is in hand."""
    newest = event.life.replica in state.replicas and state.replica(event.life.replica).life == event.life
    finishing = state.verdict is not None and newest
    return step_committed(state, at, event) if state.believed(event.life) or finishing else state


def _first_work_done(state: State, at: float, event: ev.FirstWorkDone) -> State:
    return state


def _finding_changed(state: State, at: float, event: ev.FindingChanged) -> State:
    finding = event.finding
    if finding.verdict in (Verdict.OK, Verdict.UNKNOWN):
        return replace(state, findings=without(state.findings, finding.key))
    if finding.life is not None and not state.believed(finding.life):
        return state
    return replace(state, findings={**state.findings, finding.key: finding})


def _performing(state: State, action: Perform) -> State:
    """It is set off, and never again; whoever it hits is marked until it is known not to have been hit."""
    state = _set_off(state, action.fault.id)
    for held in state.replicas.values():
        on_node = TRAITS[action.fault.kind].hits is Hits.NODE and held.believed and held.node == action.node
        if on_node or (held.life == action.life and held.believed):
            state = with_replica(state, held.id, fault=action.fault.id)
    return state


def _set_off(state: State, fault: str) -> State:
    kept = tuple(one for one in state.ordered if one.id != fault)
    faults = state.faults if fault in state.faults else (*state.faults, fault)
    return replace(state, faults=faults, ordered=kept)


def _fault_injected(state: State, at: float, event: ev.FaultInjected) -> State:
    tag = f"fault:{event.fault}"
    state = replace(_set_off(state, event.fault), intents=without(state.intents, tag))
    if event.ended or not (event.ok or event.unknown):
        for held in state.replicas.values():
            if held.fault == event.fault:
                state = with_replica(state, held.id, fault="")
    return state


def _tokens_seen(state: State, at: float, event: ev.TokensSeen) -> State:
    return state


def _stacks_taken(state: State, at: float, event: ev.StacksTaken) -> State:
    return state


def _learned(state: State, at: float, event: ev.Learned) -> State:
    return replace(state, lessons=event.lessons)


def _run_ended(state: State, at: float, event: ev.RunEnded) -> State:
    return replace(state, outcome=event.outcome, why=event.why, ended=at)


_FOLD: dict[type, _Fold] = {
    ev.ManagerStarted: _manager_started,
    ev.ManagerStopped: _manager_stopped,
    ev.Intended: _intended,
    ev.Done: _done,
    ev.Decided: _decided,
    ev.AllocationChanged: allocation_changed,
    ev.NodeChanged: node_changed,
    ev.AgentJoined: _about(agent_joined),
    ev.Admitted: _about(admitted),
    ev.Joined: _about(joined),
    ev.StepEnded: step_ended,
    ev.PhaseEntered: _about(phase_entered),
    ev.Noted: _about(noted),
    ev.FirstWorkDone: _first_work_done,
    ev.VersionHeld: _about(version_held),
    ev.StepCommitted: _step_committed,
    ev.FindingChanged: _finding_changed,
    ev.FaultInjected: _fault_injected,
    ev.Commanded: commanded,
    ev.Ordered: ordered,
    ev.Resumed: resumed,
    ev.TokensSeen: _tokens_seen,
    ev.StacksTaken: _stacks_taken,
    ev.Learned: _learned,
    ev.RunEnded: _run_ended,
}
