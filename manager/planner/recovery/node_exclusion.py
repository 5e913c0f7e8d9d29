"""Decide which nodes are excluded, which get no new replicas, and when a circuit breaker holds exclusions back.

A node is excluded for findings about the node itself (hardware, silence, fabric, storage), and if its ``[env] probe``
failed. A node without replicas is also excluded if two of its agents in a row do not answer. The node of a straggler is
excluded if the job spec says so. A finding about the user's or the run's software does not affect the node. After a
WARN about a node its replicas stay, but new replicas are placed on other nodes if possible.

If many nodes fail together, the network, the site or the manager itself is the likely cause. Replacing all these nodes
would be worse than waiting for a person. So at most max(1, 20 %) of the nodes are excluded within ten minutes
(docs/sources.md, guard rails). While the cluster reports many of the run's nodes as down, no other nodes are excluded.
A run of five nodes or more may always exclude two nodes, because 20 % of a small run are only one node, and because a
second lost node would stop the run for minutes, until Slurm reports the node as down. Two exclusions are safe in such a
run, because the majority of its nodes still reports, which proves that the manager and the network work. In a run of up
to four nodes the limit is one, because two nodes are not a minority.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from msgspec import Struct

from ....cluster.base import NodeState
from ....core.types import AGENT, Cause, Finding, NodeName, Remedy, is_support, replica_id
from ...model.actions import Exclude, Why
from ...model.queries import most_severe
from ...model.state import Node, Replica, State, Status
from ..capacity.node_fitness import excludes_node, unfit_nodes
from ..capacity.nodes import NodeInventory
from ..deadlines import NEVER

MINORITY_NODES = 2
"""Number of nodes that may always be excluded within the recovery window, if the run has more than twice as many
nodes."""
OUTAGE_SHARE = 0.25
"""Share of the run's nodes that may be down without an outage. If more than this share and at least two nodes are
down, only nodes that are down are excluded. The source (docs/sources.md, guard rails) refers to the nodes of the whole
cluster; rrl polls only this run's nodes."""


_NO_ANSWER_DETECTORS = frozenset({"agent_silence", "never_joined"})
"""Detectors of an agent that sends nothing although nobody has reported the end of its process."""


class DeferredExclusion(Struct, frozen=True):
    """An exclusion that the circuit breaker holds back."""

    exclude: Exclude
    why: str
    until: float
    """Manager's time (s) at which the exclusion is checked again; inf if only a changed node status can permit it."""


def exclusions(state: State, inventory: NodeInventory) -> list[Exclude]:
    """Return the exclusions for findings about nodes, unfit nodes, silent spare nodes and stragglers.

    Unfit nodes are those on which no role can run (:func:`unfit_nodes`). The caller applies the circuit breaker.
    """
    excludes: list[Exclude] = []
    unfit, slow = unfit_nodes(state), dict(_straggler_to_exclude(state, inventory))
    silent = dict(_silent_spares(state))
    for name, node in state.nodes.items():
        if node.excluded is not None:
            continue
        if (finding := _node_failure(state, name)) is not None:
            excludes.append(_exclude(name, _evidence_lines(finding), finding.cause, finding.proof))
        elif name in unfit:
            excludes.append(_exclude(name, (f"probe: {unfit[name]}",), Cause.SOFTWARE))
        elif name in silent:
            excludes.append(_exclude(name, silent[name], Cause.NODE))
        elif name in slow:  # without a cause, since a slow node is not drained
            excludes.append(_exclude(name, _evidence_lines(slow[name]), None))
    return excludes


def _evidence_lines(finding: Finding) -> tuple[str, ...]:
    """Return the evidence lines of a finding about a node, with detector and source, for administrators."""
    return tuple(f"{finding.title}: {evidence.source}: {evidence.text}" for evidence in finding.evidence)


def _node_failure(state: State, node: NodeName) -> Finding | None:
    """Return the finding that excludes the node, if there is one; findings with proof come first."""
    return most_severe(filter(excludes_node, state.findings_about.get(node, ())))


def _silent_spares(state: State) -> Iterator[tuple[NodeName, tuple[str, ...]]]:
    """Yield each node without replicas whose agent failed and whose next agent did not join, with the evidence.

    Two silent agents in a row suffice, because they are two observations, and because nothing else shows whether a node
    without replicas works. An agent that ended with an exit record does not count, nor does a launch that the cluster
    refused.
    """
    for name in state.nodes:
        agent = state.replica(replica_id(AGENT, name))
        if name in state.occupied or agent.status is Status.JOINED or not agent.ever_joined or len(agent.failures) < 2:
            continue
        before, newest = agent.failures[-2:]
        in_a_row = newest.at - before.at <= state.job.recovery.window
        if in_a_row and not newest.joined and {before.detector, newest.detector} <= _NO_ANSWER_DETECTORS:
            yield name, (f"agent: {before.why}", f"next agent: {newest.why}")


def _straggler_to_exclude(state: State, inventory: NodeInventory) -> Iterator[tuple[NodeName, Finding]]:
    """Yield the node and finding of at most one straggler, if the job excludes stragglers and a spare node is free.

    Yield nothing unless all replicas work, since a failed replica may need the spare node.
    """
    if state.job.health.stragglers != "exclude" or not all(_is_working(state, replica) for replica in state.workers):
        return
    for finding in state.findings.values():
        incarnation = finding.incarnation
        if incarnation is None or finding.remedy is not Remedy.EXCLUDE or is_support(incarnation.replica):
            continue
        replica = state.replica(incarnation.replica)
        if state.is_current(incarnation) and replica.node is not None and _has_spare(state, inventory, replica):
            yield replica.node, finding
            return


def _has_spare(state: State, inventory: NodeInventory, replica: Replica) -> bool:
    """Return whether the replica can move to another node; an extra elsewhere can take the place of a rollout."""
    if inventory.can_place(replica):
        return True
    displaced = state.job.traits_of(replica.id).may_be_displaced
    return displaced and any(
        extra.role == replica.role and extra.id != replica.id for extra in inventory.extras.values()
    )


def _is_working(state: State, replica: Replica) -> bool:
    """Return whether the replica is retired or completed, or works on a node that is not excluded."""
    if replica.status in (Status.RETIRED, Status.COMPLETED):
        return True
    node = state.nodes.get(replica.node) if replica.node is not None else None
    return replica.status is Status.JOINED and node is not None and node.excluded is None


def _exclude(node: NodeName, evidence: tuple[str, ...], cause: Cause | None, proof: bool = False) -> Exclude:
    """Return the exclusion of a node."""
    return Exclude(node, Why(evidence, expects="no further placement on this node"), cause, proof)


def exclusions_allowed(share: float, nodes: int) -> int:
    """Return how many of a run's ``nodes`` may be excluded within the recovery window.

    ``share`` is ``recovery.breaker``.
    """
    return max(1, int(share * nodes), MINORITY_NODES if nodes > 2 * MINORITY_NODES else 0)


def limit_exclusions(
    state: State, excludes: Sequence[Exclude], now: float
) -> tuple[list[Exclude], list[DeferredExclusion]]:
    """Return the exclusions that may be carried out now, and the exclusions that the circuit breaker holds back.

    ``now`` is the manager's time (s). An exclusion is held back while too many nodes were excluded within the recovery
    window, or while the cluster reports too many of the run's nodes as down. The nodes of further rollout pools are
    counted by themselves: the loss of a whole partition must not hold back the exclusion of a trainer's node.
    """
    pools = {group.name for group in state.job.node_groups if group.dedicated}
    of_pools = {name: node for name, node in state.nodes.items() if node.node_group in pools} if pools else {}
    if not of_pools:
        return _limit_exclusions(state, state.nodes, excludes, now)
    own = {name: node for name, node in state.nodes.items() if name not in of_pools}
    passed, deferred = _limit_exclusions(state, own, [one for one in excludes if one.node not in of_pools], now)
    further = _limit_exclusions(state, of_pools, [one for one in excludes if one.node in of_pools], now)
    return [*passed, *further[0]], [*deferred, *further[1]]


def _limit_exclusions(
    state: State, nodes: Mapping[NodeName, Node], excludes: Sequence[Exclude], now: float
) -> tuple[list[Exclude], list[DeferredExclusion]]:
    """Return the result of :func:`limit_exclusions` for some of the run's nodes."""
    recovery = state.job.recovery
    allowed = exclusions_allowed(recovery.breaker, len(nodes))
    excluded_nodes = (node for node in nodes.values() if node.excluded is not None and not node.drain_requested_by)
    ends = sorted(node.excluded_at + recovery.window for node in excluded_nodes)
    recent = [end for end in ends if end > now]
    excluded = len(recent)
    passed: list[Exclude] = []
    deferred: list[DeferredExclusion] = []
    down = _down_nodes(nodes)
    outage = len(down) > max(1, OUTAGE_SHARE * len(nodes))
    for exclude in excludes:
        if outage and exclude.node not in down:
            why = f"{len(down)} of {len(nodes)} nodes are down: only those are excluded"
            deferred.append(DeferredExclusion(exclude, why, NEVER))
        elif excluded >= allowed:
            share = f"{excluded} of {len(nodes)} nodes"
            why = f"{share} excluded within {recovery.window:g} s, and no more may be excluded"
            deferred.append(DeferredExclusion(exclude, why, recent[0] if recent else now + recovery.window))
        else:
            excluded += 1
            passed.append(exclude)
    return passed, deferred


def deferred_exclusions(state: State, now: float) -> list[DeferredExclusion]:
    """Return the exclusions that the circuit breaker holds back at ``now`` (manager's time, s), for users."""
    return limit_exclusions(state, exclusions(state, NodeInventory(state, now)), now)[1]


def _down_nodes(nodes: Mapping[NodeName, Node]) -> set[NodeName]:
    """Return the names of the nodes that the cluster reports as down."""
    return {name for name, node in nodes.items() if node.status is not None and node.status.state is NodeState.DOWN}
