"""From the records of all runs to incidents: what failed where, whose fault it was, and what it cost. Pure; times in s.

Whose fault (Meta, docs/sources.md): a failure is *infrastructure's* where the cluster gave the node up, or where
hardware evidence against its node stood within the 10 min before it or the 5 min after. Anything else is the user's or
the software's, however it looks: an NCCL timeout is a symptom.
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
    NodeReleased,
    Record,
    RecoveryDone,
    RunEnded,
    RunStarted,
    SourcedRecord,
)

EVIDENCE_BEFORE_S, EVIDENCE_AFTER_S = 600.0, 300.0
"""s before and after a failure in which evidence counts (Meta: the last 10 min of a job, or 5 min after)"""
SAME_INCIDENT_S = 600.0
"""s within which failures of one node are one incident, and those of several are related (gcm, NVSentinel)"""
HARDWARE_CAUSES = (Cause.NODE, Cause.GPU, Cause.FABRIC, Cause.STORAGE)

INFRA, SOFTWARE, USER = "infra", "software", "user"


class Incident(Struct, frozen=True):
    at: float
    node: str
    owner: str
    """``infra``, ``software`` or ``user``"""
    cause: str
    """of infrastructure: what the hardware evidence names"""
    detector: str
    remedy: str
    runs: tuple[str, ...]
    users: tuple[str, ...]
    incarnations: tuple[str, ...]
    """lives that were given up"""
    gpu_hours: float
    injected: bool = False
    node_lost: bool = False
    """the whole node"""
    related_nodes: tuple[str, ...] = ()
    """other nodes with the same cause within 10 min: a hint at fabric or storage"""
    evidence: tuple[str, ...] = ()
    witnesses: tuple[str, ...] = ()
    """users whose records alone say that it was infrastructure's: of the failure and of hardware evidence, or that the
    node was lost. A failure of one user beside another one's evidence is the word of neither alone"""
    trusted: bool = False
    """one of them is root"""


class RaisedFinding(Struct, frozen=True):
    """A finding against a node from when it was raised until it was over (inf: it never was)."""

    at: float
    until: float
    user: str
    run: str
    finding: FindingRecord
    """as it was said last while it stood"""
    observed_until: float
    """until when its run could have taken it back: it had the node, and spoke"""
    trusted: bool = False
    """the record is root's"""

    @property
    def critical(self) -> bool:
        """It is evidence against the node. What is proved and held back nevertheless is not: most nodes have it, and
        the driver or a rule is wrong."""
        observed = Flag.OBSERVED in self.finding.flags
        held_back = Flag.HELD_BACK in self.finding.flags and not self.finding.proof
        return self.finding.verdict is Verdict.FAIL or (
            self.finding.verdict is Verdict.WARN and (observed or held_back)
        )


class RunHistory(Struct, frozen=True):
    """One run's records in order."""

    user: str
    run: str
    records: tuple[Record, ...]
    trusted: bool = False
    """the run is root's"""

    @property
    def end(self) -> float:
        """Its last sign of life."""
        return self.records[-1].at if self.records else 0.0


def by_run(sourced_records: Iterable[SourcedRecord]) -> list[RunHistory]:
    records_by_run: dict[tuple[str, str, bool], list[Record]] = defaultdict(list)
    for one in sourced_records:
        records_by_run[one.user, one.run, one.trusted].append(one.record)
    return [
        RunHistory(user, run, tuple(sorted(records, key=lambda record: record.at)), trusted)
        for (user, run, trusted), records in sorted(records_by_run.items())
    ]


# ── nodes held ───────────────────────────────────────────────────────────────────────────────────────────────────────
def node_intervals(history: RunHistory) -> dict[str, tuple[list[Span], int]]:
    """Spans in which a run had each node, and GPUs there. A manager that takes over tells anew what is held; what it
    does not tell was given back unseen."""
    spans: dict[str, list[Span]] = defaultdict(list)
    gpus: dict[str, int] = defaultdict(int)
    now: dict[str, float] = {}
    carried: dict[str, float] = {}
    """held under the manager before, and not told again yet"""
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


# ── findings that stood ──────────────────────────────────────────────────────────────────────────────────────────────
def raised_findings(history: RunHistory) -> list[RaisedFinding]:
    """What was found against nodes themselves, each from when to when; not what was injected."""
    standing: dict[tuple[str, str, str], RaisedFinding] = {}
    counted: dict[tuple[str, str, str], int] = {}
    """as the manager of the moment counts"""
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
            one = standing.get(key) or RaisedFinding(
                record.at, inf, history.user, history.run, replace(record, count=0), inf, history.trusted
            )
            before = one.finding
            worse = record if before.verdict is not Verdict.FAIL or record.verdict is Verdict.FAIL else before
            more = record.count - counted.get(key, 0) if record.count > counted.get(key, 0) else record.count
            counted[key] = record.count
            standing[key] = replace(one, finding=replace(worse, count=before.count + more))
        elif key in standing and record.node not in left:  # of a node that was left nobody knows
            over.append(replace(standing.pop(key), until=record.at, observed_until=record.at))
            counted.pop(key)
    stands = [replace(one, observed_until=left.get(one.finding.node, history.end)) for one in standing.values()]
    return sorted(over + stands, key=lambda one: one.at)


# ── incidents ────────────────────────────────────────────────────────────────────────────────────────────────────────
def incidents(histories: list[RunHistory]) -> list[Incident]:
    """All failures, by time: those of infrastructure once for each node and 10 min, whoever met them."""
    against: dict[str, list[RaisedFinding]] = defaultdict(list)
    for history in histories:
        for one in raised_findings(history):
            if one.critical and one.finding.cause in HARDWARE_CAUSES:
                against[one.finding.node].append(one)
    single = [
        incident for history in histories for failed, cost in costs(history)
        if (incident := _attributed(history, failed, cost, against.get(failed.node, []))) is not None
    ]  # fmt: skip
    return _related(_merged(sorted(single, key=lambda one: one.at)))


def costs(history: RunHistory) -> list[tuple[Failed, float]]:
    """Each failure and the GPU-hours that it cost. Where a replica failed again before it worked, each failure bears
    the time until the next."""
    failures = [record for record in history.records if isinstance(record, Failed)]
    failures_of: dict[str, list[int]] = defaultdict(list)
    for i, one in enumerate(failures):
        for replica in set(one.stalled_replicas):
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
    """None: a node that was left without any evidence against itself; who failed there is told by itself."""
    near = [
        one
        for one in against
        if one.at <= failed.at + EVIDENCE_AFTER_S and one.observed_until >= failed.at - EVIDENCE_BEFORE_S
    ]
    witnesses: tuple[str, ...] = ()
    trusted = False
    if near:
        proof = max(near, key=lambda one: (one.finding.proof, -abs(one.at - failed.at)))
        owner, cause, detector = INFRA, proof.finding.cause.value, proof.finding.detector
        remedy = proof.finding.remedy.value
        if any((one.user, one.trusted) == (history.user, history.trusted) for one in near):
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
        failed.at, failed.node, owner, cause, detector, remedy, (history.run,), (history.user,),
        (failed.incarnation,) if failed.incarnation else (), cost, failed.injected, failed.node_lost or not failed.incarnation,
        evidence=failed.evidence, witnesses=witnesses, trusted=trusted,
    )  # fmt: skip


def _merged(single: list[Incident]) -> list[Incident]:
    merged: list[Incident] = []
    newest: dict[tuple[str, bool], int] = {}
    """index of each node's newest incident of infrastructure"""
    for one in single:
        at = newest.get((one.node, one.injected)) if one.owner == INFRA else None
        if at is not None and one.at - merged[at].at <= SAME_INCIDENT_S:
            merged[at] = _both(merged[at], one)
            continue
        if one.owner == INFRA:
            newest[one.node, one.injected] = len(merged)
        merged.append(one)
    return merged


def _both(first: Incident, then: Incident) -> Incident:
    def all_of(name: str) -> tuple[str, ...]:
        return tuple(dict.fromkeys((*getattr(first, name), *getattr(then, name))))

    return replace(
        first, runs=all_of("runs"), users=all_of("users"), incarnations=all_of("incarnations"), node_lost=first.node_lost or then.node_lost,
        gpu_hours=first.gpu_hours + then.gpu_hours, evidence=all_of("evidence")[:5], witnesses=all_of("witnesses"),
        trusted=first.trusted or then.trusted,
    )  # fmt: skip


def _related(incidents_by_time: list[Incident]) -> list[Incident]:
    infra = [one for one in incidents_by_time if one.owner == INFRA]
    times = [one.at for one in infra]
    related = []
    for one in incidents_by_time:
        if one.owner == INFRA:
            first = bisect_left(times, one.at - SAME_INCIDENT_S)
            last = bisect_left(times, one.at + SAME_INCIDENT_S + 1e-6)
            near = {o.node for o in infra[first:last] if o.cause == one.cause and o.node != one.node}
            one = replace(one, related_nodes=tuple(sorted(near)))
        related.append(one)
    return related


def actions_taken(histories: list[RunHistory]) -> list[tuple[RunHistory, ActionTaken]]:
    """What runs did about nodes, by time."""
    found = [(chapter, one) for chapter in histories for one in chapter.records if isinstance(one, ActionTaken)]
    return sorted(found, key=lambda pair: pair[1].at)
