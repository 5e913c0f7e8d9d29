"""Single nodes, beyond who goes where: drained in the cluster, given back, used again, and what people order of them.

A node that failed by its hardware is drained where we may, so that nobody else gets it; else its drain is asked of the
administrators (``drain_requests`` of summary.json). Our own drain is taken back when this run uses the node again. At
the run's end it stays: nobody of us is left to look after the node, and its reason says which run found what.
"""

from __future__ import annotations

import re

from ....core.types import NodeName
from ...cluster.base import NodeState
from ...model.actions import Decision, Drain, Exclude, Outside, Readmit, Shrink, Undrain, Why
from ...model.queries import node_finding, workers
from ...model.reduce_nodes import DRAIN, UNDRAIN
from ...model.state import Allocation, Node, State, Status
from ..deadlines import NEVER
from .nodes import HARDWARE, never_started

LONGEST_REASON = 160
"""characters; sinfo -R shows 20 of them by default, Slurm itself keeps thousands (measured: 2,000)"""
_NOT_IN_REASONS = re.compile(r"[^A-Za-z0-9 .,:;/@_()+-]+")
"""Slurm keeps quotes, brackets and the like (measured); what reads its output does not always"""
_DOUBLINGS = 16
"""of an exclusion's time, at most: two years of the default hour"""


def renew(state: State, now: float) -> tuple[list[Decision], float]:
    """Nodes that people want drained and that are empty by now, or have had their time, and nodes that may be used
    again. And the next wake."""
    decisions: list[Decision] = []
    wake = NEVER
    for name, (command, by) in state.marks.items():
        node = state.nodes.get(name)
        if node is None:
            continue
        if command == UNDRAIN and node.excluded is not None:
            why = Why((f"asked by {by}",), expects="its agent joins, and then roles may be placed there")
            decisions.append(Readmit(name, why))
        elif command == DRAIN and node.excluded is None:
            late = node.asked_at + state.job.limits.allocation
            if now >= late or not _occupied(state, name):
                why = Why((f"asked by {by}",), expects="no further placement on this node")
                decisions.append(Exclude(name, why, by=by))
            else:
                wake = min(wake, late)
    for name, node in state.nodes.items():
        if node.excluded is None or node.asked_by or name in state.marks:
            continue
        due = node.excluded_at + state.job.recovery.exclusion * 2.0 ** min(node.exclusions - 1, _DOUBLINGS)
        if now < due:
            wake = min(wake, due)
        elif _may_return(state, node):
            said = f"excluded for {now - node.excluded_at:.0f} s ({node.excluded}), and nothing proves that it still is"
            decisions.append(Readmit(name, Why((said,), expects="its agent joins, and then roles may be placed there")))
    return decisions, wake


def _may_return(state: State, node: Node) -> bool:
    """The cluster calls it well, no proof stands against it, and its agent may yet say what it can do."""
    finding = node_finding(state, node.name)
    proved = finding is not None and finding.proof
    return not proved and _well(node) and not never_started(state, node.name) and not _occupied(state, node.name)


def _well(node: Node) -> bool:
    """By what the cluster last said; that it is drained by us and by nobody else is no ailment. A node that we have
    given back is the cluster's to judge: it gives us none that is down."""
    if node.seen is None:
        return not (node.allocation or node.proved or node.drained)
    ours = bool(node.drained) and node.seen.reason == node.drained
    return node.seen.state is NodeState.UP or (ours and node.seen.state is NodeState.DRAINING)


def _occupied(state: State, name: NodeName) -> bool:
    """A role's life is believed to be there."""
    return any(one.believed and one.node == name for one in workers(state))


def mark(state: State) -> list[Outside]:
    """Drains and their end, and nodes that are given back."""
    actions: list[Outside] = []
    for name, node in state.nodes.items():
        if node.drained and node.excluded is None:
            actions.append(Undrain(name, node.drained, Why((f"{name} is used again",))))
        elif to_be_drained(state, node):
            why = Why((node.excluded or "excluded",), expects="no new jobs on it")
            actions.append(Drain(name, _reason(state, node), why))
    actions += _given_back(state)
    return [action for action in actions if action.tag not in state.intents]


def to_be_drained(state: State, node: Node) -> bool:
    """It is excluded by a person, or for its hardware, and nobody has drained it yet nor refused to."""
    asked = bool(node.asked_by) or (state.job.recovery.drain and node.cause in HARDWARE)
    if state.job.cluster != "slurm" or node.excluded is None or not asked or node.drained or node.not_drained:
        return False
    if state.marks.get(node.name, ("", ""))[0] == UNDRAIN:
        return False
    if node.seen is None:
        return bool(node.allocation or node.asked_by)  # of one that has left nobody knows why it did
    return node.seen.state not in (NodeState.DOWN, NodeState.DRAINING)  # else somebody has said so


def _reason(state: State, node: Node) -> str:
    asked = f"asked by {node.asked_by}" if node.asked_by else ""
    text = f"{node.cause.value}: {node.excluded}" if node.cause is not None and not asked else asked
    clean = " ".join(_NOT_IN_REASONS.sub(" ", f"rrl:{state.run}:{text}").split())
    return clean[:LONGEST_REASON].rstrip()


def _given_back(state: State) -> list[Outside]:
    """Excluded nodes of allocations that go on: as soon as everybody works again, or at once where there is proof. What
    else may happen to them comes first: others would get a broken node that is not drained yet."""
    if state.job.cluster != "slurm":
        return []
    actions: list[Outside] = []
    shrinking = {intent.action.allocation for intent in state.intents.values() if isinstance(intent.action, Shrink)}
    for allocation in state.allocations.values():
        if allocation.tag in shrinking:  # one after the other: what becomes of it may forbid the next
            continue
        nodes = allocation.seen.nodes if allocation.running and allocation.seen is not None else ()
        known = [state.nodes[name] for name in nodes if name in state.nodes]
        gone = tuple(node.name for node in known if _superfluous(state, allocation, node))
        if gone and len(gone) < len(nodes):
            evidence = tuple(f"{name}: {state.nodes[name].excluded}" for name in gone)
            actions.append(Shrink(allocation.tag, gone, Why(evidence, expects="the others go on")))
    return actions


def _superfluous(state: State, allocation: Allocation, node: Node) -> bool:
    if node.excluded is None or node.stays or _occupied(state, node.name) or node.name in state.marks:
        return False
    if to_be_drained(state, node) or f"{node.name}!drain" in state.intents:
        return False
    down = node.seen is not None and node.seen.state is NodeState.DOWN
    roles = state.job.part(allocation.ask.part).roles
    work = (one.status in (Status.JOINED, Status.COMPLETED) for one in workers(state) if one.role in roles)
    return node.proved or down or all(work)
