"""``fold``: what is believed after one more event. Pure, and total over every order of events."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from rrl.manager import events as ev
from rrl.manager.actions import (
    Drain,
    Exclude,
    Fence,
    Finish,
    Launch,
    Perform,
    Readmit,
    Release,
    Request,
    RestartAll,
    Rung,
    Shrink,
    StopStep,
    Undrain,
)
from rrl.manager.fold_marks import marked, marking, readmitted
from rrl.manager.fold_nodes import allocation_changed, given_back, kept, node_changed, not_requested, requested
from rrl.manager.fold_orders import commanded, ordered, resumed
from rrl.manager.rewards import committed
from rrl.manager.state import (
    NEVER_APPEARED,
    First,
    Lingering,
    Node,
    Open,
    Replica,
    Start,
    State,
    Status,
    completes,
    finding_about,
)  # fmt: skip
from rrl.spec.faults import TRAITS, Hits
from rrl.spec.launch import ENDED_AT_ONCE, EXITED, NOT_STARTED
from rrl.spec.words import Life, NodeName, ReplicaId, Verdict, member_id, replica_id, role_of

RETURN_PAUSE = 10.0
"""s before a give-back or a stop that the cluster refused is asked for again"""
LONGEST_PAUSE = 60.0
"""s that the pause before a restart doubles up to: ten restarts take four minutes, a short outage does not"""

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
    return msgspec.structs.replace(state, seq=stamped.seq, at=at, epoch=stamped.epoch)


def _run_started(event: ev.RunStarted, at: float) -> State:
    roles = event.job.roles
    whole = [(replica_id(role.name, i), role.ranks) for role in roles for i in range(role.replicas)]
    ids = [member_id(id, rank) for id, ranks in whole for rank in range(ranks)]
    replicas = {id: Replica(id, since=at, down_since=at) for id in ids}
    return State(run=event.run, job=event.job, started=at, replicas=replicas)


def _with(state: State, **changes: Any) -> State:
    return msgspec.structs.replace(state, **changes)


def _replica(state: State, id: ReplicaId, **changes: Any) -> State:
    held = msgspec.structs.replace(state.replica(id), **changes)
    return _with(state, replicas={**state.replicas, id: held})


def _about(fold_one: _Fold) -> _Fold:
    """For events about a life: one that is not believed changes nothing."""

    def guarded(state: State, at: float, event: Any) -> State:
        return fold_one(state, at, event) if state.believed(event.life) else state

    return guarded


def _manager_started(state: State, at: float, event: ev.ManagerStarted) -> State:
    return _with(state, host=event.host, managed_since=at)


def _manager_stopped(state: State, at: float, event: ev.ManagerStopped) -> State:
    return state


def _intended(state: State, at: float, event: ev.Intended) -> State:
    action = event.action
    state = _with(state, intents={**state.intents, action.tag: Open(action, at)})
    if isinstance(action, Request):
        return requested(state, at, action.ask)
    if isinstance(action, Release):
        return given_back(state, at, action.allocation)
    if isinstance(action, Launch):
        return _replica(
            state, action.life.replica, status=Status.LAUNCHING, incarnation=action.life.incarnation, since=at,
            node=action.node, allocation=action.allocation, step=action.step, first=None, pid=None, host="", phase="",
            phase_since=at, waits_for=None, listens=None, serves=None, holds=None, prefer=None,
            fault="",
        )  # fmt: skip
    if isinstance(action, Perform):
        return _performing(state, action)
    if isinstance(action, Drain | Undrain | Shrink):
        return marking(state, at, action)
    held_step = state.lingering.get(action.step)
    if held_step is None and not state.believed(action.life):
        return state
    if held_step is None:  # a step of a believed life: the run is ending
        replica = state.replica(action.life.replica)
        held_step = Lingering(action.life, replica.node or NodeName(""), replica.allocation or "", at)
        state = _replica(state, action.life.replica, status=Status.RETIRED, since=at)
    asked = msgspec.structs.replace(held_step, asked=True)
    return _with(state, lingering={**state.lingering, action.step: asked})


def _done(state: State, at: float, event: ev.Done) -> State:
    intended = state.intents.get(event.tag)
    if intended is None:
        return state
    state = _with(state, intents=_without(state.intents, event.tag))
    action = intended.action
    if isinstance(action, Drain | Undrain | Shrink):
        return marked(state, at, action, event.ok, event.detail)
    if event.ok:
        if isinstance(action, StopStep):
            state = _settled_launch(state, action.step)  # whatever of it may still come is sent away
            return _with(state, lingering=_without(state.lingering, action.step))
        return state
    if isinstance(action, Request):  # certainly not done: nothing of it exists
        return not_requested(state, at, action.ask, event.detail, event.unheard)
    if isinstance(action, Launch) and _launching(state, action.life):  # who has spoken runs, whatever was not seen
        if event.unheard:  # nobody's failure but the manager's: it is made up for where it was meant to be
            return _replica(state, action.life.replica, status=Status.WANTED, since=at, prefer=action.node)
        spoiled = event.detail.startswith((NEVER_APPEARED, ENDED_AT_ONCE)) or NOT_STARTED in event.detail
        state = _unstarted(state, action.life.replica) if spoiled else state
        return _failed(state, at, action.life.replica, Status.WANTED, event.detail, refused=True)
    if isinstance(action, Release):
        return kept(state, action.allocation, at + RETURN_PAUSE)
    if isinstance(action, StopStep) and (held := state.lingering.get(action.step)) is not None:
        again = msgspec.structs.replace(held, asked=False, not_before=at + RETURN_PAUSE)
        return _with(state, lingering={**state.lingering, action.step: again})
    return state


def _launching(state: State, life: Life) -> bool:
    return state.believed(life) and state.replica(life.replica).status is Status.LAUNCHING


def _failed(state: State, at: float, id: ReplicaId, status: Status, why: str, refused: bool = False) -> State:
    """One more failure on the replica's account; the next launch is put off the longer the more there are."""
    held, recovery = state.replica(id), state.job.recovery
    failure = Start(at, held.node or NodeName(""), why, refused, injected=bool(held.fault) and not refused)
    failures = (*(start for start in held.failures if at - start.at < recovery.window), failure)
    longest = max(LONGEST_PAUSE, recovery.backoff)
    pause = min(longest, recovery.backoff * 2.0 ** min(len(failures) - 2, 30)) if len(failures) > 1 else 0.0
    return _replica(state, id, status=status, since=at, failures=failures, not_before=at + pause)


def _unstarted(state: State, id: ReplicaId) -> State:
    """A life of it failed by itself; if none has ever joined, that may be the job's own mistake."""
    held = state.replica(id)
    return state if held.ever_joined else _replica(state, id, unstarted=held.unstarted + 1)


def _decided(state: State, at: float, event: ev.Decided) -> State:
    action = event.action
    if isinstance(action, Finish):
        return _with(state, verdict=action)
    if isinstance(action, Exclude):
        node = state.nodes.get(action.node) or Node(action.node, "")
        why = "; ".join(action.why.evidence) or "excluded"
        excluded = msgspec.structs.replace(node, excluded=why, excluded_at=at)
        return _with(state, nodes={**state.nodes, node.name: excluded})
    if isinstance(action, Readmit):
        return readmitted(state, at, action)
    if isinstance(action, RestartAll):
        return _restarted_all(state, at, action)
    return _fenced(state, at, action)


def _restarted_all(state: State, at: float, action: RestartAll) -> State:
    return state


def _fenced(state: State, at: float, fence: Fence) -> State:
    """The life is no longer believed; what runs of it lingers; the replica is wanted again (or retired)."""
    held = state.replica(fence.life.replica)
    retired = fence.rung in (Rung.DEGRADED, Rung.GIVE_UP)
    if not state.believed(fence.life):
        wanted = held.status is Status.WANTED and held.life == fence.life
        return _replica(state, held.id, status=Status.RETIRED, since=at) if wanted and retired else state
    if held.step and held.node and held.allocation in state.allocations:  # else it went with its allocation
        linger = Lingering(held.life, held.node, held.allocation, at)
        state = _with(state, lingering={**state.lingering, held.step: linger})
    if held.status is Status.JOINED:
        state = _replica(state, held.id, down_since=at)
    gone = [key for key, finding in state.findings.items() if finding.life == fence.life]
    if not fence.charged:
        state = _replica(state, held.id, status=Status.WANTED, since=at, prefer=fence.to, not_before=at)
        return _with(state, findings=_without(state.findings, *gone))
    if finding_about(state, fence.life) is not None:
        state = _unstarted(state, held.id)
    why = "; ".join(fence.why.evidence)
    state = _failed(state, at, held.id, Status.RETIRED if retired else Status.WANTED, why)
    state = _replica(state, held.id, prefer=held.node if fence.rung is Rung.IN_PLACE else None)
    return _with(state, findings=_without(state.findings, *gone), recoveries=state.recoveries + (not retired))


def _settled_launch(state: State, step: str) -> State:
    return _with(state, intents=_without(state.intents, step)) if step in state.intents else state


def _admitted(state: State, at: float, event: ev.Admitted) -> State:
    state = _settled_launch(state, event.step)
    held = state.replica(event.life.replica)
    if held.first is None and held.step == event.step:
        state = _replica(state, held.id, first=First(event.node, event.pid))
    if held.status is not Status.LAUNCHING:
        return state
    return _replica(state, held.id, status=Status.STARTING, since=at, node=event.node, pid=event.pid)


def _agent_joined(state: State, at: float, event: ev.AgentJoined) -> State:
    state = _settled_launch(state, state.replica(event.life.replica).step or "")
    node = state.nodes.get(event.node)
    if node is not None and node.probe != event.probe:
        state = _with(state, nodes={**state.nodes, node.name: msgspec.structs.replace(node, probe=event.probe)})
    return _replica(
        state, event.life.replica, status=Status.JOINED, since=at, host=event.host, pid=event.pid, phase="serve",
        ever_joined=True,
    )  # fmt: skip


def _joined(state: State, at: float, event: ev.Joined) -> State:
    held = state.replica(event.life.replica)
    state = _settled_launch(state, held.step or "")  # its first process may have been heard by no manager
    since = held.since if held.status is Status.JOINED else at
    return _replica(
        state, held.id, status=Status.JOINED, since=since, node=event.node, host=event.host, pid=event.pid,
        listens=event.listens, serves=event.serves, ever_joined=True,
    )  # fmt: skip


def _step_ended(state: State, at: float, event: ev.StepEnded) -> State:
    state = _settled_launch(state, event.step)
    state = _with(state, lingering=_without(state.lingering, event.step))
    if not state.believed(event.life):
        return state
    state = _replica(state, event.life.replica, pid=None, step=None)
    if event.code == 0 and event.why == EXITED and completes(state.job, role_of(event.life.replica)):
        return _replica(state, event.life.replica, status=Status.COMPLETED, since=at, phase="", waits_for=None)
    return state


def _phase_entered(state: State, at: float, event: ev.PhaseEntered) -> State:
    return _replica(state, event.life.replica, phase=event.phase, phase_since=at, waits_for=event.waits_for)


def _first_work_done(state: State, at: float, event: ev.FirstWorkDone) -> State:
    return state


def _version_held(state: State, at: float, event: ev.VersionHeld) -> State:
    return _replica(state, event.life.replica, holds=event.version)


def _step_committed(state: State, at: float, event: ev.StepCommitted) -> State:
    """In whatever order: a trainer that reconnects says first how far it is, and then what it could not say before."""
    newest = event.step > state.step or (event.step == state.step and not state.metrics)
    if newest:
        state = _with(state, step=event.step, metrics=event.metrics)
    return _with(state, rewards=committed(state.rewards, event.step, event.metrics.get("reward")))


def _finding_changed(state: State, at: float, event: ev.FindingChanged) -> State:
    finding = event.finding
    if finding.verdict in (Verdict.OK, Verdict.UNKNOWN):
        return _with(state, findings=_without(state.findings, finding.key))
    if finding.life is not None and not state.believed(finding.life):
        return state
    return _with(state, findings={**state.findings, finding.key: finding})


def _performing(state: State, action: Perform) -> State:
    """It is set off, and never again; whoever it hits is marked until it is known not to have been hit."""
    state = _set_off(state, action.fault.id)
    for held in state.replicas.values():
        on_node = TRAITS[action.fault.kind].hits is Hits.NODE and held.believed and held.node == action.node
        if on_node or (held.life == action.life and held.believed):
            state = _replica(state, held.id, fault=action.fault.id)
    return state


def _set_off(state: State, fault: str) -> State:
    kept = tuple(one for one in state.ordered if one.id != fault)
    faults = state.faults if fault in state.faults else (*state.faults, fault)
    return _with(state, faults=faults, ordered=kept)


def _fault_injected(state: State, at: float, event: ev.FaultInjected) -> State:
    tag = f"fault:{event.fault}"
    state = _with(_set_off(state, event.fault), intents=_without(state.intents, tag))
    if event.ended or not (event.ok or event.unknown):
        for held in state.replicas.values():
            if held.fault == event.fault:
                state = _replica(state, held.id, fault="")
    return state


def _tokens_seen(state: State, at: float, event: ev.TokensSeen) -> State:
    return state


def _run_ended(state: State, at: float, event: ev.RunEnded) -> State:
    return _with(state, outcome=event.outcome, why=event.why, ended=at)


def _without(held: dict[Any, Any], *keys: Any) -> dict[Any, Any]:
    return {key: value for key, value in held.items() if key not in keys}


_FOLD: dict[type, _Fold] = {
    ev.ManagerStarted: _manager_started,
    ev.ManagerStopped: _manager_stopped,
    ev.Intended: _intended,
    ev.Done: _done,
    ev.Decided: _decided,
    ev.AllocationChanged: allocation_changed,
    ev.NodeChanged: node_changed,
    ev.AgentJoined: _about(_agent_joined),
    ev.Admitted: _about(_admitted),
    ev.Joined: _about(_joined),
    ev.StepEnded: _step_ended,
    ev.PhaseEntered: _about(_phase_entered),
    ev.FirstWorkDone: _first_work_done,
    ev.VersionHeld: _about(_version_held),
    ev.StepCommitted: _about(_step_committed),
    ev.FindingChanged: _finding_changed,
    ev.FaultInjected: _fault_injected,
    ev.Commanded: commanded,
    ev.Ordered: ordered,
    ev.Resumed: resumed,
    ev.TokensSeen: _tokens_seen,
    ev.RunEnded: _run_ended,
}
