"""What is believed of lives after one more event: launched or adopted, heard, ended, fenced; and of what lingers."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from ...core.launch import ExitReason
from ...core.types import AGENT, SHADOW, Flag, Life, NodeName, ReplicaId, gang_of, role_of
from ..cluster.base import RejectReason
from . import events as ev
from .actions import Fence, Launch, Rung, StopStep
from .queries import completes, finding_about, owner_of
from .reward_curve import committed
from .state import First, Lingering, Replica, Start, State, Status
from .token_ages import with_step

RETURN_PAUSE = 10.0
"""s before a give-back or a stop that the cluster refused is asked for again, and before the next launch into an
allocation that it did not list as running"""
LONGEST_PAUSE = 60.0
"""s that the pause before a restart doubles up to: ten restarts take four minutes, a short outage does not"""
_FAILED_STARTS = frozenset({RejectReason.NEVER_APPEARED, RejectReason.NOT_STARTED, RejectReason.EXITED_AT_ONCE})
"""a launch that was rejected for one of these counts as a start that failed: the cluster did try it"""


# ── launched, and what becomes of that ───────────────────────────────────────────────────────────────────────────────
def launched(state: State, at: float, action: Launch) -> State:
    """A life is believed as soon as its launch is intended. Of a shadow's step it takes over what is known."""
    before, first, pid, host = action.shadow, None, None, ""
    state = replace(state, launched=state.launched or role_of(action.life.replica) not in (AGENT, SHADOW))
    if before is not None:
        held = state.replica(before.replica)
        if held.life == before and held.step == action.step:
            first, pid, host = held.first, held.pid, held.host
            state = with_replica(
                state, before.replica, status=Status.WANTED, since=at, step=None, first=None, pid=None, host="",
                phase="", passed=(), note="", listens=None, serves=None, prefer=None,
            )  # fmt: skip
            state = _cleared(state, before)
    return with_replica(
        state, action.life.replica, status=Status.LAUNCHING, incarnation=action.life.incarnation, since=at,
        node=action.node, allocation=action.allocation, step=action.step, first=first, pid=pid, host=host, phase="",
        phase_since=at, passed=(), waits_for=None, note="", listens=None, serves=None, holds=None, prefer=None,
        shadow=before, commits=0, fault="",
    )  # fmt: skip


def not_launched(state: State, at: float, action: Launch, event: ev.Done) -> State:
    """Certainly not done. Who has spoken runs, whatever was not seen. What a shadow has not become lingers as the life
    that it was to be: it is not trusted any more."""
    id = action.life.replica
    if not (state.believed(action.life) and state.replica(id).status is Status.LAUNCHING):
        return state
    if action.shadow is not None:
        state = _lingers(state, at, id)
    if event.unheard:  # nobody's failure but the manager's: it is made up for where it was meant to be
        return with_replica(state, id, status=Status.WANTED, since=at, prefer=action.node)
    if event.reason is RejectReason.NOT_HELD:  # later looks say what became of the allocation; nobody has failed yet
        return with_replica(state, id, status=Status.WANTED, since=at, prefer=action.node, not_before=at + RETURN_PAUSE)
    if event.reason in _FAILED_STARTS:
        state = _unstarted(state, id)
    not_started = event.detail if event.reason is RejectReason.NOT_STARTED else None
    state = failed(state, at, id, Status.WANTED, event.detail, refused=True, not_started=not_started)
    return state if action.shadow is None else with_replica(state, id, prefer=action.node)


# ── stopped ──────────────────────────────────────────────────────────────────────────────────────────────────────────
def stopping(state: State, at: float, action: StopStep) -> State:
    """The end of a step is intended. That of a believed life retires it: the run ends, or a shadow is not needed."""
    held_step = state.lingering.get(action.step)
    if held_step is None and not state.believed(action.life):
        return state
    if held_step is None:
        replica = state.replica(action.life.replica)
        held_step = Lingering(action.life, replica.node or NodeName(""), replica.allocation or "", at)
        state = with_replica(state, action.life.replica, status=Status.RETIRED, since=at)
    asked = replace(held_step, asked=True)
    return replace(state, lingering={**state.lingering, action.step: asked})


def stopped(state: State, action: StopStep) -> State:
    state = settled_launch(state, action.step)  # whatever of it may still come is sent away
    return replace(state, lingering=without(state.lingering, action.step))


def not_stopped(state: State, at: float, action: StopStep) -> State:
    if (held := state.lingering.get(action.step)) is None:
        return state
    again = replace(held, asked=False, not_before=at + RETURN_PAUSE)
    return replace(state, lingering={**state.lingering, action.step: again})


# ── failed, fenced ───────────────────────────────────────────────────────────────────────────────────────────────────
def failed(
    state: State, at: float, id: ReplicaId, status: Status, why: str, refused: bool = False,
    not_started: str | None = None, detector: str = "",
) -> State:  # fmt: skip
    """Count one more failure of the replica; the more there are, the longer the next launch is put off."""
    held, recovery = state.replica(id), state.job.recovery
    failure = Start(
        at, held.node or NodeName(""), why, refused, state.step,
        injected=bool(held.fault) and not refused, joined=held.status is Status.JOINED,
        not_started=not_started, detector=detector,
    )  # fmt: skip
    failures = (*(start for start in held.failures if at - start.at < recovery.window), failure)
    longest = max(LONGEST_PAUSE, recovery.backoff)
    pause = min(longest, recovery.backoff * 2.0 ** min(len(failures) - 2, 30)) if len(failures) > 1 else 0.0
    return with_replica(state, id, status=status, since=at, failures=failures, not_before=at + pause)


def fenced(state: State, at: float, fence: Fence) -> State:
    """The life is no longer believed; what runs of it lingers; the replica is wanted again (or retired). So is one that
    was not believed, where it restarts with its gang or because a person asked."""
    held = state.replica(fence.life.replica)
    retired = fence.rung in (Rung.DEGRADED, Rung.GIVE_UP)
    if held.id not in state.replicas or held.life != fence.life:
        return state
    if state.restarts:
        state = _restarting(state, held.id)
    if not held.believed:
        if retired:
            changed = {"status": Status.RETIRED, "since": at} if held.status is Status.WANTED else {}
        else:
            changed = {} if fence.charged else _anew(held, at, fence.to)
        return with_replica(state, held.id, **changed)
    state = _lingers(state, at, held.id)
    if held.shadow is not None and held.step is not None:
        state = settled_launch(state, held.step)  # told or not: nobody is to become this life any more
    if held.status is Status.JOINED:
        state = with_replica(state, held.id, down_since=at)
    status = Status.RETIRED if retired else Status.WANTED
    prefer = fence.to or (held.node if fence.rung is Rung.IN_PLACE else None)
    if not fence.charged:
        state = with_replica(state, held.id, status=status, since=at, prefer=prefer, not_before=at)
        return _cleared(state, fence.life)
    finding, not_started = finding_about(state, fence.life), None
    if finding is not None:
        state = _unstarted(state, held.id)
        not_started = finding.evidence[0].text if Flag.NOT_STARTED in finding.flags else None
    detector = finding.detector if finding is not None else ""
    why = "; ".join(fence.why.evidence)
    state = failed(state, at, held.id, status, why, not_started=not_started, detector=detector)
    state = with_replica(state, held.id, prefer=prefer)
    return replace(_cleared(state, fence.life), recoveries=state.recoveries + (not retired))


def _restarting(state: State, id: ReplicaId) -> State:
    """A person's order is carried out once no member of the gang but this one rests: a manager may die among them."""
    others = [one for one in state.replicas.values() if gang_of(one.id) == gang_of(id) and one.id != id]
    if any(one.status is Status.RETIRED for one in others):
        return state
    return replace(state, restarts=without(state.restarts, id, gang_of(id)))


def _anew(held: Replica, at: float, to: NodeName | None) -> dict[str, Any]:
    """What it takes to want it at once. One that was gone on without has its budget back."""
    budget = {"failures": (), "unstarted": 0} if held.status is Status.RETIRED else {}
    return {"status": Status.WANTED, "since": at, "prefer": to or held.prefer, "not_before": at, **budget}


def _lingers(state: State, at: float, id: ReplicaId) -> State:
    """Its step may still run; one whose allocation is gone went with it."""
    held = state.replica(id)
    if not held.step or not held.node or held.allocation not in state.allocations:
        return state
    linger = Lingering(held.life, held.node, held.allocation, at)
    return replace(state, lingering={**state.lingering, held.step: linger})


def _unstarted(state: State, id: ReplicaId) -> State:
    """A life of it failed by itself; if none has ever joined, that may be the job's own mistake."""
    held = state.replica(id)
    return state if held.ever_joined else with_replica(state, id, unstarted=held.unstarted + 1)


def _cleared(state: State, life: Life) -> State:
    """Nothing that was found about it matters any more."""
    gone = [key for key, finding in state.findings.items() if finding.life == life]
    return replace(state, findings=without(state.findings, *gone)) if gone else state


# ── heard ────────────────────────────────────────────────────────────────────────────────────────────────────────────
def settled_launch(state: State, step: str) -> State:
    return replace(state, intents=without(state.intents, step)) if step in state.intents else state


def admitted(state: State, at: float, event: ev.Admitted) -> State:
    held = state.replica(event.life.replica)
    if held.shadow is None or held.step != event.step:  # a shadow's step that asks again has not yet become anything
        state = settled_launch(state, event.step)
    if held.first is None and held.step == event.step:
        state = with_replica(state, held.id, first=First(event.node, event.pid))
    if held.status is not Status.LAUNCHING or held.shadow is not None:
        return state
    return with_replica(state, held.id, status=Status.STARTING, since=at, node=event.node, pid=event.pid)


def agent_joined(state: State, at: float, event: ev.AgentJoined) -> State:
    state = settled_launch(state, state.replica(event.life.replica).step or "")
    node = state.nodes.get(event.node)
    if node is not None and (node.probe, node.keeps) != (event.probe, event.keeps):
        node = replace(node, probe=event.probe, keeps=event.keeps)
        state = replace(state, nodes={**state.nodes, node.name: node})
    return with_replica(
        state, event.life.replica, status=Status.JOINED, since=at, host=event.host, pid=event.pid, phase="serve",
        ever_joined=True,
    )  # fmt: skip


def joined(state: State, at: float, event: ev.Joined) -> State:
    held = state.replica(event.life.replica)
    state = settled_launch(state, held.step or "")  # its first process may have been heard by no manager
    since = held.since if held.status is Status.JOINED else at
    return with_replica(
        state, held.id, status=Status.JOINED, since=since, node=event.node, host=event.host, pid=event.pid,
        listens=event.listens, serves=event.serves, ever_joined=True,
    )  # fmt: skip


def step_ended(state: State, at: float, event: ev.StepEnded) -> State:
    """Of a shadow's step the member has ended that it became, whoever it says it was."""
    life = event.life
    if not state.believed(life) and (owner := owner_of(state, event.step)) is not None:
        life = owner.life
    state = settled_launch(state, event.step)
    state = replace(state, lingering=without(state.lingering, event.step))
    if not state.believed(life):
        return state
    state = with_replica(state, life.replica, pid=None, step=None)
    if event.code == 0 and event.reason is ExitReason.EXITED and completes(state.job, role_of(life.replica)):
        return with_replica(state, life.replica, status=Status.COMPLETED, since=at, phase="", waits_for=None)
    return state


def phase_entered(state: State, at: float, event: ev.PhaseEntered) -> State:
    held = state.replica(event.life.replica)
    passed = held.passed if held.phase in ("", event.phase, *held.passed) else (*held.passed, held.phase)
    return with_replica(state, held.id, phase=event.phase, phase_since=at, passed=passed, waits_for=event.waits_for)


def noted(state: State, at: float, event: ev.Noted) -> State:
    return with_replica(state, event.life.replica, note=event.note)


def version_held(state: State, at: float, event: ev.VersionHeld) -> State:
    return with_replica(state, event.life.replica, holds=event.version)


def step_committed(state: State, at: float, event: ev.StepCommitted) -> State:
    """In whatever order: a trainer that reconnects says first how far it is, and then what it could not say before.
    What an earlier life had committed, and this one only repeats, is none of its commits."""
    if event.step > state.step:
        commits = state.replica(event.life.replica).commits + 1
        state = with_replica(state, event.life.replica, commits=commits)
    newest = event.step > state.step or (event.step == state.step and not state.metrics)
    if newest:
        state = replace(state, step=event.step, metrics=event.metrics)
    return replace(
        state,
        rewards=committed(state.rewards, event.step, event.metrics.get("reward")),
        token_ages=with_step(state.token_ages, event.step, event.metrics, at),
    )


def with_replica(state: State, id: ReplicaId, **changes: Any) -> State:
    """The state but for so much about one replica."""
    held = replace(state.replica(id), **changes)
    return replace(state, replicas={**state.replicas, id: held})


def without(held: dict[Any, Any], *keys: Any) -> dict[Any, Any]:
    """All but these."""
    return {key: value for key, value in held.items() if key not in keys}
