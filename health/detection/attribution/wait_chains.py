"""Attribute a stall to the replica at the end of a chain of replicas that wait for each other (wait-for graph).

A wait counts only if the whole run stalls. A replica explains why others wait if it is starting, works within its
deadlines, or has another finding. Only its own detectors judge such a replica. For example, a reward replica waits
during a long training step, and a trainer waits while a rollout is replaced. While the store reports that the run waits
for somebody outside of it, no time counts as a wait (:func:`..detectors.progress.stalled_since`).

A busy service explains a wait only for a limited time. If replicas wait for each other for longer (``wait_endless``)
and nobody works who may end the waits, one of them is blamed even while the store still serves another replica. A
replica that was replaced begins a new wait, which postpones the blame.

Of replicas that wait for each other, the first in this order is blamed (``_blame_order``):

1. Replicas that have answered a probe during their wait come after all others, because their waiting threads work.
2. Replicas of the kind of role with the fewest stalled replicas come first, because one trainer hangs more likely than
   all rollouts.
3. Among replicas of kinds of equal size, the replica that has waited longest comes first. The time is not compared
   earlier, because a queue may have been full long before the replica that empties it hung.

A service that does nothing, and does not answer probes, is blamed sooner (:func:`_idle_services`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from ....core.phases import BETWEEN
from ....core.types import Cause, Evidence, Finding, Remedy, ReplicaId, Verdict, gang_of
from ..detectors.base import is_service, is_waiting
from ..detectors.pass_deadlines import is_delayed_by_storage
from ..detectors.progress import ENDLESS_WAIT_FACTOR, stalled_since
from ..health_monitor import HealthMonitor
from ..records import ReplicaView

_ENDLESS_WAIT = "wait_endless"
_STALL_DETECTORS = (_ENDLESS_WAIT, "wait_overdue", "wait_long", "idle")
_WAIT_DETECTORS = (_ENDLESS_WAIT, "wait_overdue", "wait_long")
_MAX_WAITERS_NAMED = 4
"""Maximum number of waiting replicas that the evidence names; further replicas are counted (docs/sources.md: at most
five lines)."""


def blame_ends_of_wait_chains(findings: Sequence[Finding], monitor: HealthMonitor) -> list[Finding]:
    """Replace findings of ``_STALL_DETECTORS`` by ``standstill`` findings about the replica to blame, or drop them."""
    stalled = {
        finding.incarnation.replica: finding
        for finding in findings
        if finding.incarnation is not None and finding.detector in _STALL_DETECTORS
    }
    others = [finding for finding in findings if finding.detector not in _STALL_DETECTORS]
    if not stalled:
        return others
    blamed = _idle_services(monitor, stalled, others) or _starvation(monitor, stalled, others)
    return others + [_standstill_finding(monitor, end, waiters, stalled) for end, waiters in blamed.items()]


def _idle_services(
    monitor: HealthMonitor, stalled: Mapping[ReplicaId, Finding], others: Sequence[Finding]
) -> dict[ReplicaId, list[ReplicaId]]:
    """Return each idle service with the replicas that wait for it.

    A replica that is blocked in a call to the service counts, also while other replicas work. A replica that only polls
    counts if every worker is stalled. A service with a FAIL finding of its own is left out. A service on a failed node
    is not left out here, because the next stage (``suppress_on_failed_nodes``) drops the finding about it.
    """
    failed = {
        finding.incarnation.replica
        for finding in others
        if finding.incarnation is not None and finding.verdict is Verdict.FAIL
    }
    idle = {replica for replica, finding in stalled.items() if finding.detector == "idle"} - failed
    waiting = [replica for replica in sorted(stalled) if stalled[replica].detector in _WAIT_DETECTORS]
    all_stalled = all(view.left_at is not None or view.incarnation.replica in stalled for view in monitor.workers())
    blocked: dict[ReplicaId, list[ReplicaId]] = {}
    for replica in waiting:
        view = monitor.replicas[replica]
        if all_stalled or view.declared.waits_for is None:
            awaited = view.declared.waits_for if view.waits_for is None else None
            for service in idle:
                if service == view.waits_for or monitor.replicas[service].role.awaited_as == awaited:
                    blocked.setdefault(service, []).append(replica)
    return dict.fromkeys(blocked, waiting) if all_stalled and len(blocked) == 1 else blocked


def _starvation(
    monitor: HealthMonitor, stalled: Mapping[ReplicaId, Finding], others: Sequence[Finding]
) -> dict[ReplicaId, list[ReplicaId]]:
    """Return {replica to blame: replicas that wait for each other}, or an empty dict if no replica is to blame.

    Of at least two replicas that wait for each other, the first in ``_blame_order`` is blamed. All of these conditions
    must hold:

    - This replica has a finding ``wait_endless``.
    - No other finding is a FAIL, because a failure of any replica or node explains the waits.
    - No replica can still end the waits (``_may_end_waits``).

    If the store reports which replicas hold what the data of the trainer lack, only these replicas can end the waits,
    and only they can be blamed: the store has the request of the trainer. A busy service does not explain endless
    waits.
    """
    if any(finding.verdict is Verdict.FAIL for finding in others):
        return {}
    views = {view.incarnation.replica: view for view in monitor.workers() if view.left_at is None}
    holders = views.keys() if monitor.run.holders is None else views.keys() & monitor.run.holders
    for replica in _blame_order(monitor, stalled, stalled):
        waiting = _waiting_with(replica, views, stalled) if stalled[replica].detector == _ENDLESS_WAIT else set()
        suspects = waiting if monitor.run.holders is None else holders & stalled.keys()
        if len(waiting) < 2 or not suspects:
            continue
        first = views[_blame_order(monitor, suspects, stalled)[0]]
        if stalled[first.incarnation.replica].detector != _ENDLESS_WAIT:
            return {}
        latest = stalled_since(first) + (ENDLESS_WAIT_FACTOR - 1) * first.declared.longest
        overdue = {
            finding.incarnation.replica
            for finding in (*others, *stalled.values())
            if finding.incarnation is not None and finding.detector in ("phase_overdue", _ENDLESS_WAIT)
        }
        explained = any(_may_end_waits(views[holder], latest) for holder in holders - overdue)
        return {} if explained else {first.incarnation.replica: sorted(waiting)}
    return {}


def _waiting_with(
    start: ReplicaId, views: Mapping[ReplicaId, ReplicaView], stalled: Mapping[ReplicaId, Finding]
) -> set[ReplicaId]:
    """Return ``start`` and all replicas that wait in its chain, or an empty set if it leads to an unknown replica."""
    by_kind: dict[str, list[ReplicaId]] = {}
    for replica, view in views.items():
        by_kind.setdefault(view.role.awaited_as, []).append(replica)
    waiting: set[ReplicaId] = set()
    ahead = [start]
    while ahead:
        replica = ahead.pop()
        if replica not in views:
            return set()
        if replica not in waiting and replica in stalled and stalled[replica].detector in _WAIT_DETECTORS:
            waiting.add(replica)
            if not (awaited := _awaited(views[replica], by_kind)):
                return set()
            ahead.extend(awaited)
    return waiting


def _may_end_waits(view: ReplicaView, latest: float) -> bool:
    """Return whether this replica, which is neither overdue nor waits endlessly, may still end the waits of others.

    A replica that works may, until its own deadline, whenever it last made progress. A replica that waits may if its
    wait began after ``latest`` (s): it worked until then, or has replaced a failed replica. A service may only while
    storage delays it. The phase ``between`` says nothing about what the replica does.
    """
    if is_waiting(view) and not view.declared.own_work:
        return stalled_since(view) > latest
    if is_service(view):
        return is_delayed_by_storage(view, view.last_change_at)
    return view.declared.name != BETWEEN


def _awaited(view: ReplicaView, by_kind: Mapping[str, list[ReplicaId]]) -> list[ReplicaId]:
    """Return the replicas for which the replica of ``view`` waits.

    If the phase of the waiting replica declares what it waits for, all replicas of this kind (``RoleSpec.awaited_as``)
    are returned. Otherwise only the replica that the waiting replica has reported (``view.waits_for``) is returned. The
    declared kind has priority, because a replica that waits for it polls the store and therefore reports the store.
    """
    kind = view.declared.waits_for
    if kind is None and view.waits_for is not None:
        return [view.waits_for]
    return by_kind.get(kind or "", [])


def _blame_order(
    monitor: HealthMonitor, waiting: Collection[ReplicaId], stalled: Collection[ReplicaId]
) -> list[ReplicaId]:
    """Return the ``waiting`` replicas in the order of their likelihood to be the cause, most likely first.

    ``stalled`` contains all replicas that wait or are idle. A kind of role with few replicas in ``stalled`` (a gang
    counts as one) is a more likely cause than one with many.
    """
    gangs = {gang_of(replica): monitor.replicas[replica].role.awaited_as for replica in stalled}
    gangs_of_kind = Counter(gangs.values())

    def key(replica: ReplicaId) -> tuple[bool, int, float, ReplicaId]:
        view = monitor.replicas[replica]
        return view.probe.answer_count > 0, gangs_of_kind[view.role.awaited_as], view.last_change_at, replica

    return sorted(waiting, key=key)


def _standstill_finding(
    monitor: HealthMonitor, end: ReplicaId, waiters: list[ReplicaId], stalled: Mapping[ReplicaId, Finding]
) -> Finding:
    since = max(finding.since for finding in stalled.values())  # when the last stalled replica stopped
    waiting = [replica for replica in waiters if replica != end]
    evidence = [
        Evidence("blame", f"{replica}: {line.text}", line.at)
        for replica in [end, *waiting[:_MAX_WAITERS_NAMED]]
        for line in stalled[replica].evidence
    ]
    if len(waiting) > _MAX_WAITERS_NAMED:
        evidence.append(Evidence("blame", f"further waiting replicas: {len(waiting) - _MAX_WAITERS_NAMED}", since))
    incarnation = monitor.replicas[end].incarnation
    return Finding(
        "standstill", Verdict.FAIL, Cause.HANG, Remedy.RESTART, since, tuple(evidence), incarnation=incarnation
    )
