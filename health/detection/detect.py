"""Run the detectors over the observation table and the first stages of the pipeline over their findings."""

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
class _Results:
    """Results of a detection under unchanged limits, kept for its next call."""

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
    """Result of the last call."""
    heard_at: float = -inf
    """``RunView.heard_at`` at the last call."""


class Detection:
    """The detectors of a run and their results per node.

    Each call evaluates only nodes with new observations or passed deadlines, so its cost does not grow with the size of
    the run. A test checks that the result equals that of a full evaluation.

    Args:
        monitor: The observation table. A call updates its limits, its set of dirty nodes and the times of probes.
    """

    def __init__(self, monitor: HealthMonitor) -> None:
        self._monitor = monitor
        self._results: _Results | None = None

    def detect(self, limits: Limits, now: float) -> tuple[list[Finding], float]:
        """Return the findings that hold now, and the time at which they may change without a new observation.

        A manager that was itself stopped for a while calls ``HealthMonitor.restart`` first, because it may have missed
        messages of processes that seem silent.

        Args:
            limits: The job's deadlines.
            now: Manager's clock (s). A step backwards causes a full evaluation.

        Returns:
            The findings in the order of their keys, and a time (s) later than ``now`` (inf if there is none).
        """
        monitor, results = self._monitor, self._results
        if results is None or results.limits != limits or now < results.now:
            self._results = results = _Results(limits, now)
            monitor.set_limits(limits)
            monitor.dirty.update(monitor.nodes)
        results.now = now
        nodes = monitor.dirty | set(_due_nodes(results, now))
        if results.heard_at != monitor.run.heard_at:  # silence that was found may be waited for again
            results.heard_at = monitor.run.heard_at
            nodes |= results.raw.keys()
        monitor.dirty.clear()
        had_findings = bool(results.raw)
        for node in nodes:
            _evaluate_node(monitor, results, node)
        if nodes and (had_findings or results.raw):
            results.findings = attribute([finding for found in results.raw.values() for finding in found], monitor)
        return list(results.findings), _next_evaluation(results)


def _evaluate_node(monitor: HealthMonitor, results: _Results, node: NodeName) -> None:
    """Run the detectors on a node and on all its replicas, because each replica may be a witness for the others."""
    node_view = monitor.nodes.get(node)
    if node_view is None:  # removed
        results.raw.pop(node, None)
        results.next_evaluation.pop(node, None)
        monitor.probes_due.pop(node, None)
        return
    found, next_evaluation = _run_detectors(node_view, results.limits, results.now)
    if found:
        results.raw[node] = found
    else:
        results.raw.pop(node, None)
    results.next_evaluation[node] = next_evaluation
    monitor.probes_due[node] = next_probe_on_node(node_view, results.limits)
    _enqueue(results, node)


def _run_detectors(node_view: NodeView, limits: Limits, now: float) -> tuple[list[Finding], float]:
    found = [first_match(PROGRESS_DETECTORS, view, limits, now) for view in node_view.residents.values()]
    if node_view.agent:
        found.append(first_match(PRESENCE_DETECTORS, node_view.agent, limits, now))
    found.append(first_match(NODE_DETECTORS, node_view, limits, now))
    return [finding for finding, _ in found if finding], min(then for _, then in found)


# ── time of the next evaluation ──────────────────────────────────────────────────────────────────────────────────────
def _enqueue(results: _Results, node: NodeName) -> None:
    due = results.next_evaluation.get(node, inf)
    if due < results.queued.get(node, inf):
        results.queued[node] = due
        heappush(results.queue, (due, node))


def _next_evaluation(results: _Results) -> float:
    """Return the earliest ``next_evaluation`` of all nodes; outdated entries at the head of the queue are corrected."""
    while results.queue:
        at, node = results.queue[0]
        if results.queued.get(node) == at == results.next_evaluation.get(node):
            return at
        heappop(results.queue)
        if results.queued.get(node) == at:
            del results.queued[node]
            _enqueue(results, node)
    return inf


def _due_nodes(results: _Results, now: float) -> Iterator[NodeName]:
    while _next_evaluation(results) <= now:
        _, node = heappop(results.queue)
        del results.queued[node]
        yield node
