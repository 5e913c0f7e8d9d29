"""One way out: done, cancelled or given up, everything is stopped, then given back, then the run is over."""

from __future__ import annotations

from rrl.manager.actions import Action, Finish, Outside, Release, Rung, StopStep, Why
from rrl.manager.planner.placement import stop_lingering
from rrl.manager.planner.terms import NEVER, last_moment
from rrl.manager.state import Replica, State, Status, completes, open_requests, progress, workers
from rrl.spec.words import AGENT, Outcome, role_of


def finish(state: State, now: float) -> tuple[list[Action], float, bool]:
    """Actions, the next wake, and whether nothing is left to do."""
    if state.verdict is None:
        last = last_moment(state)
        return _decide(state, now, over=now >= last), last, False
    grace = 2 * state.job.limits.step_grace
    roles, agents = _living(state, agents=False), _living(state, agents=True)
    since = max((one.since for one in state.lingering.values()), default=state.at)
    stops, again = stop_lingering(state, now)
    late = [stop for stop in stops if role_of(stop.life.replica) != AGENT]
    if roles or late:
        return [*_stop(state, roles), *late], NEVER, False
    if _waiting(state, agents=False) and now < since + grace:
        return [], min(since + grace, again), False
    if agents or stops:
        return [*_stop(state, agents), *stops], NEVER, False
    if _waiting(state, agents=True) and now < since + grace:
        return [], min(since + grace, again), False
    due, wake = _releasable(state, now)
    release: list[Action] = [Release(tag, Why(("the run is ending",))) for tag in due]
    return release, wake, not state.allocations


def _releasable(state: State, now: float) -> tuple[list[str], float]:
    """Allocations whose give-back may be asked for, and when there may be more. One whose request nobody has answered
    yet must first be found, or be known not to be there: a timed-out sbatch can land after its scancel."""
    unsettled = open_requests(state)
    held = [a for a in state.allocations.values() if not a.releasing and a.tag not in unsettled]
    later = [a.not_before for a in held if a.not_before > now]
    return [a.tag for a in held if a.not_before <= now], min(later, default=NEVER)


def _decide(state: State, now: float, over: bool) -> list[Action]:
    if state.cancelled_by:
        why = Why((f"asked by {state.cancelled_by}",), expects="everything is given back")
        return [Finish(Outcome.CANCELLED, why)]
    if done := _done(state, now):
        return [Finish(Outcome.COMPLETED, Why(done, expects="everything is given back"))]
    if over:
        evidence = (
            f"the walltime of {state.job.walltime:g} s ends; {_so_far(state)}",
            "to go on from them in a new run is not yet built",
        )
        return [Finish(Outcome.FAILED, Why(evidence, Rung.GIVE_UP, "everything is given back in order"))]
    return []


def _done(state: State, now: float) -> tuple[str, ...]:
    """By which evidence the run is complete; empty while it is not. Where there is no trainer: every command is done,
    but for those that were given up and that the run can go on without."""
    if state.job.steps:
        done = f"step {state.step} of {state.job.steps} is committed"
        return (done,) if state.step >= state.job.steps else ()
    working = [replica for replica in workers(state) if completes(state.job, replica.role)]
    undone = [replica for replica in working if replica.status is not Status.COMPLETED]
    if not working or not all(_given_up(state, replica, now) for replica in undone):
        return ()
    for role in {replica.role: state.job.role(replica.role) for replica in undone}.values():
        if role.replicas - sum(one.role == role.name for one in undone) < max(1, role.min_replicas):
            return ()
    return (_so_far(state), *(f"{one.id} was gone on without: {one.failures[-1].why}" for one in undone))


def _given_up(state: State, replica: Replica, now: float) -> bool:
    """It has failed so often of late that the run went on without it; not for want of nodes."""
    recovery = state.job.recovery
    failed = len(replica.recent(recovery.window, now))
    return replica.status is Status.RETIRED and failed >= min(recovery.first_start, recovery.per_replica)


def _so_far(state: State) -> str:
    done, all_ = progress(state)
    return f"{done} of {all_} " + ("steps are committed" if state.job.steps else "commands are done")


def _living(state: State, agents: bool) -> list[Replica]:
    return [r for r in state.replicas.values() if r.believed and r.step and (r.role == AGENT) == agents]


def _waiting(state: State, agents: bool) -> bool:
    """Steps that were asked to end and have not been seen to, on nodes that may answer."""
    return any(
        (role_of(one.life.replica) == AGENT) == agents
        for one in state.lingering.values()
        if (node := state.nodes.get(one.node)) is not None and node.excluded is None
    )


def _stop(state: State, replicas: list[Replica]) -> list[Action]:
    why = Why(("the run is ending",))
    stops: list[Outside] = [
        StopStep(replica.step, replica.life, state.job.limits.step_grace, why)
        for replica in replicas
        if replica.step is not None
    ]
    return [*stops]
