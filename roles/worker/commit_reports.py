"""Reports the trainer's committed steps to whichever manager lives: each step once, in order, with its metrics.

Steps may be committed while no manager lives, and the trainer that committed them may be dead by the time there is one.
So a manager says in its Welcome which step it knows of, and is told what follows: from memory what this process has
committed itself, and the rest from the store, which keeps the metrics of its newest commits.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from ..trajectories.types import StepMetrics

MAX_BUFFERED_COMMITS = 1024
"""commits that are kept in memory while no manager can be told; older ones are fetched from the store"""
WELCOME_TIMEOUT_S = 2.0
"""s without a Welcome after a Hello, after which commits are reported all the same: a manager that ends the run
welcomes nobody, but records the trainer's last step"""


class CommitReports:
    """``send`` reports one step, ``connected`` tells whether a manager would get it now, ``ask_store`` fetches the
    commits after a step. All methods belong to the link's loop."""

    def __init__(
        self,
        send: Callable[[int, dict[str, float]], None],
        connected: Callable[[], bool],
        fetch_commits: Callable[[int], Awaitable[Sequence[StepMetrics]]],
    ) -> None:
        self._send, self._connected, self._fetch_commits = send, connected, fetch_commits
        self._known: int | None = None
        """newest step that the manager knows of; None between our Hello and its Welcome"""
        self._newest = 0
        self._commits: dict[int, dict[str, float]] = {}
        """not reported yet, by step"""
        self._changed, self._welcomed = asyncio.Event(), asyncio.Event()

    def on_hello(self) -> None:
        """Another manager may listen now: what it knows is yet to be heard."""
        self._known = None
        self._welcomed.clear()
        self._changed.set()

    def on_welcome(self, step: int) -> None:
        """The manager knows of all steps up to this one."""
        self._known = step
        self._commits = {number: metrics for number, metrics in self._commits.items() if number > step}
        self._welcomed.set()
        self._changed.set()

    def on_commit(self, step: int, metrics: dict[str, float]) -> None:
        """This process has committed a step."""
        self._commits[step] = metrics
        if len(self._commits) > MAX_BUFFERED_COMMITS:
            del self._commits[min(self._commits)]
        self.on_found(step)

    def on_found(self, step: int) -> None:
        """The store knows of this step, whoever committed it."""
        self._newest = max(self._newest, step)
        self._report()
        self._changed.set()

    async def run(self) -> None:
        """Report what cannot be reported at once, for as long as the link lives."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            if not self._connected():
                continue  # the Hello of the next connection comes first
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
            if self._known != known:  # another manager, or somebody committed meanwhile
                return self._changed.set()
            for commit in found:
                self._commits.setdefault(commit.step, commit.metrics)
            following = [step for step in self._commits if step > known]
            self._known = min(following, default=self._newest) - 1  # older metrics are kept nowhere
            self._commits.setdefault(self._known + 1, {})
            self._report()

    def _report(self) -> None:
        """Report all steps that follow on what the manager knows."""
        while self._known is not None and self._connected() and self._known + 1 in self._commits:
            self._known += 1
            self._send(self._known, self._commits.pop(self._known))
