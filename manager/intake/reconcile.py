"""What one look at the cluster says about open intents and known allocations. Pure.

An intent that was never answered is settled by its tag: listed = done; not listed for a quiet period after it was
intended = certainly not done (a timed-out sbatch can land later, so the period is long; a launch whose srun has ended
cannot, and is not waited for). A squeue can omit a job once, and a site's cache can answer with what was a minute ago:
whatever counts as gone, as never there or as queued again must be so in two looks, and for as long as an answer may be
old.
"""

from __future__ import annotations

import msgspec

from ...core.types import NodeName, Verdict
from ..cluster.base import AllocationState, AllocationStatus, ClusterSnapshot, NodeState, NodeStatus, RejectReason
from ..model.actions import Drain, ExternalAction, Launch, Request, Shrink, Undrain
from ..model.events import AllocationChanged, Event, IntentSettled, NodeChanged
from ..model.queries import open_requests
from ..model.state import NEVER_APPEARED, Allocation, State

FAST_POLL_AFTER_REQUEST_S = 60.0
"""s after its request that an allocation is looked for more often than at the site's pace"""
MIN_ABSENT_POLLS = 2
"""Consecutive looks that must miss an allocation before it counts as gone."""
MIN_END_CHANGE_S = 30.0
"""s by which the end of an allocation must have moved to be worth a record: told in whole seconds, look by look"""


class AbsenceCounter:
    """Since when, and how often in a row, each known thing was missing. Volatile: a new manager counts anew."""

    def __init__(self) -> None:
        self._absent: dict[str, tuple[int, float]] = {}
        self.last_unanswered_at = float("-inf")
        """manager's time (s) of the last look that was not answered"""

    def is_gone(self, tag: str, listed: bool, now: float = 0.0, min_absence_s: float = 0.0) -> bool:
        """Missing from this look, from the one before, and for ``min_absence_s`` s since the first that missed it."""
        if listed:
            self._absent.pop(tag, None)
            return False
        count, since = self._absent.get(tag, (0, now))
        self._absent[tag] = (count + 1, since)
        return count + 1 >= MIN_ABSENT_POLLS and now - since >= min_absence_s


def reconcile(
    state: State, snapshot: ClusterSnapshot, absences: AbsenceCounter, now: float, busy: frozenset[str]
) -> list[Event]:
    """Events that follow from the look. ``busy``: tags whose command is still running: those settle themselves."""
    events: list[Event] = []
    if snapshot.steps is None:
        absences.last_unanswered_at = now
    if snapshot.allocations is not None:
        events += _reconcile_requests(state, snapshot.allocations, absences, now, busy)
        unsettled = open_requests(state)
        for tag, allocation in state.allocations.items():
            status = snapshot.allocations.get(tag)
            if status is not None:
                absences.is_gone(tag, True)
                # salloc that found no free nodes leaves a cancelled job, and sbatch follows it under the same tag
                is_salloc_attempt = status.state is AllocationState.ENDED and unsettled.get(tag) in busy
                status = _reconcile_allocation(
                    allocation, status, snapshot.nodes, absences, now, state.job.limits.quiet
                )
                if not is_salloc_attempt and _changed(allocation, status, now):
                    events.append(AllocationChanged(tag, status))
            elif tag not in unsettled:
                min_absence_s = 0.0 if allocation.releasing or allocation.orphan else state.job.limits.quiet
                if absences.is_gone(tag, False, now, min_absence_s):
                    events.append(AllocationChanged(tag, None))
        for tag, status in snapshot.allocations.items():
            is_orphan = tag.startswith(f"{state.run}.") and tag not in state.allocations
            if is_orphan and status.state not in (AllocationState.ENDING, AllocationState.ENDED):
                events.append(AllocationChanged(tag, status))  # a request that was given up has landed after all
    if snapshot.steps is not None:
        for tag, intent in state.intents.items():
            if not isinstance(intent.action, Launch) or tag in busy:
                continue
            due = now - intent.at > state.job.limits.quiet or tag in snapshot.launchers_ended
            if absences.is_gone(tag, tag in snapshot.steps or not due):
                undelivered = intent.at < max(
                    state.managed_since, absences.last_unanswered_at
                )  # who meant to launch it died, or Slurm did
                events.append(IntentSettled(tag, False, NEVER_APPEARED, undelivered, RejectReason.NEVER_APPEARED))
    events += [
        IntentSettled(tag, True, "seen so")
        for tag, intent in state.intents.items()
        if _confirmed_by(intent.action, snapshot)
    ]
    for name, node_status in (snapshot.nodes or {}).items():
        node = state.nodes.get(name)
        if node is not None and node.status != node_status:
            events.append(NodeChanged(name, node_status))
    return events


def _confirmed_by(action: ExternalAction, snapshot: ClusterSnapshot) -> bool:
    """What was to be done with single nodes is: they are asked for until somebody says so, and answers can be lost."""
    if isinstance(action, Shrink):
        status = (snapshot.allocations or {}).get(action.allocation)
        return (
            status is not None and status.state is AllocationState.RUNNING and not set(action.nodes) & set(status.nodes)
        )
    if not isinstance(action, Drain | Undrain):
        return False
    node_status = (snapshot.nodes or {}).get(action.node)
    if node_status is None or node_status.state is NodeState.UNKNOWN:
        return False
    has_our_drain = node_status.state is NodeState.DRAINING and node_status.reason == action.reason
    return has_our_drain is isinstance(action, Drain)


def _reconcile_allocation(
    allocation: Allocation, status: AllocationStatus, nodes: dict[NodeName, NodeStatus] | None, absences: AbsenceCounter, now: float,
    min_absence_s: float,
) -> AllocationStatus:  # fmt: skip
    """What is believed of an answer that takes something back: that a running allocation waits again, or has lost a
    node that the cluster does not call down. Both only once they can be no old or incomplete answer."""
    before = allocation.status
    if status.state is AllocationState.ENDING and (allocation.releasing or allocation.orphan):
        return msgspec.structs.replace(status, state=AllocationState.ENDED)  # its last word may take minutes
    if before is None or not allocation.running:
        return status
    if status.state is AllocationState.PENDING:
        return status if absences.is_gone(f"{allocation.tag}!queued", False, now, min_absence_s) else before
    absences.is_gone(f"{allocation.tag}!queued", True)
    if status.state in (AllocationState.ENDING, AllocationState.ENDED):
        return status
    remaining: list[NodeName] = []
    for name in before.nodes:
        is_listed = name in status.nodes
        gone = absences.is_gone(f"{allocation.tag}!{name}", is_listed, now)
        down = (node_status := (nodes or {}).get(name)) is not None and node_status.state is NodeState.DOWN
        if is_listed or not (gone or down):
            remaining.append(name)
    if len(remaining) == len(set(remaining).intersection(status.nodes)):
        return status
    return msgspec.structs.replace(
        status, nodes=(*remaining, *(name for name in status.nodes if name not in before.nodes))
    )


def _changed(allocation: Allocation, status: AllocationStatus, now: float) -> bool:
    """The time that is left counts down by itself: only an end that has moved is news."""
    if (
        allocation.status is None
        or msgspec.structs.replace(status, time_left_s=allocation.status.time_left_s) != allocation.status
    ):
        return True
    if status.time_left_s is None or allocation.suspended:
        return False
    return (
        allocation.status.time_left_s is None or abs(now + status.time_left_s - allocation.ends_at) > MIN_END_CHANGE_S
    )


def _reconcile_requests(
    state: State, listed: dict[str, AllocationStatus], absences: AbsenceCounter, now: float, busy: frozenset[str]
) -> list[Event]:
    """Of a heterogeneous job one component that is listed settles them all: Slurm takes it whole or not at all."""
    events: list[Event] = []
    for tag, intent in state.intents.items():
        if not isinstance(intent.action, Request) or tag in busy:
            continue
        components = {one.tag for one in (intent.action.request, *intent.action.request.further_components)}
        if not components.isdisjoint(listed):
            events.append(IntentSettled(tag, True, "found by its tag"))
        elif now - intent.at > state.job.limits.quiet and absences.is_gone(tag, False):
            events.append(IntentSettled(tag, False, "never appeared in the queue", True, RejectReason.NEVER_APPEARED))
    return events


def has_undecided_launch(state: State, snapshot: ClusterSnapshot) -> bool:
    """A launch whose command has ended is open: one more look decides what became of it."""
    return any(tag in state.intents for tag in snapshot.launchers_ended)


def expects_change(state: State, now: float) -> bool:
    """Something is expected of the cluster: look soon rather than at the next poll. A queue may take days."""
    waiting = any(isinstance(intent.action, Request) for intent in state.intents.values())
    allocations = state.allocations.values()
    return (
        waiting
        or state.finish is not None
        or any(
            a.releasing or (_is_pending(a) and now - a.requested_at < FAST_POLL_AFTER_REQUEST_S) for a in allocations
        )
        or any((a.reclaimed or a.ending) and now - a.status_at < FAST_POLL_AFTER_REQUEST_S for a in allocations)
        or any(f.detector == "node_lost" and f.verdict is Verdict.WARN for f in state.findings.values())
    )


def _is_pending(allocation: Allocation) -> bool:
    return allocation.status is None or allocation.status.state is AllocationState.PENDING
