"""One way out: done, cancelled or given up, everything is stopped, then given back, then the run is over."""

from __future__ import annotations

from rrl.manager.actions import Action, Finish, Outside, Release, Rung, StopStep, Why
from rrl.manager.planner.placement import NEVER, stop_lingering
from rrl.manager.state import Replica, State
from rrl.spec.words import AGENT, Outcome, role_of

WALLTIME_MARGIN = 60.0
"""s before the end of the walltime, at least, that the run is ended in order"""


def finish(state: State, now: float) -> tuple[list[Action], float, bool]:
    """Actions, the next wake, and whether nothing is left to do."""
    if state.verdict is None:
        last = state.ends - _margin(state)
        return _decide(state, over=now >= last), last, False
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
    held = [a for a in state.allocations.values() if not a.releasing and a.tag not in state.intents]
    later = [a.not_before for a in held if a.not_before > now]
    return [a.tag for a in held if a.not_before <= now], min(later, default=NEVER)


def _margin(state: State) -> float:
    """What an orderly end takes; that the nodes were there may have been seen a poll late. Never more than half of the
    walltime: of a short one something is to be had, too."""
    limits = state.job.limits
    return min(max(WALLTIME_MARGIN, 4 * limits.step_grace) + limits.poll, state.job.walltime / 2)


def _decide(state: State, over: bool) -> list[Action]:
    if state.cancelled_by:
        why = Why((f"asked by {state.cancelled_by}",), expects="everything is given back")
        return [Finish(Outcome.CANCELLED, why)]
    if state.step >= state.job.steps:
        done = f"step {state.step} of {state.job.steps} is committed"
        return [Finish(Outcome.COMPLETED, Why((done,), expects="everything is given back"))]
    if over:
        evidence = (
            f"the walltime of {state.job.walltime:g} s ends; {state.step} of {state.job.steps} steps are committed",
            "to go on from them in a new run is not yet built",
        )
        return [Finish(Outcome.FAILED, Why(evidence, Rung.GIVE_UP, "everything is given back in order"))]
    return []


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
