"""The node inventory: the nodes of a run and what runs on them, computed once per plan to place replicas. Pure.

The result is deterministic: roles are considered in the order of the job, and nodes in natural order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterator, Sequence
from functools import cached_property
from itertools import chain

from msgspec import Struct

from ....cluster.base import NodeState
from ....core.run_spec import RoleSpec
from ....core.types import NodeName, ReplicaId, gang_of, is_support, natural_sort_key
from ...model.actions import Shrink
from ...model.queries import extra_rollouts, failed_first_starts, place_of
from ...model.reduce_nodes import DRAIN
from ...model.state import Replica, State, Status
from ..deadlines import NEVER, elastic_stops, rotate_at
from .node_fitness import agent_failed_last, barred_nodes, is_held, is_usable, needs_probe, probe_pending
from .warm_pool import Occupancy, displaceable, occupy, ready_standbys_by_node, standby_processes, waits_for_release


class CandidateNode(Struct, frozen=True):
    """A node that may get new replicas."""

    node: NodeName
    allocation: str
    expiring: bool
    """True if replicas must move off the node: its allocation needs a successor, or a user wants the node drained."""


class NodeInventory:
    """The nodes of a run, what occupies them, and which replicas each node could host.

    ``usable`` are the nodes that may get new processes, in natural order. ``failing_nodes`` are nodes on which the
    process of some replica failed too often. ``may_start`` is True once the run has the nodes that it needs to start.
    """

    def __init__(self, state: State, now: float) -> None:
        self._state, self._now = state, now
        rotation_times = {allocation.tag: rotate_at(state, allocation) for allocation in state.allocations.values()}
        ends = (allocation.ends_at for allocation in state.allocations.values())
        self.stops = stops = elastic_stops(state)
        window = state.job.recovery.window
        failure_expiries = (
            failure.at + window for replica in state.workers if replica.failures for failure in replica.failures
        )
        self.next_change = min(
            (at for at in (*rotation_times.values(), *ends, *stops.values(), *failure_expiries) if at > now),
            default=NEVER,
        )
        """Manager's time (s) at which the next allocation ends or is due for rotation, or the next failure leaves the
        window. At this time the choice of nodes may change."""
        shrinking = {
            name
            for intent in state.intents.values()
            if isinstance(intent.action, Shrink)
            for name in intent.action.nodes
        }
        pairs = [
            (node, node.allocation)
            for node in state.nodes.values()
            if node.name not in shrinking and is_usable(state, node, now)
        ]
        pairs.sort(key=lambda pair: natural_sort_key(pair[0].name))
        self.draining = {
            name for name, (command, _) in state.node_commands.items() if command == DRAIN and name in state.nodes
        }
        """Nodes that a user wants drained: no replica is placed there."""
        self.usable = [
            CandidateNode(node.name, tag, rotation_times[tag] <= now or node.name in self.draining)
            for node, tag in pairs
        ]
        self._candidates: dict[str, list[CandidateNode]] = {node_group.name: [] for node_group in state.job.node_groups}
        self._unprobed: Counter[str] = Counter()
        self.barred = barred_nodes(state)
        """Nodes on which no replica is placed, even while the circuit breaker keeps them in use."""
        suspects = {finding.node for finding in state.findings.values() if finding.node is not None}
        suspects |= {node for node in state.nodes if agent_failed_last(state, node)}
        for candidate in sorted(
            self.usable, key=lambda candidate: (candidate.expiring, candidate.node in suspects)
        ):  # a stable sort keeps the natural order
            node_group, node = state.allocations[candidate.allocation].request.node_group, state.nodes[candidate.node]
            probe_error, must_report = node.probe_error, bool(node.exclusions) or needs_probe(state, node)
            if candidate.node in self.draining or candidate.node in self.barred:
                continue
            if stops.get(candidate.allocation, NEVER) <= now:
                continue
            if probe_error == "" or (probe_error is None and not must_report):
                self._candidates[node_group].append(candidate)
            elif probe_error is None and probe_pending(state, candidate.node, now):
                self._unprobed[node_group] += 1
        leaving = (n for n in state.nodes.values() if n.status is not None and n.status.state is NodeState.LEAVING)
        self._leaving = {
            n.name: CandidateNode(n.name, n.allocation, True)
            for n in leaving
            if is_held(state, n, now) and n.name not in self.barred
        }
        """Nodes that the cluster reboots once they are idle. Only a replica that ran there may return."""
        self.gangs = state.gangs
        self._usable_names = {candidate.node for candidate in self.usable}
        self._by_node = {
            candidate.node: (node_group, candidate)
            for node_group, candidates in self._candidates.items()
            for candidate in candidates
        }
        self._group_of_role = {role: node_group for node_group in state.job.node_groups for role in node_group.roles}
        self.standby_processes = standby_processes(state)
        self._ready_standbys = ready_standbys_by_node(state, self.standby_processes, self._usable_names)
        self.failing_nodes = {
            node
            for replica in state.workers
            if replica.failures
            for node in self._nodes_that_failed(replica, refused=False)
        }
        self._ending_replicas: dict[NodeName, set[ReplicaId]] = {}
        for orphan in state.orphan_steps.values():
            if not is_support(orphan.incarnation.replica):
                self._ending_replicas.setdefault(orphan.node, set()).add(orphan.incarnation.replica)
        self.may_start = _may_start(
            state, {node_group: len(candidates) for node_group, candidates in self._candidates.items()}
        )

    def candidates(self, node_group: str) -> list[CandidateNode]:
        """Return the nodes of a node group that may get roles."""
        return self._candidates[node_group]

    def is_expiring(self, node: NodeName) -> bool:
        """Return whether replicas must move off the node."""
        return node in self._by_node and self._by_node[node][1].expiring

    def candidate(self, node: NodeName) -> CandidateNode | None:
        """Return the node if it may get roles, else None."""
        return self._by_node[node][1] if node in self._by_node else None

    def expected(self, node_group: str) -> int:
        """Return how many nodes of a group may still become usable.

        These nodes are requested but not granted, or granted and waiting for the first report of their agent.
        """
        allocations = self._state.allocations.values()
        return (
            sum(a.request.count for a in allocations if a.pending and a.request.node_group == node_group)
            + self._unprobed[node_group]
        )

    def is_usable(self, node: NodeName | None) -> bool:
        """Return whether the node may get new processes."""
        return node in self._usable_names

    def is_clear(self, node: NodeName) -> bool:
        """Return whether no step of a role is still ending on the node.

        Steps on an excluded node do not count, since nothing is launched there.
        """
        known = self._state.nodes.get(node)
        return node not in self._ending_replicas or known is None or known.excluded is not None

    def occupancy(self) -> Occupancy:
        """Return a copy of the replicas that occupy each node, to which the caller may add members.

        A replica that restarts in place or moves occupies its preferred node. If more members of a gang prefer a node
        than may share it, the members with the lowest ranks occupy it.
        """
        return {node: list(occupants) for node, occupants in self.occupied.items()}

    @cached_property
    def occupied(self) -> Occupancy:
        """Return the result of :meth:`occupancy` itself, which nobody changes."""
        occupancy: Occupancy = {}
        retired_gangs = {gang_of(replica.id) for replica in self._state.workers if replica.status is Status.RETIRED}
        for replica in self._state.workers:
            if replica.is_current:
                if replica.node is not None:
                    occupancy.setdefault(replica.node, []).append(replica)
            elif (
                replica.status is Status.WANTED
                and replica.preferred_node is not None
                and gang_of(replica.id) not in retired_gangs
            ):
                occupants = occupancy.setdefault(replica.preferred_node, [])
                gang_id = gang_of(replica.id)
                if (
                    sum(gang_of(occupant.id) == gang_id for occupant in occupants)
                    < self._state.job.role(replica.role).per_node
                ):
                    occupants.append(replica)
        return occupancy

    @cached_property
    def extras(self) -> dict[ReplicaId, Replica]:
        """Return the rollouts beyond the number that the job asks for (:func:`extra_rollouts`)."""
        return {extra.id: extra for extra in extra_rollouts(self._state)}

    @cached_property
    def extra_nodes(self) -> set[NodeName]:
        """Return the nodes on which nothing but extras works, which count as spare nodes."""
        nodes = {node for extra in self.extras.values() if (node := place_of(extra)) is not None}
        return {node for node in nodes if all(one.id in self.extras for one in self.occupied.get(node, ()))}

    @cached_property
    def _standbys_wait_beside_rollouts(self) -> bool:
        """Return whether a standby process is ready on the node of a rollout."""
        beside = (one for node in self._ready_standbys for one in self.occupied.get(node, ()))
        return any(self._state.job.traits_of(one.id).may_be_displaced for one in beside)

    @cached_property
    def _nodes_of_extras(self) -> list[tuple[NodeName, dict[ReplicaId, int]]]:
        """Return the nodes of :attr:`extra_nodes`, the last extra's first, and how many extras may leave at once."""
        may_leave = dict.fromkeys(self.extras, len(self.extras))
        places = (place_of(extra) for extra in reversed(self.extras.values()))
        return [(node, may_leave) for node in places if node is not None and node in self.extra_nodes]

    @cached_property
    def _nodes_of_others(self) -> list[tuple[NodeName, dict[ReplicaId, int]]]:
        """Return the nodes of all rollouts that could be displaced, the last first, and how many may be at once."""
        may_leave = displaceable(self._state)
        places = (self._state.replica(id).node for id in reversed(may_leave))
        return [(node, may_leave) for node in places if node is not None]

    @cached_property
    def _occupancy(self) -> Occupancy:
        """Return the replicas that occupy each node in this plan.

        The result of :meth:`occupancy` is computed once, and :meth:`reserve` adds members to it.
        """
        return self.occupancy()

    # ── where a replica can be placed ────────────────────────────────────────────────────────────────────────────────
    # ``occupancy`` defaults to :meth:`occupancy`. A caller that places several members in one pass adds each member to
    # ``occupancy``, and removes the rollouts that are displaced.
    def can_place(self, replica: Replica) -> bool:
        """Return whether a node other than the replica's own could host the replica, now or once extras have left it.

        Only a role other than a rollout displaces extras.
        """
        occupancy, failed_nodes = self._occupancy, self._nodes_that_failed(replica)
        role = self._state.job.role(replica.role)
        return any(
            candidate.node != replica.node
            and candidate.node not in failed_nodes
            and self._fits(replica, candidate.node, occupancy)
            for candidate in self._preferred_nodes(replica, role, occupancy)
        ) or (not role.traits.may_be_displaced and any(self.nodes_of_rollouts(replica, occupancy, others=False)))

    def choose_node(self, replica: Replica, occupancy: Occupancy) -> CandidateNode | None:
        """Return the node on which to launch a replica; None if no node fits.

        The order of preference is: the replica's preferred node; a node with a standby process for the replica; a node
        with other members of its gang; the first node that fits and on which the replica has not failed too often; such
        a node that rollouts are leaving; the preferred node if it is leaving. If the replica's failures are not caused
        by nodes, any node that fits is chosen. On a preferred node or a node with a standby process, a gang waits for
        steps that are still ending, which is faster than a start on another node.
        """
        role, preferred = self._state.job.role(replica.role), replica.preferred_node
        if (
            preferred is not None
            and self.can_host(role, preferred)
            and self._fits(replica, preferred, occupancy, waits_for_release(role) or self._is_vacated(role, preferred))
        ):
            return self._by_node[preferred][1]
        if (with_standby := self._spare_with_standby(replica, occupancy)) is not None:
            return with_standby
        failed_nodes = self._nodes_that_failed(replica)
        candidates = self._preferred_nodes(replica, role, occupancy)
        fallback: CandidateNode | None = None
        for candidate in candidates:
            if self._fits(replica, candidate.node, occupancy):
                if candidate.node not in failed_nodes:
                    return candidate
                fallback = fallback or candidate
        if (vacated := self._vacated(replica, candidates, failed_nodes, occupancy)) is not None:
            return vacated
        if preferred in self._leaving and self._fits(replica, preferred, occupancy, waits_for_release(role)):
            return self._leaving[preferred]
        return None if fallback is None or self.new_node_helps(replica) else fallback

    def fits_beside(self, member: Replica, node: NodeName, occupancy: Occupancy) -> bool:
        """Return whether the node can host the member beside its occupants, once steps that are ending have ended."""
        role = self._state.job.role(member.role)
        return self.can_host(role, node) and self._fits(member, node, occupancy, wait_for_release=True)

    def avoids_usable_nodes(self, replica: Replica) -> bool:
        """Return whether the replica has failed too often on a node that may get roles."""
        return any(node in self._by_node for node in self._nodes_that_failed(replica))

    def own_node(self, replica: Replica) -> NodeName | None:
        """Return the node on which a replica ran last, if it could run there again and was not sent back yet.

        The node may be one on which the replica failed too often, or one that is leaving.
        """
        node, role = replica.node, self._state.job.role(replica.role)
        if node is None or replica.returned or not (self.can_host(role, node) or node in self._leaving):
            return None
        return node if self._fits(replica, node, self._occupancy, waits_for_release(role)) else None

    def choose_successor(self, replica: Replica, occupancy: Occupancy) -> CandidateNode | None:
        """Return the node to which a replica moves from an expiring node; None if no node fits."""
        role, failed_nodes = self._state.job.role(replica.role), self._nodes_that_failed(replica)
        fresh = [candidate for candidate in self._preferred_nodes(replica, role, occupancy) if not candidate.expiring]
        fitting = (s for s in fresh if s.node not in failed_nodes and self._fits(replica, s.node, occupancy))
        return next(fitting, None) or self._vacated(replica, fresh, failed_nodes, occupancy)

    def _vacated(
        self, replica: Replica, candidates: Sequence[CandidateNode], failed: Container[NodeName], occupancy: Occupancy
    ) -> CandidateNode | None:
        """Return the first candidate that rollouts are leaving and that the replica fits on after that."""
        role = self._state.job.role(replica.role)
        ending = (one for one in candidates if one.node in self._ending_replicas and one.node not in failed)
        left = (one for one in ending if self._is_vacated(role, one.node))
        return next((one for one in left if self._fits(replica, one.node, occupancy, wait_for_release=True)), None)

    def _is_vacated(self, role: RoleSpec, node: NodeName) -> bool:
        """Return whether only rollouts are still ending on the node, whose end a member of the role awaits there."""
        job, ending = self._state.job, self._ending_replicas.get(node, ())
        return not role.traits.may_be_displaced and all(job.traits_of(id).may_be_displaced for id in ending)

    def _preferred_nodes(self, replica: Replica, role: RoleSpec, occupancy: Occupancy) -> Sequence[CandidateNode]:
        """Return the candidate nodes for a replica, nodes with other members of its gang first.

        For a replica of an exclusive role, leave out the nodes that are full or occupied by others: of thousands of
        nodes, few are left.
        """
        group = self._group_of_role[role.name].name
        candidates = self._free[group] if role.exclusive else self._candidates[group]
        if role.ranks == 1 or role.per_node == 1:
            return [candidate for candidate in candidates if not role.exclusive or candidate.node not in occupancy]
        gang_id, gang_nodes = gang_of(replica.id), []
        for candidate in (*self._partly_free, *chain.from_iterable(self._free.values())):
            occupants = occupancy.get(candidate.node, ())
            if role.exclusive and len(occupants) >= role.per_node:
                continue
            if any(gang_of(occupant.id) == gang_id for occupant in occupants) and self.can_host(role, candidate.node):
                gang_nodes.append(candidate)
        gang_nodes.sort(key=lambda candidate: natural_sort_key(candidate.node))
        chosen = {candidate.node for candidate in gang_nodes}
        taken = occupancy.keys() if role.exclusive else chosen
        return [*gang_nodes, *(candidate for candidate in candidates if candidate.node not in taken)]

    @cached_property
    def _free(self) -> dict[str, list[CandidateNode]]:
        """Return by node group the candidate nodes that nothing occupies at the begin of this plan."""
        return {
            group: [candidate for candidate in candidates if candidate.node not in self.occupied]
            for group, candidates in self._candidates.items()
        }

    @cached_property
    def _partly_free(self) -> list[CandidateNode]:
        """Return the candidate nodes whose occupants may leave room for another member of a gang."""
        return [
            candidate
            for node, occupants in self.occupied.items()
            if (candidate := self.candidate(node)) is not None
            and any(not role.exclusive or len(occupants) < role.per_node for role in self._roles_of(occupants))
        ]

    def _roles_of(self, occupants: Sequence[Replica]) -> Iterator[RoleSpec]:
        return (self._state.job.role(occupant.role) for occupant in occupants)

    # ── nodes that standby processes or other roles may take ─────────────────────────────────────────────────────────
    def ready_standbys(self, node: NodeName | None, role: str) -> Sequence[Replica]:
        """Return the standby processes on the node that can be promoted to the role now."""
        return self._ready_standbys.get(node, ()) if node is not None and self._state.job.role(role).warm else ()

    def node_to_take(
        self, member: Replica, occupancy: Occupancy | None = None
    ) -> tuple[NodeName, Sequence[Replica]] | None:
        """Return a node whose standby process can be promoted to this member, and the rollouts that leave it for that.

        Spare nodes come first, then nodes of extras, then nodes of other rollouts. If another member of the gang has
        already displaced rollouts and their node has capacity left, this node counts as a spare, so that no further
        rollout is displaced.
        """
        occupancy = self._occupancy if occupancy is None else occupancy
        if (spare := self._spare_with_standby(member, occupancy)) is not None:
            return spare.node, ()
        if not self._ready_standbys or not self._state.job.role(member.role).warm:
            return None
        others = "train" in self._state.job.tags.rollout
        taken = self.nodes_of_rollouts(member, occupancy, others, self._ready_standbys)
        return next((pair for pair in taken if self._has_free_standby(member, pair[0], occupancy)), None)

    def _spare_with_standby(self, member: Replica, occupancy: Occupancy) -> CandidateNode | None:
        """Return a node other than the member's own that could host the member and has a standby process for it."""
        role = self._state.job.role(member.role)
        if not self._ready_standbys or not role.warm:
            return None
        failed_nodes = self._nodes_that_failed(member)
        for candidate in self._preferred_nodes(member, role, occupancy):
            if candidate.node not in self._ready_standbys:  # a fast check before the slower ones below
                continue
            if (
                candidate.node == member.node
                or candidate.node in failed_nodes
                or not self._has_free_standby(member, candidate.node, occupancy)
            ):
                continue
            if self._fits(member, candidate.node, occupancy, wait_for_release=True):
                return candidate
        return None

    def nodes_of_rollouts(
        self, member: Replica, occupancy: Occupancy, others: bool, among: Container[NodeName] | None = None
    ) -> Iterator[tuple[NodeName, Sequence[Replica]]]:
        """Yield the nodes that could host this member if rollouts left them, each with these rollouts.

        Nodes on which nothing but extras works come first, then, with ``others``, the other nodes of rollouts; both
        begin with the last rollout of the job. Only nodes ``among`` the given ones are considered, if there are any.
        """
        role = self._state.job.role(member.role)
        tried = set(self._nodes_that_failed(member)) | {member.node}
        for node, may_leave in chain(self._nodes_of_extras, self._nodes_of_others if others else ()):
            if node in tried or (among is not None and node not in among) or not self.can_host(role, node):
                continue
            tried.add(node)
            leaving = self._who_leaves(member, node, occupancy, may_leave)
            if leaving and len(leaving) <= may_leave[leaving[0].id]:
                yield node, leaving

    def _who_leaves(
        self, member: Replica, node: NodeName, occupancy: Occupancy, may_leave: Container[ReplicaId]
    ) -> Sequence[Replica]:
        """Return the fewest of the rollouts that may leave a node without which the member fits there, the last first.

        The result is empty if the member does not fit without them either.
        """
        staying, leaving = list(occupancy.get(node, ())), []
        for rollout in reversed([occupant for occupant in staying if occupant.id in may_leave]):
            staying.remove(rollout)
            leaving.append(rollout)
            if self._fits(member, node, {node: staying}, wait_for_release=True):
                return leaving
        return ()

    def rollouts_to_displace(self, members: Sequence[Replica]) -> Iterator[tuple[Replica, Sequence[Replica]]]:
        """Yield the members of a gang for which rollouts leave a node, so that a standby process can be promoted there.

        If a member's preferred node has a standby process for it, these are the rollouts that still occupy this node.
        Otherwise they are those of :meth:`node_to_take`, for example after a gang has lost two nodes at the same time.
        A member needs none if it can be launched on its preferred node or on a node with a free standby process.
        """
        role = self._state.job.role(members[0].role)
        wanted = [member for member in members if member.status is Status.WANTED]
        if not role.warm or not wanted or not self._standbys_wait_beside_rollouts:
            return
        occupancy = {node: list(occupants) for node, occupants in self._occupancy.items()}
        for member in wanted:
            target = self.choose_node(member, occupancy)
            if leaving := self._displaced_by(member, role, target, occupancy):
                yield member, leaving
            if target is not None:
                occupy(occupancy, target.node, member)

    def _displaced_by(
        self, member: Replica, role: RoleSpec, target: CandidateNode | None, occupancy: Occupancy
    ) -> Sequence[Replica]:
        """Return the rollouts that leave their node for this member, which could be launched on ``target`` otherwise.

        ``occupancy`` includes the members of the gang that have lower ranks than this member.
        """
        node, job = member.preferred_node, self._state.job
        if node is not None and self.ready_standbys(node, role.name) and self.can_host(role, node):
            here = [one for one in occupancy.get(node, ()) if job.traits_of(one.id).may_be_displaced]
            movable = {one.id for one in here if one.is_current or one.id in self.extras}
            fits = self._fits(member, node, occupancy, wait_for_release=True)
            return () if fits else self._who_leaves(member, node, occupancy, movable)
        if target is not None and (target.node == node or self._has_free_standby(member, target.node, occupancy)):
            return ()
        taken = self.node_to_take(member, occupancy)
        return () if taken is None else taken[1]

    def _has_free_standby(self, member: Replica, node: NodeName, occupancy: Occupancy) -> bool:
        """Return whether the node has more ready standby processes than other members of the gang there may need."""
        others = (other for other in occupancy.get(node, ()) if other.id != member.id)
        needed = sum(gang_of(other.id) == gang_of(member.id) for other in others)
        return len(self.ready_standbys(node, member.role)) > needed

    def reserve(self, member: Replica, node: NodeName) -> None:
        """Count a member as an occupant of the node in all later decisions of this plan."""
        occupy(self._occupancy, node, member)

    def can_host(self, role: RoleSpec, node: NodeName) -> bool:
        """Return whether the node may host members of the role.

        This depends on the node's group and size. A node of the role's own group may host them. A node of another group
        may host them only if it is large enough and not dedicated to its group, and if the role has standby processes.
        """
        if node not in self._by_node:
            return False
        node_group = self._state.job.node_group(self._by_node[node][0])
        if role.name in node_group.roles:
            return True
        needed = role.members_on_node
        large_enough = (
            node_group.node.cpus >= needed.cpus
            and node_group.node.gpus >= needed.gpus
            and node_group.node.mem >= needed.mem
        )
        return role.warm and large_enough and not node_group.dedicated

    def new_node_helps(self, replica: Replica) -> bool:
        """Return whether another node may help this replica.

        Another node does not help if the replica has failed too often on two nodes already. It does not help either if
        replicas fail too often on many nodes at the same time: the likely cause is then storage, fabric or software.
        """
        if len(self._nodes_that_failed(replica, refused=False)) > 1:
            return False
        allowed = max(1, int(self._state.job.recovery.breaker * len(self._state.nodes)))
        return len(self.failing_nodes - {replica.node}) < allowed

    def _nodes_that_failed(self, replica: Replica, refused: bool = True) -> set[NodeName]:
        """Return the nodes on which the replica failed too often within the recovery window.

        With ``refused``, launches that the cluster refused count, too.
        """
        if not replica.failures:
            return set()
        recovery = self._state.job.recovery
        recent = replica.recent_failures(recovery.window, self._now)
        nodes = [failure.node for failure in recent if refused or not failure.refused]
        last_start = failed_first_starts(self._state, replica) + 1 >= recovery.first_start
        limit = min(recovery.per_node, recovery.first_start - 1) if last_start else recovery.per_node
        return {node for node in nodes if nodes.count(node) >= max(1, limit)}

    def _fits(self, replica: Replica, node: NodeName, occupancy: Occupancy, wait_for_release: bool = False) -> bool:
        """Return whether the replica fits on the node beside the node's other occupants.

        With ``wait_for_release``, steps that are still ending on the node are ignored, since the launch waits for their
        end.
        """
        job = self._state.job
        others = [other for other in occupancy.get(node, ()) if other.id != replica.id]
        role, gang_id = job.role(replica.role), gang_of(replica.id)
        others_of_other_gangs = [other for other in others if gang_of(other.id) != gang_id]
        if len(others) - len(others_of_other_gangs) >= role.per_node or (role.exclusive and others_of_other_gangs):
            return False
        returning = {other.id for other in others}  # replicas that return are counted as occupants, not as ending steps
        if not wait_for_release and any(
            gang_of(ending) != gang_id and ending not in returning for ending in self._ending_replicas.get(node, ())
        ):
            return False
        if role.exclusive:
            return True
        if any(other.exclusive for other in self._roles_of(others_of_other_gangs)):
            return False
        requested = [*(other.per_member for other in self._roles_of(others)), role.per_member]
        resources = (
            job.node_group(self._by_node[node][0]).node
            if node in self._by_node
            else self._group_of_role[replica.role].node
        )
        return (
            sum(needed.cpus for needed in requested) <= resources.cpus
            and sum(needed.gpus for needed in requested) <= resources.gpus
            and sum(needed.mem for needed in requested) <= resources.mem
        )


def _may_start(state: State, ready: dict[str, int]) -> bool:
    """Return whether roles may be launched.

    In form ``replica`` nodes arrive one by one, and nothing is launched before the run has its minimum.
    """
    if state.job.form != "replica" or state.launched:
        return True
    return all(ready[node_group.name] >= node_group.min_nodes for node_group in state.job.node_groups)
