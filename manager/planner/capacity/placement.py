"""Members to nodes: which wanted replica starts where. Launches only; nothing here stops anything but what lingers.

A gang is launched whole and with one incarnation: when every member has a home and no pause, and nothing of its earlier
lives still takes memory. A manager may die between two of its launches: the next one launches the others to them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from msgspec import Struct

from ....core.launch import tag_of
from ....core.types import AGENT, SHADOW, Life, ReplicaId, gang_of, replica_id, role_of
from ...model.actions import Launch, Outside, StopStep, Why
from ...model.queries import gang, missing
from ...model.state import Replica, State, Status
from ..deadlines import NEVER
from .nodes import Rooms, Spot, rests
from .warm_pool import Taken, engines_gone, patient, still_ending, take


class Assignment(Struct, frozen=True):
    """Who goes where, as far as there is room. Members of gangs each for itself, but that a gang moves, or gets another
    chance, only if all of it can."""

    homes: dict[ReplicaId, Spot] = {}
    """of the wanted; a gang that lacks one keeps those that it has"""
    moves: dict[ReplicaId, Spot] = {}
    """of those whose allocation ends"""
    again: dict[ReplicaId, Spot] = {}
    """of those that were gone on without, and get another chance in whatever room is left"""
    lacking: tuple[Replica, ...] = ()
    """wanted, and no node of ours can take them"""
    staying: tuple[Replica, ...] = ()
    """to be moved, and no node of ours can take them"""
    kept: dict[ReplicaId, Spot] = {}
    """of those that could be moved, but that others of their gang stay"""


def assign(state: State, rooms: Rooms, now: float) -> Assignment:
    """One pass over everybody without a node, those that pause before their next start after those that do not; first
    of all who comes back to nodes where it is warm, and which others may have just left for it."""
    if not rooms.begun:
        return Assignment()
    taken, every = rooms.occupants(), rooms.gangs
    homes: dict[ReplicaId, Spot] = {}
    lacking: list[Replica] = []
    wanted = [members for gang in every if (members := missing(gang))]
    roles = {role.name for role in state.job.roles if patient(role)}
    back = {members[0].id for members in wanted if members[0].role in roles and members[0].incarnation}
    for members in sorted(wanted, key=lambda members: (_pause(members) > now, members[0].id not in back)):
        for member in members:
            if (home := rooms.home(member, taken)) is None:
                lacking.append(member)
            else:
                homes[member.id] = home
                take(taken, home.node, member)
    moves, kept, staying = _moves(rooms, every, taken)
    again: dict[ReplicaId, Spot] = {}
    for members in every:
        if _due_again(state, members, now):
            again |= _all_or_none(rooms, members, taken)
    return Assignment(homes, moves, again, tuple(lacking), tuple(staying), kept)


def _moves(
    rooms: Rooms, every: list[list[Replica]], taken: Taken
) -> tuple[dict[ReplicaId, Spot], dict[ReplicaId, Spot], list[Replica]]:
    """Of those on nodes whose allocation ends: where they move, where they could but for others of their gang, and
    who stays for want of a node."""
    ageing = {spot.node for spot in rooms.usable if spot.ageing} | rooms.leaving
    moves: dict[ReplicaId, Spot] = {}
    kept: dict[ReplicaId, Spot] = {}
    staying: list[Replica] = []
    for members in every:
        found: dict[ReplicaId, Spot] = {}
        without: list[Replica] = []
        for member in members:
            if not member.believed or member.node not in ageing:
                continue
            if (home := rooms.successor(member, taken)) is None:
                without.append(member)
            else:
                found[member.id] = home
                take(taken, home.node, member)
        (kept if without else moves).update(found)
        staying += without
    return moves, kept, staying


def _due_again(state: State, members: list[Replica], now: float) -> bool:
    """It was gone on without, and the failures of all of it have left the window."""
    window = state.job.recovery.window
    retired = any(one.status is Status.RETIRED for one in members) and not any(one.believed for one in members)
    return retired and not any(one.recent(window, now) for one in members)


def _all_or_none(rooms: Rooms, members: list[Replica], taken: Taken) -> dict[ReplicaId, Spot]:
    """Homes for all members, or none; ``taken`` grows by them."""
    tried = {node: list(there) for node, there in taken.items()} if len(members) > 1 else taken
    homes: dict[ReplicaId, Spot] = {}
    for member in members:
        if (home := rooms.home(member, tried)) is None:
            return {}
        homes[member.id] = home
        take(tried, home.node, member)
    taken.update(tried)
    return homes


def _pause(members: Sequence[Replica]) -> float:
    """Manager's time (s) before which none of them is launched."""
    return max(one.not_before for one in members)


def nodes_for(state: State, lacking: Sequence[Replica]) -> int:
    """Nodes that these members need: those of a gang share one up to ``per_node``. One of each exclusive role; the
    others share."""
    exclusive = shared = 0
    for gang_id, count in Counter(gang_of(replica.id) for replica in lacking).items():
        role = state.job.role(role_of(gang_id))
        nodes = -(-count // role.per_node)
        if role.exclusive:
            exclusive += nodes
        else:
            shared = max(shared, nodes)
    return exclusive + shared


def place(state: State, rooms: Rooms, assigned: Assignment, now: float) -> tuple[list[Outside], float]:
    """Agents for every usable node, wanted replicas onto free ones, an end to what lingers. Returns the next wake."""
    stops, wake = stop_lingering(state, now, assigned.homes)
    agents, agents_wake = _agents(state, rooms, now)
    actions: list[Outside] = [*stops, *agents]
    again: list[Outside] = []
    used: set[str] = set()
    for members in rooms.gangs:
        retired = any(one.status is Status.RETIRED for one in members) and not any(one.believed for one in members)
        if not (wanted := members if retired else missing(members)):
            continue
        homes = assigned.again if retired else assigned.homes
        launches, launch_wake = _launches(state, rooms, homes, wanted, used, now)
        (again if retired else actions).extend(launches)
        wake = min(wake, launch_wake)
    return [*actions, *again], min(wake, agents_wake)


def _launches(
    state: State, rooms: Rooms, homes: dict[ReplicaId, Spot], wanted: list[Replica], used: set[str], now: float
) -> tuple[list[Outside], float]:
    """All of them, or none and when to look again. ``used``: the steps of shadows that are taken over."""
    retired = any(one.status is Status.RETIRED for one in wanted)
    if not retired and (pause := _pause(wanted)) > now:
        return [], pause
    if any(one.id not in homes for one in wanted):
        return [], _tried_again(state, [one for one in wanted if retired or one.id not in homes], retired, now)
    if (until := still_ending(state, wanted, [homes[one.id].node for one in wanted])) > now:
        return [], until
    whole, role = gang(state, wanted[0].id), state.job.role(wanted[0].role)
    newest = max(one.incarnation for one in whole)
    incarnation = next((one.incarnation for one in whole if one.believed), newest + 1)
    shadows: dict[ReplicaId, Replica] = {}
    for member in wanted if role.warm else ():
        free = (one for one in rooms.ready(homes[member.id].node, role.name) if one.step not in used)
        if (shadow := next(free, None)) is not None and shadow.step is not None:
            shadows[member.id] = shadow
            used.add(shadow.step)
    roomless = {homes[one.id].node for one in wanted if role.beside or one.id not in shadows}
    if (until := engines_gone(state, rooms.engines, roomless, used)) > now:
        return [], until
    launches: list[Outside] = []
    for member in wanted:
        life, home = Life(member.id, incarnation), homes[member.id]
        if (shadow := shadows.get(member.id)) is not None and shadow.step is not None:
            why = Why((f"{member.id} is wanted and {home.node} has a shadow",), expects=f"{shadow.life} becomes {life}",
                      by=now + state.job.recovery.adopt)  # fmt: skip
            launches.append(Launch(life, shadow.step, home.allocation, home.node, why, shadow.life))
        else:
            launches.append(launch(state, life, home))
    return launches, NEVER


def _tried_again(state: State, homeless: list[Replica], retired: bool, now: float) -> float:
    """Manager's time (s) at which a node that failed one of them may be tried again, or their chance comes again."""
    spent = sorted(start.at for one in homeless for start in one.recent(state.job.recovery.window, now))
    return (spent[-1] if retired else spent[0]) + state.job.recovery.window if spent else NEVER


def _agents(state: State, rooms: Rooms, now: float) -> tuple[list[Outside], float]:
    actions: list[Outside] = []
    wake = NEVER
    for spot in rooms.usable:
        agent = state.replica(replica_id(AGENT, spot.node))
        due = on_its_node(state, agent, now)
        if due <= now:
            actions.append(launch(state, Life(agent.id, agent.incarnation + 1), spot))
        else:
            wake = min(wake, due)
    return actions, wake


def on_its_node(state: State, replica: Replica, now: float) -> float:
    """Manager's time (s) from which an agent or a shadow, which belongs to its node, is to be launched there; inf where
    it runs. One that failed too often rests until its oldest failure has left the window."""
    if rests(state, replica, now):
        window = state.job.recovery.window
        return replica.recent(window, now)[0].at + window
    return replica.not_before if replica.status in (Status.WANTED, Status.RETIRED) else NEVER


def launch(state: State, life: Life, home: Spot) -> Launch:
    why = Why((f"{life.replica} is wanted and {home.node} has room",), expects=f"{life} joins")
    return Launch(life, tag_of(state.run, life), home.allocation, home.node, why)


def stop_lingering(
    state: State, now: float, homes: Mapping[ReplicaId, Spot] = MappingProxyType({})
) -> tuple[list[StopStep], float]:
    """Fenced lives may still run: end their steps, but do not wait for nodes that do not answer. And the next wake.

    What a gang waits for gets no grace: its own earlier lives, what they knew is in the snapshots, and whoever is on
    the nodes that it goes to (``homes``)."""
    stops: list[StopStep] = []
    wake = NEVER
    roles = {role.name for role in state.job.roles if patient(role)}
    awaited = {spot.node for id, spot in homes.items() if role_of(id) in roles}
    for step, one in state.lingering.items():
        node = state.nodes.get(one.node)
        if one.asked or node is None or node.excluded is not None:
            continue
        if one.not_before > now:
            wake = min(wake, one.not_before)
            continue
        hurried = role_of(one.life.replica) in {*roles, SHADOW} or one.node in awaited
        grace = 0.0 if hurried else state.job.limits.step_grace
        stops.append(StopStep(step, one.life, grace, Why((f"{one.life} is fenced",))))
    return stops, wake
