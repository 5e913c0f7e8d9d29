"""The report: figures of nodes and site (rates with their intervals, causes, days) from the records of all runs.

Pure; times in s since 1970. Injected faults are counted separately and enter no rate.
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
    records: Iterable[SourcedRecord], since: float, now: float, drains: Mapping[str, DrainState] | None = None,
    only: frozenset[str] | None = None,
) -> Report:  # fmt: skip
    """Return the report.

    Args:
        records: Records from ``since`` or the start of the lemon window on, whichever is earlier.
        since: Start of the report's window (s since 1970).
        now: End of the window (s since 1970).
        drains: State of nodes in the cluster.
        only: Nodes to report; None: all.
    """
    index = RecordIndex(by_run(records), since, now)
    nodes = [node_report(index, name, (drains or {}).get(name, DrainState())) for name in index.nodes(only)]
    site = _site_report(index, [one.node for one in nodes if one.lemon.lemon], only)
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
    nodes = [node for node in index.spans if only is None or node in only]
    held_for = {node: index.held_s(node, index.since) for node in nodes}
    incidents = [one for one in index.incidents if one.at >= index.since and (only is None or one.node in only)]
    real = [one for one in incidents if not one.injected]
    infra = [one for one in real if one.owner == INFRA]
    node_s = sum(held_for.values())
    gpu_s = sum(index.gpu_seconds(node, index.since) for node in nodes)
    named = {(one.user, one.run) for node in nodes for _, one in index.spans[node]}
    current = [
        one for one in index.histories if one.end >= index.since and (only is None or (one.user, one.run) in named)
    ]
    began = [one for chapter in current for one in chapter.records if isinstance(one, RunStarted)]
    lost = [
        one for chapter in current for one in chapter.records if isinstance(one, RecordsLost) and one.at >= index.since
    ]
    return SiteReport(
        index.since, index.now, sorted({one.cluster for one in began}), sum(span > 0 for span in held_for.values()),
        len(current), len({one.user for one in current}), round(node_s / DAY_S, 3), round(gpu_s / DAY_S, 3), len(infra),
        len(real) - len(infra), len(incidents) - len(real), rates.rate_per(len(infra), node_s / DAY_S, 1000.0),
        rates.mtbf(len(infra), node_s / 3600), rates.mtbf(len(infra), gpu_s / 3600), _causes(real),
        round(sum(one.gpu_hours for one in real), 3), round(sum(one.gpu_hours for one in infra), 3), lemon_nodes,
        _days(index, real, nodes), _correlated(current, index.since), sum(one.lines for one in lost),
    )  # fmt: skip


def _correlated(histories: Sequence[RunHistory], since: float) -> list[ReportLine]:
    lines = [
        ReportLine(one.at, f"{chapter.user}/{chapter.run}", one.evidence[0].text) for chapter in histories
        for one in chapter.records
        if isinstance(one, FindingRecord) and not one.node and not one.incarnation and one.evidence and one.at >= since
    ]  # fmt: skip
    return sorted(lines, key=lambda one: one.at)[-MAX_EVIDENCE_LINES:]


def _causes(real: Sequence[Incident]) -> list[CauseShare]:
    number: Counter[tuple[str, str]] = Counter((one.owner, one.cause) for one in real)
    hours: dict[tuple[str, str], float] = defaultdict(float)
    for one in real:
        hours[one.owner, one.cause] += one.gpu_hours
    shares = [CauseShare(*key, failures, round(hours[key], 3)) for key, failures in number.items()]
    return sorted(shares, key=lambda one: (-one.failures, one.owner, one.cause))


def _days(index: RecordIndex, real: Sequence[Incident], nodes: Sequence[str]) -> list[Day]:
    days = []
    first, last = int(index.since // DAY_S), int(index.now // DAY_S)
    by_day: dict[int, Counter[str]] = defaultdict(Counter)
    for one in real:
        by_day[int(one.at // DAY_S)][one.cause if one.owner == INFRA else one.owner] += 1
    spans = [rates.merge_intervals(span for span, _ in index.spans[node]) for node in nodes]
    for day in range(first, last + 1):
        start, end = max(day * DAY_S, index.since), min((day + 1) * DAY_S, index.now)
        held_for = sum(rates.total_length(rates.clip(intervals, start, end)) for intervals in spans)
        days.append(Day(day * DAY_S, round(held_for / DAY_S, 3), dict(sorted(by_day[day].items()))))
    return days
