"""Determine the open drain requests from the records of all runs. The module is pure."""

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
"""Maximum number of characters of a drain's reason."""
_CLOSING_ACTIONS = ("readmitted", "undrained", "drained")


class DrainRequest(Struct, frozen=True):
    """A node whose drain at least one run requests, with the values of the newest request."""

    node: str
    reason: str
    """Reason for Slurm; begins with ``rrl:``."""
    cause: str
    evidence: tuple[str, ...]
    at: float
    """Time of the newest request (s since 1970)."""
    users: tuple[str, ...]
    runs: tuple[str, ...]
    requested_by: str
    """User who requested the drain; empty if a run decided it."""
    rejection: str
    """Why the cluster did not let the run drain the node."""
    run: str
    """Run that made the newest request."""
    accused: bool
    """Whether at least two users, or root, request the drain. The request of a single user other than root does not
    lead to a drain."""


def confirmation(request: DrainRequest, findings: Iterable[Finding]) -> Finding | None:
    """Return the finding of a check that confirms the request, or None.

    The check must have found failed hardware of the requested cause. If a user requested the drain without a cause, any
    failed hardware confirms the request.
    """
    failed = [finding for finding in findings if finding.verdict is Verdict.FAIL and finding.cause in HARDWARE_CAUSES]
    any_cause = bool(request.requested_by) and not request.cause
    confirming = [finding for finding in failed if any_cause or finding.cause.value == request.cause]
    return max(confirming, key=lambda finding: finding.proof, default=None)


def confirmed_reason(request: DrainRequest, finding: Finding) -> str:
    """Return the drain reason for Slurm: what the check found, not what a user wrote."""
    text = finding.evidence[0].text if finding.evidence else finding.detector
    return clipped(f"{RUN_PREFIX}{request.run}: {finding.cause.value}: {text}")[:MAX_REASON_CHARS]


def open_requests(records: Iterable[SourcedRecord]) -> list[DrainRequest]:
    """Return the open requests, combined by node.

    A request is closed once its run has readmitted, undrained or drained the node. A request that no person made is
    also closed once other runs have held the node for an hour in total without a new finding.
    """
    standing: dict[tuple[str, str, str, bool], ActionTaken] = {}
    records = sorted(records, key=lambda sourced: sourced.record.at)
    for sourced in records:
        if not isinstance(act := sourced.record, ActionTaken) or not is_node(act.node):
            continue
        key = sourced.user, sourced.run, act.node, sourced.trusted
        if act.action == "drain_requested":
            standing[key] = act
        elif act.action in _CLOSING_ACTIONS:
            standing.pop(key, None)
    by_node: dict[str, list[_OpenRequest]] = defaultdict(list)
    outcomes = _NodeOutcomes(by_run(records)) if standing else None
    for (user, run, node, trusted), act in standing.items():
        # a person may know of a fault that no run detects
        if act.by or (outcomes is not None and not outcomes.is_healthy_since((user, run), node, act.at)):
            by_node[node].append(_OpenRequest(user, run, trusted, act))
    return [
        _combine(node, requests)
        for node, requests in sorted(by_node.items(), key=lambda pair: natural_sort_key(pair[0]))
    ]


class _NodeOutcomes:
    """The runs that held each node, and the times at which faults of the node were found."""

    def __init__(self, histories: list[RunHistory]) -> None:
        self._spans: dict[str, list[tuple[Span, tuple[str, str]]]] = defaultdict(list)
        self._bad: dict[str, float] = {}
        for history in histories:
            for node, (spans, _) in node_intervals(history).items():
                self._spans[node] += [(span, (history.user, history.run)) for span in spans]
            for raised in raised_findings(history):
                if raised.critical:
                    node = raised.finding.node
                    self._bad[node] = max(raised.at, self._bad.get(node, 0.0))

    def is_healthy_since(self, run: tuple[str, str], node: str, at: float) -> bool:
        """Return whether runs other than ``run`` have held the node for an hour in total since ``at``.

        Return False if any run has found a fault of the node since ``at``.
        """
        others = (span for span, holder in self._spans[node] if holder != run)
        return self._bad.get(node, 0.0) <= at and total_length(clip(others, at, inf)) >= RECOVERED_AFTER_S


class _OpenRequest(Struct, frozen=True):
    user: str
    run: str
    trusted: bool
    act: ActionTaken


def _combine(node: str, requests: list[_OpenRequest]) -> DrainRequest:
    newest = max(requests, key=lambda request: request.act.at)
    act, users = newest.act, {request.user for request in requests}
    marked = drain_owner(act.reason) is not DrainOwner.OTHER
    reason = act.reason if marked else f"{RUN_PREFIX}{newest.run}: {act.reason or act.cause}"
    users_with_cause = {request.user for request in requests if request.act.cause == act.cause}
    return DrainRequest(
        node,
        reason[:MAX_REASON_CHARS],
        act.cause,
        act.evidence,
        act.at,
        tuple(sorted(users)),
        tuple(sorted({request.run for request in requests})),
        act.by,
        act.rejection,
        newest.run,
        len(users_with_cause) >= MIN_WITNESSES or any(request.trusted for request in requests),
    )
