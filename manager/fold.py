"""``fold``: what is believed after one more event. Pure, and total over every order of events."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from rrl.manager import events as ev
from rrl.manager.actions import Exclude, Fence, Finish, Launch, Outside, Perform, Release, Request, Rung, StopStep
from rrl.manager.cluster import AllocationState, Ask
from rrl.manager.rewards import committed
from rrl.manager.state import Allocation, Lingering, Node, Open, Refusal, Replica, Start, State, Status
from rrl.spec.words import Life, NodeName, ReplicaId, Verdict, replica_id

REFUSED_PAUSE = 10.0
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
    ids = [replica_id(role.name, i) for role in event.job.roles for i in range(role.replicas)]
    return State(run=event.run, job=event.job, started=at, replicas={id: Replica(id, since=at) for id in ids})


def _with(state: State, **changes: Any) -> State:
    return msgspec.structs.replace(state, **changes)


def _replica(state: State, id: ReplicaId, **changes: Any) -> State:
    held = msgspec.structs.replace(state.replica(id), **changes)
    return _with(state, replicas={**state.replicas, id: held})


def _allocation(state: State, tag: str, **changes: Any) -> State:
    held = state.allocations.get(tag)
    if held is None:
        return state
    return _with(state, allocations={**state.allocations, tag: msgspec.structs.replace(held, **changes)})


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
        allocation = Allocation(action.ask.tag, action.ask, at)
        return _with(state, allocations={**state.allocations, allocation.tag: allocation})
    if isinstance(action, Release):
        return _allocation(state, action.allocation, releasing=True)
    if isinstance(action, Launch):
        return _replica(
            state, action.life.replica, status=Status.LAUNCHING, incarnation=action.life.incarnation, since=at,
            node=action.node, allocation=action.allocation, step=action.step, pid=None, host="", phase="",
            phase_since=at, waits_for=None, listens=None, serves=None, holds=None, prefer=None,
        )  # fmt: skip
    if isinstance(action, Perform):
        return _with(state, faults=(*state.faults, action.fault.id))
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
    if event.ok:
        if isinstance(action, StopStep):
            state = _settled_launch(state, action.step)  # whatever of it may still come is sent away
            return _with(state, lingering=_without(state.lingering, action.step))
        return state
    if isinstance(action, Request):  # certainly not done: nothing of it exists
        state = _refused(state, Refusal(action.ask.tag, at, event.detail, event.unheard))
        return _with(state, allocations=_without(state.allocations, action.ask.tag))
    if isinstance(action, Launch) and _launching(state, action.life):  # who has spoken runs, whatever was not seen
        if event.unheard:  # nobody's failure but the manager's: it is made up for where it was meant to be
            return _replica(state, action.life.replica, status=Status.WANTED, since=at, prefer=action.node)
        return _failed(state, at, action.life.replica, Status.WANTED, event.detail, refused=True)
    if isinstance(action, Release):
        return _allocation(state, action.allocation, releasing=False, not_before=at + REFUSED_PAUSE)
    if isinstance(action, StopStep) and (held := state.lingering.get(action.step)) is not None:
        again = msgspec.structs.replace(held, asked=False, not_before=at + REFUSED_PAUSE)
        return _with(state, lingering={**state.lingering, action.step: again})
    return state


def _launching(state: State, life: Life) -> bool:
    return state.believed(life) and state.replica(life.replica).status is Status.LAUNCHING


def _refused(state: State, refusal: Refusal) -> State:
    recent = tuple(r for r in state.refusals if refusal.at - r.at < state.job.recovery.window)
    return _with(state, refusals=(*recent, refusal))


def _failed(state: State, at: float, id: ReplicaId, status: Status, why: str, refused: bool = False) -> State:
    """One more failure on the replica's account; the next launch is put off the longer the more there are."""
    held, recovery = state.replica(id), state.job.recovery
    failure = Start(at, held.node or NodeName(""), why, refused)
    failures = (*(start for start in held.failures if at - start.at < recovery.window), failure)
    longest = max(LONGEST_PAUSE, recovery.backoff)
    pause = min(longest, recovery.backoff * 2.0 ** min(len(failures) - 2, 30)) if len(failures) > 1 else 0.0
    return _replica(state, id, status=status, since=at, failures=failures, not_before=at + pause)


def _decided(state: State, at: float, event: ev.Decided) -> State:
    action = event.action
    if isinstance(action, Finish):
        return _with(state, verdict=action)
    if isinstance(action, Exclude):
        node = state.nodes.get(action.node) or Node(action.node, "")
        why = "; ".join(action.why.evidence) or "excluded"
        excluded = msgspec.structs.replace(node, excluded=why, excluded_at=at)
        return _with(state, nodes={**state.nodes, node.name: excluded})
    return _fenced(state, at, action)


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
    why = "; ".join(fence.why.evidence)
    state = _failed(state, at, held.id, Status.RETIRED if retired else Status.WANTED, why)
    prefer = held.node if fence.rung is Rung.IN_PLACE else None
    state = _replica(state, held.id, prefer=prefer)
    gone = [key for key, finding in state.findings.items() if finding.life == fence.life]
    return _with(state, findings=_without(state.findings, *gone), recoveries=state.recoveries + (not retired))


def _allocation_changed(state: State, at: float, event: ev.AllocationChanged) -> State:
    held = state.allocations.get(event.tag)
    over = event.seen is None or event.seen.state is AllocationState.ENDED
    if held is None:
        return state if over else _with(state, allocations={**state.allocations, event.tag: _stray(state, at, event)})
    if event.seen is None or over:
        if not (held.releasing or held.stray) and (held.seen is None or held.seen.state is AllocationState.PENDING):
            detail = (event.seen.detail if event.seen else "") or "no longer in the queue"  # and it has never run
            state = _refused(state, Refusal(event.tag, at, f"{event.tag}: {detail}", unheard=True))
        return _with(
            state,
            allocations=_without(state.allocations, event.tag),
            nodes=_left(state.nodes, event.tag, ()),
            lingering={tag: one for tag, one in state.lingering.items() if one.allocation != event.tag},
            intents={tag: one for tag, one in state.intents.items() if not _launches_into(one.action, event.tag)},
        )
    held = msgspec.structs.replace(held, seen=event.seen)
    if held.stray:
        return _with(state, allocations={**state.allocations, event.tag: held})
    nodes = _left(state.nodes, event.tag, event.seen.nodes)
    for name in event.seen.nodes:
        node = nodes.get(name) or Node(name, event.tag)
        if node.allocation != event.tag:
            node = msgspec.structs.replace(node, allocation=event.tag, seen=None)
        nodes[name] = node
    since = at if state.running_since is None and held.running else state.running_since
    return _with(state, allocations={**state.allocations, event.tag: held}, nodes=nodes, running_since=since)


def _stray(state: State, at: float, event: ev.AllocationChanged) -> Allocation:
    return Allocation(event.tag, Ask(event.tag, 0, state.job.node, 0.0), at, event.seen, stray=True)


def _launches_into(action: Outside, allocation: str) -> bool:
    return isinstance(action, Launch) and action.allocation == allocation


def _left(nodes: dict[NodeName, Node], tag: str, present: tuple[NodeName, ...]) -> dict[NodeName, Node]:
    """``nodes`` after all but the ``present`` ones left the allocation. That a node is excluded is not forgotten: the
    next request must not bring it back."""
    kept: dict[NodeName, Node] = {}
    for name, node in nodes.items():
        if node.allocation != tag or name in present:
            kept[name] = node
        elif node.excluded is not None:
            kept[name] = msgspec.structs.replace(node, allocation="", seen=None)
    return kept


def _node_changed(state: State, at: float, event: ev.NodeChanged) -> State:
    if event.node not in state.nodes:
        return state
    node = msgspec.structs.replace(state.nodes[event.node], seen=event.seen)
    return _with(state, nodes={**state.nodes, event.node: node})


def _settled_launch(state: State, step: str) -> State:
    return _with(state, intents=_without(state.intents, step)) if step in state.intents else state


def _admitted(state: State, at: float, event: ev.Admitted) -> State:
    state = _settled_launch(state, event.step)
    held = state.replica(event.life.replica)
    if held.status is not Status.LAUNCHING:
        return state
    return _replica(state, held.id, status=Status.STARTING, since=at, node=event.node, pid=event.pid)


def _agent_joined(state: State, at: float, event: ev.AgentJoined) -> State:
    state = _settled_launch(state, state.replica(event.life.replica).step or "")
    return _replica(
        state, event.life.replica, status=Status.JOINED, since=at, host=event.host, pid=event.pid, phase="serve"
    )


def _joined(state: State, at: float, event: ev.Joined) -> State:
    held = state.replica(event.life.replica)
    state = _settled_launch(state, held.step or "")  # its first process may have been heard by no manager
    since = held.since if held.status is Status.JOINED else at
    return _replica(
        state, held.id, status=Status.JOINED, since=since, node=event.node, host=event.host, pid=event.pid,
        listens=event.listens, serves=event.serves,
    )  # fmt: skip


def _step_ended(state: State, at: float, event: ev.StepEnded) -> State:
    state = _settled_launch(state, event.step)
    state = _with(state, lingering=_without(state.lingering, event.step))
    if not state.believed(event.life):
        return state
    return _replica(state, event.life.replica, pid=None, step=None)


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


def _fault_injected(state: State, at: float, event: ev.FaultInjected) -> State:
    tag = f"fault:{event.fault}"
    return _with(state, intents=_without(state.intents, tag))


def _commanded(state: State, at: float, event: ev.Commanded) -> State:
    state = _with(state, commands=(*state.commands, event.id))
    return _with(state, cancelled_by=event.by) if event.command == "cancel" else state


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
    ev.AllocationChanged: _allocation_changed,
    ev.NodeChanged: _node_changed,
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
    ev.Commanded: _commanded,
    ev.RunEnded: _run_ended,
}
