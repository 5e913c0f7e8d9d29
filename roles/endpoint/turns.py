"""What the endpoint asks of the trajectory store, in an interface that its tests can implement without a store."""

from __future__ import annotations

from typing import Protocol

from ..trajectories.episodes.requests import EpisodeTurns, TurnTokens


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
