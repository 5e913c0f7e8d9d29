"""Leaves out records that cannot be true, or are too many, before anything is concluded. Pure; times in s since 1970.

Anybody can write anything into their own history. These rules only keep out what contradicts the clock, the run itself,
or the hardware; that records are plausible does not make them true (:mod:`rrl.health.report.corroboration`).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from enum import Enum

from ...core.types import Verdict
from .incidents import RunHistory, by_run, node_intervals
from .rates import Span, merge_intervals, total_length
from .records import ActionTaken, Failed, FindingRecord, NodeAcquired, Record, RecoveryDone, RunStarted, SourcedRecord

CLOCK_SKEW_S = 300.0
"""s by which the clocks of two machines of a site may differ: Kerberos and munge (TTL) refuse more"""
EARLIEST_TIME_S = 1_577_836_800.0
"""s: 2020-01-01, before there was any rrl"""
MAX_GPUS_PER_NODE = 16
"""GPUs of a node of which Slurm does not tell how many it has: the largest that are sold have 16 (DGX-2)"""
MAX_OVERLAP_S, MAX_OVERLAP_SHARE = 600.0, 0.05
"""s, and share of the time, in which claims of one user on the same GPUs may overlap: a run notices late that it has
lost a node, and the next one may have it by then"""
ROUNDING_FACTOR = 1.01
"""factor by which GPU-hours may be above what the nodes could give"""


MAX_USER_RECORDS_OF_KIND: dict[type[Record], int] = {
    FindingRecord: 5000, Failed: 2000, RecoveryDone: 2000, ActionTaken: 2000, NodeAcquired: 20_000,
}  # fmt: skip
"""records of a user from which a report is made, the newest; findings that only say the same again are not counted. A
report compares failures with findings, so that its time grows with the product: a user with that many of each costs it
5.5 s (measured)"""


class Implausible(Enum):
    """Why a record is left out; the value is the reason in words."""

    FUTURE = "in the future"
    TOO_OLD = "before 2020"
    BEFORE_BEGIN = "before their run began"
    BACKWARDS = "with an end before its beginning"
    GPU_HOURS = "with more GPU-hours than the run's nodes could give"
    OVERCLAIMED = "about nodes of which the user claims more GPUs at once than there are"
    TOO_MANY = "of more than are read of one user: only the newest count"


def plausible(
    records: Sequence[SourcedRecord], now: float, gpus_of: Mapping[str, int]
) -> tuple[list[SourcedRecord], tuple[str, ...]]:
    """Records that can be true, and a line for each user and reason with the number of those that are left out.

    ``gpus_of``: GPUs of each node that Slurm knows; of the others, :data:`MAX_GPUS_PER_NODE` are possible."""
    began = _run_starts(records)
    reasons = [_time_violation(one.record, began.get((one.user, one.run)), now) for one in records]
    left_out = Counter((one.user, reason) for one, reason in zip(records, reasons, strict=True) if reason is not None)
    in_time, too_many = _newest([one for one, reason in zip(records, reasons, strict=True) if reason is None])
    left_out.update((one.user, Implausible.TOO_MANY) for one in too_many)
    runs = by_run(in_time)
    overclaimed = _overclaimed(runs, gpus_of)
    gpus = {
        (one.user, one.run): sum(gpus_of.get(node, MAX_GPUS_PER_NODE) for node in node_intervals(one)) for one in runs
    }
    plausible_records = []
    for one in in_time:
        if (one.user, getattr(one.record, "node", "")) in overclaimed:
            left_out[one.user, Implausible.OVERCLAIMED] += 1
        elif isinstance(one.record, RecoveryDone) and not _affordable(one.record, gpus[one.user, one.run]):
            left_out[one.user, Implausible.GPU_HOURS] += 1
        else:
            plausible_records.append(one)
    lines = [f"{user}: {count} {_records(count)} {reason.value}" for (user, reason), count in left_out.items()]
    return plausible_records, tuple(sorted(lines))


def _newest(records: Sequence[SourcedRecord]) -> tuple[list[SourcedRecord], list[SourcedRecord]]:
    """Those within MAX_USER_RECORDS_OF_KIND, in the given order, and those beyond it."""
    counted: Counter[tuple[str, type[Record]]] = Counter()
    verdicts: dict[tuple[str, str, str, str, str, str], Verdict] = {}
    beyond: set[int] = set()
    for at in sorted(range(len(records)), key=lambda at: records[at].record.at, reverse=True):
        one = records[at]
        kind = type(one.record)
        if (limit := MAX_USER_RECORDS_OF_KIND.get(kind)) is None:
            continue
        if isinstance(found := one.record, FindingRecord):
            key = one.user, one.run, found.node, found.detector, found.component, found.incarnation
            if verdicts.get(key) is found.verdict:
                continue
            verdicts[key] = found.verdict
        counted[one.user, kind] += 1
        if counted[one.user, kind] > limit:
            beyond.add(at)
    return [one for at, one in enumerate(records) if at not in beyond], [records[at] for at in sorted(beyond)]


def _records(count: int) -> str:
    return "record" if count == 1 else "records"


def _run_starts(records: Sequence[SourcedRecord]) -> dict[tuple[str, str], float]:
    """When each run began, by its first manager."""
    began: dict[tuple[str, str], float] = {}
    for one in records:
        if isinstance(one.record, RunStarted):
            key = one.user, one.run
            began[key] = min(one.record.at, began.get(key, one.record.at))
    return began


def _time_violation(record: Record, began: float | None, now: float) -> Implausible | None:
    evidence = getattr(record, "evidence", ())
    latest = max([record.at, *(evidence_line.at for evidence_line in evidence if not isinstance(evidence_line, str))])
    if latest > now + CLOCK_SKEW_S:
        return Implausible.FUTURE
    if record.at < EARLIEST_TIME_S:
        return Implausible.TOO_OLD
    if began is not None and record.at < began - CLOCK_SKEW_S:
        return Implausible.BEFORE_BEGIN
    if getattr(record, "since", 0.0) > record.at + CLOCK_SKEW_S:
        return Implausible.BACKWARDS
    return None


def _overclaimed(runs: Collection[RunHistory], gpus_of: Mapping[str, int]) -> set[tuple[str, str]]:
    """Users and nodes where all runs of the user together claim more GPUs at once than the node has."""
    claims: dict[tuple[str, str], list[tuple[Span, int]]] = defaultdict(list)
    for history in runs:
        for node, (spans, gpus) in node_intervals(history).items():
            claims[history.user, node] += [(span, gpus) for span in spans]
    return {
        key
        for key, interval_claims in claims.items()
        if _overlap(interval_claims, gpus_of.get(key[1], MAX_GPUS_PER_NODE))
    }


def _overlap(claims: Sequence[tuple[Span, int]], gpus: int) -> bool:
    """More than ``gpus`` are claimed at once, for longer than runs that follow each other can explain."""
    changes = sorted(change for (start, end), count in claims for change in ((start, count), (end, -count)))
    claimed, since, excess = 0, 0.0, 0.0
    for at, change in changes:
        excess += at - since if claimed > gpus else 0.0
        claimed, since = claimed + change, at
    return excess > max(MAX_OVERLAP_S, MAX_OVERLAP_SHARE * total_length(merge_intervals(span for span, _ in claims)))


def _affordable(recovery: RecoveryDone, gpus: int) -> bool:
    """``gpus`` could give so many GPU-hours from when the replica stood still until it worked again. ``gpus``: of all
    nodes that the run ever held, for a lost node is often waited for."""
    return recovery.gpu_hours * 3600.0 <= gpus * (recovery.at - recovery.since) * ROUNDING_FACTOR + 1.0
