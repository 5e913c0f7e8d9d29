"""Derive incidents from the records of all runs: what failed where, who was at fault, and the cost.

Rule of fault (Meta, docs/sources.md): *infrastructure* is at fault if the cluster lost the node, or if hardware
evidence against the node existed in the 10 min before or the 5 min after the failure. Otherwise the user or the
software is at fault. The symptom, such as an NCCL timeout, does not matter. The module is pure. Times are in s.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable
from math import inf

from msgspec import Struct
from msgspec.structs import replace

from ...core.types import Cause, Flag, Verdict
from .rates import Span, merge_intervals
from .records import (
    ActionTaken,
    Failed,
    FindingRecord,
    NodeAcquired,
    NodeChecks,
    NodeReleased,
    Record,
    RecoveryDone,
    RunEnded,
    RunStarted,
    SourcedRecord,
)

EVIDENCE_BEFORE_S, EVIDENCE_AFTER_S = 600.0, 300.0
"""Seconds before and after a failure in which evidence counts (Meta: the last 10 min of a job, or 5 min after)."""
SAME_INCIDENT_S = 600.0
"""Seconds within which failures of one node count as one incident, and failures of several nodes as related (gcm,
NVSentinel)."""
HARDWARE_CAUSES = (Cause.NODE, Cause.GPU, Cause.FABRIC, Cause.STORAGE)

INFRA, SOFTWARE, USER = "infra", "software", "user"


class Incident(Struct, frozen=True):
    """A failure on a node, merged from all runs that it affected."""

    at: float
    node: str
    owner: str
    """Party at fault: ``infra``, ``software`` or ``user``."""
    cause: str
    """Cause of the failure. If infrastructure was at fault, it is the cause that the hardware evidence names."""
    detector: str
    remedy: str
    runs: tuple[str, ...]
    users: tuple[str, ...]
    incarnations: tuple[str, ...]
    """Incarnations that failed."""
    gpu_hours: float
    injected: bool = False
    node_lost: bool = False
    """Whether the whole node was lost."""
    related_nodes: tuple[str, ...] = ()
    """Other nodes with the same cause within 10 min, which suggests the fabric or storage."""
    evidence: tuple[str, ...] = ()
    witnesses: tuple[str, ...] = ()
    """Users whose records suffice to show that infrastructure was at fault. Their records contain both the failure and
    hardware evidence, or the loss of the node. If the failure and the evidence come from different users, neither user
    is a witness."""
    trusted: bool = False
    """Whether one of the witnesses is root."""


class RaisedFinding(Struct, frozen=True):
    """A finding against a node, with the times (s) at which it was raised and cleared (inf if it never cleared)."""

    at: float
    until: float
    user: str
    run: str
    finding: FindingRecord
    """The last record of the finding while it was raised."""
    observed_until: float
    """Time (s) until which the run held the node and wrote records, so that it could have cleared the finding."""
    trusted: bool = False
    """Whether root owns the record."""

    @property
    def critical(self) -> bool:
        """Return whether the finding is evidence against the node.

        A finding that was held back because most nodes have it does not count, because then the driver or a rule is
        wrong.
        """
        flags = self.finding.flags
        observed = Flag.OBSERVED in flags
        held_back = Flag.HELD_BACK in flags and Flag.ON_MOST_NODES not in flags
        return self.finding.verdict is Verdict.FAIL or (
            self.finding.verdict is Verdict.WARN and (observed or held_back)
        )


class RunHistory(Struct, frozen=True):
    """The records of one run, or of the checks of one node, in order."""

    user: str
    run: str
    records: tuple[Record, ...]
    trusted: bool = False
    """Whether root owns the records."""

    @property
    def of_node_checks(self) -> bool:
        """Return whether the checks of a node made the records, and not a run."""
        return any(isinstance(record, NodeChecks) for record in self.records)

    @property
    def end(self) -> float:
        """Return the time of the last record (s); 0 if there is none."""
        return self.records[-1].at if self.records else 0.0


def by_run(sourced_records: Iterable[SourcedRecord]) -> list[RunHistory]:
    """Group records by run."""
    records_by_run: dict[tuple[str, str, bool], list[Record]] = defaultdict(list)
    for sourced in sourced_records:
        records_by_run[sourced.user, sourced.run, sourced.trusted].append(sourced.record)
    return [
        RunHistory(user, run, tuple(sorted(records, key=lambda record: record.at)), trusted)
        for (user, run, trusted), records in sorted(records_by_run.items())
    ]


# ── held nodes ───────────────────────────────────────────────────────────────────────────────────────────────────────
def node_intervals(history: RunHistory) -> dict[str, tuple[list[Span], int]]:
    """Return for each node the intervals (s) in which the run held it, and the number of GPUs.

    A new manager records all held nodes again. A node that it does not name was released without a record.
    """
    spans: dict[str, list[Span]] = defaultdict(list)
    gpus: dict[str, int] = defaultdict(int)
    now: dict[str, float] = {}
    carried: dict[str, float] = {}
    """Node → start (s) of holding it, for nodes of the previous manager that the new manager has not reported yet."""
    last = 0.0
    for record in history.records:
        if isinstance(record, RunStarted):
            carried, now = {**carried, **now}, {}
        elif isinstance(record, NodeAcquired):
            now.setdefault(record.node, carried.pop(record.node, record.at))
            gpus[record.node] = max(gpus[record.node], record.gpus)
        else:
            for node, since in carried.items():
                spans[node].append((since, last))
            carried.clear()
            if isinstance(record, NodeReleased) and (since_then := now.pop(record.node, None)) is not None:
                spans[record.node].append((since_then, record.at))
            elif isinstance(record, RunEnded):
                for node, since in now.items():
                    spans[node].append((since, record.at))
                now.clear()
        last = record.at
    for node, since in {**carried, **now}.items():
        spans[node].append((since, history.end))
    return {node: (merge_intervals(intervals), gpus[node]) for node, intervals in spans.items()}


# ── raised findings ──────────────────────────────────────────────────────────────────────────────────────────────────
def raised_findings(history: RunHistory) -> list[RaisedFinding]:
    """Return the findings against nodes themselves, each with its interval; injected findings are left out."""
    standing: dict[tuple[str, str, str], RaisedFinding] = {}
    counted: dict[tuple[str, str, str], int] = {}
    """Newest ``count`` of each finding under the current manager."""
    left: dict[str, float] = {}
    over: list[RaisedFinding] = []
    for record in history.records:
        if isinstance(record, NodeAcquired):
            left.pop(record.node, None)
        elif isinstance(record, NodeReleased):
            left[record.node] = record.at
        if not isinstance(record, FindingRecord) or record.incarnation or not record.node or record.injected:
            continue
        key = record.detector, record.node, record.component
        if record.verdict in (Verdict.WARN, Verdict.FAIL):
            raised = standing.get(key) or RaisedFinding(
                record.at, inf, history.user, history.run, replace(record, count=0), inf, history.trusted
            )
            before = raised.finding
            worse = record if before.verdict is not Verdict.FAIL or record.verdict is Verdict.FAIL else before
            more = record.count - counted.get(key, 0) if record.count > counted.get(key, 0) else record.count
            counted[key] = record.count
            standing[key] = replace(raised, finding=replace(worse, count=before.count + more))
        elif key in standing and record.node not in left:  # after a node is released, its state is unknown
            over.append(replace(standing.pop(key), until=record.at, observed_until=record.at))
            counted.pop(key)
    open_findings = [
        replace(raised, observed_until=left.get(raised.finding.node, history.end)) for raised in standing.values()
    ]
    return sorted(over + open_findings, key=lambda raised: raised.at)


# ── incidents ────────────────────────────────────────────────────────────────────────────────────────────────────────
def incidents(histories: list[RunHistory]) -> list[Incident]:
    """Return all failures as incidents, in the order of time.

    Failures of infrastructure on one node within 10 min are merged into one incident, whichever runs recorded them.
    """
    against: dict[str, list[RaisedFinding]] = defaultdict(list)
    for history in histories:
        for raised in raised_findings(history):
            if raised.critical and raised.finding.cause in HARDWARE_CAUSES:
                against[raised.finding.node].append(raised)
    single = [
        incident
        for history in histories
        for failed, cost in costs(history)
        if (incident := _attributed(history, failed, cost, against.get(failed.node, []))) is not None
    ]
    return _related(_merged(sorted(single, key=lambda incident: incident.at)))


def costs(history: RunHistory) -> list[tuple[Failed, float]]:
    """Return each failure with the GPU-hours that it cost.

    If a replica failed again before it worked, each failure is charged for the time until the next failure.
    """
    failures = [record for record in history.records if isinstance(record, Failed)]
    failures_of: dict[str, list[int]] = defaultdict(list)
    for i, failed in enumerate(failures):
        for replica in set(failed.stalled_replicas):
            failures_of[replica].append(i)
    cost = [0.0] * len(failures)
    for record in history.records:
        if not isinstance(record, RecoveryDone):
            continue
        indices = [i for i in failures_of.get(record.replica, ()) if record.since <= failures[i].at <= record.at]
        span = record.at - record.since
        starts = [record.since, *(failures[i].at for i in indices[1:]), record.at]
        for i, start, end in zip(indices, starts, starts[1:], strict=False):
            cost[i] += record.gpu_hours * ((end - start) / span if span > 0 else 1 / len(indices))
    return list(zip(failures, cost, strict=True))


def _attributed(history: RunHistory, failed: Failed, cost: float, against: list[RaisedFinding]) -> Incident | None:
    """Return the incident that a failure belongs to; None for a lost node without evidence against it.

    ``cost`` is the cost of the failure in GPU-hours. ``against`` are the findings against the node of the failure;
    findings close to the failure in time decide who was at fault.
    """
    near = [
        raised
        for raised in against
        if raised.at <= failed.at + EVIDENCE_AFTER_S and raised.observed_until >= failed.at - EVIDENCE_BEFORE_S
    ]
    witnesses: tuple[str, ...] = ()
    trusted = False
    if near:
        proof = max(near, key=lambda raised: (raised.finding.proof, -abs(raised.at - failed.at)))
        owner, cause, detector = INFRA, proof.finding.cause.value, proof.finding.detector
        remedy = proof.finding.remedy.value
        if any((raised.user, raised.trusted) == (history.user, history.trusted) for raised in near):
            witnesses, trusted = (history.user,), history.trusted
    elif failed.node_lost:
        witnesses, trusted = (history.user,), history.trusted
        owner, cause, detector, remedy = INFRA, Cause.NODE.value, failed.detector or "cluster", failed.remedy
    elif not failed.incarnation:
        return None
    else:
        owner = USER if failed.cause == Cause.USER.value else SOFTWARE
        cause = failed.cause if failed.cause not in HARDWARE_CAUSES else Cause.PROCESS.value
        detector, remedy = failed.detector, failed.remedy
    return Incident(
        failed.at,
        failed.node,
        owner,
        cause,
        detector,
        remedy,
        (history.run,),
        (history.user,),
        (failed.incarnation,) if failed.incarnation else (),
        cost,
        failed.injected,
        failed.node_lost or not failed.incarnation,
        evidence=failed.evidence,
        witnesses=witnesses,
        trusted=trusted,
    )


def _merged(single: list[Incident]) -> list[Incident]:
    merged: list[Incident] = []
    newest: dict[tuple[str, bool], int] = {}
    """(node, whether the incident was injected) → index in ``merged`` of its newest incident of infrastructure."""
    for incident in single:
        index = newest.get((incident.node, incident.injected)) if incident.owner == INFRA else None
        if index is not None and incident.at - merged[index].at <= SAME_INCIDENT_S:
            merged[index] = _both(merged[index], incident)
            continue
        if incident.owner == INFRA:
            newest[incident.node, incident.injected] = len(merged)
        merged.append(incident)
    return merged


def _both(first: Incident, then: Incident) -> Incident:
    def union_of(name: str) -> tuple[str, ...]:
        return tuple(dict.fromkeys((*getattr(first, name), *getattr(then, name))))

    return replace(
        first,
        runs=union_of("runs"),
        users=union_of("users"),
        incarnations=union_of("incarnations"),
        node_lost=first.node_lost or then.node_lost,
        gpu_hours=first.gpu_hours + then.gpu_hours,
        evidence=union_of("evidence")[:5],
        witnesses=union_of("witnesses"),
        trusted=first.trusted or then.trusted,
    )


def _related(incidents_by_time: list[Incident]) -> list[Incident]:
    infra = [incident for incident in incidents_by_time if incident.owner == INFRA]
    times = [incident.at for incident in infra]
    related = []
    for incident in incidents_by_time:
        if incident.owner == INFRA:
            first = bisect_left(times, incident.at - SAME_INCIDENT_S)
            last = bisect_left(times, incident.at + SAME_INCIDENT_S + 1e-6)
            near = {
                other.node
                for other in infra[first:last]
                if other.cause == incident.cause and other.node != incident.node
            }
            incident = replace(incident, related_nodes=tuple(sorted(near)))
        related.append(incident)
    return related


def actions_taken(histories: list[RunHistory]) -> list[tuple[RunHistory, ActionTaken]]:
    """Return the actions that runs took against nodes, oldest first."""
    found = [
        (history, record) for history in histories for record in history.records if isinstance(record, ActionTaken)
    ]
    return sorted(found, key=lambda pair: pair[1].at)
