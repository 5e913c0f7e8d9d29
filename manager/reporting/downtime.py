"""Account for downtime: since when each replica has not worked, and the GPU time lost until it works again. Pure.

It takes every event with the states before and after it; a new manager starts from the state that it found. Work that
was counted after the first symptom of a failure, which is detected later, is taken back.
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
"""kinds of roles that work again with their first unit of work; the others when they have joined"""


class Down(Struct, frozen=True):
    """A replica stands still ``since`` (manager's time, s); ``node``: of the member that failed."""

    replica: ReplicaId
    node: str
    since: float
    gpus: int

    def gpu_seconds(self, until: float) -> float:
        return self.gpus * max(0.0, until - self.since)


class Downtime:
    def __init__(self, state: State | None) -> None:
        self.down: dict[ReplicaId, Down] = {}
        self.gpu_seconds = 0.0
        """of all who stood still and work again"""
        if state is None or state.finish is not None:
            return
        for replica in state.replicas.values():  # of a predecessor: whoever had worked, and does not now
            idle = (
                replica.status in (Status.WANTED, Status.LAUNCHING, Status.STARTING) and replica.incarnation_number > 0
            )
            if idle and replica.ever_joined and replica.role not in (AGENT, STANDBY_ROLE):
                self._mark_down(state, replica.incarnation, replica.down_since)

    def apply(self, before: State | None, after: State, stamped: ev.Stamped) -> list[tuple[Down, bool]]:
        """Whoever's standstill is over with this event: it works again, or (False) the run ends without it."""
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
        """All that was lost up to ``now``, whoever still stands still included."""
        return self.gpu_seconds + sum(one.gpu_seconds(now) for one in list(self.down.values()))

    def _mark_down(self, state: State, incarnation: Incarnation, since: float) -> None:
        gang, replica = gang_of(incarnation.replica), state.replica(incarnation.replica)
        if gang not in self.down:
            self.down[gang] = Down(gang, replica.node or "", since, gpus_of(state, gang))

    def _mark_up(self, gang: ReplicaId, at: float) -> Down:
        down = self.down.pop(gang)
        self.gpu_seconds += down.gpu_seconds(at)
        return down


def fences(event: ev.Decided) -> tuple[Fence, ...]:
    """Lives that a decision gives up."""
    if isinstance(event.action, RestartAll):
        return event.action.fences
    return (event.action,) if isinstance(event.action, Fence) else ()


def failures_of(state: State, incarnation: Incarnation) -> Iterator[Finding]:
    """What stands against a life or its node, what is about its node first."""
    node = state.replica(incarnation.replica).node
    found = [one for one in state.findings.values() if one.verdict is Verdict.FAIL]
    yield from (one for one in found if node is not None and one.node == node)
    yield from (one for one in found if one.incarnation == incarnation)


def first_symptom(state: State, incarnation: Incarnation, at: float) -> float:
    """Of itself: it may have worked long on a node that something stood against. Of its node, where that is all."""
    found = [finding for finding in failures_of(state, incarnation) if finding.since > 0]
    own = [finding.since for finding in found if finding.incarnation == incarnation]
    return min(own or [finding.since for finding in found], default=at)


def gpus_of(state: State, gang: ReplicaId) -> int:
    """That a whole replica has."""
    role_spec = next((role for role in state.job.roles if role.name == role_of(gang)), None)
    return role_spec.per_member.gpus * role_spec.ranks if role_spec is not None else 0


def gpus_on(state: State, node: NodeName) -> int:
    """That the run has there."""
    node_record = state.nodes.get(node)
    allocation = state.allocations.get(node_record.allocation) if node_record is not None else None
    return allocation.request.node.gpus if allocation is not None else 0


def _kind(state: State, gang: ReplicaId) -> str:
    return next((role.kind for role in state.job.roles if role.name == role_of(gang)), "")


class WorkIntervals:
    """Intervals of work by replica, in order. Times in s."""

    def __init__(self) -> None:
        self._done: dict[ReplicaId, list[tuple[float, float]]] = {}
        self._since: dict[ReplicaId, float] = {}
        """of those at work now"""

    def begin(self, replica: ReplicaId, at: float) -> None:
        self._since.setdefault(replica, at)

    def end(self, replica: ReplicaId, at: float) -> None:
        """It has not worked since ``at``, which may lie in the past: what it was credited after that is taken back."""
        done = self._done.setdefault(replica, [])
        if (since := self._since.pop(replica, None)) is not None:
            done.append((since, max(since, at)))
        while done and done[-1][1] > at:
            since, _ = done.pop()
            if since < at:
                done.append((since, at))

    def intervals(self, until: float) -> Iterator[tuple[float, float, Counter[str]]]:
        """(start, end, replicas at work by role) of every interval up to ``until``, in order."""
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
