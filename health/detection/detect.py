"""``detect``: detectors, blame and guards tied together; sightings in, findings out, and when to look again.

It remembers per node what it concluded (in ``Watch.memo``), so that a call costs as much as has been seen or has come
due since the last one, not as much as the run is big. That changes no answer: a test holds it against a full look.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from heapq import heappop, heappush
from math import inf
from typing import TypeVar

from ...core.run_spec import Limits
from ...core.types import Finding, NodeName, Verdict
from .attribution import gangs
from .attribution.wait_chains import attribute
from .detectors.probing import next_probe_on_node
from .detectors.registry import NODE_DETECTORS, PRESENCE_DETECTORS, PROGRESS_DETECTORS
from .health_monitor import HealthMonitor, NodeView

S = TypeVar("S")


@dataclass(slots=True)
class _Memo:
    limits: Limits
    now: float
    raw: dict[NodeName, list[Finding]] = field(default_factory=dict)
    """of the nodes that have any"""
    next_evaluation: dict[NodeName, float] = field(default_factory=dict)
    queue: list[tuple[float, NodeName]] = field(default_factory=list)
    """an entry lies at or before its node's ``look``: a beat moves only ``look``, the entry is put right when first"""
    queued: dict[NodeName, float] = field(default_factory=dict)
    """its entry that counts; the queue may hold later ones, which do not"""
    findings: list[Finding] = field(default_factory=list)


def detect(monitor: HealthMonitor, limits: Limits, now: float) -> tuple[list[Finding], float]:
    """All findings that hold now, in the order of their keys, and the next time (s, later than ``now``; inf = none) at
    which one could change though nothing new is seen.

    ``now`` must not run backwards (it costs a full look). A manager that was itself paused calls ``Watch.restart``
    first: it cannot tell the world's silence from its own.
    """
    memo = monitor.memo
    if not isinstance(memo, _Memo) or memo.limits != limits or now < memo.now:
        monitor.memo = memo = _Memo(limits, now)
        monitor.set_limits(limits)
        monitor.dirty.update(monitor.nodes)
    memo.now = now
    again = monitor.dirty | set(_due_nodes(memo, now))
    monitor.dirty.clear()
    before = bool(memo.raw)
    for node in again:
        _evaluate_node(monitor, memo, node)
    if again and (before or memo.raw):
        raw = sorted((finding for found in memo.raw.values() for finding in found), key=lambda finding: finding.key)
        memo.findings = sorted(
            _suppress_on_failed_nodes(attribute(gangs.judge(raw, monitor), monitor), monitor),
            key=lambda finding: finding.key,
        )
    return list(memo.findings), _next_evaluation(memo)


def _evaluate_node(monitor: HealthMonitor, memo: _Memo, node: NodeName) -> None:
    """One node with everything on it: they witness for each other, so that they are judged together."""
    node_view = monitor.nodes.get(node)
    if node_view is None:  # forgotten
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
    results = [_first_match(PROGRESS_DETECTORS, view, limits, now) for view in node_view.residents.values()]
    if node_view.agent:
        results.append(_first_match(PRESENCE_DETECTORS, node_view.agent, limits, now))
    results.append(_first_match(NODE_DETECTORS, node_view, limits, now))
    return [finding for finding, _ in results if finding], min(look for _, look in results)


def _first_match(
    ladder: Iterable[Callable[[S, Limits, float], tuple[Finding | None, float]]], view: S, limits: Limits, now: float
) -> tuple[Finding | None, float]:
    """The first detector that speaks. What weaker evidence would add is not heard while better evidence stands."""
    next_evaluation = inf
    for detector in ladder:
        finding, then = detector(view, limits, now)
        next_evaluation = min(next_evaluation, then)
        if finding is not None:
            return finding, next_evaluation
    return None, next_evaluation


def _suppress_on_failed_nodes(findings: list[Finding], monitor: HealthMonitor) -> list[Finding]:
    """Where a node has failed, what is on it is replaced anyway: only proof about its replicas is worth saying."""
    failed = {finding.node for finding in findings if finding.node and finding.verdict is Verdict.FAIL}
    return [
        f
        for f in findings
        if f.incarnation is None or f.proof or monitor.replicas[f.incarnation.replica].node not in failed
    ]


# ── when to look again ───────────────────────────────────────────────────────────────────────────────────────────────
def _enqueue(memo: _Memo, node: NodeName) -> None:
    due = memo.next_evaluation.get(node, inf)
    if due < memo.queued.get(node, inf):
        memo.queued[node] = due
        heappush(memo.queue, (due, node))


def _next_evaluation(memo: _Memo) -> float:
    """The earliest ``look``; puts entries right that turn out to be first and early."""
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
