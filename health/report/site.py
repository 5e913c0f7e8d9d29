"""The report: figures of nodes and site (rates with their intervals, causes, days) from the records of all runs.

The module is pure. Times are in s since 1970. Injected faults are counted separately and do not affect any rate.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence

from ...core.types import Verdict
from ..history import rates
from ..history.incidents import INFRA, Incident, RunHistory, by_run
from ..history.rates import DAY_S
from ..history.records import MAX_EVIDENCE_LINES, FindingRecord, RecordsLost, RunStarted, SourcedRecord
from .index import RecordIndex
from .model import VERSION, CauseShare, Day, DrainState, NodeReport, Report, ReportLine, SiteReport
from .node import node_report


def report(
    records: Iterable[SourcedRecord],
    since: float,
    now: float,
    drains: Mapping[str, DrainState] | None = None,
    only: frozenset[str] | None = None,
) -> Report:
    """Return the report.

    Args:
        records: Records from ``since`` or the start of the lemon window on, whichever is earlier.
        since: Start of the report's window (s since 1970).
        now: End of the window (s since 1970).
        drains: State of nodes in the cluster, by node; None if the cluster was not queried.
        only: Nodes to report; None for all nodes.
    """
    index = RecordIndex(by_run(records), since, now)
    nodes = [node_report(index, name, (drains or {}).get(name, DrainState())) for name in index.nodes(only)]
    site = _site_report(index, [node.node for node in nodes if node.lemon.lemon], only)
    return Report(VERSION, site, sorted(nodes, key=_worst_first))


def _worst_first(node_report: NodeReport) -> tuple[object, ...]:
    order = {Verdict.FAIL.value: 0, Verdict.WARN.value: 1}
    return (
        order.get(node_report.verdict, 2),
        not node_report.lemon.lemon,
        -node_report.incidents,
        -node_report.gpu_hours_lost,
        node_report.node,
    )


# ── the site ──────────────────────────────────────────────────────────────────────────────────────────────────────────
def _site_report(index: RecordIndex, lemon_nodes: list[str], only: frozenset[str] | None) -> SiteReport:
    """Return the figures of all nodes of the site together, or only of the nodes in ``only``."""
    nodes = [node for node in index.spans if only is None or node in only]
    held_s = {node: index.held_s(node, index.since) for node in nodes}
    incidents = [
        incident
        for incident in index.incidents
        if incident.at >= index.since and (only is None or incident.node in only)
    ]
    real = [incident for incident in incidents if not incident.injected]
    infra = [incident for incident in real if incident.owner == INFRA]
    node_s = sum(held_s.values())
    gpu_s = sum(index.gpu_seconds(node, index.since) for node in nodes)
    named = {(history.user, history.run) for node in nodes for _, history in index.spans[node]}
    current = [
        history
        for history in index.histories
        if history.end >= index.since
        and not history.of_node_checks
        and (only is None or (history.user, history.run) in named)
    ]
    began = [record for history in current for record in history.records if isinstance(record, RunStarted)]
    lost = [
        record
        for history in current
        for record in history.records
        if isinstance(record, RecordsLost) and record.at >= index.since
    ]
    return SiteReport(
        since=index.since,
        until=index.now,
        clusters=sorted({started.cluster for started in began}),
        nodes=sum(span > 0 for span in held_s.values()),
        runs=len(current),
        users=len({history.user for history in current}),
        node_days=round(node_s / DAY_S, 3),
        gpu_days=round(gpu_s / DAY_S, 3),
        failures=len(infra),
        other_failures=len(real) - len(infra),
        injected=len(incidents) - len(real),
        failures_per_1000_node_days=rates.rate_per(len(infra), node_s / DAY_S, 1000.0),
        node_hours_between_failures=rates.mtbf(len(infra), node_s / 3600),
        gpu_hours_between_failures=rates.mtbf(len(infra), gpu_s / 3600),
        causes=_causes(real),
        gpu_hours_lost=round(sum(incident.gpu_hours for incident in real), 3),
        gpu_hours_lost_to_infra=round(sum(incident.gpu_hours for incident in infra), 3),
        lemons=lemon_nodes,
        days=_days(index, real, nodes),
        correlated=_correlated(current, index.since),
        lines_lost=sum(loss.lines for loss in lost),
    )


def _correlated(histories: Sequence[RunHistory], since: float) -> list[ReportLine]:
    """Return the newest findings on many nodes at the same time."""
    lines = [
        ReportLine(record.at, f"{history.user}/{history.run}", record.evidence[0].text)
        for history in histories
        for record in history.records
        if isinstance(record, FindingRecord)
        and not record.node
        and not record.incarnation
        and record.evidence
        and record.at >= since
    ]
    return sorted(lines, key=lambda line: line.at)[-MAX_EVIDENCE_LINES:]


def _causes(real: Sequence[Incident]) -> list[CauseShare]:
    number: Counter[tuple[str, str]] = Counter((incident.owner, incident.cause) for incident in real)
    hours: dict[tuple[str, str], float] = defaultdict(float)
    for incident in real:
        hours[incident.owner, incident.cause] += incident.gpu_hours
    shares = [CauseShare(*key, failures, round(hours[key], 3)) for key, failures in number.items()]
    return sorted(shares, key=lambda share: (-share.failures, share.owner, share.cause))


def _days(index: RecordIndex, real: Sequence[Incident], nodes: Sequence[str]) -> list[Day]:
    days = []
    first, last = int(index.since // DAY_S), int(index.now // DAY_S)
    by_day: dict[int, Counter[str]] = defaultdict(Counter)
    for incident in real:
        by_day[int(incident.at // DAY_S)][incident.cause if incident.owner == INFRA else incident.owner] += 1
    spans = [rates.merge_intervals(span for span, _ in index.spans[node]) for node in nodes]
    for day in range(first, last + 1):
        start, end = max(day * DAY_S, index.since), min((day + 1) * DAY_S, index.now)
        held_s = sum(rates.total_length(rates.clip(intervals, start, end)) for intervals in spans)
        days.append(Day(day * DAY_S, round(held_s / DAY_S, 3), dict(sorted(by_day[day].items()))))
    return days
