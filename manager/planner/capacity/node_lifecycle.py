"""Single nodes, beyond who goes where: drained in the cluster, given back, used again, and what people order of them.

A node that failed by its hardware is drained where we may, so that nobody else gets it; else its drain is asked of the
administrators (``drain_requests`` of summary.json). Our own drain is taken back when this run uses the node again. At
the run's end it stays: nobody of us is left to look after the node, and its reason says which run found what.
"""

from __future__ import annotations

import re

from ....core.types import NodeName
from ...cluster.base import NodeState
from ...model.actions import Decision, Drain, Exclude, ExternalAction, Readmit, Shrink, Undrain, Why
from ...model.queries import node_finding, workers
from ...model.reduce_nodes import DRAIN, UNDRAIN
from ...model.state import Allocation, Node, State, Status
from ..deadlines import NEVER
from .nodes import HARDWARE_CAUSES, agent_never_started

MAX_REASON_CHARS = 160
"""characters; sinfo -R shows 20 of them by default, Slurm itself keeps thousands (measured: 2,000)"""
_UNSAFE_IN_REASON = re.compile(r"[^A-Za-z0-9 .,:;/@_()+-]+")
"""Slurm keeps quotes, brackets and the like (measured); what reads its output does not always"""
_MAX_DOUBLINGS = 16
"""of an exclusion's time, at most: two years of the default hour"""


def lifecycle_decisions(state: State, now: float) -> tuple[list[Decision], float]:
    """Nodes that people want drained and that are empty by now, or have had their time, and nodes that may be used
    again. And the next wake."""
    decisions: list[Decision] = []
    wake = NEVER
    for name, (command, by) in state.node_commands.items():
        node = state.nodes.get(name)
        if node is None:
            continue
        if command == UNDRAIN and node.excluded is not None:
            why = Why((f"asked by {by}",), expects="its agent joins, and then roles may be placed there")
            decisions.append(Readmit(name, why))
        elif command == DRAIN and node.excluded is None:
            deadline = node.drain_requested_at + state.job.limits.allocation
            if now >= deadline or not _is_occupied(state, name):
                why = Why((f"asked by {by}",), expects="no further placement on this node")
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
            text = f"excluded for {now - node.excluded_at:.0f} s ({node.excluded}), and nothing proves that it still is"
            decisions.append(Readmit(name, Why((text,), expects="its agent joins, and then roles may be placed there")))
    return decisions, wake


def _may_be_readmitted(state: State, node: Node) -> bool:
    """The cluster calls it well, no proof stands against it, and its agent may yet say what it can do."""
    finding = node_finding(state, node.name)
    proved = finding is not None and finding.proof
    return (
        not proved
        and _is_healthy(node)
        and not agent_never_started(state, node.name)
        and not _is_occupied(state, node.name)
    )


def _is_healthy(node: Node) -> bool:
    """By what the cluster last said; that it is drained by us and by nobody else is no ailment. A node that we have
    given back is the cluster's to judge: it gives us none that is down."""
    if node.status is None:
        return not (node.allocation or node.proved or node.drain_reason)
    is_our_drain = bool(node.drain_reason) and node.status.reason == node.drain_reason
    return node.status.state is NodeState.UP or (is_our_drain and node.status.state is NodeState.DRAINING)


def _is_occupied(state: State, name: NodeName) -> bool:
    """A role's life is believed to be there."""
    return any(one.is_current and one.node == name for one in workers(state))


def drain_actions(state: State) -> list[ExternalAction]:
    """Drains and their end, and nodes that are given back."""
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
    """It is excluded by a person, or for its hardware, and nobody has drained it yet nor refused to."""
    requested = bool(node.drain_requested_by) or (state.job.recovery.drain and node.cause in HARDWARE_CAUSES)
    if state.job.cluster != "slurm" or node.excluded is None or not requested or node.drain_reason or node.drain_error:
        return False
    if state.node_commands.get(node.name, ("", ""))[0] == UNDRAIN:
        return False
    if node.status is None:
        return bool(node.allocation or node.drain_requested_by)  # of one that has left nobody knows why it did
    return node.status.state not in (NodeState.DOWN, NodeState.DRAINING)  # else somebody has said so


def _drain_reason(state: State, node: Node) -> str:
    requested = f"asked by {node.drain_requested_by}" if node.drain_requested_by else ""
    text = f"{node.cause.value}: {node.excluded}" if node.cause is not None and not requested else requested
    clean = " ".join(_UNSAFE_IN_REASON.sub(" ", f"rrl:{state.run}:{text}").split())
    return clean[:MAX_REASON_CHARS].rstrip()


def _nodes_to_release(state: State) -> list[ExternalAction]:
    """Excluded nodes of allocations that go on: as soon as everybody works again, or at once where there is proof. What
    else may happen to them comes first: others would get a broken node that is not drained yet."""
    if state.job.cluster != "slurm":
        return []
    actions: list[ExternalAction] = []
    shrinking = {intent.action.allocation for intent in state.intents.values() if isinstance(intent.action, Shrink)}
    for allocation in state.allocations.values():
        if allocation.tag in shrinking:  # one after the other: what becomes of it may forbid the next
            continue
        nodes = allocation.status.nodes if allocation.running and allocation.status is not None else ()
        known = [state.nodes[name] for name in nodes if name in state.nodes]
        redundant = tuple(node.name for node in known if _redundant(state, allocation, node))
        if redundant and len(redundant) < len(nodes):
            evidence = tuple(f"{name}: {state.nodes[name].excluded}" for name in redundant)
            actions.append(Shrink(allocation.tag, redundant, Why(evidence, expects="the others go on")))
    return actions


def _redundant(state: State, allocation: Allocation, node: Node) -> bool:
    if node.excluded is None or node.kept_because or _is_occupied(state, node.name) or node.name in state.node_commands:
        return False
    if should_drain(state, node) or f"{node.name}!drain" in state.intents:
        return False
    down = node.status is not None and node.status.state is NodeState.DOWN
    roles = state.job.node_group(allocation.request.node_group).roles
    working = (one.status in (Status.JOINED, Status.COMPLETED) for one in workers(state) if one.role in roles)
    return node.proved or down or all(working)
