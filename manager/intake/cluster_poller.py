"""The manager's eye on the cluster: looks at the site's pace, soon where something is expected of it, and less and less
often while it does not answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from ...core.types import NodeName
from ...health.detection.watch import Watch
from ..cluster.base import AllocationSeen, AllocationState, Cluster, NodeSeen, NodeState, Observed
from ..model.actions import Launch
from ..model.events import Event
from ..model.state import State
from .reconcile import Misses, hungry, settle, undecided

HUNGRY = 1.0
"""s between two looks at the cluster while something is expected of it"""


class Eye:
    """``record`` takes what follows from a look, ``busy`` names the actions whose command still runs, ``looked`` is
    called after each."""

    def __init__(
        self,
        cluster: Cluster,
        watch: Watch,
        state: Callable[[], State],
        record: Callable[[Event], None],
        now: Callable[[], float],
        busy: Callable[[], frozenset[str]],
        looked: Callable[[], None],
    ) -> None:
        self._cluster, self._watch, self._state = cluster, watch, state
        self._record, self._now, self._busy, self._looked = record, now, busy, looked
        self._misses = Misses()
        self._soon = asyncio.Event()
        self._last: Observed | None = None
        self._unanswered = 0
        """looks in a row"""

    def soon(self) -> None:
        """Something has happened that the cluster can say more of."""
        self._soon.set()

    def consider(self) -> None:
        """Ask before a silent node is condemned: everything on it may be suspended."""
        if self._watch.unsure(self._state().job.limits, self._now()):
            self._soon.set()

    async def watch(self) -> None:
        """Look, for ever."""
        while True:
            await self._look()

    async def _look(self) -> None:
        """Look once, and return when it is time for the next look."""
        asked_at = self._now()
        observed = await self._cluster.observe()
        if observed is not self._last:  # the same one again was asked for too soon: no second observation
            self._told(observed, asked_at)
        self._last = observed
        self._looked()
        self._unanswered = self._unanswered + 1 if observed.allocations is None else 0
        self._soon.clear()
        limits = self._state().job.limits
        if self._unanswered:  # who is away is not called back by asking more often
            await asyncio.sleep(min(HUNGRY * 2.0 ** min(self._unanswered - 1, 30), max(HUNGRY, limits.poll)))
            return
        soon = hungry(self._state(), self._now()) or undecided(self._state(), observed)
        wait = HUNGRY if soon else limits.poll
        try:
            async with asyncio.timeout(wait):
                await self._soon.wait()
            await asyncio.sleep(min(HUNGRY, wait) / 4)  # several things that end together are looked at once
        except TimeoutError:
            pass

    def _told(self, observed: Observed, asked_at: float) -> None:
        state, now = self._state(), self._now()
        if observed.steps is None:
            self._postpone(state, now)
        if observed.nodes is not None:
            self._told_nodes({name: seen for name, seen in observed.nodes.items() if name in state.nodes}, now)
        for tag, seen in (observed.allocations or {}).items():
            if tag in state.allocations and seen.state in (AllocationState.RUNNING, AllocationState.SUSPENDED):
                self._told_job(state, seen, asked_at, now)
        for event in settle(state, observed, self._misses, now, self._busy()):
            self._record(event)

    def _postpone(self, state: State, now: float) -> None:
        """Launches handed to a cluster that is away have not failed: it may do them yet, or it never heard."""
        for intent in state.intents.values():
            if isinstance(intent.action, Launch):
                self._watch.postponed(intent.action.life, now)

    def _told_nodes(self, seen: Mapping[NodeName, NodeSeen], now: float) -> None:
        """Where most cease to be up at once, it is slurmctld that lost sight of them."""
        known = self._watch.nodes
        gone = [name for name, one in seen.items() if one.state in (NodeState.DOWN, NodeState.UNKNOWN)]
        ceased = [name for name in gone if (home := known.get(name)) is not None and home.called_up]
        alone = 2 * len(ceased) <= max(2, len(seen))
        for name, one in seen.items():
            self._watch.cluster_node(name, one.state, one.detail, now, alone)

    def _told_job(self, state: State, seen: AllocationSeen, asked_at: float, now: float) -> None:
        for node in seen.nodes:
            if node in state.nodes:
                self._watch.cluster_job(node, seen.state is AllocationState.SUSPENDED, asked_at, now)
