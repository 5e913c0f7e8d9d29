"""The concurrent attempts of a process at episodes. Each attempt runs the user's agent once.

An attempt ends with the reward that the agent returns. It fails by an exception, by the timeout, or by a result that is
not a reward. A failed attempt says nothing about the model, so it is reported with its reason and never scored, unless
the job gives a reward to attempts that the agent's own code ended.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from msgspec import Struct

from ...core.run_spec import AgentsSettings
from ...core.text import shortened
from ...core.units import duration_text
from ..launcher.end_report import as_exception, described
from ..models.rewards import REWARD, Reward, finite_reward
from ..trajectories.client import AskStore, FencedAttempt, NoAnswer, WrongArgument
from ..trajectories.episodes.requests import EpisodeItem, FailAttempt, FinishEpisode
from .user_function import Agent
from .user_program import ProgramFailed

_log = logging.getLogger("rrl.agents")

FAULTS_WINDOW = 32
"""Number of newest attempts among which the faults of the agent's own code are counted. If more than half of these
attempts failed by such a fault, the code is at fault rather than a few episodes. This process then ends with the
exception."""


class AgentContext(Struct, frozen=True):
    """The values that are the same for every attempt of this process."""

    agent: Agent
    settings: AgentsSettings
    item_text: Callable[[int, bool], str]
    """Returns the text of an item of the task or, if the second argument is True, of the evaluation's task."""
    folder: Path
    """Folder of job.toml; in reports of exceptions, files in this folder are named relative to it."""


class _Failure(Exception):
    """The attempt failed.

    Args:
        why: The reason.
        error: What the agent raised; None if it raised nothing.
        fault: The exception with which this process ends, if the agent's own code fails so in most attempts; None if
            the failure is no fault of this code.
    """

    def __init__(self, why: str, error: BaseException | None = None, fault: BaseException | None = None) -> None:
        super().__init__(why)
        self.error, self.fault = error, fault


class Attempts:
    """The attempts that this process makes now; used in one event loop only.

    Args:
        context: The values that all attempts share.
        base_url: Base URL of the endpoint at which the agents reach the model, for OpenAI's clients.
        api_key: Returns the key of an attempt.
        ask: Sends the results of the attempts to the store.
        on_change: Called whenever an attempt has ended.
    """

    def __init__(
        self,
        context: AgentContext,
        base_url: str,
        api_key: Callable[[EpisodeItem], str],
        ask: AskStore,
        on_change: Callable[[], None],
    ) -> None:
        self._context, self._base_url, self._api_key = context, base_url, api_key
        self._ask, self._on_change = ask, on_change
        asyncio.get_running_loop().set_task_factory(_contained_task)
        self._running: dict[int, asyncio.Task[None]] = {}
        self._faults: deque[bool] = deque(maxlen=FAULTS_WINDOW)
        self._reported: set[str] = set()
        self._stopping = False
        self.ended = 0
        """Number of attempts that have ended."""
        self.note = ""
        """A text for people about the newest failure; empty if there was none."""
        self.error: BaseException | None = None
        """The error with which this process must end, or None. It is the newest exception of an agent whose code fails
        in most attempts, or an error of rrl itself."""

    @property
    def episodes(self) -> tuple[int, ...]:
        """The episodes that are being attempted."""
        return tuple(self._running)

    def start(self, item: EpisodeItem) -> None:
        """Begin an attempt, unless it has begun already."""
        if item.episode not in self._running:
            task = asyncio.get_running_loop().create_task(self._make(item))
            self._running[item.episode] = task
            task.add_done_callback(lambda task: self._remove(item.episode, task))

    async def cancel(self) -> None:
        """Cancel all attempts; other replicas then attempt their episodes again."""
        self._stopping, tasks = True, list(self._running.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _remove(self, episode: int, task: asyncio.Task[None]) -> None:
        del self._running[episode]
        self.ended += 1
        if not task.cancelled() and task.exception() is not None:
            self.error = task.exception()
        self._on_change()

    async def _make(self, item: EpisodeItem) -> None:
        try:
            try:
                reward = await self._run(item)
                later = reward is None and self._context.settings.reward_timeout is not None
                try:
                    await self._ask(FinishEpisode, item.episode, item.attempt, reward, later)
                except WrongArgument as error:
                    raise _Failure(str(error), fault=error) from None
            except _Failure as failure:
                # If the store has ended the attempt, its failure is a consequence, and the next lines raise.
                if not await self._score_failed(failure, item):
                    await self._ask(FailAttempt, item.episode, item.attempt, str(failure))
                self._report(failure, item)
            else:
                self._faults.append(False)
        except FencedAttempt as error:
            _log.info("episode %d: %s", item.episode, error)

    async def _run(self, item: EpisodeItem) -> Reward | None:
        """Run the agent, and return the reward. Raises _Failure with the reason if the attempt fails."""
        context = self._context
        limit = asyncio.timeout(context.settings.timeout)
        try:
            async with limit:
                text = context.item_text(item.item, item.evaluation)
                returned = await context.agent(text, self._base_url, self._api_key(item))
        except BaseException as error:  # whatever the user's agent raises; a signal sets me.stopping instead
            if self._stopping:
                raise asyncio.CancelledError from None
            if limit.expired():
                raise _Failure(f"the agent did not return within {duration_text(context.settings.timeout)}") from None
            error = as_exception(error)
            if isinstance(error, ProgramFailed):
                why, environmental = str(error), error.environmental
            else:
                raised = described(error, context.folder)
                why, environmental = f"the agent raised {raised}", raised.environmental
            raise _Failure(why, error, None if environmental else error) from None
        return self._reward(returned)

    async def _score_failed(self, failure: _Failure, item: EpisodeItem) -> bool:
        """Give the job's reward to an attempt that the agent's own code ended; return False if it gets none."""
        reward = self._context.settings.failed_reward
        if reward is None or failure.error is None or failure.fault is None:
            return False
        try:
            await self._ask(FinishEpisode, item.episode, item.attempt, reward, failed=True)
        except NoAnswer:
            return False
        failure.fault = None  # the model may have caused it
        return True

    def _reward(self, returned: Any) -> Reward | None:
        if returned is None:
            return None
        if (reward := finite_reward(returned)) is not None:
            return reward
        problem = f"the agent returned {shortened(returned)}; return the reward, {REWARD}, or None"
        raise _Failure(problem, fault=ValueError(problem))

    def _report(self, failure: _Failure, item: EpisodeItem) -> None:
        """Count a failure and update the note; log only the first failure of each kind."""
        why, error = str(failure), failure.error
        self._faults.append(failure.fault is not None)
        if failure.fault is not None and 2 * sum(self._faults) > FAULTS_WINDOW:
            self.error = failure.fault
        self.note = f"the newest failed attempt: {why}"
        kind = why if error is None else type(error).__name__
        if kind not in self._reported:
            self._reported.add(kind)
            _log.warning(
                "attempt %d at an episode of item %d failed: %s; further failures of this kind are not logged",
                item.attempt,
                item.item,
                why,
                exc_info=None if isinstance(error, ProgramFailed) else error,
            )


def _contained_task(loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any) -> asyncio.Task[Any]:
    """Return a task, for example of an agent, whose exceptions never end the loop."""

    async def contained() -> Any:
        try:
            return await coroutine
        except (SystemExit, KeyboardInterrupt) as error:  # asyncio would raise these in the loop too
            raise as_exception(error) from None

    return asyncio.Task(contained(), loop=loop, **options)
