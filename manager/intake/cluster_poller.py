"""The manager's eye on the cluster: looks at the site's pace, soon where something is expected of it, and less and less
often while it does not answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from ...core.types import NodeName
from ...health.detection.health_monitor import HealthMonitor
from ..cluster.base import AllocationState, AllocationStatus, Cluster, ClusterSnapshot, NodeState, NodeStatus
from ..model.actions import Launch
from ..model.events import Event
from ..model.state import State
from .reconcile import AbsenceCounter, expects_change, has_undecided_launch, reconcile

FAST_POLL_S = 1.0
"""s between two looks at the cluster while something is expected of it"""


class ClusterPoller:
    """``record`` takes what follows from a look, ``busy`` names the actions whose command still runs, ``after_poll`` is
    called after each."""

    def __init__(
        self,
        cluster: Cluster,
        monitor: HealthMonitor,
        state: Callable[[], State],
        record: Callable[[Event], None],
        now: Callable[[], float],
        busy: Callable[[], frozenset[str]],
        after_poll: Callable[[], None],
    ) -> None:
        self._cluster, self._monitor, self._state = cluster, monitor, state
        self._record, self._now, self._busy, self._after_poll = record, now, busy, after_poll
        self._absences = AbsenceCounter()
        self._poll_requested = asyncio.Event()
        self._last_snapshot: ClusterSnapshot | None = None
        self._failed_polls = 0
        """looks in a row"""

    def poll_soon(self) -> None:
        """Something has happened that the cluster can say more of."""
        self._poll_requested.set()

    def check_suspensions(self) -> None:
        """Ask before a silent node is condemned: everything on it may be suspended."""
        if self._monitor.needs_suspend_check(self._state().job.limits, self._now()):
            self._poll_requested.set()

    async def run(self) -> None:
        """Look, for ever."""
        while True:
            await self._poll()

    async def _poll(self) -> None:
        """Look once, and return when it is time for the next look."""
        polled_at = self._now()
        snapshot = await self._cluster.observe()
        if snapshot is not self._last_snapshot:  # the same one again was asked for too soon: no second observation
            self._on_snapshot(snapshot, polled_at)
        self._last_snapshot = snapshot
        self._after_poll()
        self._failed_polls = self._failed_polls + 1 if snapshot.allocations is None else 0
        self._poll_requested.clear()
        limits = self._state().job.limits
        if self._failed_polls:  # who is away is not called back by asking more often
            await asyncio.sleep(
                min(FAST_POLL_S * 2.0 ** min(self._failed_polls - 1, 30), max(FAST_POLL_S, limits.poll))
            )
            return
        poll_fast = expects_change(self._state(), self._now()) or has_undecided_launch(self._state(), snapshot)
        wait = FAST_POLL_S if poll_fast else limits.poll
        try:
            async with asyncio.timeout(wait):
                await self._poll_requested.wait()
            await asyncio.sleep(min(FAST_POLL_S, wait) / 4)  # several things that end together are looked at once
        except TimeoutError:
            pass

    def _on_snapshot(self, snapshot: ClusterSnapshot, polled_at: float) -> None:
        state, now = self._state(), self._now()
        if snapshot.steps is None:
            self._delay_join_deadlines(state, now)
        if snapshot.nodes is not None:
            self._on_node_statuses(
                {name: status for name, status in snapshot.nodes.items() if name in state.nodes}, now
            )
        for tag, status in (snapshot.allocations or {}).items():
            if tag in state.allocations and status.state in (AllocationState.RUNNING, AllocationState.SUSPENDED):
                self._on_allocation_status(state, status, polled_at, now)
        for event in reconcile(state, snapshot, self._absences, now, self._busy()):
            self._record(event)

    def _delay_join_deadlines(self, state: State, now: float) -> None:
        """Launches handed to a cluster that is away have not failed: it may do them yet, or it never heard."""
        for intent in state.intents.values():
            if isinstance(intent.action, Launch):
                self._monitor.delay_join_deadline(intent.action.incarnation, now)

    def _on_node_statuses(self, statuses: Mapping[NodeName, NodeStatus], now: float) -> None:
        """Where most cease to be up at once, it is slurmctld that lost sight of them."""
        known = self._monitor.nodes
        gone = [name for name, one in statuses.items() if one.state in (NodeState.DOWN, NodeState.UNKNOWN)]
        ceased = [name for name in gone if (view := known.get(name)) is not None and view.reported_up]
        few_lost = 2 * len(ceased) <= max(2, len(statuses))
        for name, one in statuses.items():
            self._monitor.on_node_status(name, one.state, one.detail, now, few_lost)

    def _on_allocation_status(self, state: State, status: AllocationStatus, polled_at: float, now: float) -> None:
        for node in status.nodes:
            if node in state.nodes:
                self._monitor.on_job_status(node, status.state is AllocationState.SUSPENDED, polled_at, now)
