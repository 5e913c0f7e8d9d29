"""Remove implausible or excess records before a report uses them.

Users can write anything into their own history. These rules only remove records that contradict the clock, the run
itself or the hardware. A plausible record is not necessarily true (:mod:`rrl.health.report.corroboration`). The module
is pure. Times are in s since 1970.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from enum import Enum

from ...core.text import plural
from ...core.types import Verdict
from .incidents import RunHistory, by_run, node_intervals
from .rates import Span, merge_intervals, total_length
from .records import ActionTaken, Failed, FindingRecord, NodeAcquired, Record, RecoveryDone, RunStarted, SourcedRecord

CLOCK_SKEW_S = 300.0
"""Seconds by which the clocks of two machines of a site may differ: larger differences already break Kerberos and munge
(TTL)."""
EARLIEST_TIME_S = 1_577_836_800.0
"""2020-01-01, before rrl existed (s since 1970)."""
MAX_GPUS_PER_NODE = 16
"""If Slurm does not report a node's number of GPUs, the node is assumed to have at most this number. The largest
available nodes have 16 (DGX-2)."""
MAX_OVERLAP_S, MAX_OVERLAP_SHARE = 600.0, 0.05
"""The claims of one user may exceed the GPUs of a node for this number of seconds, or for this share of the time in
which the user claims the node, whichever is longer. Claims of successive runs overlap because a run notices the loss of
a node late, when the next run may already hold the node."""
ROUNDING_FACTOR = 1.01
"""Factor by which GPU-hours may exceed what the nodes could provide."""
MAX_USER_RECORDS_OF_KIND: dict[type[Record], int] = {
    FindingRecord: 5000,
    Failed: 2000,
    RecoveryDone: 2000,
    ActionTaken: 2000,
    NodeAcquired: 20_000,
}
"""Maximum number of records of each kind that a report uses from one user; the newest records are used. Repeated
findings with the same verdict do not count. The duration of a report grows with the product of the numbers of failures
and findings: a user who reaches these limits adds 5.5 s (measured)."""


class Implausible(Enum):
    """Reason for which a record is left out; the value is the text."""

    FUTURE = "in the future"
    TOO_OLD = "before 2020"
    BEFORE_BEGIN = "before their run began"
    BACKWARDS = "that end before they begin"
    GPU_HOURS = "with more GPU-hours than the run's nodes could give"
    OVERCLAIMED = "about nodes on which the user's runs claim more GPUs at the same time than the nodes have"
    TOO_MANY = "beyond the limit for one user: only the newest count"


def plausible(
    records: Sequence[SourcedRecord], now: float, gpus_of: Mapping[str, int]
) -> tuple[list[SourcedRecord], tuple[str, ...]]:
    """Return the plausible records, and for each user and reason a line with the number of records left out.

    ``gpus_of`` is the number of GPUs of each node that Slurm knows. Other nodes have at most :data:`MAX_GPUS_PER_NODE`.
    """
    began = _run_starts(records)
    reasons = [_time_violation(sourced.record, began.get((sourced.user, sourced.run)), now) for sourced in records]
    left_out = Counter(
        (sourced.user, reason) for sourced, reason in zip(records, reasons, strict=True) if reason is not None
    )
    in_time, too_many = _newest([sourced for sourced, reason in zip(records, reasons, strict=True) if reason is None])
    left_out.update((sourced.user, Implausible.TOO_MANY) for sourced in too_many)
    runs = by_run(in_time)
    overclaimed = _overclaimed(runs, gpus_of)
    gpus = {
        (history.user, history.run): sum(gpus_of.get(node, MAX_GPUS_PER_NODE) for node in node_intervals(history))
        for history in runs
    }
    plausible_records = []
    for sourced in in_time:
        user, record = sourced.user, sourced.record
        if (user, getattr(record, "node", "")) in overclaimed:
            left_out[user, Implausible.OVERCLAIMED] += 1
        elif isinstance(record, RecoveryDone) and not _affordable(record, gpus[user, sourced.run]):
            left_out[user, Implausible.GPU_HOURS] += 1
        else:
            plausible_records.append(sourced)
    lines = [f"{user}: {plural(count, 'record')} {reason.value}" for (user, reason), count in left_out.items()]
    return plausible_records, tuple(sorted(lines))


def _newest(records: Sequence[SourcedRecord]) -> tuple[list[SourcedRecord], list[SourcedRecord]]:
    """Return (kept, left out): the records within MAX_USER_RECORDS_OF_KIND, and the records beyond it.

    The kept records are in the given order.
    """
    counted: Counter[tuple[str, type[Record]]] = Counter()
    verdicts: dict[tuple[str, str, str, str, str, str], Verdict] = {}
    beyond: set[int] = set()
    for index in sorted(range(len(records)), key=lambda index: records[index].record.at, reverse=True):
        sourced = records[index]
        kind = type(sourced.record)
        if (limit := MAX_USER_RECORDS_OF_KIND.get(kind)) is None:
            continue
        if isinstance(finding := sourced.record, FindingRecord):
            key = sourced.user, sourced.run, finding.node, finding.detector, finding.component, finding.incarnation
            if verdicts.get(key) is finding.verdict:
                continue
            verdicts[key] = finding.verdict
        counted[sourced.user, kind] += 1
        if counted[sourced.user, kind] > limit:
            beyond.add(index)
    within = [sourced for index, sourced in enumerate(records) if index not in beyond]
    return within, [records[index] for index in sorted(beyond)]


def _run_starts(records: Sequence[SourcedRecord]) -> dict[tuple[str, str], float]:
    """Return the start time (s) of each (user, run): the time at which the run's first manager started."""
    began: dict[tuple[str, str], float] = {}
    for sourced in records:
        if isinstance(sourced.record, RunStarted):
            key = sourced.user, sourced.run
            began[key] = min(sourced.record.at, began.get(key, sourced.record.at))
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
    """Return (user, node) pairs for which the user's runs claim more GPUs at the same time than the node has."""
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
    """Return whether the claims exceed ``gpus`` GPUs for longer than the overlap of successive runs can last.

    A claim is an interval with a number of GPUs. ``MAX_OVERLAP_S`` and ``MAX_OVERLAP_SHARE`` limit the overlap.
    """
    changes = sorted(change for (start, end), count in claims for change in ((start, count), (end, -count)))
    claimed, since, excess = 0, 0.0, 0.0
    for at, change in changes:
        excess += at - since if claimed > gpus else 0.0
        claimed, since = claimed + change, at
    return excess > max(MAX_OVERLAP_S, MAX_OVERLAP_SHARE * total_length(merge_intervals(span for span, _ in claims)))


def _affordable(recovery: RecoveryDone, gpus: int) -> bool:
    """Return whether ``gpus`` GPUs could provide the GPU-hours of ``recovery`` between the failure and the recovery.

    ``gpus`` is the number of GPUs of all nodes that the run ever held. Nodes that the run no longer holds count too,
    because a run often waits for a lost node.
    """
    return recovery.gpu_hours * 3600.0 <= gpus * (recovery.at - recovery.since) * ROUNDING_FACTOR + 1.0
