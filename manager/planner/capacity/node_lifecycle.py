"""Drain, release and readmit single nodes because of findings, because of user commands, or after some time.

If the job allows it, the run drains a node with failed hardware, so that no other job gets the node. If the job does
not allow it, ``drain_requests`` in summary.json names the node for the administrators. The run removes its own drain
when it uses the node again. At the end of the run the drain stays; its reason names the run and the finding.
"""

from __future__ import annotations

import re

from ....cluster.base import NodeState
from ....cluster.traits import traits_of
from ...model.actions import Decision, Drain, Exclude, ExternalAction, Readmit, Shrink, Undrain, Why
from ...model.queries import node_finding
from ...model.reduce_nodes import DRAIN, UNDRAIN
from ...model.state import Allocation, Node, State, Status
from ..deadlines import NEVER
from .node_fitness import HARDWARE_CAUSES, agent_never_started

MAX_REASON_CHARS = 160
"""Maximum length of a drain reason in characters. ``sinfo -R`` shows 20 by default; Slurm stores thousands (measured:
2,000)."""
_UNSAFE_IN_REASON = re.compile(r"[^A-Za-z0-9 .,:;/@_()+-]+")
"""Characters removed from a drain reason: Slurm stores quotes, brackets and the like (measured), but programs that
parse its output may fail on them."""
_MAX_DOUBLINGS = 16
"""Maximum number of times that the duration of an exclusion doubles. With this limit, an exclusion of one hour grows to
more than seven years."""


def lifecycle_decisions(state: State, now: float) -> tuple[list[Decision], float]:
    """Return exclusions that users requested, readmissions, and the next wake (manager's time, s).

    A node that a user wants drained is excluded once no replica runs there, or when the time for moving replicas is
    over.
    """
    decisions: list[Decision] = []
    wake = NEVER
    for name, (command, by) in state.node_commands.items():
        node = state.nodes.get(name)
        if node is None:
            continue
        if command == UNDRAIN and node.excluded is not None:
            why = Why((f"undrain requested by {by}",), expects="its agent joins, and then roles may be placed there")
            decisions.append(Readmit(name, why))
        elif command == DRAIN and node.excluded is None:
            deadline = node.drain_requested_at + state.job.limits.allocation
            if now >= deadline or name not in state.occupied:
                why = Why((f"drain requested by {by}",), expects="no further placement on this node")
                decisions.append(Exclude(name, why, by=by))
            else:
                wake = min(wake, deadline)
    for name, node in state.nodes.items():
        if node.excluded is None or node.drain_requested_by or name in state.node_commands:
            continue
        due = node.excluded_at + state.job.recovery.exclusion * 2.0 ** min(node.exclusions - 1, _MAX_DOUBLINGS)
        if now < due:
            wake = min(wake, due)
        elif _may_be_readmitted(state, node):
            text = (
                f"excluded for {now - node.excluded_at:.0f} s ({node.excluded}); no evidence against the node remains"
            )
            decisions.append(Readmit(name, Why((text,), expects="its agent joins, and then roles may be placed there")))
    return decisions, wake


def _may_be_readmitted(state: State, node: Node) -> bool:
    """Return whether the node is healthy and empty, has no proven finding, and can start its agent."""
    finding = node_finding(state, node.name)
    proved = finding is not None and finding.proof
    return (
        not proved
        and _is_healthy(node)
        and not agent_never_started(state, node.name)
        and node.name not in state.occupied
    )


def _is_healthy(node: Node) -> bool:
    """Return whether the cluster reports the node as healthy, apart from this run's own drain.

    The status of a node that has left the run is unknown. If it was excluded without proof and this run has not drained
    it, it is assumed to be healthy. This is safe: while the node is down, the cluster does not grant it to the run.
    """
    if node.status is None:
        return not (node.allocation or node.proved or node.drain_reason)
    is_our_drain = bool(node.drain_reason) and node.status.reason == node.drain_reason
    return node.status.state is NodeState.UP or (is_our_drain and node.status.state is NodeState.DRAINING)


def drain_actions(state: State) -> list[ExternalAction]:
    """Return the drains, undrains and releases of single nodes that are due and not yet intended."""
    actions: list[ExternalAction] = []
    for name, node in state.nodes.items():
        if node.drain_reason and node.excluded is None:
            actions.append(Undrain(name, node.drain_reason, Why((f"{name} is used again",))))
        elif should_drain(state, node):
            why = Why((node.excluded or "excluded",), expects="no new jobs on it")
            actions.append(Drain(name, _drain_reason(state, node), why))
    actions += _nodes_to_release(state)
    return [action for action in actions if action.tag not in state.intents]


def should_drain(state: State, node: Node) -> bool:
    """Return whether the node must be drained: excluded by a user or for its hardware, and no drain was tried yet."""
    requested = bool(node.drain_requested_by) or (state.job.recovery.drain and node.cause in HARDWARE_CAUSES)
    requested = requested and traits_of(state.job.cluster).can_drain
    if node.excluded is None or not requested or node.drain_reason or node.drain_error:
        return False
    if state.node_commands.get(node.name, ("", ""))[0] == UNDRAIN:
        return False
    if node.status is None:
        return bool(node.allocation or node.drain_requested_by)  # the run does not know the status of a node that left
    return node.status.state not in (NodeState.DOWN, NodeState.DRAINING)  # already out of service in the cluster


def _drain_reason(state: State, node: Node) -> str:
    """Return the reason for the node's drain: the run, then the requesting user or the cause."""
    requested = f"drain requested by {node.drain_requested_by}" if node.drain_requested_by else ""
    text = f"{node.cause.value}: {node.excluded}" if node.cause is not None and not requested else requested
    clean = " ".join(_UNSAFE_IN_REASON.sub(" ", f"rrl:{state.run}:{text}").split())
    return clean[:MAX_REASON_CHARS].rstrip()


def _nodes_to_release(state: State) -> list[ExternalAction]:
    """Return releases of excluded nodes from allocations whose other nodes are kept.

    A node is released once all roles of its group work, or at once if it is down or was excluded with proof. If the
    node must be drained, the release waits until the drain is settled; otherwise another job could get the broken node.
    """
    if not traits_of(state.job.cluster).can_shrink:
        return []
    actions: list[ExternalAction] = []
    shrinking = {intent.action.allocation for intent in state.intents.values() if isinstance(intent.action, Shrink)}
    for allocation in state.allocations.values():
        if allocation.tag in shrinking:  # one Shrink at a time, because its result may rule out the next Shrink
            continue
        nodes = allocation.status.nodes if allocation.running and allocation.status is not None else ()
        known = [state.nodes[name] for name in nodes if name in state.nodes]
        redundant = tuple(node.name for node in known if _redundant(state, allocation, node))
        if redundant and len(redundant) < len(nodes):
            evidence = tuple(f"{name}: {state.nodes[name].excluded}" for name in redundant)
            actions.append(Shrink(allocation.tag, redundant, Why(evidence, expects="the other nodes are kept")))
    return actions


def _redundant(state: State, allocation: Allocation, node: Node) -> bool:
    """Return whether the excluded node can be released from its allocation now."""
    if node.excluded is None or node.release_result is not None:
        return False
    if node.name in state.occupied or node.name in state.node_commands:
        return False
    if should_drain(state, node) or f"{node.name}!drain" in state.intents:
        return False
    down = node.status is not None and node.status.state is NodeState.DOWN
    roles = state.job.node_group(allocation.request.node_group).roles
    working = (
        replica.status in (Status.JOINED, Status.COMPLETED) for replica in state.workers if replica.role in roles
    )
    return node.proved or down or all(working)
