"""Account for downtime: since when each replica has not worked, and the GPU time lost until it works again. Pure.

Every event is applied with the states before and after it; a new manager starts from the state that it restored. A
failure is detected later than its first symptom; work counted between the two is subtracted again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from msgspec import Struct

from ...core.types import AGENT, STANDBY_ROLE, Finding, Incarnation, NodeName, ReplicaId, Verdict, gang_of, role_of
from ..model import events as ev
from ..model.actions import Fence, Finish, RestartAll
from ..model.state import State, Status

RECOVERED_BY_FIRST_WORK = ("trainer", "rollout")
"""Kinds of roles that count as recovered with their first unit of work; all others count as recovered when they
join."""


class Down(Struct, frozen=True):
    """A replica that has not worked ``since`` a manager's time (s). ``node`` is the node of the member that failed."""

    replica: ReplicaId
    node: str
    since: float
    gpus: int

    def gpu_seconds(self, until: float) -> float:
        """Return the GPU time (s) lost up to ``until``."""
        return self.gpus * max(0.0, until - self.since)


class Downtime:
    """The replicas that are down, and the GPU time lost by those that work again."""

    def __init__(self, state: State | None) -> None:
        self.down: dict[ReplicaId, Down] = {}
        self.gpu_seconds = 0.0
        """GPU time (s) lost by replicas that work again."""
        if state is None or state.finish is not None:
            return
        for replica in state.replicas.values():  # replicas that worked under an earlier manager, and do not now
            idle = (
                replica.status in (Status.WANTED, Status.LAUNCHING, Status.STARTING) and replica.incarnation_number > 0
            )
            if idle and replica.ever_joined and replica.role not in (AGENT, STANDBY_ROLE):
                self._mark_down(state, replica.incarnation, replica.down_since)

    def apply(self, before: State | None, after: State, stamped: ev.Stamped) -> list[tuple[Down, bool]]:
        """Apply an event; return (downtime, recovered) for each downtime that ends.

        ``recovered`` is False if the run ended.
        """
        event, at = stamped.event, stamped.at
        if before is None:
            return []
        if isinstance(event, ev.Decided):
            if isinstance(event.action, Finish):
                return [(self._mark_up(id, at), False) for id in list(self.down)]
            for fence in fences(event):
                if after.finish is None and role_of(fence.incarnation.replica) not in (AGENT, STANDBY_ROLE):
                    self._mark_down(before, fence.incarnation, first_symptom(before, fence.incarnation, at))
        elif isinstance(event, ev.FirstWorkDone | ev.StepCommitted | ev.Joined):
            gang = gang_of(event.incarnation.replica)
            joined_only = isinstance(event, ev.Joined) and _kind(after, gang) in RECOVERED_BY_FIRST_WORK
            if gang in self.down and after.is_current(event.incarnation) and not joined_only:
                return [(self._mark_up(gang, at), True)]
        return []

    def gpu_seconds_until(self, now: float) -> float:
        """Return the GPU time (s) lost up to ``now``, including replicas that are still down."""
        return self.gpu_seconds + sum(down.gpu_seconds(now) for down in list(self.down.values()))

    def _mark_down(self, state: State, incarnation: Incarnation, since: float) -> None:
        gang, replica = gang_of(incarnation.replica), state.replica(incarnation.replica)
        if gang not in self.down:
            self.down[gang] = Down(gang, replica.node or "", since, gpus_of(state, gang))

    def _mark_up(self, gang: ReplicaId, at: float) -> Down:
        down = self.down.pop(gang)
        self.gpu_seconds += down.gpu_seconds(at)
        return down


def fences(event: ev.Decided) -> tuple[Fence, ...]:
    """Return the fences that a decision contains."""
    if isinstance(event.action, RestartAll):
        return event.action.fences
    return (event.action,) if isinstance(event.action, Fence) else ()


def failures_of(state: State, incarnation: Incarnation) -> Iterator[Finding]:
    """Yield the standing FAIL findings about an incarnation: those about its node first, then its own."""
    node = state.replica(incarnation.replica).node
    failures = [finding for finding in state.findings.values() if finding.verdict is Verdict.FAIL]
    yield from (finding for finding in failures if node is not None and finding.node == node)
    yield from (finding for finding in failures if finding.incarnation == incarnation)


def first_symptom(state: State, incarnation: Incarnation, at: float) -> float:
    """Return the time (s) of the first symptom of an incarnation's failure, or ``at`` without any.

    Findings about the incarnation itself take precedence: it may have worked for a long time on a node with findings.
    """
    failures = [finding for finding in failures_of(state, incarnation) if finding.since > 0]
    own = [finding.since for finding in failures if finding.incarnation == incarnation]
    return min(own or [finding.since for finding in failures], default=at)


def gpus_of(state: State, gang: ReplicaId) -> int:
    """Return the number of GPUs of a whole replica (all members of a gang)."""
    role_spec = next((role for role in state.job.roles if role.name == role_of(gang)), None)
    return role_spec.per_member.gpus * role_spec.ranks if role_spec is not None else 0


def gpus_on(state: State, node: NodeName) -> int:
    """Return the number of GPUs that the run has allocated on a node."""
    node_record = state.nodes.get(node)
    allocation = state.allocations.get(node_record.allocation) if node_record is not None else None
    return allocation.request.node.gpus if allocation is not None else 0


def _kind(state: State, gang: ReplicaId) -> str:
    return next((role.kind for role in state.job.roles if role.name == role_of(gang)), "")


class WorkIntervals:
    """The intervals (s) in which each replica worked, in order."""

    def __init__(self) -> None:
        self._done: dict[ReplicaId, list[tuple[float, float]]] = {}
        self._since: dict[ReplicaId, float] = {}
        """Start (s) of the current interval of each replica that is working."""

    def begin(self, replica: ReplicaId, at: float) -> None:
        """Start an interval of work, unless the replica is working already."""
        self._since.setdefault(replica, at)

    def end(self, replica: ReplicaId, at: float) -> None:
        """End a replica's work at ``at``. If that is in the past, work counted after it is subtracted again."""
        done = self._done.setdefault(replica, [])
        if (since := self._since.pop(replica, None)) is not None:
            done.append((since, max(since, at)))
        while done and done[-1][1] > at:
            since, _ = done.pop()
            if since < at:
                done.append((since, at))

    def intervals(self, until: float) -> Iterator[tuple[float, float, Counter[str]]]:
        """Yield (start, end, number of working replicas by role) for every interval up to ``until``, in order."""
        changes: list[tuple[float, int, str]] = []
        for replica in {**self._done, **self._since}:
            spans = [*self._done.get(replica, ())]
            if replica in self._since:
                spans.append((self._since[replica], until))
            for start, end in spans:
                if start < min(end, until):
                    changes += [(start, 1, role_of(replica)), (min(end, until), -1, role_of(replica))]
        at_work: Counter[str] = Counter()
        before = 0.0
        for at, change, role in sorted(changes):
            if at > before and at_work:
                yield before, at, at_work
            at_work[role] += change
            before = at
