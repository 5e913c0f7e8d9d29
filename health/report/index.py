"""The records of all runs, sorted and grouped for a report. The module is pure."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import defaultdict

from ...core.types import Cause
from ..history import rates
from ..history import rates as lemons
from ..history.incidents import (
    HARDWARE_CAUSES,
    INFRA,
    SAME_INCIDENT_S,
    Incident,
    RaisedFinding,
    RunHistory,
    actions_taken,
    incidents,
    node_intervals,
    raised_findings,
)
from ..history.rates import Span
from ..history.records import ActionTaken


class RecordIndex:
    """Incidents, findings, actions and holding times by node."""

    def __init__(self, histories: list[RunHistory], since: float, now: float) -> None:
        self.histories, self.since, self.now = histories, since, now
        self.lemon_since = now - lemons.LEMON_WINDOW_S
        self.incidents = [incident for incident in incidents(histories) if incident.at <= now]
        self.incidents_of: dict[str, list[Incident]] = defaultdict(list)
        for incident in self.incidents:
            self.incidents_of[incident.node].append(incident)
        self.findings: dict[str, list[RaisedFinding]] = defaultdict(list)
        self.actions: dict[str, list[tuple[RunHistory, ActionTaken]]] = defaultdict(list)
        self._by_others: dict[tuple[str, tuple[str, str], float], float] = {}
        self.spans: dict[str, list[tuple[Span, RunHistory]]] = defaultdict(list)
        self.gpus: dict[str, list[tuple[Span, int]]] = defaultdict(list)
        """Intervals (s) in which runs held GPUs of a node, with the number of GPUs. Two runs on one node have separate
        entries."""
        for history in histories:
            for raised in raised_findings(history):
                self.findings[raised.finding.node].append(raised)
            for node, (spans, gpus) in node_intervals(history).items():
                self.spans[node] += [(span, history) for span in spans]
                self.gpus[node] += [(span, gpus) for span in spans]
        for history, act in actions_taken(histories):
            self.actions[act.node].append((history, act))
        hardware: dict[Cause, list[tuple[float, str]]] = defaultdict(list)
        for node, findings in self.findings.items():
            for raised in findings:
                if raised.critical and raised.finding.cause in HARDWARE_CAUSES:
                    hardware[raised.finding.cause].append((raised.at, node))
        self._hardware = {cause: sorted(entries) for cause, entries in hardware.items()}
        self.lemon_failures = sum(map(self.counts_for_lemons, self.incidents))
        self.lemon_held_s = sum(self.held_s(node, self.lemon_since) for node in self.spans)

    def nodes(self, only: frozenset[str] | None) -> list[str]:
        """Return the sorted nodes with records in the report's window; if ``only`` is given, only nodes in ``only``."""
        named = {node for node in (*self.spans, *self.findings, *self.actions) if self._in_window(node)}
        named |= {incident.node for incident in self.incidents if incident.node and incident.at >= self.since}
        return sorted(named if only is None else named & only)

    def held_s(self, node: str, since: float) -> float:
        """Return for how many seconds after ``since`` at least one run held the node."""
        spans = rates.merge_intervals(span for span, _ in self.spans.get(node, ()))
        return rates.total_length(rates.clip(spans, since, self.now))

    def held_by_others_s(self, node: str, run: tuple[str, str], since: float) -> float:
        """Return the seconds in which runs other than ``run`` held the node from ``since`` on, summed over these runs.

        Results are cached, because many findings of a run need the same value.
        """
        key = node, run, since
        if key not in self._by_others:
            others = (span for span, history in self.spans.get(node, ()) if (history.user, history.run) != run)
            self._by_others[key] = rates.total_length(rates.clip(others, since, self.now))
        return self._by_others[key]

    def gpu_seconds(self, node: str, since: float) -> float:
        """Return the GPU-seconds that runs held on the node from ``since`` on."""
        return math.fsum(
            rates.total_length(rates.clip([span], since, self.now)) * gpus for span, gpus in self.gpus.get(node, ())
        )

    def counts_for_lemons(self, incident: Incident) -> bool:
        """Return whether the incident is a failure of infrastructure in the lemon window, and was not injected."""
        return incident.owner == INFRA and not incident.injected and incident.at >= self.lemon_since

    def nodes_with_same_cause(self, cause: Cause, at: float) -> set[str]:
        """Return the nodes on which a hardware check failed for this cause within 10 min of ``at`` (s)."""
        entries = self._hardware.get(cause, [])
        first, last = (
            bisect_left(entries, (at - SAME_INCIDENT_S, "")),
            bisect_right(entries, (at + SAME_INCIDENT_S, "\U0010ffff")),
        )
        return {node for _, node in entries[first:last]}

    def _in_window(self, node: str) -> bool:
        return (
            self.held_s(node, self.since) > 0
            or any(
                raised.until >= self.since and raised.finding.at >= self.since for raised in self.findings.get(node, ())
            )
            or any(act.at >= self.since for _, act in self.actions.get(node, ()))
        )
