"""Shadows: the nodes on which a process is kept warm that becomes a member of the trainer at once.

They are started once the trainer has committed a step in its present life, so that they take nothing from it while it
recovers, and ended only while it works. They take no room of their own, and nobody counts them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from rrl.manager.actions import Outside, StopStep, Why
from rrl.manager.planner.placement import Assignment, launch, on_its_node
from rrl.manager.planner.rooms import Rooms
from rrl.manager.planner.terms import NEVER
from rrl.manager.state import Replica, State, Status, at_work
from rrl.spec.jobview import RoleView
from rrl.spec.words import AGENT, SHADOW, Life, NodeName, ReplicaId, replica_id


def stand_by(state: State, rooms: Rooms, assigned: Assignment, now: float) -> tuple[list[Outside], float]:
    """Shadows that are to be started, and ended, and the next wake."""
    role = next((role for role in state.job.roles if role.warm), None)
    if role is None or state.step == 0 or state.job.recovery.policy != "role":  # no other policy takes one over
        return [], NEVER
    whole = [members for members in rooms.gangs if members[0].role == role.name]
    if not all(at_work(members) and members[0].commits for members in whole):
        return [], NEVER
    wanted = _wanted(state, rooms, assigned, role, [member for members in whole for member in members])
    actions: list[Outside] = []
    wake = NEVER
    for id, node in wanted.items():
        shadow, spot = state.replica(id), rooms.spot(node)
        if spot is None or shadow.believed or state.replica(replica_id(AGENT, node)).status is not Status.JOINED:
            continue
        due = on_its_node(state, shadow, now)
        if due <= now:
            actions.append(launch(state, Life(id, shadow.incarnation + 1), spot))
        else:
            wake = min(wake, due)
    for shadow in state.replicas.values():
        if shadow.role == SHADOW and shadow.believed and shadow.step is not None and shadow.id not in wanted:
            why = Why((f"{role.name} does not need a shadow on {shadow.node} any more",), expects="its memory is free")
            actions.append(StopStep(shadow.step, shadow.life, 0.0, why))  # it holds nothing that could be lost
    return actions, wake


def _wanted(
    state: State, rooms: Rooms, assigned: Assignment, role: RoleView, members: list[Replica]
) -> dict[ReplicaId, NodeName]:
    """Every shadow that there is to be, and its node: one for each member where it is, and as many as share a node on
    others that it may go to. Those that are kept warm already come first."""
    warm = {shadow.node for shadow in state.replicas.values() if shadow.role == SHADOW and shadow.believed}
    own = Counter(member.node for member in members if member.node is not None)
    taken = rooms.occupants()
    reserved = {spot.node for spots in (assigned.homes, assigned.moves, assigned.again, assigned.kept)
                for spot in spots.values()}  # fmt: skip
    spares = [spot.node for spot in rooms.spots(state.job.part_of(role.name).name)
              if not spot.ageing and spot.node not in reserved and not taken.get(spot.node)]  # fmt: skip
    stands = [one.node for one in rooms.standbys(members[0], taken) if one.node is not None and one.node not in own]
    each = min(role.ranks, role.per_node)
    wanted = dict(own)
    for nodes, most in ((spares, role.nodes), (stands, role.standbys)):
        chosen = sorted(dict.fromkeys(nodes), key=lambda node: node not in warm)[:most]
        wanted |= dict.fromkeys(chosen, each)
    return {id: node for node, count in wanted.items() for id in _shadows(role, node, range(count))}


def _shadows(role: RoleView, node: NodeName, slots: Iterable[int]) -> list[ReplicaId]:
    return [replica_id(SHADOW, node if role.per_node == 1 else f"{node}:{slot}") for slot in slots]
