"""Run the detectors over the observation table and the first stages of the pipeline over their findings.

``detect`` keeps its results per node (in ``HealthMonitor.memo``). It evaluates only nodes with new observations or
passed deadlines, so the cost of a call does not grow with the size of the run. A test checks that the result equals
that of a full evaluation.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from heapq import heappop, heappush
from math import inf

from ...core.run_spec import Limits
from ...core.types import Finding, NodeName
from .detectors.probing import next_probe_on_node
from .detectors.registry import NODE_DETECTORS, PRESENCE_DETECTORS, PROGRESS_DETECTORS
from .health_monitor import HealthMonitor
from .pipeline import attribute, first_match
from .records import NodeView


@dataclass(slots=True)
class _Memo:
    limits: Limits
    now: float
    raw: dict[NodeName, list[Finding]] = field(default_factory=dict)
    """Findings of the detectors before attribution, for each node with findings."""
    next_evaluation: dict[NodeName, float] = field(default_factory=dict)
    """Time (s) at which the findings of each node may change without a new observation."""
    queue: list[tuple[float, NodeName]] = field(default_factory=list)
    """Heap of (time, node). The time in a node's valid entry is never later than the node's ``next_evaluation``. It may
    be earlier, because the entry is not changed when a heartbeat postpones ``next_evaluation``. Such an entry is
    corrected when it reaches the head of the heap."""
    queued: dict[NodeName, float] = field(default_factory=dict)
    """Time of each node's valid entry in ``queue``; entries of the node with a later time are obsolete."""
    findings: list[Finding] = field(default_factory=list)
    """Result of the last call of ``detect``."""
    heard_at: float = -inf
    """``RunView.heard_at`` at the last call of ``detect``."""


def detect(monitor: HealthMonitor, limits: Limits, now: float) -> tuple[list[Finding], float]:
    """Return the findings that hold now, and the time at which they may change without a new observation.

    A manager that was itself stopped for a while calls ``HealthMonitor.restart`` first, because it may have missed
    messages of processes that seem silent.

    Args:
        monitor: The observation table. Its memo, its limits and its set of dirty nodes are updated.
        limits: The job's deadlines.
        now: Manager's clock (s). A step backwards causes a full evaluation.

    Returns:
        The findings in the order of their keys, and a time (s) later than ``now`` (inf if there is none).
    """
    memo = monitor.memo
    if not isinstance(memo, _Memo) or memo.limits != limits or now < memo.now:
        monitor.memo = memo = _Memo(limits, now)
        monitor.set_limits(limits)
        monitor.dirty.update(monitor.nodes)
    memo.now = now
    nodes = monitor.dirty | set(_due_nodes(memo, now))
    if memo.heard_at != monitor.run.heard_at:  # silence that was found may be waited for again
        memo.heard_at = monitor.run.heard_at
        nodes |= memo.raw.keys()
    monitor.dirty.clear()
    had_findings = bool(memo.raw)
    for node in nodes:
        _evaluate_node(monitor, memo, node)
    if nodes and (had_findings or memo.raw):
        memo.findings = attribute([finding for found in memo.raw.values() for finding in found], monitor)
    return list(memo.findings), _next_evaluation(memo)


def _evaluate_node(monitor: HealthMonitor, memo: _Memo, node: NodeName) -> None:
    """Run the detectors on a node and on all its replicas, because each replica may be a witness for the others."""
    node_view = monitor.nodes.get(node)
    if node_view is None:  # removed
        memo.raw.pop(node, None)
        memo.next_evaluation.pop(node, None)
        monitor.probes_due.pop(node, None)
        return
    found, next_evaluation = _run_detectors(node_view, memo.limits, memo.now)
    if found:
        memo.raw[node] = found
    else:
        memo.raw.pop(node, None)
    memo.next_evaluation[node] = next_evaluation
    monitor.probes_due[node] = next_probe_on_node(node_view, memo.limits)
    _enqueue(memo, node)


def _run_detectors(node_view: NodeView, limits: Limits, now: float) -> tuple[list[Finding], float]:
    results = [first_match(PROGRESS_DETECTORS, view, limits, now) for view in node_view.residents.values()]
    if node_view.agent:
        results.append(first_match(PRESENCE_DETECTORS, node_view.agent, limits, now))
    results.append(first_match(NODE_DETECTORS, node_view, limits, now))
    return [finding for finding, _ in results if finding], min(then for _, then in results)


# ── time of the next evaluation ──────────────────────────────────────────────────────────────────────────────────────
def _enqueue(memo: _Memo, node: NodeName) -> None:
    due = memo.next_evaluation.get(node, inf)
    if due < memo.queued.get(node, inf):
        memo.queued[node] = due
        heappush(memo.queue, (due, node))


def _next_evaluation(memo: _Memo) -> float:
    """Return the earliest ``next_evaluation`` of all nodes; outdated entries at the head of the queue are corrected."""
    while memo.queue:
        at, node = memo.queue[0]
        if memo.queued.get(node) == at == memo.next_evaluation.get(node):
            return at
        heappop(memo.queue)
        if memo.queued.get(node) == at:
            del memo.queued[node]
            _enqueue(memo, node)
    return inf


def _due_nodes(memo: _Memo, now: float) -> Iterator[NodeName]:
    while _next_evaluation(memo) <= now:
        _, node = heappop(memo.queue)
        del memo.queued[node]
        yield node
