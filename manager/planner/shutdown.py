"""One way out: done, cancelled or given up, everything is stopped, then given back, then the run is over.

In three stages. Of a run that fails the trainer is first, with time to finish and commit what is in hand while the
store still takes it; a run that is resumed goes on from there. Then come the other roles and the shadows, and last the
agents, which witness the end of the others.
"""

from __future__ import annotations

from enum import IntEnum

from ...core.types import AGENT, SHADOW, Outcome, gang_of, role_of
from ..model.actions import Action, Drain, Finish, Outside, Release, Rung, Shrink, StopStep, Undrain, Why
from ..model.queries import completes, done, gangs, open_requests, progress
from ..model.state import Allocation, Node, Replica, State, Status
from .capacity.placement import stop_lingering
from .capacity.rotation import cancelled
from .deadlines import FINAL_GRACES, GRACES, NEVER, last_moment


def finish(state: State, now: float) -> tuple[list[Action], float, bool]:
    """Actions, the next wake, and whether nothing is left to do."""
    if state.verdict is None:
        last = last_moment(state)
        return _decide(state, now, over=now >= last), last, False
    stops, again = stop_lingering(state, now)
    for stage in _Stage:
        at_stage = (one for one in state.replicas.values() if _stage(state, one.role) is stage)
        living = [one for one in at_stage if one.believed and one.step]
        late = [stop for stop in stops if _stage(state, role_of(stop.life.replica)) <= stage]
        if living or late:
            return [*_stop(state, living, stage), *late], NEVER, False
        until = _waits_until(state, stage)
        if now < until:
            return [], min(until, again), False
    due, wake = _releasable(state, now)
    release: list[Action] = [Release(tag, Why(("the run is ending",))) for tag in due]
    open_ = any(isinstance(intent.action, Drain | Undrain | Shrink) for intent in state.intents.values())
    return release, wake, not open_ and all(_kept(state, one) for one in state.allocations.values())


def said_at_the_end(state: State) -> str:
    """How the run ended, for its last record: by then the trainer's last step is known, and what is still held."""
    said = list(state.verdict.why.evidence) if state.verdict is not None else []
    kept = sorted(one.seen.job for one in state.allocations.values() if one.seen is not None and _kept(state, one))
    if kept:
        said.append(f"its nodes are kept, as asked: job{'s' * (len(kept) > 1)} {', '.join(kept)}")
        if unsure := sorted({node.name for node in _lingering_on(state)}):
            said.append(f"what ran on {', '.join(unsure)}, which did not answer, may still run")
    failed = state.verdict is not None and state.verdict.outcome is Outcome.FAILED
    if failed and state.step < state.job.steps:
        said.append(f"rrl resume {state.run} goes on from step {state.step}")
    return "; ".join(said)


class _Stage(IntEnum):
    TRAINER = 0
    ROLES = 1
    AGENTS = 2


def _stage(state: State, role: str) -> _Stage:
    if role == AGENT:
        return _Stage.AGENTS
    failed = state.verdict is not None and state.verdict.outcome is Outcome.FAILED
    leads = failed and any(view.name == role for view in state.job.kind("trainer"))
    return _Stage.TRAINER if leads else _Stage.ROLES


def _kept(state: State, allocation: Allocation) -> bool:
    """A person wants to go on using its nodes. Not those on which something of ours may still run; of a node that does
    not answer nobody knows, and the others are not given up for it."""
    lingers = any(node.allocation == allocation.tag and node.excluded is None for node in _lingering_on(state))
    return state.keep and allocation.running and not lingers


def _lingering_on(state: State) -> list[Node]:
    return [state.nodes[one.node] for one in state.lingering.values() if one.node in state.nodes]


def _releasable(state: State, now: float) -> tuple[list[str], float]:
    """Allocations whose give-back may be asked for, and when there may be more. One whose request nobody has answered
    yet must first be found, or be known not to be there: a timed-out sbatch can land after its scancel."""
    unsettled = open_requests(state)
    held = [a for a in state.allocations.values()
            if not a.releasing and a.tag not in unsettled and not _kept(state, a)]  # fmt: skip
    later = [a.not_before for a in held if a.not_before > now]
    return [a.tag for a in held if a.not_before <= now], min(later, default=NEVER)


def _decide(state: State, now: float, over: bool) -> list[Action]:
    if state.cancelled_by:
        why = Why((f"asked by {state.cancelled_by}",), expects="everything is given back")
        return [Finish(Outcome.CANCELLED, why)]
    if gone := cancelled(state):
        return [Finish(Outcome.CANCELLED, Why((gone,), expects="everything is given back"))]
    if complete := _complete(state, now):
        return [Finish(Outcome.COMPLETED, Why(complete, expects="everything is given back"))]
    if over:
        evidence = (f"the walltime of {state.job.walltime:g} s ends; {_so_far(state)}",)
        within = now + GRACES * state.job.limits.step_grace
        return [Finish(Outcome.FAILED, Why(evidence, Rung.GIVE_UP, "everything is given back in order", within))]
    return []


def _complete(state: State, now: float) -> tuple[str, ...]:
    """By which evidence the run is complete; empty while it is not. Where there is no trainer: every command is done,
    but for those that were given up and that the run can go on without."""
    if state.job.steps:
        said = f"step {state.step} of {state.job.steps} is committed"
        return (said,) if state.step >= state.job.steps else ()
    working = [members for members in gangs(state) if completes(state.job, members[0].role)]
    undone = [members for members in working if not done(members)]
    if not working or not all(_given_up(state, members, now) for members in undone):
        return ()
    for role in {members[0].role: state.job.role(members[0].role) for members in undone}.values():
        if role.replicas - sum(members[0].role == role.name for members in undone) < max(1, role.min_replicas):
            return ()
    given_up = [next(one for one in members if one.failures) for members in undone]
    return (_so_far(state), *(f"{gang_of(one.id)} was gone on without: {one.failures[-1].why}" for one in given_up))


def _given_up(state: State, members: list[Replica], now: float) -> bool:
    """One of it has failed so often of late that the run went on without it; not for want of nodes."""
    recovery = state.job.recovery
    least = min(recovery.first_start, recovery.per_replica)
    failed = any(len(one.recent(recovery.window, now)) >= least for one in members)
    return failed and any(one.status is Status.RETIRED for one in members)


def _so_far(state: State) -> str:
    far, all_ = progress(state)
    return f"{far} of {all_} " + ("steps are committed" if state.job.steps else "commands are done")


def _waits_until(state: State, stage: _Stage) -> float:
    """Manager's time (s) up to which steps that were asked to end, on nodes that may answer, are waited for."""
    asked = [
        one.since for one in state.lingering.values()
        if _stage(state, role_of(one.life.replica)) is stage
        and (node := state.nodes.get(one.node)) is not None and node.excluded is None
    ]  # fmt: skip
    return max(asked) + 2 * _grace(state, stage) if asked else 0.0


def _grace(state: State, stage: _Stage) -> float:
    return state.job.limits.step_grace * (FINAL_GRACES if stage is _Stage.TRAINER else 1)


def _stop(state: State, replicas: list[Replica], stage: _Stage) -> list[Action]:
    why = Why(("the run is ending",))
    stops: list[Outside] = [
        StopStep(replica.step, replica.life, 0.0 if replica.role == SHADOW else _grace(state, stage), why)
        for replica in replicas
        if replica.step is not None
    ]
    return [*stops]
