"""Wait-for blame: a standstill is charged to the end of the chain of those who wait, never to one who waits.

A wait is a standstill only where the whole run stands: as long as one replica works within its deadlines, starts, or
has a finding of its own, that one explains why others wait, and it is judged by its own detectors. (A reward role that
waits out a long training step, a trainer that waits while a rollout is being replaced: both normal.)

Services are no such explanation for ever: who has waited for longer than any such wait may last, for a role all
of which waits too, is charged though the store between them still serves somebody.

A service is charged sooner, for it has no business but to answer: when all who wait lead to it and to nobody else,
their waits need not be overdue; and when somebody is blocked in a call to it, others may well be at work.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf

from ....core.types import Cause, Evidence, Finding, Remedy, ReplicaId, Verdict, role_of
from ..detectors.registry import is_waiting
from ..health_monitor import HealthMonitor, ReplicaView

_ENDLESS_WAIT = "wait_endless"
_STALL_DETECTORS = (_ENDLESS_WAIT, "wait_overdue", "wait_long", "idle")
_WAIT_DETECTORS = (_ENDLESS_WAIT, "wait_overdue", "wait_long")
_MAX_WAITERS_NAMED = 4
"""waiters named as evidence; the others are counted (docs/sources.md: at most five lines)"""


def attribute(findings: Sequence[Finding], monitor: HealthMonitor) -> list[Finding]:
    """The findings; those of ``_STANDING`` are replaced by a ``standstill`` of whom they lead to, or by nothing.

    Chains end at one who does not wait. In a cycle everybody waits: the member that has waited longest is charged, then
    the smallest id. A chain that leads to a replica nobody has seen charges nobody.
    """
    standing = {
        f.incarnation.replica: f for f in findings if f.incarnation is not None and f.detector in _STALL_DETECTORS
    }
    others = [f for f in findings if f.detector not in _STALL_DETECTORS]
    if not standing:
        return others
    charged: dict[ReplicaId, list[ReplicaId]] = {}
    if _all_stalled(monitor, standing):
        ends = _chain_ends(monitor, standing)
        for replica in sorted(standing):
            end = ends[replica]
            if end is not None and standing[replica].detector in _WAIT_DETECTORS:
                charged.setdefault(end, []).append(replica)
        alone = len(charged) == 1 and all(standing[end].detector == "idle" for end in charged)
        if not alone and any(finding.detector == "wait_long" for finding in standing.values()):
            charged = {}
    charged = charged or _blocked_services(monitor, standing, others) or _starvation(monitor, standing, others)
    return others + [_standstill_finding(monitor, end, waiters, standing) for end, waiters in charged.items()]


def _blocked_services(
    monitor: HealthMonitor, standing: Mapping[ReplicaId, Finding], others: Sequence[Finding]
) -> dict[ReplicaId, list[ReplicaId]]:
    """Services that do nothing while somebody is blocked in a call to them, by who is: in a phase that by itself waits
    for nobody, for no less time than the service may stand. Where the service's own gang or node has a finding, that
    says more (``detect`` drops it)."""
    failed = {f.incarnation.replica for f in others if f.incarnation is not None and f.verdict is Verdict.FAIL}
    called: dict[ReplicaId, list[ReplicaId]] = {}
    for replica in sorted(standing):
        view = monitor.replicas[replica]
        service = view.waits_for
        if standing[replica].detector not in _WAIT_DETECTORS or service is None or service in failed:
            continue
        if view.declared.waits_for is not None or standing.get(service, standing[replica]).detector != "idle":
            continue
        called.setdefault(service, []).append(replica)
    return called


def _starvation(
    monitor: HealthMonitor, standing: Mapping[ReplicaId, Finding], others: Sequence[Finding]
) -> dict[ReplicaId, list[ReplicaId]]:
    """Who has waited endlessly for others all of which wait as well, be it in the end for a service that is at work and
    serves somebody else. The first of them, by all who wait there; nobody where anybody has failed."""
    if any(f.verdict is Verdict.FAIL for f in others):
        return {}
    found: dict[ReplicaId, list[ReplicaId]] = {}
    by_role: dict[str, list[ReplicaId]] = {}
    for view in monitor.workers():
        if view.left_at is None:
            by_role.setdefault(role_of(view.incarnation.replica), []).append(view.incarnation.replica)
    for replica in sorted(standing, key=lambda one: (monitor.replicas[one].last_change_at, one)):
        if (
            standing[replica].detector == _ENDLESS_WAIT
            and len(waiting := _waiting_with(monitor, replica, standing, by_role)) > 1
        ):
            found[replica] = sorted(waiting)
            break
    return found


def _waiting_with(
    monitor: HealthMonitor,
    start: ReplicaId,
    standing: Mapping[ReplicaId, Finding],
    by_role: Mapping[str, list[ReplicaId]],
) -> set[ReplicaId]:
    """All who wait where this wait leads to, itself too; nobody where it leads to one that may yet end it."""
    waiting: set[ReplicaId] = set()
    ahead = [start]
    while ahead:
        one = ahead.pop()
        if one in waiting:
            continue
        view = monitor.replicas.get(one)
        if view is None:
            return set()
        if one in standing and standing[one].detector in _WAIT_DETECTORS:
            waiting.add(one)
            if not (behind := _awaited(view, by_role)):
                return set()
            ahead.extend(behind)
        elif view.declared.longest != inf or view.declared.progresses:
            return set()
    return waiting


def _awaited(view: ReplicaView, by_role: Mapping[str, list[ReplicaId]]) -> list[ReplicaId]:
    """Whom it waits for by its phase, though it asks the store; whom it names where the phase waits for nobody."""
    role = view.declared.waits_for
    if role is None and view.waits_for is not None:
        return [view.waits_for]
    return by_role.get(role or "", [])


def _all_stalled(monitor: HealthMonitor, standing: Mapping[ReplicaId, Finding]) -> bool:
    return all(view.left_at is not None or view.incarnation.replica in standing for view in monitor.workers())


def _chain_ends(monitor: HealthMonitor, standing: Mapping[ReplicaId, Finding]) -> dict[ReplicaId, ReplicaId | None]:
    """Where the chain of each standing replica leads; each replica is walked through once."""
    of_role = _first_awaited_by_role(monitor, standing)
    ends: dict[ReplicaId, ReplicaId | None] = {}
    for start in standing:
        path: dict[ReplicaId, None] = {}  # ordered
        at: ReplicaId | None = start
        while at is not None and at not in ends and at not in path:
            path[at] = None
            view = monitor.replicas[at]
            if not is_waiting(view):
                ends[at] = at
            else:
                at = _next_in_chain(view, standing, of_role)
        if at is None:
            end = None
        elif at in ends:
            end = ends[at]
        else:  # back where the path has been: a cycle
            members = list(path)[list(path).index(at) :]
            end = min(members, key=lambda one: (monitor.replicas[one].last_change_at, one))
        ends.update(dict.fromkeys(path, end))
    return ends


def _next_in_chain(
    view: ReplicaView, standing: Mapping[ReplicaId, Finding], of_role: Mapping[str, ReplicaId]
) -> ReplicaId | None:
    """Whom it named, else the foremost of the role that its phase waits for; None when there is no such replica."""
    if view.waits_for is not None:
        return view.waits_for if view.waits_for in standing else None
    return of_role.get(view.declared.waits_for or "")


def _first_awaited_by_role(monitor: HealthMonitor, standing: Mapping[ReplicaId, Finding]) -> dict[str, ReplicaId]:
    """Of each role the replica that others most likely wait for: one that does not wait, else the longest waiting."""
    ordered = sorted(
        standing, key=lambda one: (is_waiting(monitor.replicas[one]), monitor.replicas[one].last_change_at, one)
    )
    return {role_of(one): one for one in reversed(ordered)}


def _standstill_finding(
    monitor: HealthMonitor, end: ReplicaId, waiters: list[ReplicaId], standing: Mapping[ReplicaId, Finding]
) -> Finding:
    since = max(finding.since for finding in standing.values())  # when the last one stopped
    waiting = [one for one in waiters if one != end]
    evidence = [Evidence("blame", f"{one}: {line.text}", line.at)
                for one in [end, *waiting[:_MAX_WAITERS_NAMED]] for line in standing[one].evidence]  # fmt: skip
    if len(waiting) > _MAX_WAITERS_NAMED:
        evidence.append(Evidence("blame", f"and {len(waiting) - _MAX_WAITERS_NAMED} more wait", since))
    return Finding("standstill", Verdict.FAIL, Cause.HANG, Remedy.RESTART, since, tuple(evidence),
                   incarnation=monitor.replicas[end].incarnation)  # fmt: skip
