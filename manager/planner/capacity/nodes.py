"""Nodes and what runs on them, computed once for a whole plan: which replica can be placed where. Pure.

Deterministic: roles in the order of the job, nodes in natural order, so that equal states give equal plans.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cached_property

from msgspec import Struct

from ....core.run_spec import RoleView
from ....core.types import (
    AGENT,
    SHADOW,
    Cause,
    Finding,
    NodeName,
    Remedy,
    ReplicaId,
    Verdict,
    gang_of,
    natural,
    replica_id,
    role_of,
    stands_for,
)
from ...cluster.base import NodeState
from ...model.actions import Shrink
from ...model.queries import admits, gang, gangs, workers
from ...model.reduce_nodes import DRAIN, GIVEN_BACK
from ...model.state import Node, Replica, State, Status
from ..deadlines import NEVER, succeeded_from
from .warm_pool import Taken, holds_room, patient, ready_shadows, shadows_of, spareable, take  # fmt: skip

HARDWARE = frozenset({Cause.NODE, Cause.GPU, Cause.FABRIC, Cause.STORAGE})
"""causes for which a node is nobody's to use; what a process did says nothing of its node"""
_LEAVES_THE_NODE = frozenset({Remedy.NONE, Remedy.RESTART})
"""remedies with which a node goes on"""
MAX_NAMED_NODES = 4
"""nodes named in a reason; the others are counted"""


def condemns(finding: Finding) -> bool:
    """It is against the node, and calls for leaving it."""
    of_node = finding.node is not None and finding.verdict is Verdict.FAIL
    return of_node and finding.cause in HARDWARE and finding.remedy not in _LEAVES_THE_NODE


class Spot(Struct, frozen=True):
    """A node that may get new work."""

    node: NodeName
    allocation: str
    ageing: bool
    """its allocation is to be succeeded, or a person wants it drained: who is here is moved"""


class Rooms:
    """``usable``: nodes that may get new work at all, in natural order. ``failing``: nodes on which somebody's process
    has failed too often. ``begun``: the run has what it cannot start without."""

    def __init__(self, state: State, now: float) -> None:
        self._state, self._now = state, now
        terms = {allocation.tag: succeeded_from(state, allocation) for allocation in state.allocations.values()}
        ends = (allocation.ends for allocation in state.allocations.values())
        window = state.job.recovery.window
        past = (start.at + window for one in workers(state) if one.failures for start in one.failures)
        self.ages = min((at for at in (*terms.values(), *ends, *past) if at > now), default=NEVER)
        """when (s, manager's time) the next allocation is to be succeeded, or ends, or a failure leaves the window: who
        pauses may have to go elsewhere then"""
        going = {name for intent in state.intents.values() if isinstance(intent.action, Shrink)
                 for name in intent.action.nodes}  # fmt: skip
        pairs = [(node, node.allocation) for node in state.nodes.values()
                 if node.name not in going and _usable(state, node, now)]  # fmt: skip
        pairs.sort(key=lambda pair: natural(pair[0].name))
        self.leaving = {name for name, (command, _) in state.marks.items() if command == DRAIN and name in state.nodes}
        """nodes that a person wants drained: nobody new goes there"""
        self.usable = [Spot(node.name, tag, terms[tag] <= now or node.name in self.leaving) for node, tag in pairs]
        self._spots: dict[str, list[Spot]] = {part.name: [] for part in state.job.parts}
        self._unproven: Counter[str] = Counter()
        proved = {one.node for one in state.findings.values() if one.proof and condemns(one)}
        suspects = {one.node for one in state.findings.values() if one.node is not None}
        for spot in sorted(self.usable, key=lambda spot: (spot.ageing, spot.node in suspects)):  # stable: natural order
            part, node = state.allocations[spot.allocation].ask.part, state.nodes[spot.node]
            probe, asked = node.probe, bool(node.exclusions) or asked_first(state, node)
            if spot.node in self.leaving or spot.node in proved:  # the brake may keep it from being excluded
                continue
            if probe == "" or (probe is None and not asked):
                self._spots[part].append(spot)
            elif probe is None and _may_yet_say(state, spot.node, now):
                self._unproven[part] += 1
        self.gangs = gangs(state)
        self._good = {spot.node for spot in self.usable}
        self._where = {spot.node: (part, spot) for part, spots in self._spots.items() for spot in spots}
        self._part = {role: part for part in state.job.parts for role in part.roles}
        self.shadows = shadows_of(state)
        self.engines = [one for one in self.shadows if one.step is not None and holds_room(state, one.id)]
        """of the shadows, those that keep others from their node's room"""
        self._ready = ready_shadows(state, self.shadows, self._good)
        self.failing = {node for one in workers(state) if one.failures for node in self._spent(one, refused=False)}
        self._ending: dict[NodeName, set[ReplicaId]] = {}
        for lingering in state.lingering.values():
            if role_of(lingering.life.replica) not in (AGENT, SHADOW):
                self._ending.setdefault(lingering.node, set()).add(lingering.life.replica)
        self.begun = _begun(state, {part: len(spots) for part, spots in self._spots.items()})

    def spots(self, part: str) -> list[Spot]:
        """Nodes of a part that may get roles."""
        return self._spots[part]

    def spot(self, node: NodeName) -> Spot | None:
        """The node, if it may get roles."""
        return self._where[node][1] if node in self._where else None

    def coming(self, part: str) -> int:
        """Nodes of a part that are still expected of the queue, or have yet to show that they are fit."""
        allocations = self._state.allocations.values()
        return sum(a.ask.count for a in allocations if a.pending and a.ask.part == part) + self._unproven[part]

    def good(self, node: NodeName | None) -> bool:
        return node in self._good

    def clear(self, node: NodeName) -> bool:
        """Nothing of a role is still ending there, or nobody waits for it any more."""
        known = self._state.nodes.get(node)
        return node not in self._ending or known is None or known.excluded is not None

    def occupants(self) -> Taken:
        """Who takes room on each node; a replica that is to restart in place, or to move, keeps its room. Where more of
        a gang are to go to one node than may share it, the first have it."""
        taken: Taken = {}
        ended = {gang_of(one.id) for one in workers(self._state) if one.status is Status.RETIRED}
        for replica in workers(self._state):
            if replica.believed:
                if replica.node is not None:
                    taken.setdefault(replica.node, []).append(replica)
            elif replica.status is Status.WANTED and replica.prefer is not None and gang_of(replica.id) not in ended:
                there = taken.setdefault(replica.prefer, [])
                whole = gang_of(replica.id)
                if sum(gang_of(one.id) == whole for one in there) < self._state.job.role(replica.role).per_node:
                    there.append(replica)
        return taken

    @cached_property
    def _taken(self) -> Taken:
        """:meth:`occupants`, for those who only look."""
        return self.occupants()

    # ── where somebody can go ────────────────────────────────────────────────────────────────────────────────────────
    # ``taken``: who takes room where, :meth:`occupants` if nothing else is said; whoever decides about several members
    # at once adds each to it where it sends it, and takes out whom it drives away.
    def vacant_for(self, replica: Replica, taken: Taken | None = None) -> bool:
        """A node other than its own could take this replica now."""
        taken, spent = self._taken if taken is None else taken, self._spent(replica)
        return any(
            spot.node != replica.node and spot.node not in spent and self._fits(replica, spot.node, taken)
            for spot in self._spots[self._part[replica.role].name]
        )

    def home(self, replica: Replica, taken: Taken) -> Spot | None:
        """Where it goes: its preferred node, else where it is warm, else beside others of its gang, else the first that
        fits and has not failed it too often; any that fits where it is not the node. Where it is preferred or warm a
        gang waits for what is still ending: that is sooner over than it would start elsewhere."""
        role, prefer = self._state.job.role(replica.role), replica.prefer
        preferred = prefer is not None and self.carries(role, prefer)
        if prefer is not None and preferred and self._fits(replica, prefer, taken, waits=patient(role)):
            return self._where[prefer][1]
        if role.warm and (warm := self.warm_spare_for(replica, taken)) is not None:
            return warm
        spent = self._spent(replica)
        whole, alone = gang_of(replica.id), role.exclusive
        fallback: Spot | None = None
        for spot in self._beside(replica, role, taken):
            if alone and spot.node in taken and (role.ranks == 1 or gang_of(taken[spot.node][0].id) != whole):
                continue  # the quick half of _fits: thousands of replicas look at thousands of nodes
            if self._fits(replica, spot.node, taken):
                if spot.node not in spent:
                    return spot
                fallback = fallback or spot
        return None if fallback is None or self.would_help(replica) else fallback

    def successor(self, replica: Replica, taken: Taken) -> Spot | None:
        """Where it moves from an allocation that ends."""
        role, spent = self._state.job.role(replica.role), self._spent(replica)
        fresh = (spot for spot in self._beside(replica, role, taken) if not spot.ageing)
        return next((s for s in fresh if s.node not in spent and self._fits(replica, s.node, taken)), None)

    def _beside(self, replica: Replica, role: RoleView, taken: Taken) -> Sequence[Spot]:
        """Spots where others of its gang are, then those of its part."""
        spots = self._spots[self._part[role.name].name]
        if role.ranks == 1 or role.per_node == 1:
            return spots
        whole = gang_of(replica.id)
        theirs = [self._where[node][1] for node, there in taken.items()
                  if self.carries(role, node) and any(gang_of(one.id) == whole for one in there)]  # fmt: skip
        theirs.sort(key=lambda spot: natural(spot.node))
        return [*theirs, *(spot for spot in spots if spot not in theirs)]

    # ── who is warm ──────────────────────────────────────────────────────────────────────────────────────────────────
    def ready(self, node: NodeName | None, role: str) -> Sequence[Replica]:
        """Shadows on this node that can become a member of the role at once."""
        return [one for one in self._ready.get(node, ()) if stands_for(one.id) == role] if node is not None else ()

    def warm_spare_for(self, member: Replica, taken: Taken | None = None) -> Spot | None:
        """A node other than its own that could take this member now, and has a shadow that is ready for it."""
        if not self._ready:
            return None
        role, spent = self._state.job.role(member.role), self._spent(member)
        taken = self._taken if taken is None else taken
        for spot in self._beside(member, role, taken):
            if spot.node not in self._ready:  # the quick half of what follows
                continue
            if spot.node == member.node or spot.node in spent or not self._free_shadow(member, spot.node, taken):
                continue
            if self._fits(member, spot.node, taken, waits=True):
                return spot
        return None

    def standby_for(self, member: Replica, taken: Taken | None = None) -> Replica | None:
        """The rollout whose node this member could take, with a shadow there that is ready for it: of those that the
        run can do without for a while, the last. Where one was driven away already for others of its gang and there is
        room left, :meth:`warm_spare_for` says so."""
        role, spent = self._state.job.role(member.role), self._spent(member)
        if not role.standbys or not self._ready:
            return None
        taken = self._taken if taken is None else taken
        for rollout in self.standbys(member, taken):
            node = rollout.node
            if node is not None and node not in spent and self._free_shadow(member, node, taken):
                return rollout
        return None

    def standbys(self, member: Replica, taken: Taken) -> Iterator[Replica]:
        """Rollouts on whose nodes this member would fit in their stead, the last first."""
        role = self._state.job.role(member.role)
        for rollout in reversed(spareable(self._state, taken)):
            node = rollout.node
            if node is None or node == member.node or not self.carries(role, node):
                continue
            without = {node: [one for one in taken[node] if one.id != rollout.id]}
            if self._fits(member, node, without, waits=True):
                yield rollout

    def in_the_way(self, member: Replica) -> Sequence[Replica]:
        """Rollouts that still work where this member is wanted, and leave it no room: they were to be driven away. Or
        one on whose node it would be warm, while it has no node, or only a cold one that was not meant for it: of two
        nodes that are lost at once, the second one's."""
        role = self._state.job.role(member.role)
        if not role.standbys or not self._ready:
            return ()
        taken = {node: list(there) for node, there in self._taken.items()}
        for one in gang(self._state, member.id):
            if one.status is not Status.WANTED:
                continue
            if one.id == member.id:
                return self._driven_away(one, role, taken)
            if (home := self.home(one, taken)) is not None:
                take(taken, home.node, one)
        return ()

    def _driven_away(self, member: Replica, role: RoleView, taken: Taken) -> Sequence[Replica]:
        node = member.prefer
        if node is not None and self.ready(node, role.name) and self.carries(role, node):
            if self._fits(member, node, taken, waits=True):
                return ()
            rollouts = {one.name for one in self._state.job.kind("rollout")}
            return [one for one in taken[node] if one.believed and one.role in rollouts]
        home = self.home(member, taken)
        if home is not None and (home.node == node or self._free_shadow(member, home.node, taken)):
            return ()
        standby = self.standby_for(member, taken)
        return () if standby is None else (standby,)

    def _free_shadow(self, member: Replica, node: NodeName, taken: Taken) -> bool:
        """One more than those that others need which go there: of a role with shadows beside it all of its gang that
        are there, of another role those that have not begun."""
        ready, there = self.ready(node, member.role), [one for one in taken.get(node, ()) if one.id != member.id]
        if not ready or self._state.job.role(member.role).beside:
            return len(ready) > sum(gang_of(one.id) == gang_of(member.id) for one in there)
        theirs = [one for one in there if one.role == member.role]
        return len(ready) > sum(not (one.believed and one.node == node) for one in theirs)

    def promise(self, member: Replica, node: NodeName) -> None:
        """It is sent there: for whoever else is decided about in the same plan it has its room already."""
        take(self._taken, node, member)

    def carries(self, role: RoleView, node: NodeName) -> bool:
        """The node is for this role, or of a shape that could carry its members too, where shadows may stand by."""
        if node not in self._where:
            return False
        part = self._state.job.part(self._where[node][0])
        if role.name in part.roles:
            return True
        each = role.on_node
        large = part.node.cpus >= each.cpus and part.node.gpus >= each.gpus and part.node.mem >= each.mem
        return role.warm and role.beside and large

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

    def _fits(self, replica: Replica, node: NodeName, taken: Taken, waits: bool = False) -> bool:
        """``waits``: for what is still ending there; else its room is not free before."""
        job = self._state.job
        others = [other for other in taken.get(node, ()) if other.id != replica.id]
        role, whole = job.role(replica.role), gang_of(replica.id)
        strangers = [other for other in others if gang_of(other.id) != whole]
        if len(others) - len(strangers) >= role.per_node or (role.exclusive and strangers):
            return False
        back = {other.id for other in others}  # whose own room it is that they still leave
        if not waits and any(gang_of(one) != whole and one not in back for one in self._ending.get(node, ())):
            return False
        if role.exclusive:
            return True
        if any(job.role(other.role).exclusive for other in strangers):
            return False
        each = [job.role(other.role).each for other in others] + [role.each]
        room = job.part(self._where[node][0]).node if node in self._where else self._part[replica.role].node
        return (
            sum(e.cpus for e in each) <= room.cpus
            and sum(e.gpus for e in each) <= room.gpus
            and sum(e.mem for e in each) <= room.mem
        )


def asked_first(state: State, node: Node) -> bool:
    """Roles wait for what its agent says of it: whether they can run there, or how the node does."""
    allocation = state.allocations.get(node.allocation)
    return bool(state.job.env.probe) or (allocation is not None and admits(state.job, allocation.ask.node.gpus))


def never_started(state: State, node: NodeName) -> bool:
    """Its agent fails to start again and again, and never has: it will not say any more what the node can do."""
    return state.replica(replica_id(AGENT, node)).unstarted >= state.job.recovery.first_start


def unfit_nodes(state: State) -> dict[NodeName, str]:
    """Nodes on which no role can run, and why: in the probe's words, or those of an agent that never started."""
    found: dict[NodeName, str] = {}
    for name, node in state.nodes.items():
        if node.probe:
            found[name] = node.probe
        elif asked_first(state, node) and never_started(state, name):
            failures = state.replica(replica_id(AGENT, name)).failures
            found[name] = failures[-1].why if failures else "its agent never started"
    return found


def rests(state: State, helper: Replica, now: float) -> bool:
    """Whether an agent or a shadow has failed so often that it is not started again before a failure leaves the
    window. One that was retired because its node left the run does not rest: it is started as soon as the node is
    back."""
    recovery = state.job.recovery
    failures = helper.recent(recovery.window, now)
    return helper.status is Status.RETIRED and len(failures) >= max(1, recovery.per_replica)


def _may_yet_say(state: State, node: NodeName, now: float) -> bool:
    """Whether the agent of this node may still report what the node can do: the agent runs or is about to be started,
    and has not failed again and again (as often as it can fail to join within the window). Without that bound, a
    replica that lacks a node would wait for ever for the agent of a node that is cut off."""
    agent, recovery = state.replica(replica_id(AGENT, node)), state.job.recovery
    often = max(1, min(recovery.first_start, int(recovery.window / state.job.limits.join) - 1))
    tried = not rests(state, agent, now) and len(agent.recent(recovery.window, now)) < often
    return tried and not never_started(state, node)


def _usable(state: State, node: Node, now: float) -> bool:
    allocation = state.allocations.get(node.allocation)
    fit = node.seen is None or node.seen.state in (NodeState.UP, NodeState.UNKNOWN)
    if allocation is None or not allocation.running or allocation.suspended or allocation.taken:
        return False
    if now >= allocation.ends:  # it may be some time before the cluster takes it back
        return False
    return node.excluded is None and fit and node.stays != GIVEN_BACK  # it is gone with the next look


def _begun(state: State, ready: dict[str, int]) -> bool:
    """Where each node is a request of its own nothing is launched before there is all that the run needs."""
    if state.job.form != "replica" or state.launched:
        return True
    return all(ready[part.name] >= part.needed for part in state.job.parts)
