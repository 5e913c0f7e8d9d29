"""Derive events from one poll of the cluster, for open intents and known allocations; find steps that are gone. Pure.

An intent whose call got no reply is settled by its tag. If the tag is listed, the action was done. If the tag stays
unlisted for a quiet period after the intent, the action was certainly not done. The period is long, because a timed-out
sbatch can take effect late. A launch whose srun has ended cannot take effect late, so it needs no quiet period. squeue
can omit a job once, and a site's cache can return an answer that is minutes old. So two polls in a row must show that a
job, step or node is gone, has never started or is queued again. In most cases the polls must also show this for
``limits.quiet`` seconds, because no answer of the cluster is older than that.
"""

from __future__ import annotations

import msgspec

from ...cluster.base import AllocationState, AllocationStatus, ClusterSnapshot, NodeState, NodeStatus, RejectReason
from ...core.run_spec import Limits
from ...core.types import Incarnation, NodeName, Verdict
from ...health.detection.detectors.base import expects_heartbeats, heartbeat_slack
from ...health.detection.detectors.node_liveness import is_silent_with_node
from ...health.detection.health_monitor import HealthMonitor
from ...health.detection.records import ReplicaView
from ..model.actions import Drain, ExternalAction, Launch, Request, Shrink, Undrain
from ..model.events import AllocationChanged, Event, IntentSettled, NodeChanged
from ..model.queries import open_requests
from ..model.state import NEVER_APPEARED, Allocation, Replica, State

FAST_POLL_AFTER_REQUEST_S = 60.0
"""Seconds after a request during which rrl polls faster than the site's interval while the allocation is pending."""
MIN_ABSENT_POLLS = 2
"""Number of consecutive polls in which an allocation must be missing before it counts as gone."""
MIN_END_CHANGE_S = 30.0
"""Minimum change (s) of an allocation's end that is recorded. Smaller changes come from rounding the remaining time to
seconds."""


class AbsenceCounter:
    """Counts for each allocation, step or node in how many polls in a row it was missing, and since when.

    The counts are not journaled: a new manager begins with empty counts.
    """

    def __init__(self) -> None:
        self._absent: dict[str, tuple[int, float]] = {}
        self.last_unanswered_at = float("-inf")
        """Manager's time (s) of the last poll that was not answered."""

    def is_gone(self, tag: str, listed: bool, now: float = 0.0, min_absence_s: float = 0.0) -> bool:
        """Count one poll in which the entry ``tag`` was listed or missing, and return whether the entry is gone.

        The entry is gone if it was missing in this poll and in the previous poll, and for ``min_absence_s`` seconds or
        more.
        """
        if listed:
            self._absent.pop(tag, None)
            return False
        count, since = self._absent.get(tag, (0, now))
        self._absent[tag] = (count + 1, since)
        return count + 1 >= MIN_ABSENT_POLLS and now - since >= min_absence_s


def reconcile(
    state: State, snapshot: ClusterSnapshot, absences: AbsenceCounter, now: float, busy: frozenset[str]
) -> list[Event]:
    """Return the events that follow from a poll.

    ``busy`` are the tags of actions whose command is still running; requests and launches among them are not settled.
    """
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
                # ignore the cancelled job of a salloc that found no free nodes: sbatch uses its tag again
                is_salloc_attempt = status.state is AllocationState.ENDED and unsettled.get(tag) in busy
                status = _reconcile_allocation(
                    allocation, status, snapshot.nodes, absences, now, state.job.limits.quiet
                )
                if not is_salloc_attempt and _changed(allocation, status, now):
                    events.append(AllocationChanged(tag, status))
            elif tag not in unsettled and not allocation.refused:
                min_absence_s = 0.0 if allocation.releasing or allocation.orphan else state.job.limits.quiet
                if absences.is_gone(tag, False, now, min_absence_s):
                    events.append(AllocationChanged(tag, None))
        for tag, status in snapshot.allocations.items():
            is_orphan = tag.startswith(f"{state.run}.") and tag not in state.allocations
            if is_orphan and status.state not in (AllocationState.ENDING, AllocationState.ENDED):
                events.append(AllocationChanged(tag, status))  # a request was granted although it had been given up
    if snapshot.steps is not None:
        for tag, intent in state.intents.items():
            if not isinstance(intent.action, Launch) or tag in busy:
                continue
            due = now - intent.at > state.job.limits.quiet or tag in snapshot.launchers_ended
            if absences.is_gone(tag, tag in snapshot.steps or not due):
                # The manager died, or the cluster did not answer: the cluster may never have received the launch.
                undelivered = intent.at < max(state.managed_since, absences.last_unanswered_at)
                events.append(IntentSettled(tag, False, NEVER_APPEARED, undelivered, RejectReason.NEVER_APPEARED))
    events += [
        IntentSettled(tag, True, "confirmed by the cluster")
        for tag, intent in state.intents.items()
        if _confirmed_by(intent.action, snapshot)
    ]
    for name, node_status in (snapshot.nodes or {}).items():
        node = state.nodes.get(name)
        if node is not None and node.status != node_status:
            events.append(NodeChanged(name, node_status))
    return events


def unlisted_steps(
    state: State, snapshot: ClusterSnapshot, absences: AbsenceCounter, monitor: HealthMonitor, now: float
) -> list[Incarnation]:
    """Return the incarnations whose steps have ended according to the cluster, and whose nodes are silent.

    Usually the agent of a node reports the end of a step at once. If the agent was lost together with the step, the
    cluster is the only other witness. Its list counts only under these conditions:

    - Messages of the incarnation and of every other process on its node are overdue. So a step that works is never
      found here, whatever the cluster lists.
    - The same poll lists the allocation of the step as running, with the node. Allocations that are missing, ending or
      suspended, and nodes that an allocation has lost, are judged by :func:`reconcile`.
    - The list contains each step that has just sent a message. A list without such a step is incomplete, or is older
      than the step, and does not count.
    - The step is missing in ``MIN_ABSENT_POLLS`` polls in a row and for ``limits.quiet`` seconds; allocations are
      judged in the same way. A poll that could not read the steps does not count.

    A launch whose intent is open is judged by :func:`reconcile`. The steps of a node that is cut off are not found here
    while they run: Slurm lists them until it reports the node as down.

    A wrong result costs a restart, but never leaves two current incarnations. The finding that follows leads to the
    fence of the incarnation before the next incarnation is launched. So no later message of the fenced incarnation is
    accepted. The fenced step is an orphan: the manager requests the cluster to stop it, and its process ends as soon as
    it reaches the manager.
    """
    if snapshot.steps is None or snapshot.allocations is None:
        return []
    limits = state.job.limits
    unlisted = {
        replica.incarnation
        for replica in state.replicas.values()
        if replica.is_current and replica.step is not None and replica.step not in snapshot.steps
    }
    missing = [view for view in monitor.replicas.values() if view.incarnation in unlisted]
    if any(_sends_messages(view, limits, now) for view in missing):
        return []
    silent = {view.incarnation for view in missing if is_silent_with_node(view, limits, now)}
    gone: list[Incarnation] = []
    for replica in state.workers:
        if replica.step is None or replica.step in state.intents:
            continue
        listed = replica.incarnation not in silent or not _holds_node(snapshot.allocations, replica)
        if absences.is_gone(f"{replica.step}!ended", listed, now, limits.quiet):
            gone.append(replica.incarnation)
    return gone


def _sends_messages(view: ReplicaView, limits: Limits, now: float) -> bool:
    """Return whether the process of an incarnation has just sent a message, so that its step runs."""
    return view.status == "joined" and not view.ended and now < view.last_message_at + heartbeat_slack(limits)


def _holds_node(allocations: dict[str, AllocationStatus], replica: Replica) -> bool:
    """Return whether a poll lists the allocation of the replica as running, with the replica's node."""
    status = allocations.get(replica.allocation or "")
    return status is not None and status.state is AllocationState.RUNNING and replica.node in status.nodes


def _confirmed_by(action: ExternalAction, snapshot: ClusterSnapshot) -> bool:
    """Return whether the snapshot shows that an action on single nodes has taken effect.

    Such an action is repeated until a snapshot confirms it, because replies can be lost.
    """
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
    allocation: Allocation,
    status: AllocationStatus,
    nodes: dict[NodeName, NodeStatus] | None,
    absences: AbsenceCounter,
    now: float,
    min_absence_s: float,
) -> AllocationStatus:
    """Return the status to accept for an allocation.

    The cluster's answer may be old or incomplete if a running allocation is pending again, or has lost a node that is
    not down. Such a change is accepted only after further polls. Until then the earlier status, or the missing node, is
    kept.
    """
    before = allocation.status
    if status.state is AllocationState.ENDING and (allocation.releasing or allocation.orphan):
        return msgspec.structs.replace(
            status, state=AllocationState.ENDED
        )  # Slurm may list the job as COMPLETING for minutes
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
    """Return whether the status has changed.

    A changed remaining time counts only if it moves the end of the allocation.
    """
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
    """Settle open allocation requests by their tags.

    One listed component settles the request of a heterogeneous job, because Slurm accepts all of its components or
    none.
    """
    events: list[Event] = []
    for tag, intent in state.intents.items():
        if not isinstance(intent.action, Request) or tag in busy:
            continue
        components = {component.tag for component in (intent.action.request, *intent.action.request.further_components)}
        if not components.isdisjoint(listed):
            events.append(IntentSettled(tag, True, "found by its tag"))
        elif now - intent.at > state.job.limits.quiet and absences.is_gone(tag, False):
            events.append(IntentSettled(tag, False, "never appeared in the queue", True, RejectReason.NEVER_APPEARED))
    return events


def has_undecided_launch(state: State, snapshot: ClusterSnapshot) -> bool:
    """Return whether there is a launch whose srun has ended while the intent of the launch is open.

    One more poll then settles the intent.
    """
    return any(tag in state.intents for tag in snapshot.launchers_ended)


def expects_change(state: State, monitor: HealthMonitor, now: float) -> bool:
    """Return whether the cluster's state is expected to change soon, so that it is polled faster.

    While replicas are ``awaited``, the cluster or the exit records, which are read after each poll, may explain their
    silence. A pending request counts only for ``FAST_POLL_AFTER_REQUEST_S`` seconds, since it may wait in the queue for
    days.
    """
    has_requests = any(isinstance(intent.action, Request) for intent in state.intents.values())
    allocations = state.allocations.values()
    return (
        has_requests
        or state.finish is not None
        or any(
            a.releasing or (_is_pending(a) and now - a.requested_at < FAST_POLL_AFTER_REQUEST_S) for a in allocations
        )
        or any((a.reclaimed or a.ending) and now - a.status_at < FAST_POLL_AFTER_REQUEST_S for a in allocations)
        or any(f.detector == "node_lost" and f.verdict is Verdict.WARN for f in state.findings.values())
        or any(view.status == "awaited" and expects_heartbeats(view) for view in monitor.replicas.values())
    )


def _is_pending(allocation: Allocation) -> bool:
    return allocation.status is None or allocation.status.state is AllocationState.PENDING
