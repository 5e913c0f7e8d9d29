"""Attribute a stall to the replica at the end of a chain of replicas that wait for each other (wait-for graph).

A wait counts only if the whole run stalls. A replica explains why others wait if it is starting, works within its
deadlines, or has another finding. Only its own detectors judge such a replica. For example, a reward replica waits
during a long training step, and a trainer waits while a rollout is replaced.

A busy service explains a wait only for a limited time. If replicas wait for each other for longer (``wait_endless``),
one of them is blamed even while the store still serves another replica. A replica that was replaced begins a new wait,
which postpones the blame.

Of replicas that wait for each other, the first in this order is blamed (``_blame_order``):

1. Replicas that have answered a probe during their wait come after all others, because their waiting threads work.
2. Replicas of the role with the fewest stalled replicas come first, because one trainer hangs more likely than all
   rollouts.
3. Among replicas of roles of equal size, the replica that has waited longest comes first. The time is not compared
   earlier, because a queue may have been full long before the replica that empties it hung.

A service that does nothing is blamed sooner. If all chains lead to the service, the waits need not be overdue. If a
replica is blocked in a call to the service, it is blamed even while other replicas work.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from math import inf

from ....core.phases import WAIT_EXTERNAL
from ....core.types import Cause, Evidence, Finding, Remedy, ReplicaId, Verdict, gang_of, role_of
from ..detectors.base import is_waiting
from ..detectors.pass_deadlines import is_delayed_by_storage
from ..detectors.progress import ENDLESS_WAIT_FACTOR
from ..health_monitor import HealthMonitor
from ..records import ReplicaView, is_polling

_ENDLESS_WAIT = "wait_endless"
_STALL_DETECTORS = (_ENDLESS_WAIT, "wait_overdue", "wait_long", "idle")
_WAIT_DETECTORS = (_ENDLESS_WAIT, "wait_overdue", "wait_long")
_MAX_WAITERS_NAMED = 4
"""Maximum number of waiting replicas that the evidence names; further replicas are counted (docs/sources.md: at most
five lines)."""


def blame_ends_of_wait_chains(findings: Sequence[Finding], monitor: HealthMonitor) -> list[Finding]:
    """Replace findings of ``_STALL_DETECTORS`` by ``standstill`` findings about the replica to blame, or drop them.

    Blame follows the chain of waiting replicas to a replica that does not wait. In a cycle, the first replica in
    ``_blame_order`` is blamed. A chain that leads to a replica without observations blames no replica.
    """
    stalled = {
        finding.incarnation.replica: finding
        for finding in findings
        if finding.incarnation is not None and finding.detector in _STALL_DETECTORS
    }
    others = [finding for finding in findings if finding.detector not in _STALL_DETECTORS]
    if not stalled:
        return others
    blamed: dict[ReplicaId, list[ReplicaId]] = {}
    if _all_stalled(monitor, stalled):
        ends = _chain_ends(monitor, stalled)
        for replica in sorted(stalled):
            end = ends[replica]
            if end is not None and stalled[replica].detector in _WAIT_DETECTORS:
                blamed.setdefault(end, []).append(replica)
        one_service = len(blamed) == 1 and all(stalled[end].detector == "idle" for end in blamed)
        if not one_service and any(finding.detector == "wait_long" for finding in stalled.values()):
            blamed = {}
    blamed = blamed or _blocked_services(monitor, stalled, others) or _starvation(monitor, stalled, others)
    return others + [_standstill_finding(monitor, end, waiters, stalled) for end, waiters in blamed.items()]


def _blocked_services(
    monitor: HealthMonitor, stalled: Mapping[ReplicaId, Finding], others: Sequence[Finding]
) -> dict[ReplicaId, list[ReplicaId]]:
    """Return each idle service with the replicas that are blocked in a call to it.

    A call counts only if it has lasted for as long as the service may be idle, and only in a phase that declares no
    wait. A service with a FAIL finding of its own is left out. A service on a failed node is not left out here, because
    the next stage (``suppress_on_failed_nodes``) drops the finding about it.
    """
    failed = {
        finding.incarnation.replica
        for finding in others
        if finding.incarnation is not None and finding.verdict is Verdict.FAIL
    }
    blocked: dict[ReplicaId, list[ReplicaId]] = {}
    for replica in sorted(stalled):
        view = monitor.replicas[replica]
        service = view.waits_for
        if stalled[replica].detector not in _WAIT_DETECTORS or service is None or service in failed:
            continue
        if view.declared.waits_for is not None or stalled.get(service, stalled[replica]).detector != "idle":
            continue
        blocked.setdefault(service, []).append(replica)
    return blocked


def _starvation(
    monitor: HealthMonitor, stalled: Mapping[ReplicaId, Finding], others: Sequence[Finding]
) -> dict[ReplicaId, list[ReplicaId]]:
    """Return {replica to blame: replicas that wait for each other}, or an empty dict if no replica is to blame.

    Of at least two replicas that wait for each other, the first in ``_blame_order`` is blamed. All of these conditions
    must hold:

    - This replica has a finding ``wait_endless``.
    - Each of the other replicas that polls and began to wait much later has a finding ``wait_endless`` too, because a
      replica that was replaced recently may still end the waits.
    - No other finding is a FAIL, because a failure of any replica or node explains the waits.
    - No replica can still end the waits by its work (``_may_be_awaited``).

    A busy service does not explain endless waits.
    """
    if any(finding.verdict is Verdict.FAIL for finding in others):
        return {}
    by_role: dict[str, list[ReplicaId]] = {}
    for view in monitor.workers():
        if view.left_at is None:
            by_role.setdefault(role_of(view.incarnation.replica), []).append(view.incarnation.replica)
    for replica in _blame_order(monitor, stalled, stalled):
        if (
            stalled[replica].detector == _ENDLESS_WAIT
            and len(waiting := _waiting_with(monitor, replica, stalled, by_role)) > 1
        ):
            culprit = monitor.replicas[_blame_order(monitor, waiting, stalled)[0]]
            latest = culprit.last_change_at + (ENDLESS_WAIT_FACTOR - 1) * culprit.declared.longest
            views = [monitor.replicas[one] for one in waiting]
            since = max(view.last_change_at for view in views)
            younger = [view.incarnation.replica for view in views if is_polling(view) and view.last_change_at > latest]
            if any(stalled[one].detector != _ENDLESS_WAIT for one in (culprit.incarnation.replica, *younger)):
                return {}
            explained = any(_may_be_awaited(view, since) for view in monitor.workers())
            return {} if explained else {culprit.incarnation.replica: sorted(waiting)}
    return {}


def _may_be_awaited(view: ReplicaView, since: float) -> bool:
    """Return whether the work of this replica may end waits that have all begun by the time ``since`` (s).

    This is possible in two cases: the replica waits for a service outside of the run (such as a judge), or it is in a
    phase that must progress and has made no progress after ``since``. Such a replica counts as healthy until its own
    deadline, which may be later than the deadlines of the waits.
    """
    if view.left_at is not None:
        return False
    return view.declared.name == WAIT_EXTERNAL or (view.declared.progresses and view.last_change_at <= since)


def _waiting_with(
    monitor: HealthMonitor,
    start: ReplicaId,
    stalled: Mapping[ReplicaId, Finding],
    by_role: Mapping[str, list[ReplicaId]],
) -> set[ReplicaId]:
    """Return ``start`` and all replicas in its wait chain, or an empty set if one of them may still end the wait."""
    waiting: set[ReplicaId] = set()
    ahead = [start]
    while ahead:
        replica = ahead.pop()
        if replica in waiting:
            continue
        view = monitor.replicas.get(replica)
        if view is None:
            return set()
        if replica in stalled and stalled[replica].detector in _WAIT_DETECTORS:
            waiting.add(replica)
            if not (awaited := _awaited(view, by_role)):
                return set()
            ahead.extend(awaited)
        elif (
            view.declared.longest != inf
            or view.declared.progresses
            or (replica not in stalled and is_delayed_by_storage(view, view.last_change_at))
        ):
            return set()
    return waiting


def _awaited(view: ReplicaView, by_role: Mapping[str, list[ReplicaId]]) -> list[ReplicaId]:
    """Return the replicas for which the replica of ``view`` waits.

    If the phase of the waiting replica declares a role to wait for, all replicas of that role are returned. Otherwise
    only the replica that the waiting replica has reported (``view.waits_for``) is returned. The declared role has
    priority, because a replica that waits for a role polls the store and therefore reports the store.
    """
    role = view.declared.waits_for
    if role is None and view.waits_for is not None:
        return [view.waits_for]
    return by_role.get(role or "", [])


def _all_stalled(monitor: HealthMonitor, stalled: Mapping[ReplicaId, Finding]) -> bool:
    """Return whether every worker that has not left is stalled."""
    return all(view.left_at is not None or view.incarnation.replica in stalled for view in monitor.workers())


def _chain_ends(monitor: HealthMonitor, stalled: Mapping[ReplicaId, Finding]) -> dict[ReplicaId, ReplicaId | None]:
    """Return for each stalled replica the end of its chain; None if the chain leads to a replica that is not stalled.

    If the chain leads into a cycle, its end is the first replica of the cycle in ``_blame_order``.
    """
    of_role = _first_awaited_by_role(monitor, stalled)
    ends: dict[ReplicaId, ReplicaId | None] = {}
    for start in stalled:
        path: dict[ReplicaId, None] = {}  # an ordered set
        at: ReplicaId | None = start
        while at is not None and at not in ends and at not in path:
            path[at] = None
            view = monitor.replicas[at]
            if not is_waiting(view):
                ends[at] = at
            else:
                at = _next_in_chain(view, stalled, of_role)
        if at is None:
            end = None
        elif at in ends:
            end = ends[at]
        else:  # ``at`` is on the path already, so the chain is a cycle
            cycle = list(path)[list(path).index(at) :]
            end = _blame_order(monitor, cycle, stalled)[0]
        ends.update(dict.fromkeys(path, end))
    return ends


def _next_in_chain(
    view: ReplicaView, stalled: Mapping[ReplicaId, Finding], of_role: Mapping[str, ReplicaId]
) -> ReplicaId | None:
    """Return the next replica in the chain; None if that replica is not stalled.

    If the replica of ``view`` has reported a replica that it waits for (``view.waits_for``), this is the next replica.
    Otherwise the next replica belongs to the role that the phase waits for. ``of_role`` contains, for each role, the
    stalled replica that is most likely awaited.
    """
    if view.waits_for is not None:
        return view.waits_for if view.waits_for in stalled else None
    return of_role.get(view.declared.waits_for or "")


def _first_awaited_by_role(monitor: HealthMonitor, stalled: Mapping[ReplicaId, Finding]) -> dict[str, ReplicaId]:
    """Return for each role the stalled replica that others most likely wait for.

    This is a replica that does not wait itself, else the role's first replica in ``_blame_order``.
    """
    ordered = sorted(_blame_order(monitor, stalled, stalled), key=lambda replica: is_waiting(monitor.replicas[replica]))
    return {role_of(replica): replica for replica in reversed(ordered)}


def _blame_order(
    monitor: HealthMonitor, waiting: Collection[ReplicaId], stalled: Collection[ReplicaId]
) -> list[ReplicaId]:
    """Return the ``waiting`` replicas in the order of their likelihood to be the cause, most likely first.

    ``stalled`` contains all replicas that wait or are idle. A role with few replicas in ``stalled`` (a gang counts as
    one) is a more likely cause than a role with many.
    """
    gangs_of_role = Counter(role_of(gang) for gang in {gang_of(replica) for replica in stalled})

    def key(replica: ReplicaId) -> tuple[bool, int, float, ReplicaId]:
        view = monitor.replicas[replica]
        return view.probe.answer_count > 0, gangs_of_role[role_of(replica)], view.last_change_at, replica

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
