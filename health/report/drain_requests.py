"""Which drains are still asked for, from the records of all runs. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from math import inf

from msgspec import Struct

from ...core.drains import RUN_PREFIX, DrainOwner, drain_owner
from ...core.types import Finding, Verdict, natural_sort_key
from ..history.incidents import HARDWARE_CAUSES, RunHistory, by_run, node_intervals, raised_findings
from ..history.rates import Span, clip, total_length
from ..history.records import ActionTaken, SourcedRecord, clipped, is_node
from .corroboration import MIN_WITNESSES
from .node import RECOVERED_AFTER_S

MAX_REASON_CHARS = 200
"""characters of a drain's reason"""
_CLOSING_ACTIONS = ("readmitted", "undrained", "drained")


class DrainRequest(Struct, frozen=True):
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
    rejection: str
    """why the run could not drain it"""
    run: str
    """the newest that asks"""
    accused: bool
    """at least two users ask, or root does: the word of one user alone drains nothing"""


def confirmation(request: DrainRequest, findings: Iterable[Finding]) -> Finding | None:
    """What a check of the node finds now that confirms the request: hardware failed, for the cause that is asked for.
    For a person's request, which names no cause, any hardware that failed."""
    failed = [one for one in findings if one.verdict is Verdict.FAIL and one.cause in HARDWARE_CAUSES]
    alike = [one for one in failed if one.cause.value == request.cause or (request.by and not request.cause)]
    return max(alike, key=lambda one: one.proof, default=None)


def confirmed_reason(request: DrainRequest, finding: Finding) -> str:
    """For Slurm: what the check found, not what a user wrote."""
    text = finding.evidence[0].text if finding.evidence else finding.detector
    return clipped(f"{RUN_PREFIX}{request.run}: {finding.cause.value}: {text}")[:MAX_REASON_CHARS]


def open_requests(records: Iterable[SourcedRecord]) -> list[DrainRequest]:
    """Those that no run took back, by node; not of a node that another run has had since, and found well."""
    standing: dict[tuple[str, str, str, bool], ActionTaken] = {}
    records = sorted(records, key=lambda one: one.record.at)
    for one in records:
        if not isinstance(act := one.record, ActionTaken) or not is_node(act.node):
            continue
        key = one.user, one.run, act.node, one.trusted
        if act.action == "drain_requested":
            standing[key] = act
        elif act.action in _CLOSING_ACTIONS:
            standing.pop(key, None)
    by_node: dict[str, list[_OpenRequest]] = defaultdict(list)
    since = _NodeOutcomes(by_run(records)) if standing else None
    for (user, run, node, trusted), act in standing.items():
        if act.by or (
            since is not None and not since.is_healthy_since((user, run), node, act.at)
        ):  # a person saw what no run sees
            by_node[node].append(_OpenRequest(user, run, trusted, act))
    return [
        _combine(node, requests)
        for node, requests in sorted(by_node.items(), key=lambda pair: natural_sort_key(pair[0]))
    ]


class _NodeOutcomes:
    """What became of nodes."""

    def __init__(self, histories: list[RunHistory]) -> None:
        self._spans: dict[str, list[tuple[Span, tuple[str, str]]]] = defaultdict(list)
        self._bad: dict[str, float] = {}
        for history in histories:
            for node, (spans, _) in node_intervals(history).items():
                self._spans[node] += [(span, (history.user, history.run)) for span in spans]
            for one in raised_findings(history):
                if one.critical:
                    self._bad[one.finding.node] = max(one.at, self._bad.get(one.finding.node, 0.0))

    def is_healthy_since(self, run: tuple[str, str], node: str, at: float) -> bool:
        """Other runs have had it for an hour since then, and nobody found anything anew."""
        others = (span for span, whose in self._spans[node] if whose != run)
        return self._bad.get(node, 0.0) <= at and total_length(clip(others, at, inf)) >= RECOVERED_AFTER_S


class _OpenRequest(Struct, frozen=True):
    user: str
    run: str
    trusted: bool
    act: ActionTaken


def _combine(node: str, requests: list[_OpenRequest]) -> DrainRequest:
    newest = max(requests, key=lambda one: one.act.at)
    act, users = newest.act, {one.user for one in requests}
    marked = drain_owner(act.reason) is not DrainOwner.OTHER
    reason = act.reason if marked else f"{RUN_PREFIX}{newest.run}: {act.reason or act.cause}"
    alike = {one.user for one in requests if one.act.cause == act.cause}
    return DrainRequest(
        node, reason[:MAX_REASON_CHARS], act.cause, act.evidence, act.at, tuple(sorted(users)),
        tuple(sorted({one.run for one in requests})), act.by, act.rejection, newest.run,
        len(alike) >= MIN_WITNESSES or any(one.trusted for one in requests),
    )  # fmt: skip
