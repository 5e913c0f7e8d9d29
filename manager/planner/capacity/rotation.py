"""Move replicas off allocations that end before the run does, and off nodes that people drain or the cluster reclaims.

Replicas move to successor allocations, one replica of a role at a time. On nodes that the cluster takes back early
(preemption, cancellation, walltime) they leave in order as long as the cluster allows. None of this is a failure of the
replica, so that it costs no restart budget however often it happens.
"""

from __future__ import annotations

from itertools import groupby

from ....core.run_spec import Part
from ....core.types import NodeName, ReplicaId, gang_of, role_of
from ...model.actions import Decision, Fence, Release, Rung, Why
from ...model.queries import missing, workers
from ...model.state import Allocation, Replica, State, Status
from ..deadlines import NEVER, pressing_from, succeeded_from
from .node_lifecycle import to_be_drained
from .nodes import Rooms
from .placement import Assignment, nodes_for

_ON_ITS_WAY = (Status.WANTED, Status.LAUNCHING, Status.STARTING)


def rotate(state: State, assigned: Assignment, now: float) -> tuple[list[Decision], float]:
    """Who moves now, and the next wake. A replica waits while another of its role is not at work; of a gang all whose
    nodes end move at once, since each would restart the others."""
    decisions: list[Decision] = []
    moving: set[str] = set()
    wake = NEVER
    for gang, members in groupby(assigned.moves, gang_of):
        role = role_of(gang)
        if role in moving:
            continue
        going = list(members)
        allocations = [state.allocations[_allocation(state, id)] for id in going]
        pressing = min(pressing_from(state, allocation) for allocation in allocations)
        if any(_awaited(state, other, now >= pressing, now) for other in workers(state) if other.role == role):
            wake = min(wake, pressing if now < pressing else NEVER)
            continue
        moving.add(role)
        for id, allocation in zip(going, allocations, strict=True):
            home, within = assigned.moves[id].node, now + state.job.limits.join
            evidence = (_leaves(state, id, allocation, now),)
            why = Why(evidence, Rung.REPLACEMENT, f"joins again on {home}", within)
            decisions.append(Fence(state.replica(id).life, Rung.REPLACEMENT, why, to=home, charged=False))
    return decisions, wake


def _leaves(state: State, id: ReplicaId, allocation: Allocation, now: float) -> str:
    node = state.replica(id).node or NodeName("")
    if node in state.marks:
        return f"{node} is to be drained, asked by {state.marks[node][1]}"
    return f"its allocation {allocation.tag} ends in {allocation.ends - now:.0f} s"


def _allocation(state: State, id: ReplicaId) -> str:
    return state.nodes[state.replica(id).node or NodeName("")].allocation


def _awaited(state: State, replica: Replica, pressing: bool, now: float) -> bool:
    """It is on its way back to work; when time presses, one that fails again and again is not waited for."""
    failing = bool(replica.recent(state.job.recovery.window, now))
    return replica.status in _ON_ITS_WAY and not (pressing and failing)


def idle(state: State, rooms: Rooms, assigned: Assignment, now: float) -> tuple[list[Release], float]:
    """Allocations that serve nobody any more: left by all who moved, with no node that may be used, or for replicas
    that are done. Of a pool the spare nodes are kept. And the next wake."""
    releases: list[Release] = []
    wake = NEVER
    occupied = {node for node, there in rooms.occupants().items() if there}
    given = (assigned.homes, assigned.moves, assigned.again, assigned.kept)
    occupied |= {spot.node for spots in given for spot in spots.values()}
    for part in state.job.parts:
        empty = [a for a in state.allocations.values() if a.ask.part == part.name and _empty(rooms, a, occupied)]
        for allocation, reason in _superfluous(state, rooms, part, empty, assigned, now):
            if allocation.not_before > now:
                wake = min(wake, allocation.not_before)
            else:
                releases.append(Release(allocation.tag, Why((f"{allocation.tag}: {reason}",))))
    return releases, wake


def _empty(rooms: Rooms, allocation: Allocation, occupied: set[NodeName]) -> bool:
    if allocation.running:
        return all(node not in occupied and rooms.clear(node) for node in _nodes(allocation))
    return allocation.pending and allocation.seen is not None


def _superfluous(
    state: State, rooms: Rooms, part: Part, empty: list[Allocation], assigned: Assignment, now: float
) -> list[tuple[Allocation, str]]:
    """With the reason. Whoever lacks a node keeps its request, whoever was gone on without keeps its node."""
    found: list[tuple[Allocation, str]] = []
    here: list[Allocation] = []
    for one in (one for one in empty if one.running):
        if succeeded_from(state, one) <= now:
            found.append((one, f"it ends in {one.ends - now:.0f} s, and nobody is left on it"))
        elif not _bound(state, part, one) and not any(rooms.good(node) for node in _nodes(one)):
            found.append((one, "no node of it may be used"))
        elif any(spot.allocation == one.tag for spot in rooms.spots(part.name)):
            here.append(one)
    if not part.separate:
        return found
    every = [members for members in rooms.gangs if members[0].role in part.roles]
    wanted = [one for members in every for one in missing(members) if one.id not in assigned.homes]
    rest = [one for members in every if any(one.status is Status.RETIRED for one in members)
            for one in members if one.id not in assigned.again]  # fmt: skip
    stay = [one for one in assigned.staying if one.role in part.roles]
    lacking, resting, staying = nodes_for(state, wanted), nodes_for(state, rest), nodes_for(state, stay)
    queued = [one for one in empty if one.pending]
    for several, needed in ((here, lacking + resting), (queued, lacking + resting + staying)):
        found += [(one, "nobody is left who could use it") for one in several[needed:]]
    return found


def _bound(state: State, part: Part, one: Allocation) -> bool:
    """It is not given back for having no node that may be used: the manager may be in it, or others depend on it, or a
    node of it is yet to be drained, before others get it."""
    if any(to_be_drained(state, state.nodes[node]) or f"{node}!drain" in state.intents
           for node in _nodes(one) if node in state.nodes):  # fmt: skip
        return True
    return not part.separate and one.tag == f"{state.run}.{part.name}"


def _nodes(allocation: Allocation) -> tuple[NodeName, ...]:
    return allocation.seen.nodes if allocation.seen is not None else ()


CANCELLATIONS = 2
"""Once all that a run had may be cancelled by mistake, or for a maintenance; whoever does it again means the run."""


def evict(state: State, rooms: Rooms, now: float) -> list[Decision]:
    """Who is not to be believed any more. ``now``: manager's time (s)."""
    fences: list[Decision] = []
    limits = state.job.limits
    for replica in workers(state):
        if not replica.believed or not (evidence := _evidence(state, replica, now)):
            continue
        rung, expects, within = Rung.REPLACEMENT, "joins again once it has a node", limits.allocation + limits.join
        if rooms.vacant_for(replica):
            rung, expects, within = Rung.SPARE, "joins again on a spare node", limits.join
        fences.append(Fence(replica.life, rung, Why((evidence,), rung, expects, now + within), charged=False))
    return fences


def _evidence(state: State, replica: Replica, now: float) -> str:
    tag = replica.allocation or ""
    held = state.allocations.get(tag)
    if held is None:
        return f"its allocation {tag} was taken back: {state.taken_back[tag]}" if tag in state.taken_back else ""
    if held.ending:
        return f"its allocation {tag} ends: {held.seen.detail if held.seen else ''}"
    if held.running and now >= held.ends and replica.step is None:
        return f"its allocation {tag} has come to the end of its time, and its process was ended"
    if not held.taken:
        return ""
    return f"its allocation {tag} is taken back in {max(0.0, held.ends - now):.0f} s: it is preempted"


def cancelled(state: State) -> str:
    """By which evidence somebody wants the run to end though no command of rrl says so; empty: nobody does."""
    if len(state.emptied) < CANCELLATIONS:
        return ""
    return f"all that it had was cancelled {len(state.emptied)} times within an hour, and not by rrl cancel"
