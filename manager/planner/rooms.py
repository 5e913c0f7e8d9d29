"""Who can go where: the nodes and what is on them, looked at once for a whole plan.

Deterministic: roles in the order of the job spec, nodes in natural order, so that the same state gives the same plan.
"""

from __future__ import annotations

import re
from collections import Counter
from functools import lru_cache

from msgspec import Struct

from rrl.manager.cluster import NodeState
from rrl.manager.planner.terms import NEVER, succeeded_from
from rrl.manager.state import Node, Replica, State, Status, workers
from rrl.spec.words import AGENT, NodeName, ReplicaId, replica_id, role_of

Taken = dict[NodeName, list[Replica]]


class Spot(Struct, frozen=True):
    """A node that may get new work."""

    node: NodeName
    allocation: str
    ageing: bool
    """its allocation is to be succeeded: who is placed here is soon moved"""


class Rooms:
    """``usable``: nodes that may get new work at all, in natural order. ``failing``: nodes on which somebody's process
    has failed too often. ``begun``: the run has what it cannot start without."""

    def __init__(self, state: State, now: float) -> None:
        self._state, self._now = state, now
        terms = {allocation.tag: succeeded_from(state, allocation) for allocation in state.allocations.values()}
        self.ages = min((at for at in terms.values() if at > now), default=NEVER)
        """when (s, manager's time) the next allocation is to be succeeded"""
        pairs = [(node, node.allocation) for node in state.nodes.values() if _usable(state, node)]
        pairs.sort(key=lambda pair: _natural(pair[0].name))
        self.usable = [Spot(node.name, tag, terms[tag] <= now) for node, tag in pairs]
        self._spots: dict[str, list[Spot]] = {part.name: [] for part in state.job.parts}
        self._unproven: Counter[str] = Counter()
        for spot in sorted(self.usable, key=lambda spot: spot.ageing):  # stable: natural order among equals
            part, probe = state.allocations[spot.allocation].ask.part, state.nodes[spot.node].probe
            if probe == "" or (probe is None and not state.job.env.probe):
                self._spots[part].append(spot)
            elif probe is None and _may_yet_say(state, spot.node):
                self._unproven[part] += 1
        self._part = {role: part for part in state.job.parts for role in part.roles}
        self.failing = {node for one in workers(state) if one.failures for node in self._spent(one, refused=False)}
        self._ending: dict[NodeName, set[ReplicaId]] = {}
        for lingering in state.lingering.values():
            if role_of(lingering.life.replica) != AGENT:
                self._ending.setdefault(lingering.node, set()).add(lingering.life.replica)
        self.begun = _begun(state, {part: len(spots) for part, spots in self._spots.items()})

    def spots(self, part: str) -> list[Spot]:
        """Nodes of a part that may get roles."""
        return self._spots[part]

    def coming(self, part: str) -> int:
        """Nodes of a part that are still expected of the queue, or have yet to show that they are fit."""
        allocations = self._state.allocations.values()
        return sum(a.ask.count for a in allocations if a.pending and a.ask.part == part) + self._unproven[part]

    def good(self, node: NodeName | None) -> bool:
        return any(spot.node == node for spot in self.usable)

    def clear(self, node: NodeName) -> bool:
        """Nothing of a role is still ending there, or nobody waits for it any more."""
        known = self._state.nodes.get(node)
        return node not in self._ending or known is None or known.excluded is not None

    def occupants(self) -> Taken:
        """Who takes room on each node; a replica that is to restart in place, or to move, keeps its room."""
        taken: Taken = {}
        for replica in workers(self._state):
            where = replica.node if replica.believed else replica.prefer if replica.status is Status.WANTED else None
            if where is not None:
                taken.setdefault(where, []).append(replica)
        return taken

    def vacant_for(self, replica: Replica) -> bool:
        """A node other than its own could take this replica now."""
        taken, spent = self.occupants(), self._spent(replica)
        return any(
            spot.node != replica.node and spot.node not in spent and self._fits(replica, spot.node, taken)
            for spot in self._spots[self._part[replica.role].name]
        )

    def home(self, replica: Replica, taken: Taken) -> Spot | None:
        """Where it goes: its preferred node, else the first that fits and has not failed it too often; any that fits
        where it is not the node."""
        spots = self._spots[self._part[replica.role].name]
        if replica.prefer is not None:
            preferred = next((spot for spot in spots if spot.node == replica.prefer), None)
            if preferred is not None and self._fits(replica, preferred.node, taken):
                return preferred
        spent = self._spent(replica)
        alone = self._state.job.role(replica.role).exclusive
        fallback: Spot | None = None
        for spot in spots:
            if alone and spot.node in taken:
                continue  # the quick half of _fits: thousands of replicas look at thousands of nodes
            if self._fits(replica, spot.node, taken):
                if spot.node not in spent:
                    return spot
                fallback = fallback or spot
        return None if fallback is None or self.would_help(replica) else fallback

    def successor(self, replica: Replica, taken: Taken) -> Spot | None:
        """Where it moves from an allocation that ends."""
        fresh = [spot for spot in self._spots[self._part[replica.role].name] if not spot.ageing]
        spent = self._spent(replica)
        return next((s for s in fresh if s.node not in spent and self._fits(replica, s.node, taken)), None)

    def would_help(self, replica: Replica) -> bool:
        """A node more for this replica: not where it fails as often on two, nor where so many nodes fail somebody at
        once that it is the storage, the fabric or the software."""
        if len(self._spent(replica, refused=False)) > 1:
            return False
        allowed = max(1, int(self._state.job.recovery.breaker * len(self._state.nodes)))
        return len(self.failing - {replica.node}) < allowed

    def _spent(self, replica: Replica, refused: bool = True) -> set[NodeName]:
        """Nodes that have failed it too often within the window; ``refused``: launches that the cluster refused
        count."""
        recovery = self._state.job.recovery
        recent = replica.recent(recovery.window, self._now)
        nodes = [start.node for start in recent if refused or not start.refused]
        last = not replica.ever_joined and replica.unstarted + 1 >= recovery.first_start  # before it is given up
        often = min(recovery.per_node, recovery.first_start - 1) if last else recovery.per_node
        return {node for node in nodes if nodes.count(node) >= max(1, often)}

    def _fits(self, replica: Replica, node: NodeName, taken: Taken) -> bool:
        job, there = self._state.job, taken.get(node, [])
        others = [other for other in there if other.id != replica.id]
        role = job.role(replica.role)
        if role.exclusive and others:
            return False
        if self._ending.get(node, set()) - {replica.id}:
            return False  # its room is not free before what is there has ended
        if role.exclusive:
            return True
        if any(job.role(other.role).exclusive for other in others):
            return False
        each = [job.role(other.role).each for other in others] + [role.each]
        room = self._part[replica.role].node
        return (
            sum(e.cpus for e in each) <= room.cpus
            and sum(e.gpus for e in each) <= room.gpus
            and sum(e.mem for e in each) <= room.mem
        )


def never_started(state: State, node: NodeName) -> bool:
    """Its agent fails to start again and again, and never has: it will not say any more what the node can do."""
    return state.replica(replica_id(AGENT, node)).unstarted >= state.job.recovery.first_start


def _may_yet_say(state: State, node: NodeName) -> bool:
    """What the node can do: its agent is still tried."""
    return state.replica(replica_id(AGENT, node)).status is not Status.RETIRED and not never_started(state, node)


def _usable(state: State, node: Node) -> bool:
    allocation = state.allocations.get(node.allocation)
    fit = node.seen is None or node.seen.state in (NodeState.UP, NodeState.UNKNOWN)
    return node.excluded is None and fit and allocation is not None and allocation.running


def _begun(state: State, ready: dict[str, int]) -> bool:
    """Where each node is a request of its own nothing is launched before there is all that the run needs."""
    if state.job.form != "replica" or any(replica.incarnation for replica in workers(state)):
        return True
    return all(ready[part.name] >= part.needed for part in state.job.parts)


@lru_cache(maxsize=65536)
def _natural(name: str) -> tuple[tuple[int, str], ...]:
    """Sort key: n2 before n10."""
    return tuple((int(part), "") if part.isdigit() else (0, part) for part in re.split(r"(\d+)", name))
