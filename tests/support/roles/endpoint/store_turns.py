"""Turns and episodes of a real store in this process, through the interface that the endpoint uses."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from typing import Any

from rrl.core.types import Incarnation
from rrl.roles.trajectories.client import FencedAttempt, NoAnswer, Refused
from rrl.roles.trajectories.episodes.requests import (
    EndTurn,
    EpisodeItem,
    EpisodeTurns,
    FailAttempt,
    FinishEpisode,
    Follow,
    GetEpisode,
    LeasedEpisodes,
    MarkUnused,
    OpenEpisode,
    OpenTurn,
    PostReward,
    TurnOpened,
    TurnTokens,
)
from rrl.roles.trajectories.server import answer
from rrl.roles.trajectories.store import Store
from rrl.roles.trajectories.types import Denied, Sampling
from rrl.tests.support.roles.endpoint.fake_turns import CLIENT

POLL_S = 0.005


class StoreInProcess(CLIENT):  # type: ignore[misc]
    """A client of the store for one incarnation, which repeats requests that have to wait."""

    def __init__(self, store: Store, who: Incarnation) -> None:
        self.store, self._who = store, who
        self.lock = threading.Lock()

    def _answer(self, request: Any) -> Any:
        with self.lock:
            given = answer(self.store, request)
            self.store.flush()
        if isinstance(given, Denied):
            raise (FencedAttempt if given.fenced_attempt else NoAnswer if given.no_answer else Refused)(given.why)
        return given

    async def get_episode(self, episode: int, holding: Sequence[int] = (), call: str = "") -> EpisodeTurns:
        turns: EpisodeTurns = self._answer(GetEpisode(self._who, episode, tuple(holding), call))
        return turns

    async def open_turn(
        self,
        episode: int,
        attempt: int,
        request: str,
        parent: int | None,
        offset: int,
        given: tuple[int, ...],
        max_new: int,
        messages: tuple[str, ...],
        options: str,
        sampling: Sampling | None,
    ) -> int:
        opened = self._answer(
            OpenTurn(self._who, episode, attempt, request, parent, offset, given, max_new, messages, options, sampling)
        )
        assert isinstance(opened, TurnOpened)
        return opened.turn

    async def follow(self, turn: int, offset: int, wait: float) -> TurnTokens | None:
        return await self._until(Follow(self._who, turn, offset), TurnTokens, wait)

    async def end_turn(self, turn: int, length: int) -> None:
        self._answer(EndTurn(self._who, turn, length))

    async def mark_unused(self, turn: int, undelivered: bool) -> None:
        self._answer(MarkUnused(self._who, turn, undelivered))

    async def open_episode(self, request: str, wait: float) -> EpisodeItem | None:
        loop = asyncio.get_running_loop()
        until = loop.time() + wait
        while True:
            leased = self._answer(OpenEpisode(self._who, request))
            if isinstance(leased, LeasedEpisodes) and leased.items:
                return leased.items[0]
            if loop.time() >= until:
                return None
            await asyncio.sleep(POLL_S)

    async def finish_episode(self, episode: int, attempt: int, reward: float | None, later: bool) -> None:
        self._answer(FinishEpisode(self._who, episode, attempt, reward, later))

    async def post_reward(self, episode: int, attempt: int, reward: float) -> None:
        self._answer(PostReward(self._who, episode, attempt, reward))

    async def fail_attempt(self, episode: int, attempt: int, why: str) -> None:
        self._answer(FailAttempt(self._who, episode, attempt, why))

    async def _until(self, request: Any, kind: type[TurnTokens], wait: float) -> TurnTokens | None:
        loop = asyncio.get_running_loop()
        until = loop.time() + wait
        while loop.time() < until:
            if isinstance(given := self._answer(request), kind):
                return given
            await asyncio.sleep(POLL_S)
        return None
