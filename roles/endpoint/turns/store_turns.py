"""The requests of the endpoint to the trajectory store.

In a run each method sends a request. Tests can implement the interfaces without a store.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Protocol, TypeVar

from ...trajectories.client import Fenced, FencedAttempt, TrajectoryClient
from ...trajectories.episodes.requests import EpisodeItem, EpisodeTurns, TurnTokens
from ...trajectories.types import Sampling

_Answer = TypeVar("_Answer")


class Turns(Protocol):
    """The turns of episodes in the store.

    Each method raises :class:`~rrl.roles.trajectories.client.FencedAttempt` if the attempt is over.
    """

    async def get_episode(self, episode: int, holding: Sequence[int] = ()) -> EpisodeTurns:
        """Return the newest attempt at an episode with its turns, except those in ``holding``."""
        ...

    async def open_turn(
        self, episode: int, attempt: int, request: str, parent: int | None, offset: int, given: tuple[int, ...],
        max_new: int, messages: tuple[str, ...], options: str, sampling: Sampling | None,
    ) -> int:  # fmt: skip
        """Open a turn durably, and return its number. A repeated ``request`` gets the number of its existing turn.

        The arguments are the fields of :class:`~rrl.roles.trajectories.episodes.requests.OpenTurn`.
        """
        ...

    async def follow(self, turn: int, offset: int, wait: float) -> TurnTokens | None:
        """Return the sampled tokens from ``offset`` on; None if there are none within ``wait`` seconds."""
        ...

    async def end_turn(self, turn: int, length: int) -> None:
        """End the answer of a turn after ``length`` sampled tokens, durably."""
        ...


class Episodes(Protocol):
    """The episodes of agents outside of the run; its methods raise the errors of :class:`Turns`."""

    async def open_episode(self, request: str, wait: float) -> EpisodeItem | None:
        """Lease an episode, or return None after ``wait`` seconds. A repeated ``request`` gets the same episode."""
        ...

    async def finish_episode(self, episode: int, attempt: int, reward: float | None, later: bool) -> None:
        """End an episode with its reward, durably."""
        ...

    async def post_reward(self, episode: int, attempt: int, reward: float) -> None:
        """Post the reward of an episode that was finished with ``later``, durably."""
        ...

    async def fail_attempt(self, episode: int, attempt: int, why: str) -> None:
        """Report that an attempt failed, durably."""
        ...


class AskStore(Protocol):
    """Sends a request to the store, and returns the store's answer to the event loop of the caller."""

    async def __call__(self, request: Callable[[TrajectoryClient], Coroutine[Any, Any, _Answer]]) -> _Answer:
        """Send the request that the function ``request`` makes."""
        ...


class _Asking:
    """Sends the requests of this process; once the process is fenced, every request raises FencedAttempt."""

    def __init__(self, ask: AskStore) -> None:
        self._send = ask

    async def __call__(self, request: Callable[[TrajectoryClient], Coroutine[Any, Any, _Answer]]) -> _Answer:
        try:
            return await self._send(request)
        except Fenced as error:
            raise FencedAttempt(str(error)) from error


class StoreTurns:
    """Sends the requests of :class:`Turns` to the store. The event loop of the caller awaits each request.

    Args:
        ask: Sends a request: :meth:`rrl.Worker.ask_store`.
    """

    def __init__(self, ask: AskStore) -> None:
        self._ask = _Asking(ask)

    async def get_episode(self, episode: int, holding: Sequence[int] = ()) -> EpisodeTurns:
        """Return an episode, as :meth:`Turns.get_episode` describes."""
        return await self._ask(lambda store: store.get_episode(episode, holding))

    async def open_turn(
        self, episode: int, attempt: int, request: str, parent: int | None, offset: int, given: tuple[int, ...],
        max_new: int, messages: tuple[str, ...], options: str, sampling: Sampling | None,
    ) -> int:  # fmt: skip
        """Open a turn, as :meth:`Turns.open_turn` describes."""
        return await self._ask(
            lambda store: store.open_turn(
                episode, attempt, request, parent, offset, given, max_new, messages, options, sampling
            )
        )

    async def follow(self, turn: int, offset: int, wait: float) -> TurnTokens | None:
        """Return sampled tokens, as :meth:`Turns.follow` describes."""
        return await self._ask(lambda store: store.follow(turn, offset, wait))

    async def end_turn(self, turn: int, length: int) -> None:
        """End an answer, as :meth:`Turns.end_turn` describes."""
        await self._ask(lambda store: store.end_turn(turn, length))


class StoreEpisodes:
    """Sends the requests of :class:`Episodes` to the store of the run.

    Args:
        ask: Sends a request: :meth:`rrl.Worker.ask_store`.
    """

    def __init__(self, ask: AskStore) -> None:
        self._ask = _Asking(ask)

    async def open_episode(self, request: str, wait: float) -> EpisodeItem | None:
        """Lease an episode, as :meth:`Episodes.open_episode` describes."""
        return await self._ask(lambda store: store.open_episode(request, wait))

    async def finish_episode(self, episode: int, attempt: int, reward: float | None, later: bool) -> None:
        """End an episode, as :meth:`Episodes.finish_episode` describes."""
        await self._ask(lambda store: store.finish_episode(episode, attempt, reward, later))

    async def post_reward(self, episode: int, attempt: int, reward: float) -> None:
        """Post a reward, as :meth:`Episodes.post_reward` describes."""
        await self._ask(lambda store: store.post_reward(episode, attempt, reward))

    async def fail_attempt(self, episode: int, attempt: int, why: str) -> None:
        """Report a failed attempt, as :meth:`Episodes.fail_attempt` describes."""
        await self._ask(lambda store: store.fail_attempt(episode, attempt, why))
