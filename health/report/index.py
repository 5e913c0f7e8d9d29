"""The records of all runs, sorted once for a report. Pure."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import defaultdict

from ...core.types import Cause
from ..history import rates
from ..history import rates as lemons
from ..history.incidents import HARDWARE, INFRA, TOGETHER, Chapter, Incident, Raised, acted, held, incidents, raised
from ..history.rates import Span
from ..history.records import Acted


class Book:
    """Everything, sorted once."""

    def __init__(self, told: list[Chapter], since: float, now: float) -> None:
        self.chapters, self.since, self.now = told, since, now
        self.lemon_since = now - lemons.WINDOW
        self.incidents = [one for one in incidents(told) if one.at <= now]
        self.incidents_of: dict[str, list[Incident]] = defaultdict(list)
        for incident in self.incidents:
            self.incidents_of[incident.node].append(incident)
        self.findings: dict[str, list[Raised]] = defaultdict(list)
        self.acted: dict[str, list[tuple[Chapter, Acted]]] = defaultdict(list)
        self._by_others: dict[tuple[str, tuple[str, str], float], float] = {}
        self.spans: dict[str, list[tuple[Span, Chapter]]] = defaultdict(list)
        self.gpus: dict[str, list[tuple[Span, int]]] = defaultdict(list)
        """when runs had how many GPUs of a node; of two runs each has its own"""
        for chapter in told:
            for one in raised(chapter):
                self.findings[one.found.node].append(one)
            for node, (spans, gpus) in held(chapter).items():
                self.spans[node] += [(span, chapter) for span in spans]
                self.gpus[node] += [(span, gpus) for span in spans]
        for chapter, act in acted(told):
            self.acted[act.node].append((chapter, act))
        hardware: dict[Cause, list[tuple[float, str]]] = defaultdict(list)
        for node, found in self.findings.items():
            for one in found:
                if one.critical and one.found.cause in HARDWARE:
                    hardware[one.found.cause].append((one.at, node))
        self._hardware = {cause: sorted(those) for cause, those in hardware.items()}
        self.lemon_failures = sum(map(self.counts_for_lemons, self.incidents))
        self.lemon_held = sum(self.held(node, self.lemon_since) for node in self.spans)

    def nodes(self, only: frozenset[str] | None) -> list[str]:
        """Those with anything to say of them in the window."""
        named = {node for node in (*self.spans, *self.findings, *self.acted) if self._in_window(node)}
        named |= {one.node for one in self.incidents if one.node and one.at >= self.since}
        return sorted(named if only is None else named & only)

    def held(self, node: str, since: float) -> float:
        """s in which any run had it."""
        spans = rates.union(span for span, _ in self.spans.get(node, ()))
        return rates.length(rates.within(spans, since, self.now))

    def held_by_others(self, node: str, run: tuple[str, str], since: float) -> float:
        """s in which runs other than ``run`` had the node from ``since`` on; remembered, for many findings of a run ask
        for the same."""
        asked = node, run, since
        if asked not in self._by_others:
            others = (span for span, chapter in self.spans.get(node, ()) if (chapter.user, chapter.run) != run)
            self._by_others[asked] = rates.length(rates.within(others, since, self.now))
        return self._by_others[asked]

    def gpu_seconds(self, node: str, since: float) -> float:
        return math.fsum(
            rates.length(rates.within([span], since, self.now)) * gpus for span, gpus in self.gpus.get(node, ())
        )

    def counts_for_lemons(self, one: Incident) -> bool:
        return one.owner == INFRA and not one.injected and one.at >= self.lemon_since

    def near(self, cause: Cause, at: float) -> set[str]:
        """Nodes whose hardware failed a check for this cause within 10 min of then."""
        those = self._hardware.get(cause, [])
        first, last = bisect_left(those, (at - TOGETHER, "")), bisect_right(those, (at + TOGETHER, "\U0010ffff"))
        return {node for _, node in those[first:last]}

    def _in_window(self, node: str) -> bool:
        return (
            self.held(node, self.since) > 0
            or any(one.until >= self.since and one.found.at >= self.since for one in self.findings.get(node, ()))
            or any(act.at >= self.since for _, act in self.acted.get(node, ()))
        )
