"""Members to nodes: which wanted replica starts where. Launches only; nothing here stops anything but what lingers."""

from __future__ import annotations

from msgspec import Struct

from rrl.manager.actions import Launch, Outside, StopStep, Why
from rrl.manager.planner.rooms import Rooms, Spot
from rrl.manager.planner.terms import NEVER
from rrl.manager.state import Replica, State, Status, workers
from rrl.spec.launch import tag_of
from rrl.spec.words import AGENT, Life, ReplicaId, replica_id


class Assignment(Struct, frozen=True):
    """Who goes where, as far as there is room."""

    homes: dict[ReplicaId, Spot] = {}
    """of the wanted"""
    moves: dict[ReplicaId, Spot] = {}
    """of those whose allocation ends"""
    again: dict[ReplicaId, Spot] = {}
    """of those that were gone on without, and get another chance in whatever room is left"""
    lacking: tuple[Replica, ...] = ()
    """wanted, and no node of ours can take them"""
    staying: tuple[Replica, ...] = ()
    """to be moved, and no node of ours can take them"""


def assign(state: State, rooms: Rooms, now: float) -> Assignment:
    """One pass over everybody without a node, those that pause before their next start after those that do not."""
    if not rooms.begun:
        return Assignment()
    taken = rooms.occupants()
    ageing = {spot.node for spot in rooms.usable if spot.ageing}
    homes: dict[ReplicaId, Spot] = {}
    moves: dict[ReplicaId, Spot] = {}
    again: dict[ReplicaId, Spot] = {}
    lacking: list[Replica] = []
    staying: list[Replica] = []
    wanted = [replica for replica in workers(state) if replica.status is Status.WANTED]
    for replica in sorted(wanted, key=lambda one: one.not_before > now):
        if (home := rooms.home(replica, taken)) is None:
            lacking.append(replica)
        else:
            homes[replica.id] = home
            taken.setdefault(home.node, []).append(replica)
    for replica in workers(state):
        if replica.believed and replica.node in ageing:
            if (home := rooms.successor(replica, taken)) is None:
                staying.append(replica)
            else:
                moves[replica.id] = home
                taken.setdefault(home.node, []).append(replica)
    for replica in workers(state):
        if replica.status is not Status.RETIRED or replica.recent(state.job.recovery.window, now):
            continue
        if (home := rooms.home(replica, taken)) is not None:
            again[replica.id] = home
            taken.setdefault(home.node, []).append(replica)
    return Assignment(homes, moves, again, tuple(lacking), tuple(staying))


def place(state: State, rooms: Rooms, assigned: Assignment, now: float) -> tuple[list[Outside], float]:
    """Agents for every usable node, wanted replicas onto free ones, an end to what lingers. Returns the next wake."""
    stops, wake = stop_lingering(state, now)
    agents, agents_wake = _agents(state, rooms, now)
    actions: list[Outside] = [*stops, *agents]
    window = state.job.recovery.window
    again: list[Outside] = []
    for replica in workers(state):
        if replica.status is Status.WANTED:
            if replica.not_before > now:
                wake = min(wake, replica.not_before)
            elif (home := assigned.homes.get(replica.id)) is not None:
                actions.append(_launch(state, replica, home))
            elif spent := replica.recent(window, now):  # a node that failed it may be tried again then
                wake = min(wake, spent[0].at + window)
        elif replica.status is Status.RETIRED:
            if (home := assigned.again.get(replica.id)) is not None:
                again.append(_launch(state, replica, home))
            elif spent := replica.recent(window, now):
                wake = min(wake, spent[-1].at + window)
    return [*actions, *again], min(wake, agents_wake)


def _agents(state: State, rooms: Rooms, now: float) -> tuple[list[Outside], float]:
    actions: list[Outside] = []
    wake, recovery = NEVER, state.job.recovery
    for spot in rooms.usable:
        agent = state.replica(replica_id(AGENT, spot.node))
        spent = agent.recent(recovery.window, now)
        back = agent.status is Status.RETIRED and len(spent) < recovery.per_replica
        if agent.status is Status.WANTED or back:  # retired with its node, and the node is back
            if agent.not_before > now:
                wake = min(wake, agent.not_before)
            else:
                actions.append(_launch(state, agent, spot))
        elif agent.status is Status.RETIRED and spent:
            wake = min(wake, spent[0].at + recovery.window)
    return actions, wake


def _launch(state: State, replica: Replica, home: Spot) -> Launch:
    life = Life(replica.id, replica.incarnation + 1)
    why = Why((f"{replica.id} is wanted and {home.node} has room",), expects=f"{life} joins")
    return Launch(life, tag_of(state.run, life), home.allocation, home.node, why)


def stop_lingering(state: State, now: float) -> tuple[list[StopStep], float]:
    """Fenced lives may still run: end their steps, but do not wait for nodes that do not answer. And the next wake."""
    stops: list[StopStep] = []
    wake = NEVER
    for step, one in state.lingering.items():
        node = state.nodes.get(one.node)
        if one.asked or node is None or node.excluded is not None:
            continue
        if one.not_before > now:
            wake = min(wake, one.not_before)
            continue
        stops.append(StopStep(step, one.life, state.job.limits.step_grace, Why((f"{one.life} is fenced",))))
    return stops, wake
