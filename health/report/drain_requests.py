"""Which drains are still asked for, from the records of all runs. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from math import inf

from msgspec import Struct

from ...core.drains import RUN_PREFIX, DrainOwner, drain_owner
from ...core.types import Finding, Verdict, natural
from ..history.incidents import HARDWARE, Chapter, chapters, held, raised
from ..history.rates import Span, length, within
from ..history.records import Acted, Told, clipped, is_node
from .corroboration import MIN_WITNESSES
from .node import WELL_AGAIN

MAX_REASON = 200
"""characters of a drain's reason"""
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
    run: str
    """the newest that asks"""
    accused: bool
    """at least two users ask, or root does: the word of one user alone drains nothing"""


def confirmation(request: Request, findings: Iterable[Finding]) -> Finding | None:
    """What a check of the node finds now that confirms the request: hardware failed, for the cause that is asked for.
    For a person's request, which names no cause, any hardware that failed."""
    failed = [one for one in findings if one.verdict is Verdict.FAIL and one.cause in HARDWARE]
    alike = [one for one in failed if one.cause.value == request.cause or (request.by and not request.cause)]
    return max(alike, key=lambda one: one.proof, default=None)


def confirmed_reason(request: Request, finding: Finding) -> str:
    """For Slurm: what the check found, not what a user wrote."""
    text = finding.evidence[0].text if finding.evidence else finding.detector
    return clipped(f"{RUN_PREFIX}{request.run}: {finding.cause.value}: {text}")[:MAX_REASON]


def open_requests(told: Iterable[Told]) -> list[Request]:
    """Those that no run took back, by node; not of a node that another run has had since, and found well."""
    standing: dict[tuple[str, str, str, bool], Acted] = {}
    told = sorted(told, key=lambda one: one.record.at)
    for one in told:
        if not isinstance(act := one.record, Acted) or not is_node(act.node):
            continue
        key = one.user, one.run, act.node, one.trusted
        if act.what == "asked":
            standing[key] = act
        elif act.what in _ENDS:
            standing.pop(key, None)
    by_node: dict[str, list[_Asked]] = defaultdict(list)
    since = _Since(chapters(told)) if standing else None
    for (user, run, node, trusted), act in standing.items():
        if act.by or (since is not None and not since.well((user, run), node, act.at)):  # a person saw what no run sees
            by_node[node].append(_Asked(user, run, trusted, act))
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


class _Asked(Struct, frozen=True):
    user: str
    run: str
    trusted: bool
    act: Acted


def _one(node: str, those: list[_Asked]) -> Request:
    newest = max(those, key=lambda one: one.act.at)
    act, users = newest.act, {one.user for one in those}
    marked = drain_owner(act.reason) is not DrainOwner.OTHER
    reason = act.reason if marked else f"{RUN_PREFIX}{newest.run}: {act.reason or act.cause}"
    alike = {one.user for one in those if one.act.cause == act.cause}
    return Request(
        node, reason[:MAX_REASON], act.cause, act.evidence, act.at, tuple(sorted(users)),
        tuple(sorted({one.run for one in those})), act.by, act.said, newest.run,
        len(alike) >= MIN_WITNESSES or any(one.trusted for one in those),
    )  # fmt: skip
