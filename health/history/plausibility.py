"""Leaves out records that cannot be true, or are too many, before anything is concluded. Pure; times in s since 1970.

Anybody can write anything into their own history. These rules only keep out what contradicts the clock, the run itself,
or the hardware; that records are plausible does not make them true (:mod:`rrl.health.report.corroboration`).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from enum import Enum

from ...core.types import Verdict
from .incidents import Chapter, chapters, held
from .rates import Span, length, union
from .records import Acted, Began, Failed, Found, Held, Mended, Record, Told

CLOCK_SKEW_S = 300.0
"""s by which the clocks of two machines of a site may differ: Kerberos and munge (TTL) refuse more"""
EARLIEST_S = 1_577_836_800.0
"""s: 2020-01-01, before there was any rrl"""
MAX_GPUS_PER_NODE = 16
"""GPUs of a node of which Slurm does not tell how many it has: the largest that are sold have 16 (DGX-2)"""
MAX_OVERLAP_S, MAX_OVERLAP_SHARE = 600.0, 0.05
"""s, and share of the time, in which claims of one user on the same GPUs may overlap: a run notices late that it has
lost a node, and the next one may have it by then"""
ROUNDING = 1.01
"""factor by which GPU-hours may be above what the nodes could give"""


MAX_USER_RECORDS_OF_KIND: dict[type[Record], int] = {
    Found: 5000, Failed: 2000, Mended: 2000, Acted: 2000, Held: 20_000,
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


def plausible(told: Sequence[Told], now: float, gpus_of: Mapping[str, int]) -> tuple[list[Told], tuple[str, ...]]:
    """Records that can be true, and a line for each user and reason with the number of those that are left out.

    ``gpus_of``: GPUs of each node that Slurm knows; of the others, :data:`MAX_GPUS_PER_NODE` are possible."""
    began = _began(told)
    reasons = [_against_time(one.record, began.get((one.user, one.run)), now) for one in told]
    left_out = Counter((one.user, reason) for one, reason in zip(told, reasons, strict=True) if reason is not None)
    in_time, too_many = _newest([one for one, reason in zip(told, reasons, strict=True) if reason is None])
    left_out.update((one.user, Implausible.TOO_MANY) for one in too_many)
    runs = chapters(in_time)
    overclaimed = _overclaimed(runs, gpus_of)
    gpus = {(one.user, one.run): sum(gpus_of.get(node, MAX_GPUS_PER_NODE) for node in held(one)) for one in runs}
    kept = []
    for one in in_time:
        if (one.user, getattr(one.record, "node", "")) in overclaimed:
            left_out[one.user, Implausible.OVERCLAIMED] += 1
        elif isinstance(one.record, Mended) and not _affordable(one.record, gpus[one.user, one.run]):
            left_out[one.user, Implausible.GPU_HOURS] += 1
        else:
            kept.append(one)
    lines = [f"{user}: {count} {_records(count)} {reason.value}" for (user, reason), count in left_out.items()]
    return kept, tuple(sorted(lines))


def _newest(told: Sequence[Told]) -> tuple[list[Told], list[Told]]:
    """Those within MAX_USER_RECORDS_OF_KIND, in the given order, and those beyond it."""
    counted: Counter[tuple[str, type[Record]]] = Counter()
    verdicts: dict[tuple[str, str, str, str, str, str], Verdict] = {}
    beyond: set[int] = set()
    for at in sorted(range(len(told)), key=lambda at: told[at].record.at, reverse=True):
        one = told[at]
        kind = type(one.record)
        if (most := MAX_USER_RECORDS_OF_KIND.get(kind)) is None:
            continue
        if isinstance(found := one.record, Found):
            key = one.user, one.run, found.node, found.detector, found.part, found.life
            if verdicts.get(key) is found.verdict:
                continue
            verdicts[key] = found.verdict
        counted[one.user, kind] += 1
        if counted[one.user, kind] > most:
            beyond.add(at)
    return [one for at, one in enumerate(told) if at not in beyond], [told[at] for at in sorted(beyond)]


def _records(count: int) -> str:
    return "record" if count == 1 else "records"


def _began(told: Sequence[Told]) -> dict[tuple[str, str], float]:
    """When each run began, by its first manager."""
    began: dict[tuple[str, str], float] = {}
    for one in told:
        if isinstance(one.record, Began):
            key = one.user, one.run
            began[key] = min(one.record.at, began.get(key, one.record.at))
    return began


def _against_time(record: Record, began: float | None, now: float) -> Implausible | None:
    evidence = getattr(record, "evidence", ())
    latest = max([record.at, *(said.at for said in evidence if not isinstance(said, str))])
    if latest > now + CLOCK_SKEW_S:
        return Implausible.FUTURE
    if record.at < EARLIEST_S:
        return Implausible.TOO_OLD
    if began is not None and record.at < began - CLOCK_SKEW_S:
        return Implausible.BEFORE_BEGIN
    if getattr(record, "since", 0.0) > record.at + CLOCK_SKEW_S:
        return Implausible.BACKWARDS
    return None


def _overclaimed(runs: Collection[Chapter], gpus_of: Mapping[str, int]) -> set[tuple[str, str]]:
    """Users and nodes where all runs of the user together claim more GPUs at once than the node has."""
    claims: dict[tuple[str, str], list[tuple[Span, int]]] = defaultdict(list)
    for chapter in runs:
        for node, (spans, gpus) in held(chapter).items():
            claims[chapter.user, node] += [(span, gpus) for span in spans]
    return {key for key, those in claims.items() if _overlap(those, gpus_of.get(key[1], MAX_GPUS_PER_NODE))}


def _overlap(claims: Sequence[tuple[Span, int]], gpus: int) -> bool:
    """More than ``gpus`` are claimed at once, for longer than runs that follow each other can explain."""
    changes = sorted(change for (start, end), count in claims for change in ((start, count), (end, -count)))
    claimed, since, excess = 0, 0.0, 0.0
    for at, change in changes:
        excess += at - since if claimed > gpus else 0.0
        claimed, since = claimed + change, at
    return excess > max(MAX_OVERLAP_S, MAX_OVERLAP_SHARE * length(union(span for span, _ in claims)))


def _affordable(mended: Mended, gpus: int) -> bool:
    """``gpus`` could give so many GPU-hours from when the replica stood still until it worked again. ``gpus``: of all
    nodes that the run ever held, for a lost node is often waited for."""
    return mended.gpu_hours * 3600.0 <= gpus * (mended.at - mended.since) * ROUNDING + 1.0
