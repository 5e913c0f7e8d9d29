"""Allocations wanted against held: what the run starts with, nodes for those that were lost, when to stop waiting, and
what is given back because it serves nobody."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

import msgspec

from ....core.run_spec import Part
from ....core.types import Outcome, gang_of
from ...model.actions import Action, Fence, Finish, Release, Request, Rung, Why
from ...model.queries import gang, gangs, open_requests, workers
from ...model.state import Allocation, Replica, State, Status
from ..deadlines import GRACES, NEVER, hopeless_from, succeeded_from
from .initial_request import REFUSALS, asks_for, first_request, gather, hopeless_start, nothing_held, refusals_of
from .nodes import MAX_NAMED_NODES, Rooms
from .placement import Assignment, nodes_for
from .rotation import idle

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
    """Where a request was not met by its deadline, or never can be, the ladder goes on one rung down. It is given back,
    unless those who were gone on without can still use what comes late. Before the run has begun only those that never
    can be: it loses nothing by waiting in the queue."""
    wake, unsettled = NEVER, open_requests(state)
    for allocation in state.allocations.values():
        if allocation.stray and not allocation.releasing:
            if now >= allocation.not_before:
                return [Release(allocation.tag, Why((f"{allocation.tag} landed after it had been given up",)))], now
            wake = min(wake, allocation.not_before)
        if not allocation.pending or allocation.tag in unsettled:
            continue  # a request that nobody has answered is settled first: it may land after its give-back
        hopeless = allocation.seen.hopeless if allocation.seen and now >= hopeless_from(allocation) else ""
        if state.running_since is None or not rooms.begun or _waits(state):
            if hopeless:
                return [hopeless_start(state, allocation)], now
            wake = min(wake, hopeless_from(allocation))
            continue
        due = min(_deadline(state, assigned, allocation), hopeless_from(allocation))
        deadline = max(due, allocation.not_before)
        if now < deadline:
            wake = min(wake, deadline)
            continue
        detail = allocation.seen.detail if allocation.seen else "not seen in the queue"
        said = f"no nodes after {now - allocation.at:.0f} s ({detail})"
        evidence = (f"{allocation.tag}: {hopeless or said}",)
        part = state.job.part(allocation.ask.part)
        left = rooms.coming(part.name) - allocation.ask.count
        without = _without_nodes(state, assigned, part, left, evidence, now)
        late = bool(without) and not hopeless and all(isinstance(action, Fence) for action in without)
        return [*([] if late else [Release(allocation.tag, Why(evidence))]), *without], now
    return [], wake


def _waits(state: State) -> bool:
    """Nothing is launched and no nodes are held: of a run that was given back whole (policy ``requeue``)."""
    return not state.launched and not any(allocation.running for allocation in state.allocations.values())


def _deadline(state: State, assigned: Assignment, allocation: Allocation) -> float:
    """Manager's time (s) by which its nodes must be here: counted from when somebody first lacked them. A successor,
    and the own request of a replica that can be spared, wait as long as the queue takes."""
    part = state.job.part(allocation.ask.part)
    lacking = [replica for replica in assigned.lacking if replica.role in part.roles]
    if not lacking and any(replica.role in part.roles for replica in assigned.staying):
        return NEVER
    roles = {replica.role for replica in lacking}
    if part.separate and all(_left(state, role, lacking) >= _floor(state, role) for role in roles):
        return NEVER
    if not lacking and any(one.status is Status.RETIRED for one in workers(state) if one.role in part.roles):
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
    lacking += [] if refusals or lacking else _resting(state, assigned, part, now)
    coming = rooms.coming(part.name)
    missing = nodes_for(state, lacking) + _spares(state, rooms, assigned, part) - coming
    if missing <= 0:
        return [], refusals[-1].at + window if refusals else NEVER
    if len(refusals) >= REFUSALS:
        without = _without_nodes(state, assigned, part, coming, tuple(refusal.detail for refusal in refusals), now)
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
    over = any(_comes_to_its_end(state, one, now) for one in state.allocations.values() if one.ask.part == part.name)
    asks = [msgspec.structs.replace(ask, comment=f"{ask.comment} replacement", again=over) for ask in asks]
    return [Request(ask, why) for ask in asks], NEVER


def _comes_to_its_end(state: State, allocation: Allocation, now: float) -> bool:
    return allocation.taken or allocation.ending or succeeded_from(state, allocation) <= now


def _spares(state: State, rooms: Rooms, assigned: Assignment, part: Part) -> int:
    """Nodes that a follow-up of the pool needs beyond what its replicas take."""
    if part.separate or not any(replica.role in part.roles for replica in assigned.staying):
        return 0
    taken = rooms.occupants().keys() | {spot.node for spot in (*assigned.homes.values(), *assigned.moves.values())}
    free = sum(not spot.ageing and spot.node not in taken for spot in rooms.spots(part.name))
    return max(0, state.job.spares - free)


def _resting(state: State, assigned: Assignment, part: Part, now: float) -> list[Replica]:
    """Gone on without, due for another chance, and no node of ours can take them. Where that is refused, too, they are
    not asked for again before the refusal has left the window; what is queued stays so and is used when it comes.
    They are not asked for while others lack nodes either: a new request once a window would keep up the others' hope
    of a node for ever, and neither would be gone on without."""
    window = state.job.recovery.window
    return [
        replica for members in gangs(state) for replica in members
        if replica.role in part.roles and any(one.status is Status.RETIRED for one in members)
        and replica.id not in assigned.again and not any(one.recent(window, now) for one in members)
    ]  # fmt: skip


def _without_nodes(
    state: State, assigned: Assignment, part: Part, coming: int, evidence: tuple[str, ...], now: float
) -> list[Action]:
    """No nodes to be had, but for so many that are ``coming``: retire what the roles can spare, else end the run."""
    actions: list[Action] = []
    wanted = [replica for replica in assigned.lacking if replica.role in part.roles]
    lacking = {id: list(members) for id, members in groupby(wanted, lambda one: gang_of(one.id))}
    served: list[Replica] = []
    for members in list(lacking.values()):
        if nodes_for(state, [*served, *members]) > coming:
            break
        served += members
        del lacking[gang_of(members[0].id)]
    without = [one for members in lacking.values() for one in members]
    for id, members in lacking.items():
        role = members[0].role
        left = _left(state, role, without)
        if left < _floor(state, role):
            names = ", ".join(one.id for one in members)
            by = now + GRACES * state.job.limits.step_grace
            said = (*dict.fromkeys(evidence), f"{names} has no node", *_left_nodes(state, part))
            why = Why(said, Rung.GIVE_UP, "everything is given back", by)
            return [Finish(Outcome.FAILED, why)]
        by = now + state.job.recovery.window
        why = Why(evidence, Rung.DEGRADED, f"{role} goes on with {left} replicas", by)
        actions += [Fence(one.life, Rung.DEGRADED, why, charged=False) for one in gang(state, id)]
    return actions


def _left_nodes(state: State, part: Part) -> Iterator[str]:
    """Why those that there were are not used: what the run ends for, in the end."""
    left = [node for node in state.nodes.values() if node.excluded is not None and node.part in (part.name, "")]
    yield from (f"{node.name} is excluded: {node.excluded}" for node in left[:MAX_NAMED_NODES])
    if len(left) > MAX_NAMED_NODES:
        yield f"and {len(left) - MAX_NAMED_NODES} more"


def _left(state: State, role: str, without: list[Replica]) -> int:
    """Replicas of a role that it keeps without these."""
    ids = {gang_of(replica.id) for replica in without}
    kept = [members for members in gangs(state) if members[0].role == role and gang_of(members[0].id) not in ids]
    return sum(all(one.status is not Status.RETIRED for one in members) for members in kept)


def _floor(state: State, role: str) -> int:
    """Replicas below which the run does not go on for want of nodes."""
    return max(1, state.job.role(role).min_replicas)
