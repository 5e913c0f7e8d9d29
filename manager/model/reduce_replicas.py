"""What is believed of lives after one more event: launched or adopted, heard, ended, fenced; and of what lingers."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from ...core.launch import ExitReason
from ...core.types import AGENT, STANDBY_ROLE, Flag, Incarnation, NodeName, ReplicaId, gang_of, role_of
from ..cluster.base import RejectReason
from . import events as ev
from .actions import Fence, Launch, Rung, StopStep
from .queries import finding_about, is_batch_role, owner_of
from .reward_curve import add_step
from .state import AdmittedProcess, FailedIncarnation, OrphanStep, Replica, State, Status
from .token_ages import with_step

RETRY_PAUSE_S = 10.0
"""s before a give-back or a stop that the cluster refused is asked for again, and before the next launch into an
allocation that it did not list as running"""
MAX_RESTART_BACKOFF_S = 60.0
"""s that the pause before a restart doubles up to: ten restarts take four minutes, a short outage does not"""
_FAILED_STARTS = frozenset({RejectReason.NEVER_APPEARED, RejectReason.NOT_STARTED, RejectReason.EXITED_AT_ONCE})
"""a launch that was rejected for one of these counts as a start that failed: the cluster did try it"""


# ── launched, and what becomes of that ───────────────────────────────────────────────────────────────────────────────
def on_launch_intended(state: State, at: float, action: Launch) -> State:
    """A life is believed as soon as its launch is intended. Of a shadow's step it takes over what is known."""
    before, first, pid, host = action.standby, None, None, ""
    state = replace(state, launched=state.launched or role_of(action.incarnation.replica) not in (AGENT, STANDBY_ROLE))
    if before is not None:
        replica = state.replica(before.replica)
        if replica.incarnation == before and replica.step == action.step:
            first, pid, host = replica.admitted_process, replica.pid, replica.host
            state = with_replica(
                state, before.replica, status=Status.WANTED, since=at, step=None, admitted_process=None, pid=None, host="",
                phase="", past_phases=(), note="", listen_address=None, weight_address=None, preferred_node=None,
            )  # fmt: skip
            state = _drop_findings(state, before)
    return with_replica(
        state, action.incarnation.replica, status=Status.LAUNCHING, incarnation_number=action.incarnation.number, since=at,
        node=action.node, allocation=action.allocation, step=action.step, admitted_process=first, pid=pid, host=host, phase="",
        phase_since=at, past_phases=(), waits_for=None, note="", listen_address=None, weight_address=None, weight_version=None, preferred_node=None,
        promoted_from=before, commits=0, fault="",
    )  # fmt: skip


def on_launch_rejected(state: State, at: float, action: Launch, event: ev.IntentSettled) -> State:
    """Certainly not done. Who has spoken runs, whatever was not seen. What a shadow has not become lingers as the life
    that it was to be: it is not trusted any more."""
    id = action.incarnation.replica
    if not (state.is_current(action.incarnation) and state.replica(id).status is Status.LAUNCHING):
        return state
    if action.standby is not None:
        state = _add_orphan(state, at, id)
    if event.undelivered:  # nobody's failure but the manager's: it is made up for where it was meant to be
        return with_replica(state, id, status=Status.WANTED, since=at, preferred_node=action.node)
    if (
        event.reason is RejectReason.ALLOCATION_NOT_RUNNING
    ):  # later looks say what became of the allocation; nobody has failed yet
        return with_replica(
            state, id, status=Status.WANTED, since=at, preferred_node=action.node, not_before=at + RETRY_PAUSE_S
        )
    if event.reason in _FAILED_STARTS:
        state = _count_failed_start(state, id)
    not_started = event.detail if event.reason is RejectReason.NOT_STARTED else None
    state = count_failure(state, at, id, Status.WANTED, event.detail, refused=True, not_started=not_started)
    return state if action.standby is None else with_replica(state, id, preferred_node=action.node)


# ── stopped ──────────────────────────────────────────────────────────────────────────────────────────────────────────
def on_stop_intended(state: State, at: float, action: StopStep) -> State:
    """The end of a step is intended. That of a believed life retires it: the run ends, or a shadow is not needed."""
    orphan = state.orphan_steps.get(action.step)
    if orphan is None and not state.is_current(action.incarnation):
        return state
    if orphan is None:
        replica = state.replica(action.incarnation.replica)
        orphan = OrphanStep(action.incarnation, replica.node or NodeName(""), replica.allocation or "", at)
        state = with_replica(state, action.incarnation.replica, status=Status.RETIRED, since=at)
    stopping_orphan = replace(orphan, stop_requested=True)
    return replace(state, orphan_steps={**state.orphan_steps, action.step: stopping_orphan})


def on_stop_done(state: State, action: StopStep) -> State:
    state = settle_launch(state, action.step)  # whatever of it may still come is sent away
    return replace(state, orphan_steps=without(state.orphan_steps, action.step))


def on_stop_rejected(state: State, at: float, action: StopStep) -> State:
    if (orphan := state.orphan_steps.get(action.step)) is None:
        return state
    retryable = replace(orphan, stop_requested=False, not_before=at + RETRY_PAUSE_S)
    return replace(state, orphan_steps={**state.orphan_steps, action.step: retryable})


# ── failed, fenced ───────────────────────────────────────────────────────────────────────────────────────────────────
def count_failure(
    state: State, at: float, id: ReplicaId, status: Status, why: str, refused: bool = False,
    not_started: str | None = None, detector: str = "",
) -> State:  # fmt: skip
    """Count one more failure of the replica; the more there are, the longer the next launch is put off."""
    replica, recovery = state.replica(id), state.job.recovery
    failure = FailedIncarnation(
        at, replica.node or NodeName(""), why, refused, state.step,
        injected=bool(replica.fault) and not refused, joined=replica.status is Status.JOINED,
        not_started=not_started, detector=detector,
    )  # fmt: skip
    failures = (*(start for start in replica.failures if at - start.at < recovery.window), failure)
    longest = max(MAX_RESTART_BACKOFF_S, recovery.backoff)
    pause = min(longest, recovery.backoff * 2.0 ** min(len(failures) - 2, 30)) if len(failures) > 1 else 0.0
    return with_replica(state, id, status=status, since=at, failures=failures, not_before=at + pause)


def on_fence(state: State, at: float, fence: Fence) -> State:
    """The life is no longer believed; what runs of it lingers; the replica is wanted again (or retired). So is one that
    was not believed, where it restarts with its gang or because a person asked."""
    replica = state.replica(fence.incarnation.replica)
    retired = fence.rung in (Rung.DEGRADED, Rung.GIVE_UP)
    if replica.id not in state.replicas or replica.incarnation != fence.incarnation:
        return state
    if state.requested_restarts:
        state = _clear_restart_request(state, replica.id)
    if not replica.is_current:
        if retired:
            changed = {"status": Status.RETIRED, "since": at} if replica.status is Status.WANTED else {}
        else:
            changed = {} if fence.charged else _reset_for_restart(replica, at, fence.target_node)
        return with_replica(state, replica.id, **changed)
    state = _add_orphan(state, at, replica.id)
    if replica.promoted_from is not None and replica.step is not None:
        state = settle_launch(state, replica.step)  # told or not: nobody is to become this life any more
    if replica.status is Status.JOINED:
        state = with_replica(state, replica.id, down_since=at)
    status = Status.RETIRED if retired else Status.WANTED
    prefer = fence.target_node or (replica.node if fence.rung is Rung.IN_PLACE else None)
    if not fence.charged:
        state = with_replica(state, replica.id, status=status, since=at, preferred_node=prefer, not_before=at)
        return _drop_findings(state, fence.incarnation)
    finding, not_started = finding_about(state, fence.incarnation), None
    if finding is not None:
        state = _count_failed_start(state, replica.id)
        not_started = finding.evidence[0].text if Flag.NOT_STARTED in finding.flags else None
    detector = finding.detector if finding is not None else ""
    why = "; ".join(fence.why.evidence)
    state = count_failure(state, at, replica.id, status, why, not_started=not_started, detector=detector)
    state = with_replica(state, replica.id, preferred_node=prefer)
    return replace(_drop_findings(state, fence.incarnation), recoveries=state.recoveries + (not retired))


def _clear_restart_request(state: State, id: ReplicaId) -> State:
    """A person's order is carried out once no member of the gang but this one rests: a manager may die among them."""
    others = [one for one in state.replicas.values() if gang_of(one.id) == gang_of(id) and one.id != id]
    if any(one.status is Status.RETIRED for one in others):
        return state
    return replace(state, requested_restarts=without(state.requested_restarts, id, gang_of(id)))


def _reset_for_restart(held: Replica, at: float, to: NodeName | None) -> dict[str, Any]:
    """What it takes to want it at once. One that was gone on without has its budget back."""
    budget = {"failures": (), "failed_starts": 0} if held.status is Status.RETIRED else {}
    return {
        "status": Status.WANTED,
        "since": at,
        "preferred_node": to or held.preferred_node,
        "not_before": at,
        **budget,
    }


def _add_orphan(state: State, at: float, id: ReplicaId) -> State:
    """Its step may still run; one whose allocation is gone went with it."""
    replica = state.replica(id)
    if not replica.step or not replica.node or replica.allocation not in state.allocations:
        return state
    orphan = OrphanStep(replica.incarnation, replica.node, replica.allocation, at)
    return replace(state, orphan_steps={**state.orphan_steps, replica.step: orphan})


def _count_failed_start(state: State, id: ReplicaId) -> State:
    """A life of it failed by itself; if none has ever joined, that may be the job's own mistake."""
    replica = state.replica(id)
    return state if replica.ever_joined else with_replica(state, id, failed_starts=replica.failed_starts + 1)


def _drop_findings(state: State, incarnation: Incarnation) -> State:
    """Nothing that was found about it matters any more."""
    keys = [key for key, finding in state.findings.items() if finding.incarnation == incarnation]
    return replace(state, findings=without(state.findings, *keys)) if keys else state


# ── heard ────────────────────────────────────────────────────────────────────────────────────────────────────────────
def settle_launch(state: State, step: str) -> State:
    return replace(state, intents=without(state.intents, step)) if step in state.intents else state


def on_admitted(state: State, at: float, event: ev.Admitted) -> State:
    replica = state.replica(event.incarnation.replica)
    if (
        replica.promoted_from is None or replica.step != event.step
    ):  # a shadow's step that asks again has not yet become anything
        state = settle_launch(state, event.step)
    if replica.admitted_process is None and replica.step == event.step:
        state = with_replica(state, replica.id, admitted_process=AdmittedProcess(event.node, event.pid))
    if replica.status is not Status.LAUNCHING or replica.promoted_from is not None:
        return state
    return with_replica(state, replica.id, status=Status.STARTING, since=at, node=event.node, pid=event.pid)


def on_agent_joined(state: State, at: float, event: ev.AgentJoined) -> State:
    state = settle_launch(state, state.replica(event.incarnation.replica).step or "")
    node = state.nodes.get(event.node)
    if node is not None and (node.probe_error, node.snapshot_address) != (event.probe_error, event.snapshot_address):
        node = replace(node, probe_error=event.probe_error, snapshot_address=event.snapshot_address)
        state = replace(state, nodes={**state.nodes, node.name: node})
    return with_replica(
        state, event.incarnation.replica, status=Status.JOINED, since=at, host=event.host, pid=event.pid, phase="serve",
        ever_joined=True,
    )  # fmt: skip


def on_joined(state: State, at: float, event: ev.Joined) -> State:
    replica = state.replica(event.incarnation.replica)
    state = settle_launch(state, replica.step or "")  # its first process may have been heard by no manager
    since = replica.since if replica.status is Status.JOINED else at
    return with_replica(
        state, replica.id, status=Status.JOINED, since=since, node=event.node, host=event.host, pid=event.pid,
        listen_address=event.listen_address, weight_address=event.weight_address, ever_joined=True,
    )  # fmt: skip


def on_step_ended(state: State, at: float, event: ev.StepEnded) -> State:
    """Of a shadow's step the member has ended that it became, whoever it says it was."""
    incarnation = event.incarnation
    if not state.is_current(incarnation) and (owner := owner_of(state, event.step)) is not None:
        incarnation = owner.incarnation
    state = settle_launch(state, event.step)
    state = replace(state, orphan_steps=without(state.orphan_steps, event.step))
    if not state.is_current(incarnation):
        return state
    state = with_replica(state, incarnation.replica, pid=None, step=None)
    if event.code == 0 and event.reason is ExitReason.EXITED and is_batch_role(state.job, role_of(incarnation.replica)):
        return with_replica(state, incarnation.replica, status=Status.COMPLETED, since=at, phase="", waits_for=None)
    return state


def on_phase_entered(state: State, at: float, event: ev.PhaseEntered) -> State:
    replica = state.replica(event.incarnation.replica)
    passed = (
        replica.past_phases
        if replica.phase in ("", event.phase, *replica.past_phases)
        else (*replica.past_phases, replica.phase)
    )
    return with_replica(
        state, replica.id, phase=event.phase, phase_since=at, past_phases=passed, waits_for=event.waits_for
    )


def on_note_changed(state: State, at: float, event: ev.NoteChanged) -> State:
    return with_replica(state, event.incarnation.replica, note=event.note)


def on_version_available(state: State, at: float, event: ev.VersionAvailable) -> State:
    return with_replica(state, event.incarnation.replica, weight_version=event.version)


def on_step_committed(state: State, at: float, event: ev.StepCommitted) -> State:
    """In whatever order: a trainer that reconnects says first how far it is, and then what it could not say before.
    What an earlier life had committed, and this one only repeats, is none of its commits."""
    if event.step > state.step:
        commits = state.replica(event.incarnation.replica).commits + 1
        state = with_replica(state, event.incarnation.replica, commits=commits)
    newest = event.step > state.step or (event.step == state.step and not state.metrics)
    if newest:
        state = replace(state, step=event.step, metrics=event.metrics)
    return replace(
        state,
        rewards=add_step(state.rewards, event.step, event.metrics.get("reward")),
        token_ages=with_step(state.token_ages, event.step, event.metrics, at),
    )


def with_replica(state: State, id: ReplicaId, **changes: Any) -> State:
    """The state but for so much about one replica."""
    replica = replace(state.replica(id), **changes)
    return replace(state, replicas={**state.replicas, id: replica})


def without(mapping: dict[Any, Any], *keys: Any) -> dict[Any, Any]:
    """All but these."""
    return {key: value for key, value in mapping.items() if key not in keys}
