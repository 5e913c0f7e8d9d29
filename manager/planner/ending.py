"""One way out: done, cancelled or given up, everything is stopped, then given back, then the run is over."""

from __future__ import annotations

from rrl.manager.actions import Action, Finish, Outside, Release, StopStep, Why
from rrl.manager.planner.placement import NEVER
from rrl.manager.state import Replica, State, Status
from rrl.spec.words import AGENT, Outcome


def finish(state: State, now: float) -> tuple[list[Action], float, bool]:
    """Actions, the next wake, and whether nothing is left to do."""
    if state.verdict is None:
        return _decide(state), NEVER, False
    grace = 2 * state.job.limits.step_grace
    roles, agents = _living(state, agents=False), _living(state, agents=True)
    since = max((one.since for one in state.lingering.values()), default=state.at)
    if roles:
        return _stop(state, roles), NEVER, False
    if _waiting(state, agents=False) and now < since + grace:
        return [], since + grace, False
    if agents:
        return _stop(state, agents), NEVER, False
    if _waiting(state, agents=True) and now < since + grace:
        return [], since + grace, False
    due, wake = _releasable(state, now)
    release: list[Action] = [Release(tag, Why(("the run is ending",))) for tag in due]
    return release, wake, not state.allocations


def _releasable(state: State, now: float) -> tuple[list[str], float]:
    """Allocations whose give-back may be asked for, and when there may be more. One whose request nobody has answered
    yet must first be found, or be known not to be there: a timed-out sbatch can land after its scancel."""
    held = [a for a in state.allocations.values() if not a.releasing and a.tag not in state.intents]
    later = [a.not_before for a in held if a.not_before > now]
    return [a.tag for a in held if a.not_before <= now], min(later, default=NEVER)


def _decide(state: State) -> list[Action]:
    if state.cancelled_by:
        why = Why((f"asked by {state.cancelled_by}",), expects="everything is given back")
        return [Finish(Outcome.CANCELLED, why)]
    if state.step >= state.job.steps:
        done = f"step {state.step} of {state.job.steps} is committed"
        return [Finish(Outcome.COMPLETED, Why((done,), expects="everything is given back"))]
    return []


def _living(state: State, agents: bool) -> list[Replica]:
    return [r for r in state.replicas.values() if r.believed and r.step and (r.role == AGENT) == agents]


def _waiting(state: State, agents: bool) -> bool:
    """Steps that were asked to end and have not been seen to, on nodes that may answer."""
    return any(
        one.life.replica.startswith(f"{AGENT}/") == agents
        for one in state.lingering.values()
        if (node := state.nodes.get(one.node)) is not None and node.excluded is None
    )


def _stop(state: State, replicas: list[Replica]) -> list[Action]:
    why = Why(("the run is ending",))
    stops: list[Outside] = [
        StopStep(replica.step, replica.life, state.job.limits.step_grace, why)
        for replica in replicas
        if replica.step is not None and replica.status is not Status.RETIRED
    ]
    return [*stops]
