"""The turns of an episode as the endpoint reads and opens them in the trajectory store."""

from __future__ import annotations

from typing import Protocol

from msgspec import Struct

from ....core.types import Version


class Turn(Struct, frozen=True):
    """An answer within an episode: its path is ``offset`` tokens of its parent's path, then given, then sampled."""

    id: int
    parent: int | None
    """Turn that this one continues or leaves; None for a turn that begins with its own given tokens."""
    offset: int
    given: tuple[int, ...]
    """Tokens that were not sampled: of the prompt, of results of tools."""
    sampled: tuple[int, ...]
    finished: bool
    messages: tuple[str, ...]
    """Rolling hashes of the messages of the request, from the front."""
    attempt: int
    request: str
    """Identifies the agent's call within the attempt."""


class EpisodeTurns(Struct, frozen=True):
    """The newest attempt of an episode, and the turns of all attempts."""

    attempt: int
    turns: tuple[Turn, ...]


class TurnTokens(Struct, frozen=True):
    """Durable sampled tokens of a turn, from the requested offset on."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[Version, ...]
    finished: bool


class OldAttempt(RuntimeError):
    """A newer attempt of the episode has begun, or the episode has ended: this one may do nothing more."""


class Turns(Protocol):
    """What the endpoint asks of the store. Each method raises OldAttempt if the attempt is no longer current."""

    async def episode(self, episode: int) -> EpisodeTurns:
        """Return all turns of an episode."""
        ...

    async def open(
        self, episode: int, attempt: int, request: str, parent: int | None, offset: int, given: tuple[int, ...],
        max_new: int, messages: tuple[str, ...],
    ) -> int:  # fmt: skip
        """Open a turn, which is durable on return, and return its id; the same request gets the same turn."""
        ...

    async def follow(self, turn: int, offset: int, wait: float) -> TurnTokens | None:
        """Return the sampled tokens from ``offset`` on; None if within ``wait`` seconds there are none."""
        ...
