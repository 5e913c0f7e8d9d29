"""Pass every event to the observers: the timeline of failures, the health history, the metrics and the notifications.

:class:`EttrEstimator` reads the events from the journal. No observer delays the manager's loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from typing import Any

from ...core.run_dir import RunDir
from ...core.run_spec import RunSpec
from ..model import events as ev
from ..model.state import State
from ..notifications.notifier import Notifier
from ..storage.journal import EventFollower, Journal, JournalError
from ..storage.lease import Lease
from .accounting.committed_steps import CommittedSteps
from .accounting.interruptions import Interruptions
from .failure_timeline import FailureTimeline
from .history_writer import HistoryWriter
from .metrics import RunCounters
from .metrics_server import MetricsServer

_log = logging.getLogger("rrl.manager")

ETTR_INTERVAL_S = 5.0
"""Seconds between two estimates of the ETTR, which is only displayed. A new manager, whose first estimate reads the
whole journal, has this time to restore the run."""
TOKEN_COUNT_INTERVAL_S = 1.0
"""Seconds between two counts of the generated tokens. Each count visits every rollout."""


class EventObservers:
    """Passes the events of one manager to its observers.

    ``now`` returns the manager's time (s), and ``tokens`` returns the number of tokens generated so far.
    """

    def __init__(
        self,
        run: RunDir,
        spec: RunSpec,
        lease: Lease,
        journal: Journal,
        now: Callable[[], float],
        tokens: Callable[[], int],
    ) -> None:
        state, health = journal.state, spec.health
        self._timeline = FailureTimeline(state)
        self._history = HistoryWriter(health.history, run.id, lease.epoch, spec, now(), state, self._timeline)
        self._lease, self._journal, self._now, self._tokens = lease, journal, now, tokens
        self._state = state
        self._counted_at, self._generated, self._oldest_unwritten_at = 0.0, 0, now()
        self._counters = RunCounters(self._timeline) if health.metrics else None
        self._server = MetricsServer(run, health.metrics, self._collect) if health.metrics else None
        self._notifier = Notifier(run, lambda: self._state, self._durable_seq, now) if spec.notify else None

    def on_event(self, before: State | None, after: State, stamped: ev.Stamped) -> None:
        """Pass on an event that changed the state from ``before`` to ``after``."""
        self._state = after
        changes = self._timeline.apply(stamped)
        self._history.on_event(before, after, stamped, changes)
        if self._counters is None:
            return
        self._counters.apply(before, after, stamped, changes)
        if self._journal.unwritten <= 1:
            self._oldest_unwritten_at = stamped.at
        if stamped.at - self._counted_at >= TOKEN_COUNT_INTERVAL_S:
            self._counted_at, self._generated = stamped.at, self._tokens()

    async def close(self) -> None:
        """Send the last notifications, stop serving metrics, and write the remaining history records."""
        if self._notifier is not None:
            await asyncio.to_thread(self._notifier.close)
        if self._server is not None:
            await asyncio.to_thread(self._server.close)
        await asyncio.to_thread(self._history.close)

    def _durable_seq(self) -> int:
        """Return the number of the newest record that is certainly durable; called in the notifier's thread."""
        state = self._state  # read before the journal: a record added in between only makes the result smaller
        return 0 if state is None else state.seq - self._journal.unwritten

    def _collect(self) -> Iterable[Any]:
        """Return the metrics of one state; called in the server's threads, while the manager may replace the state."""
        from .metrics import Facts, samples

        state, counters = self._state, self._counters
        if state is None or counters is None:
            return []
        now, unwritten = self._now(), self._journal.unwritten
        lag = max(0.0, now - self._oldest_unwritten_at) if unwritten else 0.0
        facts = Facts(now, self._generated, self._lease.age, unwritten, lag, self._history.lost)
        return list(samples(state, counters, facts))


class EttrEstimator:
    """Records the ETTR of the run (``committed_steps``) at intervals, from the whole journal.

    So everybody who knows the state of the run knows it. ``record`` records an event of the manager.
    """

    def __init__(self, run: RunDir, record: Callable[[ev.Event], None]) -> None:
        self._record = record
        self._journal = EventFollower(run)
        self._timeline = FailureTimeline()
        self._interruptions = Interruptions(self._timeline)
        self._steps = CommittedSteps(self._interruptions)
        self._recorded: float | None = None
        self._estimating = asyncio.Lock()

    async def run(self) -> None:
        """Record the ETTR at intervals, until the task is cancelled."""
        while True:
            await asyncio.sleep(ETTR_INTERVAL_S)
            await self.estimate()

    async def estimate(self) -> None:
        """Record the ETTR as of the newest durable commit, if it has changed."""
        async with self._estimating:
            try:
                ettr = await asyncio.to_thread(self._newest)
            except (JournalError, OSError) as error:
                _log.warning("the ETTR of the run is not updated: %s", error)
                return
            if ettr is not None and round(ettr, 4) != self._recorded:
                self._recorded = round(ettr, 4)
                self._record(ev.EttrEstimated(self._recorded))

    def _newest(self) -> float | None:
        """Read the newest events of the journal, and return the ETTR. Blocks."""
        for stamped in self._journal.events():
            self._timeline.apply(stamped)
            self._steps.apply(stamped, self._interruptions.apply(stamped))
        return self._steps.ettr
