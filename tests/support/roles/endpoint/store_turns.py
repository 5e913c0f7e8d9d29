"""Turns and episodes of a real store in this process, through the interface that the endpoint uses."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

from rrl.core.types import Incarnation
from rrl.roles.trajectories.client import FencedAttempt, NoAnswer, Refused
from rrl.roles.trajectories.episodes.requests import LeasedEpisodes
from rrl.roles.trajectories.server import answer
from rrl.roles.trajectories.store import Store
from rrl.roles.trajectories.types import Denied, NotReady

POLL_S = 0.005


class StoreInProcess:
    """Sends the requests of one incarnation to the store, and repeats requests that have to wait."""

    def __init__(self, store: Store, who: Incarnation) -> None:
        self.store, self._who = store, who
        self.lock = threading.Lock()

    async def __call__(self, kind: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        request, loop = kind(self._who, *arguments, **named), asyncio.get_running_loop()
        until = loop.time() + getattr(request, "wait", 0.0)
        while (given := self._answer(request)) in (NotReady(), LeasedEpisodes(())) and loop.time() < until:
            await asyncio.sleep(POLL_S)
        return None if isinstance(given, NotReady) else given

    def _answer(self, request: Any) -> Any:
        with self.lock:
            given = answer(self.store, request)
            self.store.flush()
        if isinstance(given, Denied):
            raise (FencedAttempt if given.fenced_attempt else NoAnswer if given.no_answer else Refused)(given.why)
        return given
