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

    async def get_episode(self, episode: int, holding: Sequence[int] = (), call: str = "") -> EpisodeTurns:
        """Return the newest attempt at an episode with its turns, except those in ``holding``.

        The fields are those of :class:`~rrl.roles.trajectories.episodes.requests.GetEpisode`.
        """
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

    async def mark_unused(self, turn: int, undelivered: bool) -> None:
        """Report that the answer of a turn was not used (MarkUnused in the module of OpenTurn), durably."""
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


class StoreRequests:
    """Has the methods of :class:`Turns` and :class:`Episodes`, and sends each call as a request to the store.

    The event loop of the caller awaits the answer. Once this process is fenced, every request raises FencedAttempt.

    Args:
        ask: Sends a request: :meth:`rrl.Worker.ask_store`.
    """

    def __init__(self, ask: AskStore) -> None:
        self._ask = ask

    def __getattr__(self, name: str) -> Any:
        async def send(*arguments: Any) -> Any:
            try:
                return await self._ask(lambda store: getattr(store, name)(*arguments))
            except Fenced as error:
                raise FencedAttempt(str(error)) from error

        return send
