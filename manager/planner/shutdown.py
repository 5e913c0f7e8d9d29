"""Shut down a run that is complete, cancelled or failed: stop its steps, release its allocations, and end it.

There are three stages. In a run that fails, the trainer is stopped first. It has time to finish and commit its step
while the trajectory store still accepts the commit, so that a resumed run continues from this step. The trainer is also
stopped first in a cancelled run whose commits cover several steps, because uncommitted steps would be lost otherwise.
Then the other roles and the standby processes are stopped, and last the agents, which witness the ends of the other
steps.
"""

from __future__ import annotations

from enum import IntEnum

from ...core.types import AGENT, STANDBY_ROLE, Outcome, ReplicaId, gang_of, is_trainer, role_of
from ..model.actions import (
    Action,
    Drain,
    ExternalAction,
    Finish,
    Release,
    Rung,
    Shrink,
    StopStep,
    Undrain,
    Why,
    every_lower,
)
from ..model.pools import elastic_role
from ..model.queries import all_completed, is_batch_role, open_requests, progress
from ..model.state import Allocation, Node, Replica, State, Status
from .capacity.placement import stop_orphans
from .capacity.rotation import cancelled_externally
from .deadlines import NEVER, SHUTDOWN_GRACES, TRAINER_SHUTDOWN_GRACES, shutdown_at


def plan_shutdown(state: State, now: float) -> tuple[list[Action], float, bool]:
    """Return the actions that end the run, the next wake (manager's time, s), and whether everything is released."""
    if state.finish is None:
        deadline = shutdown_at(state)
        return _decide_finish(state, now, over=now >= deadline), deadline, False
    stops, retry_at = stop_orphans(state, now)
    for stage in _Stage:
        at_stage = (replica for replica in state.replicas.values() if _shutdown_stage(state, replica.id) is stage)
        current = [replica for replica in at_stage if replica.is_current and replica.step]
        orphan_stops = [stop for stop in stops if _shutdown_stage(state, stop.incarnation.replica) <= stage]
        if current or orphan_stops:
            return [*_stop(state, current, stage), *orphan_stops], NEVER, False
        until = _stop_deadline(state, stage)
        if now < until:
            return [], min(until, retry_at), False
    due, wake = _releasable(state, now)
    release: list[Action] = [Release(tag, Why(("the run is ending",))) for tag in due]
    unsettled = any(isinstance(intent.action, Drain | Undrain | Shrink) for intent in state.intents.values())
    return (
        release,
        wake,
        not unsettled and all(_left_to_user(state, allocation) for allocation in state.allocations.values()),
    )


def final_reason(state: State) -> str:
    """Return the text of the run's last record: why the run ended, and which allocations and drains remain."""
    lines = list(state.finish.why.evidence) if state.finish is not None else []
    kept_jobs = sorted(
        allocation.status.job
        for allocation in state.allocations.values()
        if allocation.status is not None and _left_to_user(state, allocation)
    )
    if kept_jobs:
        lines.append(f"its nodes are kept as requested: job{'s' * (len(kept_jobs) > 1)} {', '.join(kept_jobs)}")
        if silent_nodes := sorted({node.name for node in _orphan_step_nodes(state)}):
            lines.append(f"processes on {', '.join(silent_nodes)}, which did not respond, may still run")
    failed = state.finish is not None and state.finish.outcome is Outcome.FAILED
    if failed and state.step < state.job.steps:
        lines.append(f"rrl resume {state.run} goes on from step {state.step}")
    return "; ".join(lines)


class _Stage(IntEnum):
    """Stages of a shutdown, in order."""

    TRAINER = 0
    ROLES = 1
    AGENTS = 2


def _shutdown_stage(state: State, replica: ReplicaId) -> _Stage:
    """Return the stage in which a replica is stopped."""
    if role_of(replica) == AGENT:
        return _Stage.AGENTS
    outcome = None if state.finish is None else state.finish.outcome
    commits = outcome is Outcome.FAILED or (outcome is Outcome.CANCELLED and state.job.trainer.checkpoint_every > 1)
    return _Stage.TRAINER if commits and is_trainer(replica) else _Stage.ROLES


def _left_to_user(state: State, allocation: Allocation) -> bool:
    """Return whether the user keeps this allocation.

    An allocation is not left to the user while it has an orphan step on a usable node. An orphan step on an excluded
    node does not count: its end may never be reported. The elastic pool, which has a budget, keeps nothing.
    """
    elastic = elastic_role(state.job)
    if elastic is not None and allocation.request.node_group == elastic.name:
        return False
    has_orphans = any(node.allocation == allocation.tag and node.excluded is None for node in _orphan_step_nodes(state))
    return state.keep_allocations and allocation.running and not has_orphans


def _orphan_step_nodes(state: State) -> list[Node]:
    """Return the nodes of all orphan steps."""
    return [state.nodes[orphan.node] for orphan in state.orphan_steps.values() if orphan.node in state.nodes]


def _releasable(state: State, now: float) -> tuple[list[str], float]:
    """Return the tags of the allocations that can be released now, and the manager's time (s) of the next check.

    An allocation whose request is unanswered can be released once the cluster lists it, or once it certainly does not
    exist. It is not released before, because a scancel has no effect on an allocation that a timed-out sbatch makes
    later.
    """
    unsettled = open_requests(state)
    releasable = [
        a
        for a in state.allocations.values()
        if not a.releasing and a.tag not in unsettled and not _left_to_user(state, a)
    ]
    later = [a.not_before for a in releasable if a.not_before > now]
    return [a.tag for a in releasable if a.not_before <= now], min(later, default=NEVER)


def _decide_finish(state: State, now: float, over: bool) -> list[Action]:
    """Return the decision to end the run, if it is cancelled, complete or out of time."""
    if state.cancelled_by:
        why = Why((f"cancelled by {state.cancelled_by}",), expects="everything is released")
        return [Finish(Outcome.CANCELLED, why)]
    if cancellation := cancelled_externally(state):
        return [Finish(Outcome.CANCELLED, Why((cancellation,), expects="everything is released"))]
    if complete := _complete(state, now):
        return [Finish(Outcome.COMPLETED, Why(complete, expects="everything is released"))]
    if over:
        evidence = (f"the walltime of {state.job.walltime:g} s ends; {_progress_text(state)}",)
        within = now + SHUTDOWN_GRACES * state.job.limits.step_grace
        lower = every_lower("more walltime")
        return [Finish(Outcome.FAILED, Why(evidence, Rung.GIVE_UP, "everything is released", within, lower))]
    return []


def _complete(state: State, now: float) -> tuple[str, ...]:
    """Return the evidence that the run is complete; empty while the run is not complete.

    A run without a trainer is complete when the commands of all its batch roles (:func:`is_batch_role`) have completed.
    A gang whose command failed too often may be missing, if enough other gangs of its role have completed.
    """
    if state.job.steps:
        text = f"step {state.step} of {state.job.steps} is committed"
        evaluated = state.job.eval is None or state.evaluated >= state.job.steps
        return (text,) if state.step >= state.job.steps and evaluated else ()
    working = [members for members in state.gangs if is_batch_role(state.job, members[0].role)]
    undone = [members for members in working if not all_completed(members)]
    if not working or not all(_given_up(state, members, now) for members in undone):
        return ()
    for role in {members[0].role: state.job.role(members[0].role) for members in undone}.values():
        if role.replicas - sum(members[0].role == role.name for members in undone) < max(1, role.min_replicas):
            return ()
    given_up = [next(member for member in members if member.failures) for members in undone]
    return (
        _progress_text(state),
        *(f"{gang_of(member.id)} was retired: {member.failures[-1].why}" for member in given_up),
    )


def _given_up(state: State, members: list[Replica], now: float) -> bool:
    """Return whether the gang is retired because a member failed too often recently, rather than for lack of nodes."""
    recovery = state.job.recovery
    least = min(recovery.first_start, recovery.per_replica)
    failed = any(len(member.recent_failures(recovery.window, now)) >= least for member in members)
    return failed and any(member.status is Status.RETIRED for member in members)


def _progress_text(state: State) -> str:
    """Return the progress of the run as text."""
    completed, total = progress(state)
    return f"{completed} of {total} " + ("steps are committed" if state.job.steps else "commands are done")


def _stop_deadline(state: State, stage: _Stage) -> float:
    """Return the manager's time (s) until which the shutdown waits for the orphan steps of a stage to end.

    Only steps on nodes that may still answer count.
    """
    stopped_since = [
        orphan.since
        for orphan in state.orphan_steps.values()
        if _shutdown_stage(state, orphan.incarnation.replica) is stage
        and (node := state.nodes.get(orphan.node)) is not None
        and node.excluded is None
    ]
    return max(stopped_since) + 2 * _stage_grace(state, stage) if stopped_since else 0.0


def _stage_grace(state: State, stage: _Stage) -> float:
    """Return the grace (s) that steps have in this stage."""
    return state.job.limits.step_grace * (TRAINER_SHUTDOWN_GRACES if stage is _Stage.TRAINER else 1)


def _stop(state: State, replicas: list[Replica], stage: _Stage) -> list[Action]:
    """Return the actions that stop the steps of these replicas."""
    why = Why(("the run is ending",))
    stops: list[ExternalAction] = [
        StopStep(
            replica.step, replica.incarnation, 0.0 if replica.role == STANDBY_ROLE else _stage_grace(state, stage), why
        )
        for replica in replicas
        if replica.step is not None
    ]
    return [*stops]
