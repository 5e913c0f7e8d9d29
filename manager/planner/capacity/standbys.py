"""Shadows: the nodes on which a process is kept warm that becomes a member of the trainer, or a rollout, at once.

They are started once the trainer has committed a step in its present life, so that they take nothing from it while it
recovers. Those of the trainer wait beside whoever works, take no room, and are ended only while it works. A rollout's
has its engine running and holds all that a rollout takes, on a spare node: it is started while no rollout is on its
way back, and ended as soon as anybody else is to go there, who waits for that (``engines_gone``). Nobody counts
either kind.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from ....core.run_spec import RoleView
from ....core.types import AGENT, Life, NodeName, ReplicaId, replica_id, role_of, shadow_id, stands_for
from ...model.actions import Action, Launch, Outside, StopStep, Why
from ...model.queries import at_work
from ...model.state import Replica, State, Status
from ..deadlines import NEVER
from .nodes import Rooms, Spot
from .placement import Assignment, launch, on_its_node
from .warm_pool import Taken

_Wanted = dict[ReplicaId, NodeName]


def stand_by(
    state: State, rooms: Rooms, assigned: Assignment, placed: Sequence[Action], now: float
) -> tuple[list[Outside], float]:
    """Shadows that are to be started, and ended, and the next wake. ``placed``: what this plan launches already."""
    roles = [role for role in state.job.roles if role.warm]
    settled = _settled(state, rooms)
    if not roles or not (settled or rooms.engines) or state.job.recovery.policy != "role":  # no other takes one over
        return [], NEVER
    taken = rooms.occupants()
    actions: list[Outside] = []
    wake = NEVER
    for role in roles:
        wanted: _Wanted = {}
        if role.beside and settled:
            wanted = _beside(state, rooms, assigned, taken, role)
            actions += _not_needed(rooms, role, wanted)
        elif not role.beside:
            actions += _in_the_way(rooms, assigned, taken, placed, role)
            if settled and not _on_its_way(rooms, role):
                wanted = _on_spares(state, rooms, assigned, taken, role)
        starts, again = _started(state, rooms, wanted, now)
        actions, wake = [*actions, *starts], min(wake, again)
    return actions, wake


def _settled(state: State, rooms: Rooms) -> bool:
    """Every trainer works, and has committed a step in its present life."""
    trainers = {role.name for role in state.job.kind("trainer")}
    whole = [members for members in rooms.gangs if members[0].role in trainers]
    return state.step > 0 and all(at_work(members) and members[0].commits for members in whole)


def _on_its_way(rooms: Rooms, role: RoleView) -> bool:
    """One of the role is, or waits for its next start."""
    before = (Status.WANTED, Status.LAUNCHING, Status.STARTING)
    return any(one.status in before for members in rooms.gangs if members[0].role == role.name for one in members)


def _started(state: State, rooms: Rooms, wanted: _Wanted, now: float) -> tuple[list[Outside], float]:
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
    return actions, wake


def _stop(shadow: Replica, evidence: str) -> StopStep:
    """Without grace: it holds nothing that could be lost."""
    return StopStep(shadow.step or "", shadow.life, 0.0, Why((evidence,), expects="its memory is free"))


# ── beside whoever works: the trainer's ──────────────────────────────────────────────────────────────────────────────
def _not_needed(rooms: Rooms, role: RoleView, wanted: _Wanted) -> list[StopStep]:
    return [_stop(shadow, f"{role.name} does not need a shadow on {shadow.node} any more") for shadow in rooms.shadows
            if stands_for(shadow.id) == role.name and shadow.step is not None and shadow.id not in wanted]  # fmt: skip


def _beside(state: State, rooms: Rooms, assigned: Assignment, taken: Taken, role: RoleView) -> _Wanted:
    """Every shadow that there is to be, and its node: one for each member where it is, and as many as share a node on
    others that it may go to. Those that are kept warm already come first."""
    members = [one for whole in rooms.gangs for one in whole if one.role == role.name]
    warm = {shadow.node for shadow in rooms.shadows if stands_for(shadow.id) == role.name}
    own = Counter(member.node for member in members if member.node is not None)
    spares = [spot.node for spot in _spares(state, rooms, assigned, taken, role)]
    stands = [one.node for one in rooms.standbys(members[0], taken) if one.node is not None and one.node not in own]
    each = min(role.ranks, role.per_node)
    wanted = dict(own)
    for nodes, most in ((spares, role.nodes), (stands, role.standbys)):
        chosen = sorted(dict.fromkeys(nodes), key=lambda node: node not in warm)[:most]
        wanted |= dict.fromkeys(chosen, each)
    return {id: node for node, count in wanted.items() for id in _ids(role, node, count, role.per_node > 1)}


def _ids(role: RoleView, node: NodeName, count: int, several: bool) -> list[ReplicaId]:
    return [shadow_id(role.name, node, slot if several else None) for slot in range(count)]


def _spares(state: State, rooms: Rooms, assigned: Assignment, taken: Taken, role: RoleView) -> list[Spot]:
    """Nodes for the role on which nobody works, and to which nobody is to go."""
    reserved = {node for node, _ in _coming(assigned)}
    return [spot for spot in rooms.spots(state.job.part_of(role.name).name)
            if not spot.ageing and spot.node not in reserved and not taken.get(spot.node)]  # fmt: skip


def _coming(assigned: Assignment) -> Iterator[tuple[NodeName, ReplicaId]]:
    """Who is to go where."""
    for spots in (assigned.homes, assigned.moves, assigned.again, assigned.kept):
        for id, spot in spots.items():
            yield spot.node, id


# ── on spare nodes: a rollout's ──────────────────────────────────────────────────────────────────────────────────────
def _on_spares(state: State, rooms: Rooms, assigned: Assignment, taken: Taken, role: RoleView) -> _Wanted:
    """As many on each spare node as it carries, but on no more nodes than there are replicas; where nothing of anybody
    is ending any more."""
    ending = {one.node for one in state.lingering.values()}
    warm = {shadow.node for shadow in rooms.engines}
    spares = sorted(_spares(state, rooms, assigned, taken, role), key=lambda spot: spot.node not in warm)
    chosen = [spot.node for spot in spares[: role.replicas] if spot.node not in ending]
    count = role.fitting(state.job.part_of(role.name).node)
    return {id: node for node in chosen for id in _ids(role, node, count, not role.exclusive)}


def _in_the_way(
    rooms: Rooms, assigned: Assignment, taken: Taken, placed: Sequence[Action], role: RoleView
) -> list[StopStep]:
    """Engines on nodes where anybody works or is to go, but for ready ones that are taken over, or are going to be."""
    if not rooms.engines:
        return []
    becoming = {action.shadow for action in placed if isinstance(action, Launch)}
    coming: dict[NodeName, set[ReplicaId]] = {}
    for node, id in _coming(assigned):
        coming.setdefault(node, set()).add(id)
    for node, there in taken.items():
        for one in there:
            if not one.believed:
                coming.setdefault(node, set()).add(one.id)
    stops: list[StopStep] = []
    for one in rooms.engines:
        if one.node is None or stands_for(one.id) != role.name or one.life in becoming:
            continue
        ids, spot = coming.get(one.node, set()), rooms.spot(one.node)
        alone = not ids and not taken.get(one.node) and spot is not None and not spot.ageing
        awaited = {role_of(id) for id in ids} == {role.name} and one in rooms.ready(one.node, role.name)
        if not (alone or awaited):
            who = ", ".join(sorted(ids or {other.id for other in taken.get(one.node, ())}))
            stops.append(_stop(one, f"{one.node} is for {who}" if who else f"{one.node} is no spare node any more"))
    return stops
