"""What the endpoint asks of the trajectory store, in an interface that its tests can implement without a store."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, Protocol, TypeVar

from ..trajectories.client import TrajectoryClient
from ..trajectories.episodes.requests import EpisodeTurns, TurnTokens

_Answer = TypeVar("_Answer")


class Turns(Protocol):
    """The turns of episodes in the store.

    Each method raises :class:`~rrl.roles.trajectories.client.FencedAttempt` if the attempt is over.
    """

    async def get_episode(self, episode: int) -> EpisodeTurns:
        """Return the newest attempt at an episode with its turns."""
        ...

    async def open_turn(
        self, episode: int, attempt: int, request: str, parent: int | None, offset: int, given: tuple[int, ...],
        max_new: int, messages: tuple[str, ...],
    ) -> int:  # fmt: skip
        """Open a turn, which is durable on return, and return its number; the same request gets the same turn."""
        ...

    async def follow(self, turn: int, offset: int, wait: float) -> TurnTokens | None:
        """Return the sampled tokens from ``offset`` on; None if within ``wait`` seconds there are none."""
        ...


class AskStore(Protocol):
    """Sends a request to the store, and returns its answer to the event loop of the caller."""

    async def __call__(self, request: Callable[[TrajectoryClient], Coroutine[Any, Any, _Answer]]) -> _Answer:
        """Send the request that ``request`` makes."""
        ...


class StoreTurns:
    """The turns in the store; the methods are those of :class:`Turns`.

    Args:
        ask: How requests are sent, as :meth:`rrl.Worker.ask_store`.
    """

    def __init__(self, ask: AskStore) -> None:
        self._ask = ask

    async def get_episode(self, episode: int) -> EpisodeTurns:
        """Return the newest attempt at an episode with its turns."""
        return await self._ask(lambda store: store.get_episode(episode))

    async def open_turn(
        self, episode: int, attempt: int, request: str, parent: int | None, offset: int, given: tuple[int, ...],
        max_new: int, messages: tuple[str, ...],
    ) -> int:  # fmt: skip
        """Open a turn, and return its number."""
        return await self._ask(
            lambda store: store.open_turn(episode, attempt, request, parent, offset, given, max_new, messages)
        )

    async def follow(self, turn: int, offset: int, wait: float) -> TurnTokens | None:
        """Return the sampled tokens from ``offset`` on."""
        return await self._ask(lambda store: store.follow(turn, offset, wait))
