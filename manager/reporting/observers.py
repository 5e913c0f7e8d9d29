"""Who is told of every event and changes nothing: the history across runs, and the metrics. Neither holds the manager
up."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any

from ...core.run_dir import RunDir
from ...core.run_spec import JobView
from ..model import events as ev
from ..model.state import State
from ..storage.journal import Journal
from ..storage.lease import Lease
from .history_writer import HistoryKeeper
from .metrics import Tally
from .metrics_server import MetricsServer

COUNT = 1.0
"""s between two counts of tokens: each asks every rollout"""


class Onlookers:
    """``state``: as the journal left it; ``now``: the manager's time; ``tokens``: generated so far."""

    def __init__(
        self, run: RunDir, view: JobView, lease: Lease, journal: Journal, now: Callable[[], float],
        tokens: Callable[[], int],
    ) -> None:  # fmt: skip
        state, health = journal.state, view.health
        self._history = HistoryKeeper(health.history, run.id, lease.epoch, view, now(), state)
        self._lease, self._journal, self._now, self._tokens = lease, journal, now, tokens
        self._state = state
        self._counted, self._generated, self._oldest = 0.0, 0, now()
        self._tally = Tally(state, now()) if health.metrics else None
        self._server = MetricsServer(run, health.metrics, self._collect) if health.metrics else None

    def notice(self, before: State | None, after: State, stamped: ev.Stamped) -> None:
        """An event was recorded, which made ``after`` of ``before``."""
        self._history.notice(before, after, stamped)
        if self._tally is None:
            return
        self._tally.enter(before, after, stamped)
        self._state = after
        if self._journal.unwritten <= 1:
            self._oldest = stamped.at
        if stamped.at - self._counted >= COUNT:
            self._counted, self._generated = stamped.at, self._tokens()

    async def close(self) -> None:
        if self._server is not None:
            await asyncio.to_thread(self._server.close)
        await asyncio.to_thread(self._history.close)

    def _collect(self) -> Iterable[Any]:
        """In the server's threads: of one state, whatever comes meanwhile."""
        from .metrics import Facts, samples

        state, tally = self._state, self._tally
        if state is None or tally is None:
            return []
        now, unwritten = self._now(), self._journal.unwritten
        lag = max(0.0, now - self._oldest) if unwritten else 0.0
        facts = Facts(now, self._generated, self._lease.age, unwritten, lag, self._history.lost)
        return list(samples(state, tally, facts))
