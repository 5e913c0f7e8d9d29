"""Reports the trainer's committed steps to the current manager: each step once, in order, with its metrics.

Steps may be committed while no manager runs, and the trainer that committed them may be dead when the next manager
starts. Therefore a manager's Welcome names the newest step that the manager has recorded, and the trainer reports all
later steps. The metrics of the steps that this process has committed are in its memory. The metrics of all other steps
are fetched from the store, which keeps the metrics of its newest commits.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from ..trajectories.types import StepMetrics

MAX_BUFFERED_COMMITS = 1024
"""Number of commits kept in memory while no manager can receive them; older commits are fetched from the store."""
WELCOME_TIMEOUT_S = 2.0
"""Seconds to wait for a Welcome after a Hello. After this time, commits are reported without a Welcome, because a
manager that is ending the run sends no Welcome, but records the trainer's last step."""


class CommitReports:
    """The commits that the manager may not have recorded yet.

    One commit may commit several steps. ``send`` reports one step, its metrics, and the newest step of the same commit.
    ``connected`` returns whether a manager would receive the report now. ``fetch_commits`` returns the committed steps
    after a step from the store. All methods run in the connection's loop.
    """

    def __init__(
        self,
        send: Callable[[int, dict[str, float], int], None],
        connected: Callable[[], bool],
        fetch_commits: Callable[[int], Awaitable[Sequence[StepMetrics]]],
    ) -> None:
        self._send, self._connected, self._fetch_commits = send, connected, fetch_commits
        self._known: int | None = None
        """Newest step that the manager has recorded; None between the Hello and its Welcome."""
        self._newest = 0
        self._commits: dict[int, tuple[dict[str, float], int]] = {}
        """For each unreported step: its metrics, and the newest step that the same commit has committed."""
        self._changed, self._welcomed = asyncio.Event(), asyncio.Event()

    def on_hello(self) -> None:
        """Forget which steps the manager has recorded, because the Hello may go to another manager."""
        self._known = None
        self._welcomed.clear()
        self._changed.set()

    def on_welcome(self, step: int) -> None:
        """Note that the manager has recorded all steps up to ``step``."""
        self._known = step
        self._commits = {number: commit for number, commit in self._commits.items() if number > step}
        self._welcomed.set()
        self._changed.set()

    def on_commit(self, steps: Sequence[StepMetrics]) -> None:
        """Record the steps of a commit that this process has made, and report them if possible."""
        commit = steps[-1].step
        self._commits |= {one.step: (one.metrics, commit) for one in steps}
        for step in sorted(self._commits)[:-MAX_BUFFERED_COMMITS]:
            del self._commits[step]
        self.on_found(commit)

    def on_found(self, step: int) -> None:
        """Record that this or an earlier incarnation has committed ``step``, and report the step if possible."""
        self._newest = max(self._newest, step)
        self._report()
        self._changed.set()

    async def run(self) -> None:
        """Report the steps that could not be reported at once; runs until it is cancelled."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            if not self._connected():
                continue  # the Hello of the next connection wakes this task again
            if self._known is None and not await self._is_welcomed() and self._known is None and self._commits:
                self._known = min(self._commits) - 1
            await self._catch_up()

    async def _is_welcomed(self) -> bool:
        try:
            async with asyncio.timeout(WELCOME_TIMEOUT_S):
                return await self._welcomed.wait()
        except TimeoutError:
            return False

    async def _catch_up(self) -> None:
        self._report()
        while (known := self._known) is not None and known < self._newest and self._connected():
            found = await self._fetch_commits(known)
            if self._known != known:  # another manager connected, or a step was reported during the request
                return self._changed.set()
            for commit in found:
                self._commits.setdefault(commit.step, (commit.metrics, commit.step))
            following = [step for step in self._commits if step > known]
            self._known = min(following, default=self._newest) - 1  # metrics of older steps are lost
            self._commits.setdefault(self._known + 1, ({}, self._known + 1))
            self._report()

    def _report(self) -> None:
        """Report the buffered steps that follow the newest recorded step, up to the first step that is missing."""
        while self._known is not None and self._connected() and self._known + 1 in self._commits:
            self._known += 1
            self._send(self._known, *self._commits.pop(self._known))
