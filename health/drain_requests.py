"""Which drains are still asked for, from the records of all runs. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from math import inf

from msgspec import Struct

from rrl.health.history import Acted, Told, is_node
from rrl.health.incidents import Chapter, chapters, held, raised
from rrl.health.rates import Span, length, within
from rrl.health.report_nodes import OURS, WELL_AGAIN
from rrl.spec.words import natural

_ENDS = ("readmitted", "undrained", "drained")


class Request(Struct, frozen=True):
    """A node that at least one run wants to be drained. Told as the newest of them tells it."""

    node: str
    reason: str
    """for Slurm; begins with ``rrl:``"""
    cause: str
    evidence: tuple[str, ...]
    at: float
    """the newest, s since 1970"""
    users: tuple[str, ...]
    runs: tuple[str, ...]
    by: str
    """the person who wants it; empty: a run found it"""
    said: str
    """why the run could not drain it"""


def open_requests(told: Iterable[Told]) -> list[Request]:
    """Those that no run took back, by node; not of a node that another run has had since, and found well."""
    standing: dict[tuple[str, str, str], Acted] = {}
    told = sorted(told, key=lambda one: one.record.at)
    for one in told:
        if not isinstance(act := one.record, Acted) or not is_node(act.node):
            continue
        key = one.user, one.run, act.node
        if act.what == "asked":
            standing[key] = act
        elif act.what in _ENDS:
            standing.pop(key, None)
    by_node: dict[str, list[tuple[str, str, Acted]]] = defaultdict(list)
    since = _Since(chapters(told)) if standing else None
    for (user, run, node), act in standing.items():
        if act.by or (since is not None and not since.well((user, run), node, act.at)):  # a person saw what no run sees
            by_node[node].append((user, run, act))
    return [_one(node, those) for node, those in sorted(by_node.items(), key=lambda pair: natural(pair[0]))]


class _Since:
    """What became of nodes."""

    def __init__(self, told: list[Chapter]) -> None:
        self._spans: dict[str, list[tuple[Span, tuple[str, str]]]] = defaultdict(list)
        self._bad: dict[str, float] = {}
        for chapter in told:
            for node, (spans, _) in held(chapter).items():
                self._spans[node] += [(span, (chapter.user, chapter.run)) for span in spans]
            for one in raised(chapter):
                if one.critical:
                    self._bad[one.found.node] = max(one.at, self._bad.get(one.found.node, 0.0))

    def well(self, run: tuple[str, str], node: str, at: float) -> bool:
        """Other runs have had it for an hour since then, and nobody found anything anew."""
        others = (span for span, whose in self._spans[node] if whose != run)
        return self._bad.get(node, 0.0) <= at and length(within(others, at, inf)) >= WELL_AGAIN


def _one(node: str, those: list[tuple[str, str, Acted]]) -> Request:
    _, run, newest = max(those, key=lambda one: one[2].at)
    reason = newest.reason if newest.reason.startswith(OURS) else f"{OURS}{run}: {newest.reason or newest.cause}"
    return Request(
        node, reason[:200], newest.cause, newest.evidence, newest.at, tuple(sorted({user for user, _, _ in those})),
        tuple(sorted({run for _, run, _ in those})), newest.by, newest.said,
    )  # fmt: skip
