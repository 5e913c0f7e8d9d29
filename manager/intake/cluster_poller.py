"""Poll the cluster: at the site's interval, faster while a change is expected, and slower while it does not answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from ...cluster.base import AllocationState, Cluster, ClusterSnapshot, NodeState, NodeStatus
from ...core.types import NodeName
from ..context import RunContext
from ..model.actions import Launch
from ..model.events import ClusterUnknown
from ..model.state import State
from .message_handler import with_reason
from .reconcile import AbsenceCounter, expects_change, has_undecided_launch, reconcile, unlisted_steps

FAST_POLL_S = 1.0
"""Seconds between two polls of the cluster while a change is expected."""
MIN_UNKNOWN_POLLS = 2
"""Consecutive incomplete polls after which the run records that the cluster's state is unknown: one alone is common."""


class ClusterPoller:
    """Polls the cluster for one manager and records the events that follow from each poll.

    ``busy`` returns the tags of the actions whose command is still running.
    """

    def __init__(self, context: RunContext, cluster: Cluster, busy: Callable[[], frozenset[str]]) -> None:
        self._context, self._cluster, self._busy = context, cluster, busy
        self._absences = AbsenceCounter()
        self._poll_requested = asyncio.Event()
        self._last_snapshot: ClusterSnapshot | None = None
        self._failed_polls = 0
        """Consecutive polls that failed."""
        self._unknown_polls, self._unknown_since = 0, 0.0
        """Consecutive polls that lack a part, and the manager's time (s) of the first of them."""

    def poll_soon(self) -> None:
        """Poll without waiting for the interval, because the cluster may explain an event that was just recorded."""
        self._poll_requested.set()

    def check_suspensions(self) -> None:
        """Request a poll if a node is silent: the allocation may be suspended, which is not a failure of the node."""
        if self._context.monitor.needs_suspend_check(self._context.state().job.limits, self._context.now()):
            self._poll_requested.set()

    async def run(self, after_poll: Callable[[], None]) -> None:
        """Poll until cancelled; call ``after_poll`` after every poll."""
        while True:
            await self._poll(after_poll)

    async def _poll(self, after_poll: Callable[[], None]) -> None:
        """Poll once, then wait until the next poll is due."""
        polled_at = self._context.now()
        snapshot = await self._cluster.observe()
        if snapshot is not self._last_snapshot:  # a cached answer that is returned again is not a second observation
            self._on_snapshot(snapshot, polled_at)
        self._last_snapshot = snapshot
        after_poll()
        self._failed_polls = self._failed_polls + 1 if snapshot.allocations is None else 0
        self._poll_requested.clear()
        limits = self._context.state().job.limits
        if self._failed_polls:  # polling more often does not bring an unreachable cluster back
            await asyncio.sleep(
                min(FAST_POLL_S * 2.0 ** min(self._failed_polls - 1, 30), max(FAST_POLL_S, limits.poll))
            )
            return
        state, monitor = self._context.state(), self._context.monitor
        poll_fast = expects_change(state, monitor, self._context.now()) or has_undecided_launch(state, snapshot)
        wait = FAST_POLL_S if poll_fast else limits.poll
        try:
            async with asyncio.timeout(wait):
                await self._poll_requested.wait()
            await asyncio.sleep(min(FAST_POLL_S, wait) / 4)  # so one poll covers steps that end together
        except TimeoutError:
            pass

    def _on_snapshot(self, snapshot: ClusterSnapshot, polled_at: float) -> None:
        """Update the health monitor from one poll, and record the events that follow from it."""
        state, now = self._context.state(), self._context.now()
        self._record_unknown(snapshot.unknown, polled_at)
        if snapshot.steps is None:
            self._delay_join_deadlines(state, now)
        if snapshot.nodes is not None:
            self._on_node_statuses(
                {name: status for name, status in snapshot.nodes.items() if name in state.nodes}, now
            )
        for name, node in state.nodes.items():  # also nodes that the job has lost
            status = (snapshot.allocations or {}).get(node.allocation)
            if status is not None and status.state in (AllocationState.RUNNING, AllocationState.SUSPENDED):
                suspended = status.state is AllocationState.SUSPENDED
                self._context.monitor.on_job_status(name, suspended, polled_at, now)
        for event in reconcile(state, snapshot, self._absences, now, self._busy()):
            self._context.record(with_reason(self._context.run_dir, event))
        monitor = self._context.monitor
        for incarnation in unlisted_steps(self._context.state(), snapshot, self._absences, monitor, now):
            monitor.on_step_unlisted(incarnation, now)

    def _record_unknown(self, why: str, polled_at: float) -> None:
        """Record once that the cluster's state is unknown, and once that it is known again."""
        if why and not self._unknown_polls:
            self._unknown_since = polled_at
        self._unknown_polls = self._unknown_polls + 1 if why else 0
        recorded = bool(self._context.state().cluster_unknown)
        if self._unknown_polls >= MIN_UNKNOWN_POLLS and not recorded:
            self._context.record(ClusterUnknown(why, self._unknown_since))
        elif not why and recorded:
            self._context.record(ClusterUnknown("", polled_at))

    def _delay_join_deadlines(self, state: State, now: float) -> None:
        """Delay the join deadlines of open launches after a failed poll: their steps may still be started."""
        for intent in state.intents.values():
            if isinstance(intent.action, Launch):
                self._context.monitor.delay_join_deadline(intent.action.incarnation, now)

    def _on_node_statuses(self, statuses: Mapping[NodeName, NodeStatus], now: float) -> None:
        """Update the node states in the health monitor.

        The update also contains whether only few nodes went down in this poll. If most nodes went down at the same
        time, slurmctld has probably lost contact with them, and they have not all failed.
        """
        known = self._context.monitor.nodes
        gone = [name for name, status in statuses.items() if status.state in (NodeState.DOWN, NodeState.UNKNOWN)]
        ceased = [name for name in gone if (view := known.get(name)) is not None and view.reported_up]
        few_lost = 2 * len(ceased) <= max(2, len(statuses))
        for name, status in statuses.items():
            self._context.monitor.on_node_status(name, status.state, status.detail, now, few_lost)
