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
from .rates import Span, union
from .records import Acted, Began, Failed, Found, Held, Left, Mended, Over, Record, Told

BEFORE, AFTER = 600.0, 300.0
"""s before and after a failure in which evidence counts (Meta: the last 10 min of a job, or 5 min after)"""
TOGETHER = 600.0
"""s within which failures of one node are one incident, and those of several are related (gcm, NVSentinel)"""
HARDWARE = (Cause.NODE, Cause.GPU, Cause.FABRIC, Cause.STORAGE)

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
    who: tuple[str, ...]
    """lives that were given up"""
    gpu_hours: float
    injected: bool = False
    lost: bool = False
    """the whole node"""
    also: tuple[str, ...] = ()
    """other nodes with the same cause within 10 min: a hint at fabric or storage"""
    evidence: tuple[str, ...] = ()
    witnesses: tuple[str, ...] = ()
    """users whose records alone say that it was infrastructure's: of the failure and of hardware evidence, or that the
    node was lost. A failure of one user beside another one's evidence is the word of neither alone"""
    trusted: bool = False
    """one of them is root"""


class Raised(Struct, frozen=True):
    """A finding against a node from when it was raised until it was over (inf: it never was)."""

    at: float
    until: float
    user: str
    run: str
    found: Found
    """as it was said last while it stood"""
    seen: float
    """until when its run could have taken it back: it had the node, and spoke"""
    trusted: bool = False
    """the record is root's"""

    @property
    def critical(self) -> bool:
        """It is evidence against the node. What is proved and held back nevertheless is not: most nodes have it, and
        the driver or a rule is wrong."""
        observed = Flag.OBSERVED in self.found.flags
        held_back = Flag.HELD_BACK in self.found.flags and not self.found.proof
        return self.found.verdict is Verdict.FAIL or (self.found.verdict is Verdict.WARN and (observed or held_back))


class Chapter(Struct, frozen=True):
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


def chapters(told: Iterable[Told]) -> list[Chapter]:
    by_run: dict[tuple[str, str, bool], list[Record]] = defaultdict(list)
    for one in told:
        by_run[one.user, one.run, one.trusted].append(one.record)
    return [
        Chapter(user, run, tuple(sorted(records, key=lambda record: record.at)), trusted)
        for (user, run, trusted), records in sorted(by_run.items())
    ]


# ── nodes held ───────────────────────────────────────────────────────────────────────────────────────────────────────
def held(chapter: Chapter) -> dict[str, tuple[list[Span], int]]:
    """Spans in which a run had each node, and GPUs there. A manager that takes over tells anew what is held; what it
    does not tell was given back unseen."""
    spans: dict[str, list[Span]] = defaultdict(list)
    gpus: dict[str, int] = defaultdict(int)
    now: dict[str, float] = {}
    carried: dict[str, float] = {}
    """held under the manager before, and not told again yet"""
    last = 0.0
    for record in chapter.records:
        if isinstance(record, Began):
            carried, now = {**carried, **now}, {}
        elif isinstance(record, Held):
            now.setdefault(record.node, carried.pop(record.node, record.at))
            gpus[record.node] = max(gpus[record.node], record.gpus)
        else:
            for node, since in carried.items():
                spans[node].append((since, last))
            carried.clear()
            if isinstance(record, Left) and (since_then := now.pop(record.node, None)) is not None:
                spans[record.node].append((since_then, record.at))
            elif isinstance(record, Over):
                for node, since in now.items():
                    spans[node].append((since, record.at))
                now.clear()
        last = record.at
    for node, since in {**carried, **now}.items():
        spans[node].append((since, chapter.end))
    return {node: (union(those), gpus[node]) for node, those in spans.items()}


# ── findings that stood ──────────────────────────────────────────────────────────────────────────────────────────────
def raised(chapter: Chapter) -> list[Raised]:
    """What was found against nodes themselves, each from when to when; not what was injected."""
    standing: dict[tuple[str, str, str], Raised] = {}
    counted: dict[tuple[str, str, str], int] = {}
    """as the manager of the moment counts"""
    left: dict[str, float] = {}
    over: list[Raised] = []
    for record in chapter.records:
        if isinstance(record, Held):
            left.pop(record.node, None)
        elif isinstance(record, Left):
            left[record.node] = record.at
        if not isinstance(record, Found) or record.life or not record.node or record.injected:
            continue
        key = record.detector, record.node, record.part
        if record.verdict in (Verdict.WARN, Verdict.FAIL):
            one = standing.get(key) or Raised(
                record.at, inf, chapter.user, chapter.run, replace(record, count=0), inf, chapter.trusted
            )
            before = one.found
            worse = record if before.verdict is not Verdict.FAIL or record.verdict is Verdict.FAIL else before
            more = record.count - counted.get(key, 0) if record.count > counted.get(key, 0) else record.count
            counted[key] = record.count
            standing[key] = replace(one, found=replace(worse, count=before.count + more))
        elif key in standing and record.node not in left:  # of a node that was left nobody knows
            over.append(replace(standing.pop(key), until=record.at, seen=record.at))
            counted.pop(key)
    stands = [replace(one, seen=left.get(one.found.node, chapter.end)) for one in standing.values()]
    return sorted(over + stands, key=lambda one: one.at)


# ── incidents ────────────────────────────────────────────────────────────────────────────────────────────────────────
def incidents(told: list[Chapter]) -> list[Incident]:
    """All failures, by time: those of infrastructure once for each node and 10 min, whoever met them."""
    against: dict[str, list[Raised]] = defaultdict(list)
    for chapter in told:
        for one in raised(chapter):
            if one.critical and one.found.cause in HARDWARE:
                against[one.found.node].append(one)
    single = [
        incident for chapter in told for failed, cost in costs(chapter)
        if (incident := _attributed(chapter, failed, cost, against.get(failed.node, []))) is not None
    ]  # fmt: skip
    return _related(_merged(sorted(single, key=lambda one: one.at)))


def costs(chapter: Chapter) -> list[tuple[Failed, float]]:
    """Each failure and the GPU-hours that it cost. Where a replica failed again before it worked, each failure bears
    the time until the next."""
    failures = [record for record in chapter.records if isinstance(record, Failed)]
    took: dict[str, list[int]] = defaultdict(list)
    for i, one in enumerate(failures):
        for replica in set(one.took):
            took[replica].append(i)
    cost = [0.0] * len(failures)
    for record in chapter.records:
        if not isinstance(record, Mended):
            continue
        mine = [i for i in took.get(record.replica, ()) if record.since <= failures[i].at <= record.at]
        span = record.at - record.since
        starts = [record.since, *(failures[i].at for i in mine[1:]), record.at]
        for i, start, end in zip(mine, starts, starts[1:], strict=False):
            cost[i] += record.gpu_hours * ((end - start) / span if span > 0 else 1 / len(mine))
    return list(zip(failures, cost, strict=True))


def _attributed(chapter: Chapter, failed: Failed, cost: float, against: list[Raised]) -> Incident | None:
    """None: a node that was left without any evidence against itself; who failed there is told by itself."""
    near = [one for one in against if one.at <= failed.at + AFTER and one.seen >= failed.at - BEFORE]
    witnesses: tuple[str, ...] = ()
    trusted = False
    if near:
        proof = max(near, key=lambda one: (one.found.proof, -abs(one.at - failed.at)))
        owner, cause, detector = INFRA, proof.found.cause.value, proof.found.detector
        remedy = proof.found.remedy.value
        if any((one.user, one.trusted) == (chapter.user, chapter.trusted) for one in near):
            witnesses, trusted = (chapter.user,), chapter.trusted
    elif failed.lost:
        witnesses, trusted = (chapter.user,), chapter.trusted
        owner, cause, detector, remedy = INFRA, Cause.NODE.value, failed.detector or "cluster", failed.remedy
    elif not failed.who:
        return None
    else:
        owner = USER if failed.cause == Cause.USER.value else SOFTWARE
        cause = failed.cause if failed.cause not in HARDWARE else Cause.PROCESS.value
        detector, remedy = failed.detector, failed.remedy
    return Incident(
        failed.at, failed.node, owner, cause, detector, remedy, (chapter.run,), (chapter.user,),
        (failed.who,) if failed.who else (), cost, failed.injected, failed.lost or not failed.who,
        evidence=failed.evidence, witnesses=witnesses, trusted=trusted,
    )  # fmt: skip


def _merged(single: list[Incident]) -> list[Incident]:
    merged: list[Incident] = []
    newest: dict[tuple[str, bool], int] = {}
    """index of each node's newest incident of infrastructure"""
    for one in single:
        at = newest.get((one.node, one.injected)) if one.owner == INFRA else None
        if at is not None and one.at - merged[at].at <= TOGETHER:
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
        first, runs=all_of("runs"), users=all_of("users"), who=all_of("who"), lost=first.lost or then.lost,
        gpu_hours=first.gpu_hours + then.gpu_hours, evidence=all_of("evidence")[:5], witnesses=all_of("witnesses"),
        trusted=first.trusted or then.trusted,
    )  # fmt: skip


def _related(told: list[Incident]) -> list[Incident]:
    infra = [one for one in told if one.owner == INFRA]
    times = [one.at for one in infra]
    related = []
    for one in told:
        if one.owner == INFRA:
            first = bisect_left(times, one.at - TOGETHER)
            last = bisect_left(times, one.at + TOGETHER + 1e-6)
            near = {o.node for o in infra[first:last] if o.cause == one.cause and o.node != one.node}
            one = replace(one, also=tuple(sorted(near)))
        related.append(one)
    return related


def acted(told: list[Chapter]) -> list[tuple[Chapter, Acted]]:
    """What runs did about nodes, by time."""
    found = [(chapter, one) for chapter in told for one in chapter.records if isinstance(one, Acted)]
    return sorted(found, key=lambda pair: pair[1].at)
