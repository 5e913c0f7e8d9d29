"""Nodes and what runs on them, computed once for a whole plan: which replica can be placed where. Pure.

Deterministic: roles in the order of the job, nodes in natural order, so that equal states give equal plans.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cached_property

from msgspec import Struct

from ....core.run_spec import RoleSpec
from ....core.types import (
    AGENT,
    STANDBY_ROLE,
    Cause,
    Finding,
    NodeName,
    Remedy,
    ReplicaId,
    Verdict,
    gang_of,
    natural_sort_key,
    replica_id,
    role_of,
    standby_role_of,
)
from ...cluster.base import NodeState
from ...model.actions import Shrink
from ...model.queries import gang, gangs, requires_admission, workers
from ...model.reduce_nodes import DRAIN, GIVEN_BACK
from ...model.state import Node, Replica, State, Status
from ..deadlines import NEVER, rotate_at
from .warm_pool import (  # fmt: skip
    Occupancy,
    donors,
    is_exclusive,
    occupy,
    ready_standbys_by_node,
    standby_processes,
    waits_for_release,
)

HARDWARE_CAUSES = frozenset({Cause.NODE, Cause.GPU, Cause.FABRIC, Cause.STORAGE})
"""causes for which a node is nobody's to use; what a process did says nothing of its node"""
_NODE_STAYS_USABLE = frozenset({Remedy.NONE, Remedy.RESTART})
"""remedies with which a node goes on"""
MAX_NAMED_NODES = 4
"""nodes named in a reason; the others are counted"""


def excludes_node(finding: Finding) -> bool:
    """It is against the node, and calls for leaving it."""
    of_node = finding.node is not None and finding.verdict is Verdict.FAIL
    return of_node and finding.cause in HARDWARE_CAUSES and finding.remedy not in _NODE_STAYS_USABLE


class CandidateNode(Struct, frozen=True):
    """A node that may get new work."""

    node: NodeName
    allocation: str
    expiring: bool
    """its allocation is to be succeeded, or a person wants it drained: who is here is moved"""


class NodeInventory:
    """``usable``: nodes that may get new work at all, in natural order. ``failing``: nodes on which somebody's process
    has failed too often. ``begun``: the run has what it cannot start without."""

    def __init__(self, state: State, now: float) -> None:
        self._state, self._now = state, now
        rotation_times = {allocation.tag: rotate_at(state, allocation) for allocation in state.allocations.values()}
        ends = (allocation.ends_at for allocation in state.allocations.values())
        window = state.job.recovery.window
        failure_expiries = (start.at + window for one in workers(state) if one.failures for start in one.failures)
        self.next_change = min(
            (at for at in (*rotation_times.values(), *ends, *failure_expiries) if at > now), default=NEVER
        )
        """when (s, manager's time) the next allocation is to be succeeded, or ends, or a failure leaves the window: who
        pauses may have to go elsewhere then"""
        shrinking = {name for intent in state.intents.values() if isinstance(intent.action, Shrink)
                 for name in intent.action.nodes}  # fmt: skip
        pairs = [(node, node.allocation) for node in state.nodes.values()
                 if node.name not in shrinking and _is_usable(state, node, now)]  # fmt: skip
        pairs.sort(key=lambda pair: natural_sort_key(pair[0].name))
        self.draining = {
            name for name, (command, _) in state.node_commands.items() if command == DRAIN and name in state.nodes
        }
        """nodes that a person wants drained: nobody new goes there"""
        self.usable = [
            CandidateNode(node.name, tag, rotation_times[tag] <= now or node.name in self.draining)
            for node, tag in pairs
        ]
        self._candidates: dict[str, list[CandidateNode]] = {node_group.name: [] for node_group in state.job.node_groups}
        self._unprobed: Counter[str] = Counter()
        proven_bad = {one.node for one in state.findings.values() if one.proof and excludes_node(one)}
        suspects = {one.node for one in state.findings.values() if one.node is not None}
        for candidate in sorted(
            self.usable, key=lambda candidate: (candidate.expiring, candidate.node in suspects)
        ):  # stable: natural order
            node_group, node = state.allocations[candidate.allocation].request.node_group, state.nodes[candidate.node]
            probe_error, must_report = node.probe_error, bool(node.exclusions) or needs_probe(state, node)
            if (
                candidate.node in self.draining or candidate.node in proven_bad
            ):  # the brake may keep it from being excluded
                continue
            if probe_error == "" or (probe_error is None and not must_report):
                self._candidates[node_group].append(candidate)
            elif probe_error is None and _probe_pending(state, candidate.node, now):
                self._unprobed[node_group] += 1
        self.gangs = gangs(state)
        self._usable_names = {candidate.node for candidate in self.usable}
        self._by_node = {
            candidate.node: (node_group, candidate)
            for node_group, candidates in self._candidates.items()
            for candidate in candidates
        }
        self._group_of_role = {role: node_group for node_group in state.job.node_groups for role in node_group.roles}
        self.standby_processes = standby_processes(state)
        self.exclusive_standbys = [
            one for one in self.standby_processes if one.step is not None and is_exclusive(state, one.id)
        ]
        """of the shadows, those that keep others from their node's room"""
        self._ready_standbys = ready_standbys_by_node(state, self.standby_processes, self._usable_names)
        self.failing_nodes = {
            node for one in workers(state) if one.failures for node in self._nodes_that_failed(one, refused=False)
        }
        self._ending_replicas: dict[NodeName, set[ReplicaId]] = {}
        for orphan_steps in state.orphan_steps.values():
            if role_of(orphan_steps.incarnation.replica) not in (AGENT, STANDBY_ROLE):
                self._ending_replicas.setdefault(orphan_steps.node, set()).add(orphan_steps.incarnation.replica)
        self.may_start = _may_start(
            state, {node_group: len(candidates) for node_group, candidates in self._candidates.items()}
        )

    def candidates(self, node_group: str) -> list[CandidateNode]:
        """Nodes of a part that may get roles."""
        return self._candidates[node_group]

    def candidate(self, node: NodeName) -> CandidateNode | None:
        """The node, if it may get roles."""
        return self._by_node[node][1] if node in self._by_node else None

    def expected(self, node_group: str) -> int:
        """Nodes of a part that are still expected of the queue, or have yet to show that they are fit."""
        allocations = self._state.allocations.values()
        return (
            sum(a.request.count for a in allocations if a.pending and a.request.node_group == node_group)
            + self._unprobed[node_group]
        )

    def is_usable(self, node: NodeName | None) -> bool:
        return node in self._usable_names

    def is_clear(self, node: NodeName) -> bool:
        """Nothing of a role is still ending there, or nobody waits for it any more."""
        known = self._state.nodes.get(node)
        return node not in self._ending_replicas or known is None or known.excluded is not None

    def occupancy(self) -> Occupancy:
        """Who takes room on each node; a replica that is to restart in place, or to move, keeps its room. Where more of
        a gang are to go to one node than may share it, the first have it."""
        occupancy: Occupancy = {}
        retired_gangs = {gang_of(one.id) for one in workers(self._state) if one.status is Status.RETIRED}
        for replica in workers(self._state):
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
                if sum(gang_of(one.id) == gang_id for one in occupants) < self._state.job.role(replica.role).per_node:
                    occupants.append(replica)
        return occupancy

    @cached_property
    def _occupancy(self) -> Occupancy:
        """:meth:`occupants`, for those who only look."""
        return self.occupancy()

    # ── where somebody can go ────────────────────────────────────────────────────────────────────────────────────────
    # ``taken``: who takes room where, :meth:`occupants` if nothing else is said; whoever decides about several members
    # at once adds each to it where it sends it, and takes out whom it drives away.
    def has_room_for(self, replica: Replica, occupancy: Occupancy | None = None) -> bool:
        """A node other than its own could take this replica now."""
        occupancy, failed_nodes = self._occupancy if occupancy is None else occupancy, self._nodes_that_failed(replica)
        return any(
            candidate.node != replica.node
            and candidate.node not in failed_nodes
            and self._fits(replica, candidate.node, occupancy)
            for candidate in self._candidates[self._group_of_role[replica.role].name]
        )

    def choose_node(self, replica: Replica, occupancy: Occupancy) -> CandidateNode | None:
        """Where it goes: its preferred node, else where it is warm, else beside others of its gang, else the first that
        fits and has not failed it too often; any that fits where it is not the node. Where it is preferred or warm a
        gang waits for what is still ending: that is sooner over than it would start elsewhere."""
        role, preferred = self._state.job.role(replica.role), replica.preferred_node
        can_use_preferred = preferred is not None and self.can_host(role, preferred)
        if (
            preferred is not None
            and can_use_preferred
            and self._fits(replica, preferred, occupancy, wait_for_release=waits_for_release(role))
        ):
            return self._by_node[preferred][1]
        if role.warm and (with_standby := self.spare_with_standby(replica, occupancy)) is not None:
            return with_standby
        failed_nodes = self._nodes_that_failed(replica)
        gang_id, alone = gang_of(replica.id), role.exclusive
        fallback: CandidateNode | None = None
        for candidate in self._preferred_nodes(replica, role, occupancy):
            if (
                alone
                and candidate.node in occupancy
                and (role.ranks == 1 or gang_of(occupancy[candidate.node][0].id) != gang_id)
            ):
                continue  # the quick half of _fits: thousands of replicas look at thousands of nodes
            if self._fits(replica, candidate.node, occupancy):
                if candidate.node not in failed_nodes:
                    return candidate
                fallback = fallback or candidate
        return None if fallback is None or self.new_node_helps(replica) else fallback

    def choose_successor(self, replica: Replica, occupancy: Occupancy) -> CandidateNode | None:
        """Where it moves from an allocation that ends."""
        role, failed_nodes = self._state.job.role(replica.role), self._nodes_that_failed(replica)
        fresh = (candidate for candidate in self._preferred_nodes(replica, role, occupancy) if not candidate.expiring)
        return next((s for s in fresh if s.node not in failed_nodes and self._fits(replica, s.node, occupancy)), None)

    def _preferred_nodes(self, replica: Replica, role: RoleSpec, occupancy: Occupancy) -> Sequence[CandidateNode]:
        """Spots where others of its gang are, then those of its part."""
        candidates = self._candidates[self._group_of_role[role.name].name]
        if role.ranks == 1 or role.per_node == 1:
            return candidates
        gang_id = gang_of(replica.id)
        gang_nodes = [self._by_node[node][1] for node, there in occupancy.items()
                  if self.can_host(role, node) and any(gang_of(one.id) == gang_id for one in there)]  # fmt: skip
        gang_nodes.sort(key=lambda candidate: natural_sort_key(candidate.node))
        return [*gang_nodes, *(candidate for candidate in candidates if candidate not in gang_nodes)]

    # ── who is warm ──────────────────────────────────────────────────────────────────────────────────────────────────
    def ready_standbys(self, node: NodeName | None, role: str) -> Sequence[Replica]:
        """Shadows on this node that can become a member of the role at once."""
        return (
            [one for one in self._ready_standbys.get(node, ()) if standby_role_of(one.id) == role]
            if node is not None
            else ()
        )

    def spare_with_standby(self, member: Replica, occupancy: Occupancy | None = None) -> CandidateNode | None:
        """A node other than its own that could take this member now, and has a shadow that is ready for it."""
        if not self._ready_standbys:
            return None
        role, failed_nodes = self._state.job.role(member.role), self._nodes_that_failed(member)
        occupancy = self._occupancy if occupancy is None else occupancy
        for candidate in self._preferred_nodes(member, role, occupancy):
            if candidate.node not in self._ready_standbys:  # the quick half of what follows
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

    def donor_for(self, member: Replica, occupancy: Occupancy | None = None) -> Replica | None:
        """The rollout whose node this member could take, with a shadow there that is ready for it: of those that the
        run can do without for a while, the last. Where one was driven away already for others of its gang and there is
        room left, :meth:`warm_spare_for` says so."""
        role, failed_nodes = self._state.job.role(member.role), self._nodes_that_failed(member)
        if not role.donor_rollouts or not self._ready_standbys:
            return None
        occupancy = self._occupancy if occupancy is None else occupancy
        for rollout in self.donors(member, occupancy):
            node = rollout.node
            if node is not None and node not in failed_nodes and self._has_free_standby(member, node, occupancy):
                return rollout
        return None

    def donors(self, member: Replica, occupancy: Occupancy) -> Iterator[Replica]:
        """Rollouts on whose nodes this member would fit in their stead, the last first."""
        role = self._state.job.role(member.role)
        for rollout in reversed(donors(self._state, occupancy)):
            node = rollout.node
            if node is None or node == member.node or not self.can_host(role, node):
                continue
            without = {node: [one for one in occupancy[node] if one.id != rollout.id]}
            if self._fits(member, node, without, wait_for_release=True):
                yield rollout

    def blocking_rollouts(self, member: Replica) -> Sequence[Replica]:
        """Rollouts that still work where this member is wanted, and leave it no room: they were to be driven away. Or
        one on whose node it would be warm, while it has no node, or only a cold one that was not meant for it: of two
        nodes that are lost at once, the second one's."""
        role = self._state.job.role(member.role)
        if not role.donor_rollouts or not self._ready_standbys:
            return ()
        occupancy = {node: list(there) for node, there in self._occupancy.items()}
        for one in gang(self._state, member.id):
            if one.status is not Status.WANTED:
                continue
            if one.id == member.id:
                return self._preempted_by(one, role, occupancy)
            if (target := self.choose_node(one, occupancy)) is not None:
                occupy(occupancy, target.node, one)
        return ()

    def _preempted_by(self, member: Replica, role: RoleSpec, occupancy: Occupancy) -> Sequence[Replica]:
        node = member.preferred_node
        if node is not None and self.ready_standbys(node, role.name) and self.can_host(role, node):
            if self._fits(member, node, occupancy, wait_for_release=True):
                return ()
            rollouts = {one.name for one in self._state.job.kind("rollout")}
            return [one for one in occupancy[node] if one.is_current and one.role in rollouts]
        target = self.choose_node(member, occupancy)
        if target is not None and (target.node == node or self._has_free_standby(member, target.node, occupancy)):
            return ()
        donor = self.donor_for(member, occupancy)
        return () if donor is None else (donor,)

    def _has_free_standby(self, member: Replica, node: NodeName, occupancy: Occupancy) -> bool:
        """One more than those that others need which go there: of a role with shadows beside it all of its gang that
        are there, of another role those that have not begun."""
        ready, others = (
            self.ready_standbys(node, member.role),
            [one for one in occupancy.get(node, ()) if one.id != member.id],
        )
        if not ready or self._state.job.role(member.role).standby_shares_node:
            return len(ready) > sum(gang_of(one.id) == gang_of(member.id) for one in others)
        of_role = [one for one in others if one.role == member.role]
        return len(ready) > sum(not (one.is_current and one.node == node) for one in of_role)

    def reserve(self, member: Replica, node: NodeName) -> None:
        """It is sent there: for whoever else is decided about in the same plan it has its room already."""
        occupy(self._occupancy, node, member)

    def can_host(self, role: RoleSpec, node: NodeName) -> bool:
        """The node is for this role, or of a shape that could carry its members too, where shadows may stand by."""
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
        return role.warm and role.standby_shares_node and large_enough

    def new_node_helps(self, replica: Replica) -> bool:
        """A node more for this replica: not where it fails as often on two, nor where so many nodes fail somebody at
        once that it is the storage, the fabric or the software."""
        if len(self._nodes_that_failed(replica, refused=False)) > 1:
            return False
        allowed = max(1, int(self._state.job.recovery.breaker * len(self._state.nodes)))
        return len(self.failing_nodes - {replica.node}) < allowed

    def _nodes_that_failed(self, replica: Replica, refused: bool = True) -> set[NodeName]:
        """Nodes that have failed it too often within the window; ``refused``: launches that the cluster refused
        count."""
        recovery = self._state.job.recovery
        recent = replica.recent_failures(recovery.window, self._now)
        nodes = [start.node for start in recent if refused or not start.refused]
        last_start = (
            not replica.ever_joined and replica.failed_starts + 1 >= recovery.first_start
        )  # before it is given up
        limit = min(recovery.per_node, recovery.first_start - 1) if last_start else recovery.per_node
        return {node for node in nodes if nodes.count(node) >= max(1, limit)}

    def _fits(self, replica: Replica, node: NodeName, occupancy: Occupancy, wait_for_release: bool = False) -> bool:
        """``waits``: for what is still ending there; else its room is not free before."""
        job = self._state.job
        others = [other for other in occupancy.get(node, ()) if other.id != replica.id]
        role, gang_id = job.role(replica.role), gang_of(replica.id)
        others_of_other_gangs = [other for other in others if gang_of(other.id) != gang_id]
        if len(others) - len(others_of_other_gangs) >= role.per_node or (role.exclusive and others_of_other_gangs):
            return False
        returning = {other.id for other in others}  # whose own room it is that they still leave
        if not wait_for_release and any(
            gang_of(one) != gang_id and one not in returning for one in self._ending_replicas.get(node, ())
        ):
            return False
        if role.exclusive:
            return True
        if any(job.role(other.role).exclusive for other in others_of_other_gangs):
            return False
        requested = [job.role(other.role).per_member for other in others] + [role.per_member]
        resources = (
            job.node_group(self._by_node[node][0]).node
            if node in self._by_node
            else self._group_of_role[replica.role].node
        )
        return (
            sum(e.cpus for e in requested) <= resources.cpus
            and sum(e.gpus for e in requested) <= resources.gpus
            and sum(e.mem for e in requested) <= resources.mem
        )


def needs_probe(state: State, node: Node) -> bool:
    """Roles wait for what its agent says of it: whether they can run there, or how the node does."""
    allocation = state.allocations.get(node.allocation)
    return bool(state.job.env.probe) or (
        allocation is not None and requires_admission(state.job, allocation.request.node.gpus)
    )


def agent_never_started(state: State, node: NodeName) -> bool:
    """Its agent fails to start again and again, and never has: it will not say any more what the node can do."""
    return state.replica(replica_id(AGENT, node)).failed_starts >= state.job.recovery.first_start


def unfit_nodes(state: State) -> dict[NodeName, str]:
    """Nodes on which no role can run, and why: in the probe's words, or those of an agent that never started."""
    found: dict[NodeName, str] = {}
    for name, node in state.nodes.items():
        if node.probe_error:
            found[name] = node.probe_error
        elif needs_probe(state, node) and agent_never_started(state, name):
            failures = state.replica(replica_id(AGENT, name)).failures
            found[name] = failures[-1].why if failures else "its agent never started"
    return found


def restarts_exhausted(state: State, helper: Replica, now: float) -> bool:
    """Whether an agent or a shadow has failed so often that it is not started again before a failure leaves the
    window. One that was retired because its node left the run does not rest: it is started as soon as the node is
    back."""
    recovery = state.job.recovery
    failures = helper.recent_failures(recovery.window, now)
    return helper.status is Status.RETIRED and len(failures) >= max(1, recovery.per_replica)


def _probe_pending(state: State, node: NodeName, now: float) -> bool:
    """Whether the agent of this node may still report what the node can do: the agent runs or is about to be started,
    and has not failed again and again (as often as it can fail to join within the window). Without that bound, a
    replica that lacks a node would wait for ever for the agent of a node that is cut off."""
    agent, recovery = state.replica(replica_id(AGENT, node)), state.job.recovery
    limit = max(1, min(recovery.first_start, int(recovery.window / state.job.limits.join) - 1))
    may_report = not restarts_exhausted(state, agent, now) and len(agent.recent_failures(recovery.window, now)) < limit
    return may_report and not agent_never_started(state, node)


def _is_usable(state: State, node: Node, now: float) -> bool:
    allocation = state.allocations.get(node.allocation)
    fit = node.status is None or node.status.state in (NodeState.UP, NodeState.UNKNOWN)
    if allocation is None or not allocation.running or allocation.suspended or allocation.reclaimed:
        return False
    if now >= allocation.ends_at:  # it may be some time before the cluster takes it back
        return False
    return node.excluded is None and fit and node.kept_because != GIVEN_BACK  # it is gone with the next look


def _may_start(state: State, ready: dict[str, int]) -> bool:
    """Where each node is a request of its own nothing is launched before there is all that the run needs."""
    if state.job.form != "replica" or state.launched:
        return True
    return all(ready[node_group.name] >= node_group.min_nodes for node_group in state.job.node_groups)
