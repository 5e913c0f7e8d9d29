"""An in-memory stand-in for the turns of the trajectory store, in which the test samples the tokens."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from rrl.core.types import Incarnation, ReplicaId, Version
from rrl.roles.trajectories.client import FencedAttempt
from rrl.roles.trajectories.episodes.requests import (
    EndTurn,
    EpisodeTurns,
    Follow,
    GetEpisode,
    MarkAnswer,
    OpenTurn,
    Turn,
    TurnOpened,
    TurnTokens,
)
from rrl.roles.trajectories.types import Sampling

VERSION = Version(3, 1)
WHO = Incarnation(ReplicaId("agents/0"), 1)


class FakeTurns:
    """The turns of episodes 0, 1, ..., which are at attempt 1.

    ``on_open`` is called with each new turn, in the thread of the endpoint.
    """

    def __init__(self, on_open: Callable[[Turn], None] = lambda turn: None) -> None:
        self.on_open = on_open
        self.attempts: dict[int, int] = {}
        self.turns: dict[int, Turn] = {}
        self.max_new: dict[int, int] = {}
        self.recorded: list[Turn] = []
        """Turns that the store would return as those of an earlier attempt."""
        self.marked: list[tuple[int, bool, bool]] = []
        """What the endpoint has reported of answers: turn, whether it was delivered, and whether it was asked again."""
        self._lost: set[int] = set()
        self.holding: tuple[int, ...] = ()
        """The turns that the endpoint had according to its newest request."""
        self._episode_of: dict[int, int] = {}
        self._lock = threading.Lock()

    async def __call__(self, kind: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        match kind(WHO, *arguments, **named):
            case GetEpisode(_, episode, holding, call):
                return await self.get_episode(episode, holding, call)
            case OpenTurn() as request:
                return TurnOpened(await self.open_turn(*msgspec.structs.astuple(request)[1:]))
            case Follow(_, turn, offset, wait):
                return await self.follow(turn, offset, wait)
            case EndTurn(_, turn, length):
                return await self.end_turn(turn, length)
            case MarkAnswer(_, turn, delivered, repeated):
                return await self.mark(turn, delivered, repeated)

    async def get_episode(self, episode: int, holding: Sequence[int] = (), call: str = "") -> EpisodeTurns:
        with self._lock:
            attempt = self.attempts.get(episode, 1)
            turns = tuple(
                turn
                for turn in self.turns.values()
                if self._episode_of[turn.id] == episode and turn.attempt == attempt and turn.id not in holding
            )
            self.holding = tuple(holding)
            lost = tuple(
                turn for turn in self._lost if (known := self.turns.get(turn)) and known.request.startswith(f"{call}/")
            )
            return EpisodeTurns(attempt, turns, tuple(self.recorded), lost)

    async def open_turn(
        self,
        episode: int,
        attempt: int,
        request: str,
        parent: int | None,
        offset: int,
        given: tuple[int, ...],
        max_new: int,
        conversation: str,
        options: str = "",
        sampling: Sampling | None = None,
        agent: str = "",
    ) -> int:
        with self._lock:
            self._check(episode, attempt)
            for turn in self.turns.values():
                if (self._episode_of[turn.id], turn.attempt, turn.request) == (episode, attempt, request):
                    self._lost.discard(turn.id)
                    return turn.id
            made = Turn(
                2**40 + len(self._episode_of),
                parent,
                offset,
                given,
                (),
                False,
                conversation,
                attempt,
                request,
                options,
                sampling,
                agent,
            )
            self.turns[made.id], self._episode_of[made.id] = made, episode
            self.max_new[made.id] = max_new
        self.on_open(made)
        return made.id

    async def follow(self, turn: int, offset: int, wait: float) -> TurnTokens | None:
        loop = asyncio.get_running_loop()
        until = loop.time() + wait
        while loop.time() < until:
            with self._lock:
                now = self.turns[turn]
                self._check(self._episode_of[turn], now.attempt)
            tokens = now.sampled[offset:]
            if tokens or now.finished:
                return TurnTokens(tokens, tuple(-0.5 for _ in tokens), tuple(VERSION for _ in tokens), now.finished)
            await asyncio.sleep(0.005)
        return None

    async def end_turn(self, turn: int, length: int) -> None:
        with self._lock:
            now = self.turns[turn]
            self.turns[turn] = msgspec.structs.replace(now, sampled=now.sampled[:length], finished=True)

    async def mark(self, turn: int, delivered: bool, repeated: bool) -> None:
        self.marked.append((turn, delivered, repeated))
        if not delivered:
            self._lost.add(turn)

    def sample(self, turn: int, *tokens: int, finished: bool = False) -> None:
        """Add durable tokens to a turn."""
        with self._lock:
            now = self.turns[turn]
            self.turns[turn] = msgspec.structs.replace(now, sampled=now.sampled + tokens, finished=finished)

    def adopt(self, turn: Turn, episode: int = 0) -> None:
        """Add a turn that was opened before."""
        self.turns[turn.id], self._episode_of[turn.id] = turn, episode

    def begin_attempt(self, episode: int, attempt: int) -> None:
        with self._lock:
            self.attempts[episode] = attempt

    def _check(self, episode: int, attempt: int) -> None:
        if self.attempts.get(episode, 1) != attempt:
            raise FencedAttempt(f"attempt {attempt} of this episode is over")
