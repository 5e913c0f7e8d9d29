"""Allocations wanted against held: the pool at the start, one node for one that was lost, and when to stop waiting."""

from __future__ import annotations

from rrl.manager.actions import Action, Fence, Finish, Outside, Release, Request, Rung, Why
from rrl.manager.cluster import Ask
from rrl.manager.planner.placement import NEVER, unplaced
from rrl.manager.state import Refusal, Replica, State, Status, workers
from rrl.spec.words import Outcome

REFUSALS = 3
"""A replacement refused so often is not asked for again within the recovery window."""
REFUSED_PAUSE = 10.0
"""s before asking again after a refusal; doubles with each."""


def supply(state: State, now: float) -> tuple[list[Action], float]:
    """Requests and give-backs, and the next wake."""
    if not state.allocations and not state.nodes and not any(r.incarnation for r in state.replicas.values()):
        return _first_pool(state, now), NEVER
    actions, wake = _overdue(state, now)
    if actions:
        return actions, wake
    lacking = unplaced(state, now)
    if not lacking:
        return [], wake
    coming = sum(a.ask.count for a in state.allocations.values() if not a.running and not a.releasing)
    missing = _nodes_for(state, lacking) - coming
    if missing <= 0:
        return [], wake
    return _replacement(state, lacking, missing, now, wake)


def _first_pool(state: State, now: float) -> list[Action]:
    refusals = _refusals(state, now)
    told = [refusal for refusal in refusals if not refusal.unheard]
    if told or len(refusals) >= REFUSALS:  # what a cluster refuses at once, it refuses again
        why = Why((refusals[-1].detail,), Rung.GIVE_UP, "the run ends; correct the job spec and submit again")
        return [Finish(Outcome.FAILED, why)]
    job = state.job
    tag = f"{state.run}.pool-{state.seq}" if refusals else f"{state.run}.pool"  # the first may yet land
    ask = Ask(tag, job.nodes, job.node, job.walltime, sbatch=job.sbatch, comment=f"rrl {state.run}")
    why = Why((f"{job.nodes} nodes wanted, none held",), expects="nodes, when the queue comes to it")
    return [Request(ask, why)]


def _refusals(state: State, now: float) -> list[Refusal]:
    """Those within the recovery window; the state drops older ones only when a new one comes."""
    return [refusal for refusal in state.refusals if now < refusal.at + state.job.recovery.window]


def _overdue(state: State, now: float) -> tuple[list[Action], float]:
    """Requests that were not met by their deadline are given back, and the ladder goes on one rung down. The first pool
    has none: a run that has not begun loses nothing by waiting in the queue."""
    wake = NEVER
    for allocation in state.allocations.values():
        if allocation.stray and not allocation.releasing and now >= allocation.not_before:
            return [Release(allocation.tag, Why((f"{allocation.tag} landed after it had been given up",)))], now
        if allocation.stray or allocation.running or allocation.releasing or allocation.tag in state.intents:
            continue  # a request that nobody has answered is settled first: it may land after its give-back
        if state.running_since is None:
            continue
        deadline = max(allocation.at + state.job.limits.allocation, allocation.not_before)
        if now < deadline:
            wake = min(wake, deadline)
            continue
        detail = allocation.seen.detail if allocation.seen else "not seen in the queue"
        evidence = (f"{allocation.tag}: no nodes after {state.job.limits.allocation:g} s ({detail})",)
        return [Release(allocation.tag, Why(evidence)), *_without_nodes(state, evidence, now)], now
    return [], wake


def _replacement(
    state: State, lacking: list[Replica], missing: int, now: float, wake: float
) -> tuple[list[Action], float]:
    """Ask for as many nodes as are missing, sparing those that failed; after too many refusals go on without."""
    refusals = _refusals(state, now)
    if len(refusals) >= REFUSALS:
        return _without_nodes(state, tuple(r.detail for r in refusals), now), wake
    if refusals:
        again = refusals[-1].at + REFUSED_PAUSE * 2 ** (len(refusals) - 1)
        if now < again:
            return [], min(wake, again)
    excluded = tuple(sorted(name for name, node in state.nodes.items() if node.excluded is not None))
    remaining = max(60.0, min(state.ends - now, state.job.walltime))
    ask = Ask(
        f"{state.run}.more-{state.seq}", missing, state.job.node, remaining, exclude=excluded,
        sbatch=state.job.sbatch, comment=f"rrl {state.run} replacement",
    )  # fmt: skip
    names = ", ".join(replica.id for replica in lacking)
    why = Why((f"no free node for {names}",), Rung.REPLACEMENT, "a node", now + state.job.limits.allocation)
    request: Outside = Request(ask, why)
    return [request], wake


def _without_nodes(state: State, evidence: tuple[str, ...], now: float) -> list[Action]:
    """No nodes to be had: retire what the roles can spare, else end the run."""
    actions: list[Action] = []
    lacking = unplaced(state, now)
    without = {replica.id for replica in lacking}
    for replica in lacking:
        role = state.job.role(replica.role)
        kept = [r for r in workers(state) if r.role == replica.role and r.id not in without]
        left = sum(r.status is not Status.RETIRED for r in kept)
        if left < role.min_replicas or not left:
            why = Why((*evidence, f"{replica.id} has no node"), Rung.GIVE_UP, "everything is given back")
            return [Finish(Outcome.FAILED, why)]
        why = Why(evidence, Rung.DEGRADED, f"{replica.role} goes on with {left} replicas")
        actions.append(Fence(replica.life, Rung.DEGRADED, why))
    return actions


def _nodes_for(state: State, lacking: list[Replica]) -> int:
    """Nodes that these replicas need: one each if exclusive; the others share one."""
    exclusive = sum(state.job.role(replica.role).exclusive for replica in lacking)
    return exclusive + (exclusive < len(lacking))

