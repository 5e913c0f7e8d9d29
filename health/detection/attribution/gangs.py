"""One member of a gang stands, and all stand: they wait for it in a collective. So they are judged together.

Loads tell who: who is idle while the others' GPUs are kept by a collective is the one they wait for. Where all rest,
the one that is behind. Where one works and the others rest, they wait for it, and it may well be at work (an evaluation
by the first rank alone): time judges that.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

import msgspec

from ....core.types import Evidence, Finding, Life, Remedy, Verdict, rank_of
from ..detectors.idleness import at_rest, must_compute
from ..records import GAP, ReplicaSighting
from ..watch import Watch

_RAW = ("stands_idle", "stands_idle_long")
_LOADS = "loads_idle"
RESTED = 45.0
"""s of rest after which a member counts as one that rests, where others have rested for long: what DCGM says of tensor
cores is up to 15 s old, what NVML says of kernels is not, so that who has just gone on to work looks as if it spun"""
_ALONE = ("phase_overdue",)
"""found of every member of a gang that stands; one of them is enough"""


def judge(findings: Sequence[Finding], watch: Watch) -> list[Finding]:
    """The findings; those of ``idleness.stands_idle`` become ``idle_hang`` of whom they speak against, or nothing, and
    so do those of ``idleness.loads_idle``."""
    findings = _loading(findings, watch)
    raw = {finding.life: finding for finding in findings if finding.life is not None and finding.detector in _RAW}
    others = _one_a_gang([finding for finding in findings if finding.detector not in _RAW], watch)
    if not raw:
        return others
    members = _members(watch, {life.gang for life in raw})
    judged = {finding.life.gang for finding in others if finding.life is not None and finding.verdict is Verdict.FAIL}
    for gang in sorted(members):
        if gang not in judged and (blamed := _blamed(members[gang], raw)) is not None:
            others.append(_hang(blamed, raw, members[gang]))
    return others


def _loading(findings: Sequence[Finding], watch: Watch) -> list[Finding]:
    """Who loads weights and does nothing hangs where another one has begun later and come to the end of it, and few do
    nothing there. Else all may wait for the same, storage or whoever has the weights: time judges that."""
    others = [finding for finding in findings if finding.detector != _LOADS]
    for finding in findings:
        if finding.life is None or finding.detector != _LOADS:
            continue
        seen = watch.replicas[finding.life.replica]
        peers = [one for one in watch.workers() if one.role is seen.role]
        alike = sum(one.declared.own_work and one.activity.idle_since is not None for one in peers)
        if (alike == 1 or 2 * alike < len(peers)) and seen.role.loaded_since >= seen.clock:
            others.append(msgspec.structs.replace(
                finding, detector="idle_hang", verdict=Verdict.FAIL, remedy=Remedy.RESTART
            ))  # fmt: skip
    return others


def _members(watch: Watch, gangs: set[Life]) -> dict[Life, list[ReplicaSighting]]:
    members: dict[Life, list[ReplicaSighting]] = {}
    for seen in watch.replicas.values():
        if seen.life.gang in gangs and seen.left_at is None:
            members.setdefault(seen.life.gang, []).append(seen)
    return members


def _blamed(members: Sequence[ReplicaSighting], raw: Mapping[Life, Finding]) -> ReplicaSighting | None:
    standing = [seen for seen in members if seen.life in raw]
    if any(seen.phase != standing[0].phase or not must_compute(seen) for seen in members):
        return None  # one is elsewhere, and may be who is waited for
    if all(at_rest(seen) for seen in members):
        rested = all(seen.life in raw or _rested(seen) for seen in members)
        return _behind(standing, idle_first=True) if rested else None
    idle = [seen for seen in members if seen.activity.idle_since is not None]
    suspects = [seen for seen in idle if seen.life in raw]
    if not suspects or any(seen.activity.at is None for seen in members):
        return None
    if any(_tensors_work(seen, members) for seen in members):
        return None  # it does not wait in a collective: it is who they wait for, and at work
    busy_done = min((seen.done or 0) for seen in members if seen not in idle)
    behind = all((seen.done or 0) < busy_done for seen in idle)
    even = 2 * len(idle) == len(members)
    long = any(raw[seen.life].detector == "stands_idle_long" for seen in suspects)
    if 2 * len(idle) < len(members) or (even and (long or behind)):
        return _behind(suspects)
    return None


def _rested(seen: ReplicaSighting) -> bool:
    activity = seen.activity
    return max(activity.idle_for(seen.clock), activity.spins_for(seen.clock)) >= RESTED


def _tensors_work(seen: ReplicaSighting, members: Iterable[ReplicaSighting]) -> bool:
    """By its newest loads, as fresh as those of the others."""
    worked = seen.activity.tensor_at
    return worked is not None and worked >= max(one.activity.at or 0.0 for one in members) - GAP


def _behind(members: Iterable[ReplicaSighting], idle_first: bool = False) -> ReplicaSighting:
    """Who has done least; then who has stood longest; then the first. An idle one before one that spins."""

    def key(seen: ReplicaSighting) -> tuple[bool, int, float, int]:
        spins = idle_first and seen.activity.idle_since is None
        return spins, seen.done or 0, seen.clock, rank_of(seen.life.replica)

    return min(members, key=key)


def _hang(blamed: ReplicaSighting, raw: Mapping[Life, Finding], members: Sequence[ReplicaSighting]) -> Finding:
    found = raw[blamed.life]
    evidence = found.evidence
    if len(members) > 1:
        text = f"the other {len(members) - 1} of its gang rest too, or are kept waiting"
        evidence += (Evidence("blame", text, found.since),)
    return msgspec.structs.replace(
        found, detector="idle_hang", verdict=Verdict.FAIL, remedy=Remedy.RESTART, evidence=evidence
    )


def _one_a_gang(findings: list[Finding], watch: Watch) -> list[Finding]:
    """Of the members of a gang that stand for too long all alike, the one that is behind; nobody where another member
    is at work within its own deadline, and so explains why they stand."""
    alike: dict[Life, list[Finding]] = {}
    for finding in findings:
        if finding.life is not None and finding.detector in _ALONE and finding.verdict is Verdict.FAIL:
            alike.setdefault(finding.life.gang, []).append(finding)
    gangs = _members(watch, set(alike)) if alike else {}
    kept: set[Life] = set()
    for gang, found in alike.items():
        if _explained(gangs.get(gang, ()), {finding.life for finding in found}):
            continue
        seen = [watch.replicas[finding.life.replica] for finding in found if finding.life is not None]
        resting = [one for one in seen if at_rest(one)]
        outliers = resting if 2 * len(resting) < len(seen) else [one for one in seen if one not in resting]
        kept.add(_behind(outliers or seen).life)
    dropped = {finding.key for found in alike.values() for finding in found if finding.life not in kept}
    return [finding for finding in findings if finding.key not in dropped]


def _explained(members: Sequence[ReplicaSighting], overdue: Collection[Life | None]) -> bool:
    """The tensor cores of one work that is not overdue, and it is in the pass in which the others came to stand: one
    that goes on from pass to pass without them is not who they wait for."""
    since = min((seen.clock for seen in members if seen.life in overdue), default=0.0)
    halfway = (since + max((seen.activity.at or 0.0 for seen in members), default=0.0)) / 2
    return any(
        seen.life not in overdue and seen.phase_since <= halfway and _tensors_work(seen, members) for seen in members
    )
