"""Find the member of a gang that blocks the others: when it stalls, all other members wait for it in a collective.

The CPU and GPU loads show which member blocks the others. If some members are idle while the GPUs of the others are
busy in a collective, an idle member causes the stall. If all members are inactive (idle, or spinning in a collective),
the member with the least progress causes it. If one member works while the others are inactive, they wait for it. Its
work may be legitimate (an evaluation by the first rank only), so only the deadline of the phase applies.
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
"""If all members of a gang are inactive, the gang counts as stalled only once each member without a finding has been
inactive for this time (s). A shorter time proves nothing: DCGM's tensor core activity is up to 15 s older than NVML's
kernel activity, so a member that has just resumed work seems to spin."""
_ONE_PER_GANG_DETECTORS = ("phase_overdue",)
"""Detectors that find every member of a stalled gang. Of their findings, one per gang is kept."""


def blame_gang_members(findings: Sequence[Finding], monitor: HealthMonitor) -> list[Finding]:
    """Replace findings of ``computes_nothing`` and ``load_stalled`` by ``idle_hang`` findings, or drop them.

    The ``computes_nothing`` findings of a gang become one finding about the member that the others wait for. They are
    dropped if the loads do not show this member, or if the gang has another FAIL finding. Each ``load_stalled`` finding
    is replaced or dropped separately. Of the ``phase_overdue`` FAILs of a gang, at most one is kept
    (:func:`_one_per_gang`).
    """
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
    """Replace each ``load_stalled`` finding by ``idle_hang``, or drop it.

    The finding is replaced if few replicas of the role are idle, and another replica of the role began to load later
    and has finished loading. Otherwise all replicas may wait for the same storage or weight source, and only the
    deadline of the phase applies.
    """
    others = [finding for finding in findings if finding.detector != _LOAD_DETECTOR]
    for finding in findings:
        if finding.incarnation is None or finding.detector != _LOAD_DETECTOR:
            continue
        view = monitor.replicas[finding.incarnation.replica]
        peers = [peer for peer in monitor.workers() if peer.role is view.role]
        idle_count = sum(peer.declared.own_work and peer.loads.idle_since is not None for peer in peers)
        if (idle_count == 1 or 2 * idle_count < len(peers)) and view.role.newest_load_began >= view.last_change_at:
            others.append(_idle_hang(finding, "a replica of its role that began to load later has finished loading"))
    return others


def _members(monitor: HealthMonitor, gangs: set[Incarnation]) -> dict[Incarnation, list[ReplicaView]]:
    """Return the members of each gang that have not left."""
    members: dict[Incarnation, list[ReplicaView]] = {}
    for view in monitor.replicas.values():
        if view.incarnation.gang in gangs and view.left_at is None:
            members.setdefault(view.incarnation.gang, []).append(view)
    return members


def _culprit(members: Sequence[ReplicaView], raw: Mapping[Incarnation, Finding]) -> ReplicaView | None:
    """Return the member that the others wait for; None if the loads of CPUs and GPUs do not show this member.

    ``raw`` contains the findings of ``computes_nothing``, by incarnation.
    """
    stalled = [view for view in members if view.incarnation in raw]
    if any(view.phase != stalled[0].phase or not must_compute(view) for view in members):
        return None  # the others may wait for a member that is in another phase
    idle = [view for view in members if view.loads.idle_since is not None]
    suspects = [view for view in idle if view.incarnation in raw]
    if all(is_inactive(view) for view in members):
        if idle and len(idle) < len(members) and not suspects:
            return None  # the spinning members wait for an idle member, whose longer limit has not passed
        all_long = all(view.incarnation in raw or _inactive_for_long(view) for view in members)
        return _slowest(stalled, idle_first=True) if all_long else None
    if not suspects or any(view.loads.latest_at is None for view in members):
        return None
    if any(_tensor_cores_active(view, members) for view in members):
        return None  # the others wait in a collective for the member that still works
    busy_done = min((view.done or 0) for view in members if view not in idle)
    behind = all((view.done or 0) < busy_done for view in idle)
    even = 2 * len(idle) == len(members)
    long = any(raw[view.incarnation].detector == "computes_nothing_long" for view in suspects)
    if 2 * len(idle) < len(members) or (even and (long or behind)):
        return _slowest(suspects)
    return None


def _inactive_for_long(view: ReplicaView) -> bool:
    since = view.last_change_at
    return max(view.loads.idle_for(since), view.loads.spinning_for(since)) >= MIN_INACTIVE_S


def _tensor_cores_active(view: ReplicaView, members: Iterable[ReplicaView]) -> bool:
    """Return whether the member's tensor cores work, according to loads as recent as the other members' loads."""
    active_at = view.loads.tensor_active_at
    newest_load_at = max(member.loads.latest_at or 0.0 for member in members)
    return active_at is not None and active_at >= newest_load_at - MAX_LOAD_GAP_S


def _slowest(members: Iterable[ReplicaView], idle_first: bool = False) -> ReplicaView:
    """Return the member with the least progress; break ties by the longest stall, then by the lowest rank.

    With ``idle_first`` an idle member is returned rather than a spinning member, even if it has made more progress.
    """

    def key(view: ReplicaView) -> tuple[bool, int, float, int]:
        spinning = idle_first and view.loads.idle_since is None
        return spinning, view.done or 0, view.last_change_at, rank_of(view.incarnation.replica)

    return min(members, key=key)


def _hang_finding(culprit: ReplicaView, raw: Mapping[Incarnation, Finding], members: Sequence[ReplicaView]) -> Finding:
    others = len(members) - 1
    text = f"the other {others} members of its gang are idle too, or wait for it in a collective"
    return _idle_hang(raw[culprit.incarnation], text if others else "its gang has no other member to wait for")


def _idle_hang(finding: Finding, why: str) -> Finding:
    """Return the finding as an ``idle_hang`` finding, with ``why`` as a further line of evidence."""
    evidence = (*finding.evidence, Evidence("blame", why, finding.since))
    return msgspec.structs.replace(
        finding, detector="idle_hang", verdict=Verdict.FAIL, remedy=Remedy.RESTART, evidence=evidence
    )


def _one_per_gang(findings: list[Finding], monitor: HealthMonitor) -> list[Finding]:
    """Drop the ``phase_overdue`` FAILs about the members of each gang, except the finding about one member.

    If fewer than half of the overdue members are inactive, this member is one of the inactive members, else one of the
    active members. If there is none of this kind, it may be any overdue member. Of the candidates, it is the member
    with the least progress (:func:`_slowest`).

    The finding about this member is dropped too if a member that is not overdue still computes, because the overdue
    members wait for that member.
    """
    overdue: dict[Incarnation, list[Finding]] = {}
    for finding in findings:
        if (
            finding.incarnation is not None
            and finding.detector in _ONE_PER_GANG_DETECTORS
            and finding.verdict is Verdict.FAIL
        ):
            overdue.setdefault(finding.incarnation.gang, []).append(finding)
    gangs = _members(monitor, set(overdue)) if overdue else {}
    culprits: set[Incarnation] = set()
    for gang, of_gang in overdue.items():
        if _has_busy_member(gangs.get(gang, ()), {finding.incarnation for finding in of_gang}):
            continue
        views = [
            monitor.replicas[finding.incarnation.replica] for finding in of_gang if finding.incarnation is not None
        ]
        inactive = [view for view in views if is_inactive(view)]
        outliers = inactive if 2 * len(inactive) < len(views) else [view for view in views if view not in inactive]
        culprits.add(_slowest(outliers or views).incarnation)
    all_overdue = {finding.key: len(of_gang) for of_gang in overdue.values() for finding in of_gang}
    kept = list[Finding]()
    for finding in findings:
        if finding.key not in all_overdue:
            kept.append(finding)
        elif finding.incarnation in culprits:
            kept.append(_as_culprit(finding) if all_overdue[finding.key] > 1 else finding)
    return kept


def _as_culprit(finding: Finding) -> Finding:
    """Return the finding with a line of evidence about the other overdue members, whose own findings are dropped."""
    text = "other members of its gang are overdue too; they wait for it"
    return msgspec.structs.replace(finding, evidence=(*finding.evidence, Evidence("blame", text, finding.since)))


def _has_busy_member(members: Sequence[ReplicaView], overdue: Collection[Incarnation | None]) -> bool:
    """Return whether a member that is not overdue computes in the training pass in which the overdue members stalled.

    A member computes if its tensor cores work. A member that has begun a later training pass does not count, because
    the overdue members do not wait for it.
    """
    since = min((view.last_change_at for view in members if view.incarnation in overdue), default=0.0)
    halfway = (since + max((view.loads.latest_at or 0.0 for view in members), default=0.0)) / 2
    return any(
        view.incarnation not in overdue and view.phase_since <= halfway and _tensor_cores_active(view, members)
        for view in members
    )
