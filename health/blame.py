"""Wait-for blame: a standstill is charged to the end of the chain of those who wait, never to one who waits.

A wait is a standstill only where the whole run stands: as long as one replica works within its deadlines, starts, or
has a finding of its own, that one explains why others wait, and it is judged by its own detectors. (A reward role that
waits out a long training step, a trainer that waits while a rollout is being replaced: both normal.)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rrl.health.progress import waits
from rrl.health.sightings import ReplicaSighting, Watch
from rrl.spec.words import Cause, Evidence, Finding, Remedy, ReplicaId, Verdict, role_of

_STANDING = ("wait_overdue", "idle")
_SHOWN = 4
"""waiters named as evidence; the others are counted (docs/sources.md: at most five lines)"""


def charge(findings: Sequence[Finding], watch: Watch) -> list[Finding]:
    """The findings; ``wait_overdue`` and ``idle`` are replaced by a ``standstill`` of whom they lead to, or by nothing.

    Chains end at one who does not wait. In a cycle everybody waits: the member that has waited longest is charged, then
    the smallest id. A chain that leads to a replica nobody has seen charges nobody.
    """
    standing = {f.life.replica: f for f in findings if f.life is not None and f.detector in _STANDING}
    others = [f for f in findings if f.detector not in _STANDING]
    if not standing or not _everybody_stands(watch, standing):
        return others
    ends = _ends(watch, standing)
    charged: dict[ReplicaId, list[ReplicaId]] = {}
    for replica in sorted(standing):
        end = ends[replica]
        if end is not None and standing[replica].detector == "wait_overdue":
            charged.setdefault(end, []).append(replica)
    return others + [_standstill(watch, end, waiters, standing) for end, waiters in charged.items()]


def _everybody_stands(watch: Watch, standing: Mapping[ReplicaId, Finding]) -> bool:
    return all(seen.left_at is not None or seen.life.replica in standing for seen in watch.workers())


def _ends(watch: Watch, standing: Mapping[ReplicaId, Finding]) -> dict[ReplicaId, ReplicaId | None]:
    """Where the chain of each standing replica leads; each replica is walked through once."""
    of_role = _foremost(watch, standing)
    ends: dict[ReplicaId, ReplicaId | None] = {}
    for start in standing:
        path: dict[ReplicaId, None] = {}  # ordered
        at: ReplicaId | None = start
        while at is not None and at not in ends and at not in path:
            path[at] = None
            seen = watch.replicas[at]
            if not waits(seen):
                ends[at] = at
            else:
                at = _waits_for(seen, standing, of_role)
        if at is None:
            end = None
        elif at in ends:
            end = ends[at]
        else:  # back where the path has been: a cycle
            members = list(path)[list(path).index(at) :]
            end = min(members, key=lambda one: (watch.replicas[one].clock, one))
        ends.update(dict.fromkeys(path, end))
    return ends


def _waits_for(
    seen: ReplicaSighting, standing: Mapping[ReplicaId, Finding], of_role: Mapping[str, ReplicaId]
) -> ReplicaId | None:
    """Whom it named, else the foremost of the role that its phase waits for; None when there is no such replica."""
    if seen.waits_for is not None:
        return seen.waits_for if seen.waits_for in standing else None
    return of_role.get(seen.declared.waits_for or "")


def _foremost(watch: Watch, standing: Mapping[ReplicaId, Finding]) -> dict[str, ReplicaId]:
    """Of each role the replica that others most likely wait for: one that does not wait, else the longest waiting."""
    ordered = sorted(standing, key=lambda one: (waits(watch.replicas[one]), watch.replicas[one].clock, one))
    return {role_of(one): one for one in reversed(ordered)}


def _standstill(
    watch: Watch, end: ReplicaId, waiters: list[ReplicaId], standing: Mapping[ReplicaId, Finding]
) -> Finding:
    since = max(finding.since for finding in standing.values())  # when the last one stopped
    waiting = [one for one in waiters if one != end]
    evidence = [Evidence("blame", f"{one}: {line.text}", line.at)
                for one in [end, *waiting[:_SHOWN]] for line in standing[one].evidence]  # fmt: skip
    if len(waiting) > _SHOWN:
        evidence.append(Evidence("blame", f"and {len(waiting) - _SHOWN} more wait", since))
    return Finding("standstill", Verdict.FAIL, Cause.HANG, Remedy.RESTART, since, tuple(evidence),
                   life=watch.replicas[end].life)  # fmt: skip
