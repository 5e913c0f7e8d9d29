"""Allocations that end before the run does: who is on them moves to successors, one replica of a role at a time."""

from __future__ import annotations

from rrl.manager.actions import Decision, Fence, Release, Rung, Why
from rrl.manager.planner.placement import Assignment
from rrl.manager.planner.rooms import Rooms
from rrl.manager.planner.terms import NEVER, pressing_from, succeeded_from
from rrl.manager.state import Allocation, Replica, State, Status, workers
from rrl.spec.jobview import Part
from rrl.spec.words import NodeName

_ON_ITS_WAY = (Status.WANTED, Status.LAUNCHING, Status.STARTING)


def rotate(state: State, assigned: Assignment, now: float) -> tuple[list[Decision], float]:
    """Who moves now, and the next wake. A replica waits while another of its role is not at work."""
    decisions: list[Decision] = []
    moving: set[str] = set()
    wake = NEVER
    for id, home in assigned.moves.items():
        replica = state.replica(id)
        if replica.role in moving:
            continue
        allocation = state.allocations[state.nodes[replica.node or NodeName("")].allocation]
        pressing = pressing_from(state, allocation)
        if any(_awaited(state, other, now >= pressing, now) for other in workers(state) if other.role == replica.role):
            wake = min(wake, pressing if now < pressing else NEVER)
            continue
        moving.add(replica.role)
        left = f"its allocation {allocation.tag} ends in {allocation.ends - now:.0f} s"
        why = Why((left,), Rung.REPLACEMENT, f"joins again on {home.node}", now + state.job.limits.join)
        decisions.append(Fence(replica.life, Rung.REPLACEMENT, why, to=home.node, charged=False))
    return decisions, wake


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
    occupied |= {spot.node for spots in (assigned.homes, assigned.moves, assigned.again) for spot in spots.values()}
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
        elif part.separate and not any(rooms.good(node) for node in _nodes(one)):
            found.append((one, "no node of it may be used"))
        elif any(spot.allocation == one.tag for spot in rooms.spots(part.name)):
            here.append(one)
    if not part.separate:
        return found
    replicas = [replica for replica in workers(state) if replica.role in part.roles]
    lacking = sum(one.status is Status.WANTED and one.id not in assigned.homes for one in replicas)
    resting = sum(one.status is Status.RETIRED and one.id not in assigned.again for one in replicas)
    staying = sum(one in assigned.staying for one in replicas)
    queued = [one for one in empty if one.pending]
    for several, needed in ((here, lacking + resting), (queued, lacking + resting + staying)):
        found += [(one, "nobody is left who could use it") for one in several[needed:]]
    return found


def _nodes(allocation: Allocation) -> tuple[NodeName, ...]:
    return allocation.seen.nodes if allocation.seen is not None else ()
