"""Allocations wanted against held: what the run starts with, nodes for those that were lost, when to stop waiting, and
what is given back because it serves nobody."""

from __future__ import annotations

import msgspec

from rrl.manager.actions import Action, Fence, Finish, Release, Request, Rung, Why
from rrl.manager.planner.placement import Assignment
from rrl.manager.planner.rooms import Rooms
from rrl.manager.planner.rotation import idle
from rrl.manager.planner.start import (
    REFUSALS,
    asks_for,
    first_request,
    gather,
    hopeless_start,
    nothing_held,
    refusals_of,
)
from rrl.manager.planner.terms import NEVER
from rrl.manager.state import Allocation, Replica, State, Status, open_requests, workers
from rrl.spec.jobview import Part
from rrl.spec.words import Outcome

REQUEST_PAUSE = 10.0
"""s before nodes are asked for again after a refusal; doubles with each."""


def supply(state: State, rooms: Rooms, assigned: Assignment, now: float) -> tuple[list[Action], float]:
    """Requests and give-backs, and the next wake."""
    if state.job.form != "replica" and nothing_held(state):
        return first_request(state, now), NEVER
    actions, wake = _overdue(state, rooms, assigned, now)
    if actions:
        return actions, wake
    releases, idle_wake = idle(state, rooms, assigned, now)
    wake = min(wake, idle_wake, rooms.ages)
    if not rooms.begun:
        actions, deadline = gather(state, rooms, now)
        return [*releases, *actions], min(wake, deadline)
    for part in state.job.parts:
        more, again = _replacements(state, rooms, assigned, part, now)
        actions, wake = [*actions, *more], min(wake, again)
    return [*releases, *actions], wake


def _overdue(state: State, rooms: Rooms, assigned: Assignment, now: float) -> tuple[list[Action], float]:
    """Requests that were not met by their deadline, or never can be, are given back, and the ladder goes on one rung
    down. Before the run has begun only those that never can be: it loses nothing by waiting in the queue."""
    wake, unsettled = NEVER, open_requests(state)
    for allocation in state.allocations.values():
        if allocation.stray and not allocation.releasing:
            if now >= allocation.not_before:
                return [Release(allocation.tag, Why((f"{allocation.tag} landed after it had been given up",)))], now
            wake = min(wake, allocation.not_before)
        if not allocation.pending or allocation.tag in unsettled:
            continue  # a request that nobody has answered is settled first: it may land after its give-back
        hopeless = allocation.seen.hopeless if allocation.seen else ""
        if state.running_since is None or not rooms.begun:
            if hopeless:
                return [hopeless_start(state, allocation)], now
            continue
        due = now if hopeless else _deadline(state, assigned, allocation)
        deadline = max(due, allocation.not_before)
        if now < deadline:
            wake = min(wake, deadline)
            continue
        detail = allocation.seen.detail if allocation.seen else "not seen in the queue"
        said = f"no nodes after {now - allocation.at:.0f} s ({detail})"
        evidence = (f"{allocation.tag}: {hopeless or said}",)
        part = state.job.part(allocation.ask.part)
        left = rooms.coming(part.name) - allocation.ask.count
        return [Release(allocation.tag, Why(evidence)), *_without_nodes(state, assigned, part, left, evidence)], now
    return [], wake


def _deadline(state: State, assigned: Assignment, allocation: Allocation) -> float:
    """Manager's time (s) by which its nodes must be here: counted from when somebody first lacked them. A successor,
    and the own request of a replica that can be spared, wait as long as the queue takes."""
    part = state.job.part(allocation.ask.part)
    lacking = [replica for replica in assigned.lacking if replica.role in part.roles]
    if not lacking and any(replica.role in part.roles for replica in assigned.staying):
        return NEVER
    if part.separate and all(_left(state, one.role, lacking) >= _floor(state, one.role) for one in lacking):
        return NEVER
    since = max(allocation.at, min((replica.down_since for replica in lacking), default=allocation.at))
    return since + state.job.limits.allocation


def _replacements(
    state: State, rooms: Rooms, assigned: Assignment, part: Part, now: float
) -> tuple[list[Action], float]:
    """Ask for as many nodes as are missing, sparing those that failed; after too many refusals go on without."""
    refusals = refusals_of(state, part, now)
    window = state.job.recovery.window
    lacking = [replica for replica in (*assigned.lacking, *assigned.staying) if replica.role in part.roles]
    lacking += [] if refusals else _resting(state, assigned, part, now)
    coming = rooms.coming(part.name)
    missing = _nodes_for(state, lacking) - coming
    if missing <= 0:
        return [], refusals[-1].at + window if refusals and part.separate else NEVER
    if len(refusals) >= REFUSALS:
        without = _without_nodes(state, assigned, part, coming, tuple(refusal.detail for refusal in refusals))
        return without, refusals[-REFUSALS].at + window
    if refusals:
        again = refusals[-1].at + REQUEST_PAUSE * 2 ** (len(refusals) - 1)
        if now < again:
            return [], again
    names = ", ".join(replica.id for replica in lacking)
    ends = all(replica in assigned.staying for replica in lacking)
    said = f"the allocation of {names} ends" if ends else f"no free node for {names}"
    why = Why((said,), Rung.REPLACEMENT, "a node", now + state.job.limits.allocation)
    asks = asks_for(state, part, missing, now)
    if not part.separate:
        kind = "more" if part is state.job.parts[0] else f"more-{part.name}"
        asks = [msgspec.structs.replace(ask, tag=f"{state.run}.{kind}-{state.seq}") for ask in asks]
    return [Request(msgspec.structs.replace(ask, comment=f"{ask.comment} replacement"), why) for ask in asks], NEVER


def _resting(state: State, assigned: Assignment, part: Part, now: float) -> list[Replica]:
    """Gone on without, for want of nodes, and due for another chance. In a pool they get what the others leave."""
    return [
        replica for replica in workers(state)
        if part.separate and replica.role in part.roles and replica.status is Status.RETIRED
        and replica.id not in assigned.again and not replica.recent(state.job.recovery.window, now)
    ]  # fmt: skip


def _without_nodes(
    state: State, assigned: Assignment, part: Part, coming: int, evidence: tuple[str, ...]
) -> list[Action]:
    """No nodes to be had, but for so many that are ``coming``: retire what the roles can spare, else end the run."""
    actions: list[Action] = []
    wanted = [replica for replica in assigned.lacking if replica.role in part.roles]
    served = 0
    while served < len(wanted) and _nodes_for(state, wanted[: served + 1]) <= coming:
        served += 1
    without = wanted[served:]
    for replica in without:
        left = _left(state, replica.role, without)
        if left < _floor(state, replica.role):
            why = Why((*evidence, f"{replica.id} has no node"), Rung.GIVE_UP, "everything is given back")
            return [Finish(Outcome.FAILED, why)]
        why = Why(evidence, Rung.DEGRADED, f"{replica.role} goes on with {left} replicas")
        actions.append(Fence(replica.life, Rung.DEGRADED, why))
    return actions


def _left(state: State, role: str, without: list[Replica]) -> int:
    """Replicas of a role that it keeps without these."""
    ids = {replica.id for replica in without}
    kept = [replica for replica in workers(state) if replica.role == role and replica.id not in ids]
    return sum(replica.status is not Status.RETIRED for replica in kept)


def _floor(state: State, role: str) -> int:
    """Replicas below which the run does not go on for want of nodes."""
    return max(1, state.job.role(role).min_replicas)


def _nodes_for(state: State, lacking: list[Replica]) -> int:
    """Nodes that these replicas need: one each if exclusive; the others share one."""
    exclusive = sum(state.job.role(replica.role).exclusive for replica in lacking)
    return exclusive + (exclusive < len(lacking))
