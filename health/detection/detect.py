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
from .attribution.wait_chains import charge
from .detectors.probing import next_ask
from .detectors.registry import NODE_DETECTORS, PRESENCE_DETECTORS, PROGRESS_DETECTORS
from .watch import NodeSighting, Watch

S = TypeVar("S")


@dataclass(slots=True)
class _Memo:
    limits: Limits
    now: float
    raw: dict[NodeName, list[Finding]] = field(default_factory=dict)
    """of the nodes that have any"""
    look: dict[NodeName, float] = field(default_factory=dict)
    queue: list[tuple[float, NodeName]] = field(default_factory=list)
    """an entry lies at or before its node's ``look``: a beat moves only ``look``, the entry is put right when first"""
    queued: dict[NodeName, float] = field(default_factory=dict)
    """its entry that counts; the queue may hold later ones, which do not"""
    findings: list[Finding] = field(default_factory=list)


def detect(watch: Watch, limits: Limits, now: float) -> tuple[list[Finding], float]:
    """All findings that hold now, in the order of their keys, and the next time (s, later than ``now``; inf = none) at
    which one could change though nothing new is seen.

    ``now`` must not run backwards (it costs a full look). A manager that was itself paused calls ``Watch.restart``
    first: it cannot tell the world's silence from its own.
    """
    memo = watch.memo
    if not isinstance(memo, _Memo) or memo.limits != limits or now < memo.now:
        watch.memo = memo = _Memo(limits, now)
        watch.heed(limits)
        watch.touched.update(watch.nodes)
    memo.now = now
    again = watch.touched | set(_come_due(memo, now))
    watch.touched.clear()
    before = bool(memo.raw)
    for node in again:
        _look_at(watch, memo, node)
    if again and (before or memo.raw):
        raw = sorted((finding for found in memo.raw.values() for finding in found), key=lambda finding: finding.key)
        memo.findings = sorted(_fold(charge(gangs.judge(raw, watch), watch), watch), key=lambda finding: finding.key)
    return list(memo.findings), _next_look(memo)


def _look_at(watch: Watch, memo: _Memo, node: NodeName) -> None:
    """One node with everything on it: they witness for each other, so that they are judged together."""
    home = watch.nodes.get(node)
    if home is None:  # forgotten
        memo.raw.pop(node, None)
        memo.look.pop(node, None)
        watch.asks.pop(node, None)
        return
    found, look = _judge(home, memo.limits, memo.now)
    if found:
        memo.raw[node] = found
    else:
        memo.raw.pop(node, None)
    memo.look[node] = look
    watch.asks[node] = next_ask(home, memo.limits)
    _enqueue(memo, node)


def _judge(home: NodeSighting, limits: Limits, now: float) -> tuple[list[Finding], float]:
    judged = [_climb(PROGRESS_DETECTORS, seen, limits, now) for seen in home.residents.values()]
    if home.agent:
        judged.append(_climb(PRESENCE_DETECTORS, home.agent, limits, now))
    judged.append(_climb(NODE_DETECTORS, home, limits, now))
    return [finding for finding, _ in judged if finding], min(look for _, look in judged)


def _climb(
    ladder: Iterable[Callable[[S, Limits, float], tuple[Finding | None, float]]], seen: S, limits: Limits, now: float
) -> tuple[Finding | None, float]:
    """The first detector that speaks. What weaker evidence would add is not heard while better evidence stands."""
    look = inf
    for detector in ladder:
        finding, then = detector(seen, limits, now)
        look = min(look, then)
        if finding is not None:
            return finding, look
    return None, look


def _fold(findings: list[Finding], watch: Watch) -> list[Finding]:
    """Where a node has failed, what is on it is replaced anyway: only proof about its replicas is worth saying."""
    failed = {finding.node for finding in findings if finding.node and finding.verdict is Verdict.FAIL}
    return [f for f in findings if f.life is None or f.proof or watch.replicas[f.life.replica].node not in failed]


# ── when to look again ───────────────────────────────────────────────────────────────────────────────────────────────
def _enqueue(memo: _Memo, node: NodeName) -> None:
    look = memo.look.get(node, inf)
    if look < memo.queued.get(node, inf):
        memo.queued[node] = look
        heappush(memo.queue, (look, node))


def _next_look(memo: _Memo) -> float:
    """The earliest ``look``; puts entries right that turn out to be first and early."""
    while memo.queue:
        at, node = memo.queue[0]
        if memo.queued.get(node) == at == memo.look.get(node):
            return at
        heappop(memo.queue)
        if memo.queued.get(node) == at:
            del memo.queued[node]
            _enqueue(memo, node)
    return inf


def _come_due(memo: _Memo, now: float) -> Iterator[NodeName]:
    while _next_look(memo) <= now:
        _, node = heappop(memo.queue)
        del memo.queued[node]
        yield node
