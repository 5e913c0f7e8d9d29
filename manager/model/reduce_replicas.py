"""Reduce events about incarnations into the state: launches, promotions, reports, ends, fences, orphans. Pure."""

from __future__ import annotations

from itertools import zip_longest
from typing import Any

from msgspec.structs import replace

from ...cluster.base import RejectReason
from ...core.launch import ExitReason
from ...core.types import (
    Finding,
    Flag,
    Incarnation,
    NodeName,
    RaisedException,
    ReplicaId,
    WeightTraffic,
    gang_of,
    is_support,
    role_of,
)
from . import events as ev
from .actions import Fence, Launch, Rung, StopStep
from .figures import idle_times, stream_figures
from .figures.reward_curve import add_step
from .figures.step_times import with_commit
from .figures.token_ages import with_step
from .queries import (
    current_owner,
    is_batch_role,
    is_crowded,
    members,
    most_severe,
    reached_step,
    returned_early,
    starts_ended_by,
)
from .state import AdmittedProcess, FailedIncarnation, OrphanStep, Replica, State, Status, UnchargedRestart
from .table import put, without

RETRY_PAUSE_S = 10.0
"""Seconds before a refused release or stop is requested again, and before the next launch into an allocation that the
cluster did not list as running."""
MAX_RESTART_BACKOFF_S = 60.0
"""Upper limit (s) of the pause before a restart, which doubles with each failure. Ten restarts then take at least four
minutes, so that they outlast a short outage."""
_FAILED_STARTS = frozenset({RejectReason.NEVER_APPEARED, RejectReason.NOT_STARTED, RejectReason.EXITED_AT_ONCE})
"""Reasons for which a rejected launch counts as a failed start, because the cluster tried to start the step."""
_STANDBY_UNUSABLE = frozenset({RejectReason.STANDBY_OUTDATED, RejectReason.GPUS_UNREPORTED})
"""Reasons for which a promotion is rejected although neither the replica nor its node has failed."""


# ── launches ─────────────────────────────────────────────────────────────────────────────────────────────────────────
def on_launch_intended(state: State, at: float, action: Launch) -> State:
    """Make the new incarnation the current one as soon as its launch is intended.

    In a promotion the member takes over the step, the admitted process and the pid of the standby process. The standby
    replica is then launched again.
    """
    standby, admitted, pid, host = action.standby, None, None, ""
    if not (state.launched or is_support(action.incarnation.replica)):
        state = replace(state, launched=True)
    if standby is not None:
        replica = state.replica(standby.replica)
        if replica.incarnation == standby and replica.step == action.step:
            admitted, pid, host = replica.admitted_process, replica.pid, replica.host
            state = with_replica(
                state,
                standby.replica,
                status=Status.WANTED,
                since=at,
                step=None,
                admitted_process=None,
                pid=None,
                host="",
                phase="",
                past_phases=(),
                note="",
                listen_address=None,
                weight_address=None,
                rendezvous_address=None,
                preferred_node=None,
            )
            state = _drop_findings(state, standby)
    return with_replica(
        state,
        action.incarnation.replica,
        status=Status.LAUNCHING,
        incarnation_number=action.incarnation.number,
        since=at,
        node=action.node,
        allocation=action.allocation,
        step=action.step,
        admitted_process=admitted,
        pid=pid,
        host=host,
        phase="",
        phase_since=at,
        past_phases=(),
        waits_for=None,
        note="",
        outside=None,
        listen_address=None,
        weight_address=None,
        rendezvous_address=None,
        weight_version=None,
        traffic=WeightTraffic(),
        traffic_before=WeightTraffic(),
        advanced=False,
        preferred_node=None,
        promoted_from=standby,
        commits=0,
        fault="",
    )


def on_launch_rejected(state: State, at: float, action: Launch, event: ev.IntentSettled) -> State:
    """Apply the rejection of a launch, unless a process of its incarnation has reported.

    If a promotion was rejected, the step of the standby process becomes an orphan step and is not used again.
    """
    id = action.incarnation.replica
    if not (state.is_current(action.incarnation) and state.replica(id).status is Status.LAUNCHING):
        return state
    if action.standby is not None:
        state = _add_orphan(state, at, id)
    # the manager failed, or the standby process cannot be used: nothing is wrong with the replica or its node
    if event.undelivered or event.reason in _STANDBY_UNUSABLE:
        return with_replica(state, id, status=Status.WANTED, since=at, preferred_node=action.node)
    if event.reason is RejectReason.ALLOCATION_NOT_RUNNING:  # later polls show what happened; nothing has failed yet
        return with_replica(
            state, id, status=Status.WANTED, since=at, preferred_node=action.node, not_before=at + RETRY_PAUSE_S
        )
    if event.reason in _FAILED_STARTS:
        state = _count_failed_start(state, id)
    not_started = event.detail if event.reason is RejectReason.NOT_STARTED else None
    state = count_failure(state, at, id, Status.WANTED, event.detail, refused=True, not_started=not_started)
    return state if action.standby is None else with_replica(state, id, preferred_node=action.node)


# ── stops ────────────────────────────────────────────────────────────────────────────────────────────────────────────
def on_stop_intended(state: State, at: float, action: StopStep) -> State:
    """Record that a step is being stopped.

    If the step runs a current incarnation, its replica is retired, because a current incarnation is stopped only if the
    run ends or, for a standby process, if it is no longer needed.
    """
    orphan = state.orphan_steps.get(action.step)
    if orphan is None and not state.is_current(action.incarnation):
        return state
    if orphan is None:
        replica = state.replica(action.incarnation.replica)
        orphan = OrphanStep(action.incarnation, replica.node or NodeName(""), replica.allocation or "", at)
        state = with_replica(state, action.incarnation.replica, status=Status.RETIRED, since=at)
    stopping_orphan = replace(orphan, stop_requested=True)
    return replace(state, orphan_steps=put(state.orphan_steps, action.step, stopping_orphan))


def on_stop_done(state: State, action: StopStep) -> State:
    """Remove a stopped step and the open intent of its launch; later messages of the step are rejected."""
    state = settle_launch(state, action.step)
    return replace(state, orphan_steps=without(state.orphan_steps, action.step))


def on_stop_rejected(state: State, at: float, action: StopStep) -> State:
    """Allow another stop of the step after a pause."""
    if (orphan := state.orphan_steps.get(action.step)) is None:
        return state
    retryable = replace(orphan, stop_requested=False, not_before=at + RETRY_PAUSE_S)
    return replace(state, orphan_steps=put(state.orphan_steps, action.step, retryable))


# ── failures and fences ───────────────────────────────────────────────────────────────────────────────────────────────
def count_failure(
    state: State,
    at: float,
    id: ReplicaId,
    status: Status,
    why: str,
    refused: bool = False,
    not_started: str | None = None,
    detector: str = "",
    crowded: bool = False,
) -> State:
    """Count one more failure of the replica and delay its next launch. The delay doubles with each recent failure."""
    replica, recovery = state.replica(id), state.job.recovery
    failure = FailedIncarnation(
        at,
        replica.node or NodeName(""),
        why,
        refused,
        reached_step(state),
        injected=bool(replica.fault) and not refused,
        joined=replica.status is Status.JOINED,
        not_started=not_started,
        detector=detector,
        crowded=crowded,
    )
    failures = (*(failed for failed in replica.failures if at - failed.at < recovery.window), failure)
    longest = max(MAX_RESTART_BACKOFF_S, recovery.backoff)
    pause = min(longest, recovery.backoff * 2.0 ** min(len(failures) - 2, 30)) if len(failures) > 1 else 0.0
    return with_replica(state, id, status=status, since=at, failures=failures, not_before=at + pause)


def on_fence(state: State, at: float, fence: Fence) -> State:
    """Apply a fence: the incarnation is no longer current and its step becomes an orphan to be stopped.

    The replica is then launched again or retired. This also applies to a replica that is not running but restarts with
    its gang or on a user's request.
    """
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
        state = settle_launch(state, replica.step)  # a promotion that is still open must not be delivered
    changes: dict[str, Any] = {"down_since": at} if replica.status is Status.JOINED else {}
    status = Status.RETIRED if retired else Status.WANTED
    prefer = fence.target_node or (replica.node if fence.rung is Rung.IN_PLACE else None)
    why = "; ".join(fence.why.evidence)
    if not fence.charged:
        if not _follows_gang(state, replica):
            changes["uncharged_restart"] = UnchargedRestart(at, replica.node or NodeName(""), why)
        changes |= {"status": status, "since": at, "preferred_node": prefer, "not_before": at}
        state = with_replica(state, replica.id, **changes)
        return _drop_findings(state, fence.incarnation)
    about = (finding for finding in state.findings.values() if finding.incarnation == fence.incarnation)
    finding, not_started = most_severe(about), None  # an index of all findings would serve for this state only
    state = _count_exception(state, replica.id, None if finding is None else finding.exception)
    state = _count_clean_exit(state, at, replica.id, finding)
    if finding is not None:
        state = _count_failed_start(state, replica.id)
        not_started = finding.evidence[0].text if Flag.NOT_STARTED in finding.flags else None
    detector = finding.detector if finding is not None else ""
    crowded = is_crowded(state, replica, finding)
    state = count_failure(
        state, at, replica.id, status, why, not_started=not_started, detector=detector, crowded=crowded
    )
    state = with_replica(state, replica.id, preferred_node=prefer, **changes)
    return replace(_drop_findings(state, fence.incarnation), recoveries=state.recoveries + (not retired))


def _follows_gang(state: State, replica: Replica) -> bool:
    """Return whether another member of the gang's newest incarnation failed or was stopped before this replica."""
    return not is_support(replica.id) and any(
        member.incarnation_number == replica.incarnation_number and not member.is_current
        for member in members(state, replica.id)
    )


def _clear_restart_request(state: State, id: ReplicaId) -> State:
    """Remove a user's restart request once no other member of the gang is retired.

    The request is kept until then, because the next manager may take over between the restarts of two members.
    """
    others = [member for member in state.replicas.values() if gang_of(member.id) == gang_of(id) and member.id != id]
    if any(member.status is Status.RETIRED for member in others):
        return state
    return replace(state, requested_restarts=without(state.requested_restarts, id, gang_of(id)))


def _reset_for_restart(replica: Replica, at: float, to: NodeName | None) -> dict[str, Any]:
    """Return the changes that make a replica due for launch at once; a retired replica gets its budget back."""
    spent = {"failures": (), "failed_starts": 0, "last_exception": None, "exception_starts": 0, "clean_exits": 0}
    budget = spent if replica.status is Status.RETIRED else {}
    return {
        "status": Status.WANTED,
        "since": at,
        "preferred_node": to or replica.preferred_node,
        "returned": to is not None or replica.returned,
        "not_before": at,
        **budget,
    }


def _add_orphan(state: State, at: float, id: ReplicaId) -> State:
    """Record the step of the replica as an orphan that may still run, unless its allocation is gone."""
    replica = state.replica(id)
    allocation = replica.allocation or ""
    if not replica.step or not replica.node or allocation not in state.allocations:
        return state
    orphan = OrphanStep(replica.incarnation, replica.node, allocation, at)
    return replace(state, orphan_steps=put(state.orphan_steps, replica.step, orphan))


def _count_failed_start(state: State, id: ReplicaId) -> State:
    """Count a failed start of a replica that has never joined, because the job spec itself may be wrong."""
    replica = state.replica(id)
    return state if replica.ever_joined else with_replica(state, id, failed_starts=replica.failed_starts + 1)


def _count_exception(state: State, id: ReplicaId, exception: RaisedException | None) -> State:
    """Count in how many consecutive incarnations the same exception ended the replica.

    Any other failure resets the count, as does an exception that the environment may have caused. An injected fault
    leaves the count unchanged, since it shows nothing about the code.
    """
    replica = state.replica(id)
    if replica.fault:
        return state
    if exception is not None and exception.environmental:
        exception = None
    starts = 0 if exception is None else 1 + starts_ended_by(exception, replica)
    return with_replica(state, id, last_exception=exception, exception_starts=starts)


def _count_clean_exit(state: State, at: float, id: ReplicaId, finding: Finding | None) -> State:
    """Count in how many consecutive incarnations the replica's program returned soon after its start.

    Any other failure resets the count, except an injected failure, which shows nothing about the program.
    """
    replica = state.replica(id)
    if replica.fault:
        return state
    return with_replica(
        state, id, clean_exits=replica.clean_exits + 1 if returned_early(state, replica, finding, at) else 0
    )


def _drop_findings(state: State, incarnation: Incarnation) -> State:
    """Drop all findings about an incarnation."""
    keys = [key for key, finding in state.findings.items() if finding.incarnation == incarnation]
    return replace(state, findings=without(state.findings, *keys)) if keys else state


# ── reports ───────────────────────────────────────────────────────────────────────────────────────────────────────────
def settle_launch(state: State, step: str) -> State:
    """Drop the open intent of a step's launch."""
    return replace(state, intents=without(state.intents, step)) if step in state.intents else state


def on_admitted(state: State, at: float, event: ev.Admitted) -> State:
    """Record that a step's first process was admitted, which settles the launch intent.

    A standby process that requests admission again does not settle the promotion that is still open.
    """
    replica = state.replica(event.incarnation.replica)
    # A standby process that requests admission again has not been promoted yet: its promotion stays open.
    if replica.promoted_from is None or replica.step != event.step:
        state = settle_launch(state, event.step)
    if replica.admitted_process is None and replica.step == event.step:
        state = with_replica(state, replica.id, admitted_process=AdmittedProcess(event.node, event.pid))
    if replica.status is not Status.LAUNCHING or replica.promoted_from is not None:
        return state
    return with_replica(state, replica.id, status=Status.STARTING, since=at, node=event.node, pid=event.pid)


def on_agent_joined(state: State, at: float, event: ev.AgentJoined) -> State:
    """Record that the agent of a node has joined, with the node's result of ``[env] probe``."""
    state = settle_launch(state, state.replica(event.incarnation.replica).step or "")
    node = state.nodes.get(event.node)
    if node is not None and (node.probe_error, node.snapshot_address) != (event.probe_error, event.snapshot_address):
        node = replace(node, probe_error=event.probe_error, snapshot_address=event.snapshot_address)
        state = replace(state, nodes=put(state.nodes, node.name, node))
    return with_replica(
        state,
        event.incarnation.replica,
        status=Status.JOINED,
        since=at,
        host=event.host,
        pid=event.pid,
        phase="serve",
        ever_joined=True,
    )


def on_joined(state: State, at: float, event: ev.Joined) -> State:
    """Record that a worker has joined, with its addresses."""
    replica = state.replica(event.incarnation.replica)
    state = settle_launch(state, replica.step or "")  # the admission may have been lost with an earlier manager
    since = replica.since if replica.status is Status.JOINED else at
    return with_replica(
        state,
        replica.id,
        status=Status.JOINED,
        since=since,
        node=event.node,
        host=event.host,
        pid=event.pid,
        listen_address=event.listen_address,
        weight_address=event.weight_address,
        rendezvous_address=event.rendezvous_address,
        ever_joined=True,
        returned=False,
    )


def on_step_ended(state: State, at: float, event: ev.StepEnded) -> State:
    """Record the end of a step.

    After a promotion the step belongs to the promoted member, even if the event names the standby process. A replica of
    a batch role has completed if its command exited with code 0.
    """
    incarnation = current_owner(state, event.incarnation, event.step)
    state = settle_launch(state, event.step)
    state = replace(state, orphan_steps=without(state.orphan_steps, event.step))
    if not state.is_current(incarnation):
        return state
    state = with_replica(state, incarnation.replica, pid=None, step=None)
    if event.code == 0 and event.reason is ExitReason.EXITED and is_batch_role(state.job, role_of(incarnation.replica)):
        return with_replica(state, incarnation.replica, status=Status.COMPLETED, since=at, phase="", waits_for=None)
    return state


def on_first_work_done(state: State, at: float, event: ev.FirstWorkDone) -> State:
    """Record that an incarnation has completed its first unit of work, and reset the count of equal exceptions."""
    return with_replica(state, event.incarnation.replica, ever_worked=True, last_exception=None, exception_starts=0)


def on_phase_entered(state: State, at: float, event: ev.PhaseEntered) -> State:
    """Record the phase of a replica, and that the replica has left its previous phase."""
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
    """Record the message of a replica for users."""
    return with_replica(state, event.incarnation.replica, note=event.note)


def on_outside_wait_changed(state: State, at: float, event: ev.OutsideWaitChanged) -> State:
    """Record for whom outside of the run the whole run waits, according to the store."""
    since = at - event.wait.seconds if event.wait is not None else 0.0
    return with_replica(state, event.incarnation.replica, outside=event.wait, outside_since=since)


def on_version_available(state: State, at: float, event: ev.VersionAvailable) -> State:
    """Record the weight version that a replica holds."""
    replica = state.replica(event.incarnation.replica)
    advanced = replica.weight_version is not None and replica.weight_version.step < event.version.step
    return with_replica(state, replica.id, weight_version=event.version, advanced=replica.advanced or advanced)


def on_weights_recorded(state: State, at: float, event: ev.WeightsRecorded) -> State:
    """Record the weight versions that rollouts hold, and what the rollouts have received of them."""
    for (incarnation, version), traffic in zip_longest(event.versions, event.traffic[: len(event.versions)]):
        if state.is_current(incarnation):
            before = state.replica(incarnation.replica).traffic
            changes = {} if traffic is None else {"traffic": traffic, "traffic_before": before}
            state = with_replica(state, incarnation.replica, weight_version=version, **changes)
    return state


def on_step_committed(state: State, at: float, event: ev.StepCommitted) -> State:
    """Record a committed training step. Steps may be reported in any order.

    A trainer that reconnects reports its newest step first and the earlier steps later. A step that is not newer than
    the run's newest step does not count as a commit of the reporting incarnation.
    """
    if event.step > state.step:
        commits = state.replica(event.incarnation.replica).commits + 1
        state = with_replica(state, event.incarnation.replica, commits=commits)
    newest = event.step > state.step or (event.step == state.step and not state.metrics)
    if newest:
        state = replace(state, step=event.step, metrics=event.metrics)
    return replace(
        state,
        commits=with_commit(state.commits, state.step, at) if event.completes_commit else state.commits,
        rewards=add_step(state.rewards, event.step, event.metrics.get("reward")),
        idle_times=idle_times.with_step(state.idle_times, event.metrics),
        stream_figures=stream_figures.with_step(state.stream_figures, event.metrics),
        episode_figures=stream_figures.with_episode_counts(state.episode_figures, event.metrics),
        token_ages=with_step(state.token_ages, event.step, event.metrics, at, state.job.sampling.ahead),
    )


def with_replica(state: State, id: ReplicaId, **changes: Any) -> State:
    """Return the state with changed fields of one replica."""
    replica = replace(state.replica(id), **changes)
    return replace(state, replicas=put(state.replicas, id, replica))
