"""The report: figures of nodes and site (rates with their intervals, causes, days) from the records of all runs. Pure;
times in s since 1970.

What is injected on purpose is told apart and is in no rate.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence

from ...core.types import Verdict
from ..history import rates
from ..history.incidents import INFRA, Chapter, Incident, chapters
from ..history.rates import DAY
from ..history.records import MOST_EVIDENCE, Began, Found, Lost, Told
from .index import Book
from .model import VERSION, CauseShare, Day, DrainState, Line, NodeReport, Report, SiteReport
from .node import node_report


def report(
    told: Iterable[Told], since: float, now: float, drains: Mapping[str, DrainState] | None = None,
    only: frozenset[str] | None = None,
) -> Report:  # fmt: skip
    """``told``: from ``since`` or the lemon window on, whichever is longer ago. ``only``: of the nodes, these."""
    book = Book(chapters(told), since, now)
    nodes = [node_report(book, name, (drains or {}).get(name, DrainState())) for name in book.nodes(only)]
    site = _site_report(book, [one.node for one in nodes if one.lemon.lemon], only)
    return Report(VERSION, site, sorted(nodes, key=_worst_first))


def _worst_first(one: NodeReport) -> tuple[object, ...]:
    order = {Verdict.FAIL.value: 0, Verdict.WARN.value: 1}
    return (order.get(one.verdict, 2), not one.lemon.lemon, -one.incidents, -one.gpu_hours_lost, one.node)


# ── the site ──────────────────────────────────────────────────────────────────────────────────────────────────────────
def _site_report(book: Book, lemon_nodes: list[str], only: frozenset[str] | None) -> SiteReport:
    nodes = [node for node in book.spans if only is None or node in only]
    held_for = {node: book.held(node, book.since) for node in nodes}
    told = [one for one in book.incidents if one.at >= book.since and (only is None or one.node in only)]
    real = [one for one in told if not one.injected]
    infra = [one for one in real if one.owner == INFRA]
    node_s = sum(held_for.values())
    gpu_s = sum(book.gpu_seconds(node, book.since) for node in nodes)
    named = {(one.user, one.run) for node in nodes for _, one in book.spans[node]}
    current = [one for one in book.chapters if one.end >= book.since and (only is None or (one.user, one.run) in named)]
    began = [one for chapter in current for one in chapter.records if isinstance(one, Began)]
    lost = [one for chapter in current for one in chapter.records if isinstance(one, Lost) and one.at >= book.since]
    return SiteReport(
        book.since, book.now, sorted({one.cluster for one in began}), sum(span > 0 for span in held_for.values()),
        len(current), len({one.user for one in current}), round(node_s / DAY, 3), round(gpu_s / DAY, 3), len(infra),
        len(real) - len(infra), len(told) - len(real), rates.per(len(infra), node_s / DAY, 1000.0),
        rates.between(len(infra), node_s / 3600), rates.between(len(infra), gpu_s / 3600), _causes(real),
        round(sum(one.gpu_hours for one in real), 3), round(sum(one.gpu_hours for one in infra), 3), lemon_nodes,
        _days(book, real, nodes), _shared(current, book.since), sum(one.lines for one in lost),
    )  # fmt: skip


def _shared(chapters: Sequence[Chapter], since: float) -> list[Line]:
    told = [
        Line(one.at, f"{chapter.user}/{chapter.run}", one.evidence[0].text) for chapter in chapters
        for one in chapter.records
        if isinstance(one, Found) and not one.node and not one.life and one.evidence and one.at >= since
    ]  # fmt: skip
    return sorted(told, key=lambda one: one.at)[-MOST_EVIDENCE:]


def _causes(real: Sequence[Incident]) -> list[CauseShare]:
    number: Counter[tuple[str, str]] = Counter((one.owner, one.cause) for one in real)
    hours: dict[tuple[str, str], float] = defaultdict(float)
    for one in real:
        hours[one.owner, one.cause] += one.gpu_hours
    shares = [CauseShare(*key, failures, round(hours[key], 3)) for key, failures in number.items()]
    return sorted(shares, key=lambda one: (-one.failures, one.owner, one.cause))


def _days(book: Book, real: Sequence[Incident], nodes: Sequence[str]) -> list[Day]:
    days = []
    first, last = int(book.since // DAY), int(book.now // DAY)
    by_day: dict[int, Counter[str]] = defaultdict(Counter)
    for one in real:
        by_day[int(one.at // DAY)][one.cause if one.owner == INFRA else one.owner] += 1
    spans = [rates.union(span for span, _ in book.spans[node]) for node in nodes]
    for day in range(first, last + 1):
        start, end = max(day * DAY, book.since), min((day + 1) * DAY, book.now)
        held_for = sum(rates.length(rates.within(those, start, end)) for those in spans)
        days.append(Day(day * DAY, round(held_for / DAY, 3), dict(sorted(by_day[day].items()))))
    return days
