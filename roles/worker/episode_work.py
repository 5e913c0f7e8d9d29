"""The episodes that the user's own program works on: ``for episode in me.episodes(): ...``.

The endpoint for them is served by a thread of this process (:mod:`rrl.roles.endpoint.loopback`), so that calls are
answered and phases are reported while the program's own code runs.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

from msgspec import Struct

from ...core.run_spec import RunSpec
from ...core.text import on_one_line, shortened
from ...core.units import duration_text
from ..endpoint.loopback import LoopbackEndpoint
from ..launcher.end_report import Misuse, exits_on_invalid_config
from ..models.chat import open_chat
from ..models.rewards import REWARD, Reward, finite_reward
from ..models.tasks import TaskError, load_episode_items
from ..trajectories.client import AskStore, FencedAttempt, WrongArgument
from ..trajectories.episodes.requests import EpisodeItem, FailAttempt, FinishEpisode, LeaseEpisodes
from .connection import ManagerConnection
from .status.episode_status import EpisodeStatus

_log = logging.getLogger("rrl.worker")

_LEASE_WAIT_S = 1.0
"""Seconds that a request for an episode waits at the store before it is repeated."""
_POLL_S = 0.2
"""Seconds between two checks for a stop request and for overdue attempts, while ``at_most`` attempts are at work."""


class _Attempt(Struct, eq=False):
    """An attempt at an episode, which this process makes."""

    leased: EpisodeItem
    deadline: float
    """Monotonic time (s) after which the attempt has lasted too long."""
    ended: bool = False
    """True if the end of the attempt has been reported or is being reported."""
    overdue: bool = False
    """True if the attempt was ended because it lasted too long."""


class Episode:
    """One attempt at an episode, to be ended by :meth:`finish` or :meth:`fail`, once and in any thread."""

    def __init__(self, work: EpisodeWork, attempt: _Attempt, item: str, base_url: str, api_key: str) -> None:
        self._work, self._attempt = work, attempt
        self.item = item
        """The text that ``prompt(i)`` of the task returns for the item."""
        self.base_url = base_url
        """Base URL of the endpoint, for OpenAI's clients."""
        self.api_key = api_key
        """The key of this attempt; give it to every program that works for the episode."""
        self.attempt = attempt.leased.attempt
        """Number of the attempt, from 1."""
        self.split = "eval" if attempt.leased.evaluation else "train"
        """``"eval"`` for an episode of an evaluation, which is never trained; ``"train"`` for any other."""

    def finish(self, reward: Reward | None = None, later: bool = False) -> bool:
        """End the episode, durably.

        Args:
            reward: The episode's reward, or rewards by the names of agents, which are the ``model`` of their calls; the
                name ``*`` stands for all others. If it is None and the job has a ``reward_timeout``, the reward comes
                from outside. If it is None in any other job, [task] scores the last answer.
            later: True if the reward comes from outside, even in a job without a ``reward_timeout``.

        Returns:
            False if the attempt is over already, because it took too long or another attempt replaced it.

        Raises:
            ValueError: The reward is not a finite number, or is given together with ``later``; or a name is that of no
                call, while calls of another name have no reward; or the attempt was ended before. Only in the last case
                has the attempt ended.
        """
        if reward is not None:
            if later:
                raise Misuse("finish(): got a reward and later=True; give only one of them")
            if (valid := finite_reward(reward)) is None:
                raise Misuse(f"finish(): the reward is {shortened(reward)}; give {REWARD}, or None")
            reward = valid
        return self._work.finish(self._attempt, reward, later)

    def fail(self, why: str) -> bool:
        """Report that this attempt failed for a reason that says nothing about the model.

        Another attempt is made, or after too many failures the group is dropped. Nothing is scored zero.

        Args:
            why: The reason, which ``rrl status`` shows.

        Returns:
            False if the attempt is over already, or if a stop of this process is requested, which is not a failure.

        Raises:
            ValueError: The attempt was ended before.
        """
        return self._work.fail(self._attempt, on_one_line(why))


class EpisodeWork:
    """Leases episodes to this process until a stop is requested, and reports phases and progress meanwhile.

    Args:
        connection: Connection to the manager and the store.
        job: The job.
        status: Where phase and progress are reported.
        ask: How the endpoint sends requests to the store.
        at_most: Maximum number of attempts at the same time; None selects ``[roles.agents] concurrency``.

    Raises:
        ValueError: The job has no agents, or ``at_most`` is less than 1.
    """

    def __init__(
        self, connection: ManagerConnection, job: RunSpec, status: EpisodeStatus, ask: AskStore, at_most: int | None
    ) -> None:
        if job.agents is None:
            raise Misuse("me.episodes(): job.toml has no agents; add [roles.agents]")
        if at_most is not None and at_most < 1:
            raise Misuse(f"me.episodes(): at_most is {at_most}; it must be 1 or more")
        self._connection, self._status, self._settings = connection, status, job.agents
        self._at_most = job.agents.concurrency if at_most is None else at_most
        with exits_on_invalid_config():
            chat = open_chat(job.model)
        with exits_on_invalid_config(TaskError):
            self._item_text = load_episode_items(job, chat.tokenizer, Path(connection.launch.cwd))
        self._endpoint = LoopbackEndpoint(
            job, connection.run.id, connection.keys.secret, chat, ask, status.endpoint_changed
        )
        self._lock = threading.Lock()
        self._changed = threading.Event()
        """Set when an attempt has ended."""
        self._attempts: dict[int, _Attempt] = {}
        """The attempts whose end the store has not confirmed yet, by episode."""

    def lease(self) -> Iterator[Episode]:
        """Yield episodes; while ``at_most`` attempts are at work, wait until one of them has ended."""
        store, stopping = self._connection.store, self._connection.stopping
        threading.Thread(target=self._break_calls_on_stop, name="episodes-stop", daemon=True).start()
        with self._status, self._endpoint:
            while not stopping.is_set():
                self._connection.faults.trigger()
                self._connection.probes.answer()
                self._fail_overdue()
                if len(self._attempts) >= self._at_most:
                    self._changed.wait(_POLL_S)
                    self._changed.clear()
                    continue
                holding = tuple(self._attempts)
                leased = self._connection.call_store(store.ask(LeaseEpisodes, 1, _LEASE_WAIT_S, holding))
                for item in leased.items if leased is not None else ():
                    if (episode := self._begin(item)) is not None:
                        yield episode

    def finish(self, attempt: _Attempt, reward: Reward | None, later: bool) -> bool:
        """End an episode; see :meth:`Episode.finish`."""
        if time.monotonic() > attempt.deadline and not attempt.ended:
            self._end_overdue(attempt)
        later = later or (reward is None and self._settings.reward_timeout is not None)
        of = attempt.leased
        store = self._connection.store
        return self._end(attempt, lambda: store.ask(FinishEpisode, of.episode, of.attempt, reward, later))

    def fail(self, attempt: _Attempt, why: str) -> bool:
        """End an attempt; see :meth:`Episode.fail`."""
        if self._connection.stopping.is_set():  # the attempt failed because of the stop; another process repeats it
            return False
        self._connection.status.note = f"the newest failed attempt: {why}"
        of = attempt.leased
        return self._end(attempt, lambda: self._connection.store.ask(FailAttempt, of.episode, of.attempt, why))

    def _break_calls_on_stop(self) -> None:
        """Close the endpoint once a stop is requested, so that code that waits for an answer gets an error."""
        self._connection.stopping.wait()
        self._endpoint.stop()

    def _begin(self, leased: EpisodeItem) -> Episode | None:
        attempt = _Attempt(leased, time.monotonic() + self._settings.timeout)
        with self._lock:
            self._attempts[leased.episode] = attempt
            self._status.attempts_changed(len(self._attempts))
        try:
            item = self._item_text(leased.item, leased.evaluation)
        except BaseException as error:  # user code may raise anything
            table = "eval" if leased.evaluation else "task"
            self.fail(attempt, f"prompt({leased.item}) of [{table}] raised {shortened(error)}")
            return None
        return Episode(self, attempt, item, self._endpoint.base_url, self._endpoint.api_key(leased))

    def _fail_overdue(self) -> None:
        now = time.monotonic()
        for attempt in list(self._attempts.values()):
            if now > attempt.deadline and not attempt.ended:
                self._end_overdue(attempt)

    def _end_overdue(self, attempt: _Attempt) -> None:
        attempt.overdue = True
        self.fail(attempt, f"the program did not end the episode within {duration_text(self._settings.timeout)}")

    def _end(self, attempt: _Attempt, request: Callable[[], Coroutine[Any, Any, object]]) -> bool:
        """Report the end of an attempt; return False if the attempt was over already."""
        of = attempt.leased
        with self._lock:
            if attempt.ended:
                if attempt.overdue:
                    return False
                raise Misuse(
                    f"attempt {of.attempt} at episode {of.episode} has already ended; call finish() or fail() only once"
                )
            attempt.ended = True
        try:
            self._connection.call_store(request())
        except FencedAttempt as error:
            _log.info("episode %d: %s", of.episode, error)
            return False
        except WrongArgument:
            attempt.ended = False  # the program may correct it
            raise
        finally:
            with self._lock:
                if attempt.ended:  # last: the episode counts as leased until the store has answered
                    del self._attempts[of.episode]
                self._status.attempts_changed(len(self._attempts))
            self._changed.set()
        self._connection.progress(1)
        return True
