"""Members to nodes: which wanted replica starts where. Launches only; nothing here stops anything but what lingers.

Deterministic: roles in the order of the job spec, nodes in natural order, so that the same state gives the same plan.
"""

from __future__ import annotations

import re

from rrl.manager.actions import Launch, Outside, StopStep, Why
from rrl.manager.cluster import NodeState
from rrl.manager.state import Node, Replica, State, Status, workers
from rrl.spec.launch import tag_of
from rrl.spec.words import AGENT, Life, NodeName, replica_id, role_of

NEVER = float("inf")


def place(state: State, now: float) -> tuple[list[Outside], float]:
    """Agents for every usable node, wanted replicas onto free ones, an end to what lingers. Returns the next wake."""
    stops, wake = stop_lingering(state, now)
    actions: list[Outside] = [*stops]
    recovery = state.job.recovery
    taken, failing = _occupants(state), failing_nodes(state, now)
    for node, allocation in usable_nodes(state):
        agent = state.replica(replica_id(AGENT, node))
        spent = agent.recent(recovery.window, now)
        back = agent.status is Status.RETIRED and len(spent) < recovery.per_replica
        if agent.status is Status.WANTED or back:  # retired with its node, and the node is back
            if agent.not_before > now:
                wake = min(wake, agent.not_before)
            else:
                actions.append(_launch(state, agent, node, allocation))
        elif agent.status is Status.RETIRED and spent:
            wake = min(wake, spent[0].at + recovery.window)
    for replica in workers(state):
        if replica.status is not Status.WANTED:
            continue
        if replica.not_before > now:
            wake = min(wake, replica.not_before)
            continue
        home = _home(state, replica, taken, failing, now)
        if home is not None:
            actions.append(_launch(state, replica, *home))
            taken.setdefault(home[0], []).append(replica)
        elif spent := replica.recent(recovery.window, now):  # a node that failed it may be tried again then
            wake = min(wake, spent[0].at + recovery.window)
    again, again_wake = _once_more(state, taken, failing, now)
    return [*actions, *again], min(wake, again_wake)


def _once_more(
    state: State, taken: dict[NodeName, list[Replica]], failing: set[NodeName], now: float
) -> tuple[list[Outside], float]:
    """Replicas that were gone on without get another chance once their failures have left the window, in whatever room
    the wanted ones leave."""
    actions: list[Outside] = []
    wake, window = NEVER, state.job.recovery.window
    for replica in workers(state):
        if replica.status is not Status.RETIRED:
            continue
        if recent := replica.recent(window, now):
            wake = min(wake, recent[-1].at + window)
        elif (home := _home(state, replica, taken, failing, now)) is not None:
            actions.append(_launch(state, replica, *home))
            taken.setdefault(home[0], []).append(replica)
    return actions, wake


def usable_nodes(state: State) -> list[tuple[NodeName, str]]:
    """Nodes that may get new work, with the tag of their allocation, in natural order."""

    def usable(node: Node) -> bool:
        allocation = state.allocations.get(node.allocation)
        fit = node.seen is None or node.seen.state in (NodeState.UP, NodeState.UNKNOWN)
        return node.excluded is None and fit and allocation is not None and allocation.running

    pairs = [(node.name, node.allocation) for node in state.nodes.values() if usable(node)]
    return sorted(pairs, key=lambda pair: _natural(pair[0]))


def vacant_for(state: State, replica: Replica, avoid: NodeName | None, now: float) -> bool:
    """A node other than ``avoid`` could take this replica now."""
    taken = _occupants(state)
    spent = _spent(state, replica, now)
    nodes = [node for node, _ in usable_nodes(state) if node != avoid and node not in spent]
    return any(_fits(state, replica, node, taken) for node in nodes)


def unplaced(state: State, now: float) -> list[Replica]:
    """Wanted replicas that no node of ours can take."""
    taken, failing = _occupants(state), failing_nodes(state, now)
    lacking = []
    for replica in workers(state):
        if replica.status is not Status.WANTED:
            continue
        home = _home(state, replica, taken, failing, now)
        if home is None:
            lacking.append(replica)
        else:
            taken.setdefault(home[0], []).append(replica)
    return lacking


def _home(
    state: State, replica: Replica, taken: dict[NodeName, list[Replica]], failing: set[NodeName], now: float
) -> tuple[NodeName, str] | None:
    """Where it goes: its preferred node, else the first that fits and has not failed it too often; any that fits where
    it is not the node. ``failing``: :func:`failing_nodes`."""
    nodes = usable_nodes(state)
    fitting = [pair for pair in nodes if _fits(state, replica, pair[0], taken)]
    preferred = [pair for pair in fitting if pair[0] == replica.prefer]
    if preferred:
        return preferred[0]
    spent = _spent(state, replica, now)
    good = next((pair for pair in fitting if pair[0] not in spent), None)
    return fitting[0] if good is None and fitting and not would_help(state, replica, failing, now) else good


def would_help(state: State, replica: Replica, failing: set[NodeName], now: float) -> bool:
    """A node more for this replica: not where it fails as often on two, nor where so many nodes fail somebody at once
    that it is the storage, the fabric or the software."""
    if len(_spent(state, replica, now, refused=False)) > 1:
        return False
    return len(failing - {replica.node}) < max(1, int(state.job.recovery.breaker * len(state.nodes)))


def failing_nodes(state: State, now: float) -> set[NodeName]:
    """Nodes on which somebody's process has failed too often within the window."""
    tried = (replica for replica in workers(state) if replica.failures)
    return {node for replica in tried for node in _spent(state, replica, now, refused=False)}


def _spent(state: State, replica: Replica, now: float, refused: bool = True) -> set[NodeName]:
    """Nodes that have failed it too often within the window; ``refused``: launches that the cluster refused count."""
    recovery = state.job.recovery
    nodes = [start.node for start in replica.recent(recovery.window, now) if refused or not start.refused]
    return {node for node in nodes if nodes.count(node) >= max(1, recovery.per_node)}


def _occupants(state: State) -> dict[NodeName, list[Replica]]:
    """Who takes room on each node; a replica that is to restart in place keeps its room."""
    taken: dict[NodeName, list[Replica]] = {}
    for replica in workers(state):
        where = replica.node if replica.believed else replica.prefer if replica.status is Status.WANTED else None
        if where is not None:
            taken.setdefault(where, []).append(replica)
    return taken


def _fits(state: State, replica: Replica, node: NodeName, taken: dict[NodeName, list[Replica]]) -> bool:
    role = state.job.role(replica.role)
    others = [other for other in taken.get(node, []) if other.id != replica.id]
    ending = (one for one in state.lingering.values() if one.node == node and role_of(one.life.replica) != AGENT)
    if any(one.life.replica != replica.id for one in ending):
        return False  # its room is not free before it has ended
    if role.exclusive:
        return not others
    if any(state.job.role(other.role).exclusive for other in others):
        return False
    each = [state.job.role(other.role).each for other in others] + [role.each]
    room = state.job.node
    return (
        sum(e.cpus for e in each) <= room.cpus
        and sum(e.gpus for e in each) <= room.gpus
        and sum(e.mem for e in each) <= room.mem
    )


def _launch(state: State, replica: Replica, node: NodeName, allocation: str) -> Launch:
    life = Life(replica.id, replica.incarnation + 1)
    why = Why((f"{replica.id} is wanted and {node} has room",), expects=f"{life} joins")
    return Launch(life, tag_of(state.run, life), allocation, node, why)


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


def _natural(name: str) -> list[tuple[int, str]]:
    """Sort key: n2 before n10."""
    return [(int(part), "") if part.isdigit() else (0, part) for part in re.split(r"(\d+)", name)]
