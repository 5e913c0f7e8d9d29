"""The routes with which agents outside of the run open episodes and end them.

``POST /rrl/v1/episodes`` with the key of the run opens an episode, of an evaluation if its ``split`` is ``eval``, and
returns the episode's key. With the episode's key, the paths ``finish``, ``reward`` and ``fail`` below
``/rrl/v1/episodes`` end the episode. A client may repeat a request that opens an episode with the same
``Idempotency-Key``, and any other request with the same body.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import msgspec
from msgspec import Struct
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from ...core.text import shortened
from ..models.rewards import NAMED_REWARDS, Reward, finite_reward
from ..trajectories.client import AskStore, FencedAttempt
from ..trajectories.episodes.requests import FailAttempt, FinishEpisode, OpenEpisode, PostReward
from .calls.errors import ApiError, wrong
from .http_messages import bearer_key, read_body
from .key import EpisodeKey, encode_key

OPEN_TIMEOUT_S = 30.0
"""Seconds that a request for an episode waits if no episode is ready."""
_OPEN_WAIT_S = 5.0
"""Seconds that a request to the store waits for an episode before it is repeated."""
_RETRY_AFTER_S = 5.0
"""Seconds after which a client should repeat its request for an episode."""
_MAX_REQUEST_CHARS = 200
"""Maximum number of characters of an ``Idempotency-Key``."""
_MAX_BODY_BYTES = 64 * 2**10
"""Maximum size (bytes) of a body. It is small, because bodies are read in the event loop."""
_TRAINING, _EVALUATION = "train", "eval"
"""What an episode is for (``split``)."""
_MAX_REASON_CHARS = 2000
"""Maximum number of characters of a failure's reason that the store receives."""


class EpisodeRoutes(Struct, frozen=True):
    """The routes by which agents open and end episodes."""

    ask: AskStore
    run: str
    """Name of the run directory."""
    secret: bytes
    item_text: Callable[[int, bool], str]
    """Returns the text of an item of the task or, if the second argument is True, of the evaluation's task."""
    not_evaluated: str = ""
    """Why agents outside of the run cannot open episodes of evaluations; empty if they can."""

    def routes(self) -> list[Route]:
        """Return the routes of the application."""
        return [
            Route("/rrl/v1/episodes", self._open, methods=["POST"]),
            Route("/rrl/v1/episodes/finish", self._finish, methods=["POST"]),
            Route("/rrl/v1/episodes/reward", self._reward, methods=["POST"]),
            Route("/rrl/v1/episodes/fail", self._fail, methods=["POST"]),
        ]

    async def _open(self, request: Request) -> Response:
        if bearer_key(request, self.run, self.secret).attempt:
            message = "this is the key of an episode; open episodes with the key of the run (rrl endpoint RUN)"
            raise ApiError(403, message, "permission_error", "run_key_needed")
        split = (await _fields(request, {"split"})).get("split", _TRAINING)
        if split not in (_TRAINING, _EVALUATION):
            raise wrong("split", f'must be "{_TRAINING}" or "{_EVALUATION}"')
        evaluation = split == _EVALUATION
        if evaluation and self.not_evaluated:
            raise wrong("split", f'cannot be "{_EVALUATION}": {self.not_evaluated}')
        name = request.headers.get("idempotency-key", "") or secrets.token_hex(16)
        if len(name) > _MAX_REQUEST_CHARS:
            raise wrong("Idempotency-Key", f"must have at most {_MAX_REQUEST_CHARS} characters")
        name = f"{split}/{name}" if evaluation else name
        loop = asyncio.get_running_loop()
        until = loop.time() + OPEN_TIMEOUT_S
        while (left := until - loop.time()) > 0:
            leased = await self.ask(OpenEpisode, name, min(_OPEN_WAIT_S, left), evaluation)
            for item in leased.items if leased is not None else ():
                try:
                    text = self.item_text(item.item, item.evaluation)
                except BaseException as error:  # user code may raise anything
                    why = f"prompt({item.item}) of [{'eval' if evaluation else 'task'}] raised {shortened(error)}"
                    with suppress(FencedAttempt):  # this request is a repetition
                        await self.ask(FailAttempt, item.episode, item.attempt, why)
                    name += "+"
                    continue
                key = encode_key(EpisodeKey(self.run, item.episode, item.attempt), self.secret)
                opened = {
                    "episode": item.episode,
                    "attempt": item.attempt,
                    "split": split,
                    "item": text,
                    "api_key": key,
                    "base_url": f"{request.url.scheme}://{request.headers.get('host', '')}/v1",
                }
                return JSONResponse(opened)
        raise ApiError(
            503,
            f"the run had no free episode within {OPEN_TIMEOUT_S:g} s; repeat the request",
            "server_error",
            "no_episode",
            retry_after=_RETRY_AFTER_S,
        )

    async def _finish(self, request: Request) -> Response:
        key, given = await self._read(request, {"reward", "rewards", "later"})
        later, reward = given.get("later", False), _reward(given)
        if not isinstance(later, bool) or (later and reward is not None):
            raise wrong("later", "must be true or false; if it is true, the request must have no reward")
        await self.ask(FinishEpisode, key.episode, key.attempt, reward, later)
        return JSONResponse({})

    async def _reward(self, request: Request) -> Response:
        key, given = await self._read(request, {"reward", "rewards"})
        if (reward := _reward(given)) is None:
            raise wrong("reward", "must be a finite number; or give rewards by the names of agents")
        await self.ask(PostReward, key.episode, key.attempt, reward)
        return JSONResponse({})

    async def _fail(self, request: Request) -> Response:
        key, given = await self._read(request, {"why"})
        why = given.get("why")
        if not isinstance(why, str) or not why:
            raise wrong("why", "must be a text that says why the attempt failed")
        await self.ask(FailAttempt, key.episode, key.attempt, why[:_MAX_REASON_CHARS])
        return JSONResponse({})

    async def _read(self, request: Request, keys: set[str]) -> tuple[EpisodeKey, dict[str, Any]]:
        """Return the episode's API key, which the request contains, and the fields of the request's body.

        ``keys`` are the names of the fields that the body may have.

        Raises:
            ApiError: The API key is not that of an episode of this run, or the body is invalid.
        """
        key = bearer_key(request, self.run, self.secret)
        if not key.attempt:
            message = "this is the key of the run; use the api_key with which the episode was opened"
            raise ApiError(403, message, "permission_error", "episode_key_needed")
        return key, await _fields(request, keys)


async def _fields(request: Request, keys: set[str]) -> dict[str, Any]:
    """Return the fields of the request's body, which may only have these names. Raises ApiError."""
    body = await read_body(request, _MAX_BODY_BYTES)
    try:
        given = msgspec.json.decode(body or b"{}", type=dict[str, Any] | None) or {}
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise ApiError(400, "the body must be a JSON object") from None
    if unknown := sorted(given.keys() - keys):
        raise wrong(unknown[0], f"is unknown; the body may have {', '.join(sorted(keys))}")
    return given


def _reward(given: dict[str, Any]) -> Reward | None:
    """Return the reward of a body, or its rewards by name; None if it has neither. Raises ApiError."""
    number, named = given.get("reward"), given.get("rewards")
    try:
        if named is None:
            return None if number is None else msgspec.convert(number, float)
        reward = finite_reward(msgspec.convert(named, dict[str, float]))
    except msgspec.ValidationError:  # another type, or an integer beyond all floats
        reward = None
    if named is None:
        raise wrong("reward", "must be a finite number")
    if number is not None or reward is None:
        raise wrong("rewards", f"must be {NAMED_REWARDS}, and the request must have no reward")
    return reward
