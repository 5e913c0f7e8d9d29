"""One member of a gang stands, and all stand: they wait for it in a collective. So they are judged together.

Loads tell who: who is idle while the others' GPUs are kept by a collective is the one they wait for. Where all rest,
the one that is behind. Where one works and the others rest, they wait for it, and it may well be at work (an evaluation
by the first rank alone): time judges that.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

import msgspec

from ....core.types import Evidence, Finding, Incarnation, Remedy, Verdict, rank_of
from ..detectors.idleness import is_inactive, must_compute
from ..health_monitor import HealthMonitor
from ..records import MAX_LOAD_GAP_S, ReplicaView

_RAW_DETECTORS = ("computes_nothing", "computes_nothing_long")
_LOAD_DETECTOR = "load_stalled"
MIN_INACTIVE_S = 45.0
"""s of rest after which a member counts as one that rests, where others have rested for long: what DCGM says of tensor
cores is up to 15 s old, what NVML says of kernels is not, so that who has just gone on to work looks as if it spun"""
_ONE_PER_GANG_DETECTORS = ("phase_overdue",)
"""found of every member of a gang that stands; one of them is enough"""


def judge(findings: Sequence[Finding], monitor: HealthMonitor) -> list[Finding]:
    """The findings; those of ``idleness.stands_idle`` become ``idle_hang`` of whom they speak against, or nothing, and
    so do those of ``idleness.loads_idle``."""
    findings = _resolve_loading(findings, monitor)
    raw = {
        finding.incarnation: finding
        for finding in findings
        if finding.incarnation is not None and finding.detector in _RAW_DETECTORS
    }
    others = _one_per_gang([finding for finding in findings if finding.detector not in _RAW_DETECTORS], monitor)
    if not raw:
        return others
    members = _members(monitor, {incarnation.gang for incarnation in raw})
    judged = {
        finding.incarnation.gang
        for finding in others
        if finding.incarnation is not None and finding.verdict is Verdict.FAIL
    }
    for gang in sorted(members):
        if gang not in judged and (culprit := _culprit(members[gang], raw)) is not None:
            others.append(_hang_finding(culprit, raw, members[gang]))
    return others


def _resolve_loading(findings: Sequence[Finding], monitor: HealthMonitor) -> list[Finding]:
    """Who loads weights and does nothing hangs where another one has begun later and come to the end of it, and few do
    nothing there. Else all may wait for the same, storage or whoever has the weights: time judges that."""
    others = [finding for finding in findings if finding.detector != _LOAD_DETECTOR]
    for finding in findings:
        if finding.incarnation is None or finding.detector != _LOAD_DETECTOR:
            continue
        view = monitor.replicas[finding.incarnation.replica]
        peers = [one for one in monitor.workers() if one.role is view.role]
        alike = sum(one.declared.own_work and one.loads.idle_since is not None for one in peers)
        if (alike == 1 or 2 * alike < len(peers)) and view.role.newest_load_began >= view.last_change_at:
            others.append(msgspec.structs.replace(
                finding, detector="idle_hang", verdict=Verdict.FAIL, remedy=Remedy.RESTART
            ))  # fmt: skip
    return others


def _members(monitor: HealthMonitor, gangs: set[Incarnation]) -> dict[Incarnation, list[ReplicaView]]:
    members: dict[Incarnation, list[ReplicaView]] = {}
    for view in monitor.replicas.values():
        if view.incarnation.gang in gangs and view.left_at is None:
            members.setdefault(view.incarnation.gang, []).append(view)
    return members


def _culprit(members: Sequence[ReplicaView], raw: Mapping[Incarnation, Finding]) -> ReplicaView | None:
    standing = [view for view in members if view.incarnation in raw]
    if any(view.phase != standing[0].phase or not must_compute(view) for view in members):
        return None  # one is elsewhere, and may be who is waited for
    if all(is_inactive(view) for view in members):
        rested = all(view.incarnation in raw or _inactive_for_long(view) for view in members)
        return _slowest(standing, idle_first=True) if rested else None
    idle = [view for view in members if view.loads.idle_since is not None]
    suspects = [view for view in idle if view.incarnation in raw]
    if not suspects or any(view.loads.latest_at is None for view in members):
        return None
    if any(_tensor_cores_active(view, members) for view in members):
        return None  # it does not wait in a collective: it is who they wait for, and at work
    busy_done = min((view.done or 0) for view in members if view not in idle)
    behind = all((view.done or 0) < busy_done for view in idle)
    even = 2 * len(idle) == len(members)
    long = any(raw[view.incarnation].detector == "computes_nothing_long" for view in suspects)
    if 2 * len(idle) < len(members) or (even and (long or behind)):
        return _slowest(suspects)
    return None


def _inactive_for_long(view: ReplicaView) -> bool:
    activity = view.loads
    return max(activity.idle_for(view.last_change_at), activity.spinning_for(view.last_change_at)) >= MIN_INACTIVE_S


def _tensor_cores_active(view: ReplicaView, members: Iterable[ReplicaView]) -> bool:
    """By its newest loads, as fresh as those of the others."""
    worked = view.loads.tensor_active_at
    return worked is not None and worked >= max(one.loads.latest_at or 0.0 for one in members) - MAX_LOAD_GAP_S


def _slowest(members: Iterable[ReplicaView], idle_first: bool = False) -> ReplicaView:
    """Who has done least; then who has stood longest; then the first. An idle one before one that spins."""

    def key(view: ReplicaView) -> tuple[bool, int, float, int]:
        spinning = idle_first and view.loads.idle_since is None
        return spinning, view.done or 0, view.last_change_at, rank_of(view.incarnation.replica)

    return min(members, key=key)


def _hang_finding(culprit: ReplicaView, raw: Mapping[Incarnation, Finding], members: Sequence[ReplicaView]) -> Finding:
    found = raw[culprit.incarnation]
    evidence = found.evidence
    if len(members) > 1:
        text = f"the other {len(members) - 1} of its gang rest too, or are kept waiting"
        evidence += (Evidence("blame", text, found.since),)
    return msgspec.structs.replace(
        found, detector="idle_hang", verdict=Verdict.FAIL, remedy=Remedy.RESTART, evidence=evidence
    )


def _one_per_gang(findings: list[Finding], monitor: HealthMonitor) -> list[Finding]:
    """Of the members of a gang that stand for too long all alike, the one that is behind; nobody where another member
    is at work within its own deadline, and so explains why they stand."""
    alike: dict[Incarnation, list[Finding]] = {}
    for finding in findings:
        if (
            finding.incarnation is not None
            and finding.detector in _ONE_PER_GANG_DETECTORS
            and finding.verdict is Verdict.FAIL
        ):
            alike.setdefault(finding.incarnation.gang, []).append(finding)
    gangs = _members(monitor, set(alike)) if alike else {}
    culprits: set[Incarnation] = set()
    for gang, found in alike.items():
        if _has_busy_member(gangs.get(gang, ()), {finding.incarnation for finding in found}):
            continue
        views = [monitor.replicas[finding.incarnation.replica] for finding in found if finding.incarnation is not None]
        inactive = [one for one in views if is_inactive(one)]
        outliers = inactive if 2 * len(inactive) < len(views) else [one for one in views if one not in inactive]
        culprits.add(_slowest(outliers or views).incarnation)
    dropped = {finding.key for found in alike.values() for finding in found if finding.incarnation not in culprits}
    return [finding for finding in findings if finding.key not in dropped]


def _has_busy_member(members: Sequence[ReplicaView], overdue: Collection[Incarnation | None]) -> bool:
    """The tensor cores of one work that is not overdue, and it is in the pass in which the others came to stand: one
    that goes on from pass to pass without them is not who they wait for."""
    since = min((view.last_change_at for view in members if view.incarnation in overdue), default=0.0)
    halfway = (since + max((view.loads.latest_at or 0.0 for view in members), default=0.0)) / 2
    return any(
        view.incarnation not in overdue and view.phase_since <= halfway and _tensor_cores_active(view, members)
        for view in members
    )
