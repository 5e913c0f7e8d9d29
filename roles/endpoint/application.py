"""The HTTP application: OpenAI's chat completions, completions and models over the turns of the trajectory store.

A call opens one turn for each answer and follows it until its last token is durable. A call that was repeated because
its connection broke is joined to its turns; so is one whose server was restarted, because everything that this process
knows can be read from the store again. Every wait ends with tokens, however long the store or the rollouts are away:
until then the agent gets white space before the JSON, or comments in a stream, so that its read timeout does not pass.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakValueDictionary

import msgspec
from msgspec import Struct
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from ..models.chat import Chat
from ..trajectories.client import FencedAttempt
from ..trajectories.episodes.requests import Turn, TurnTokens
from .answer import SampledAnswer, usage
from .call import ApiError, Call, parse_chat, parse_completion
from .key import EpisodeKey, decode_key
from .turn_context import Context, Paths, chat_context, plain_context
from .turns import Turns

_log = logging.getLogger("rrl.endpoint")

MAX_BODY_BYTES = 16 * 2**20
"""Bytes of the largest body: a conversation of 1 M tokens has about 4 MB of text."""
BODY_TIMEOUT_S = 60.0
"""Seconds in which a body must arrive, so that slow senders do not occupy memory for ever."""
KEEP_ALIVE_S = 0.5
"""Seconds between two signs of life of a waiting answer: a client's read timeout may be as short as 1 s."""
FOLLOW_WAIT_S = 5.0
"""Seconds after which a request for further tokens is repeated."""
MODEL = "policy"
"""Name under which the model is listed; requests may use any name."""
_RETRY_HEADER = "x-stainless-retry-count"
"""Header in which OpenAI's clients count the repetitions of a request."""
_SERVED = "served here are POST /v1/chat/completions, POST /v1/completions and GET /v1/models"


class EndpointSettings(Struct, frozen=True):
    """What the endpoint must know of the run."""

    run: str
    """Name of the run directory."""
    secret: bytes
    temperature: float
    max_new: int
    """Greatest number of tokens of an answer."""
    max_length: float
    """Greatest number of tokens of context and answer together."""


class _Abandoned(Exception):
    """A reply that has begun cannot be completed: its connection is closed, so that the agent repeats the call."""


class _Opened(Struct):
    """The turns of a call."""

    prompt: tuple[int, ...]
    """All tokens of the context."""
    requests: tuple[str, ...]
    turns: tuple[int, ...]


class Endpoint:
    """The application and the calls that it serves now.

    Args:
        settings: What it must know of the run.
        chat: Tokenizer and chat template of the model.
        turns: The turns in the store.
        on_change: Called whenever ``waiting`` or ``answered`` changes.
    """

    def __init__(
        self, settings: EndpointSettings, chat: Chat, turns: Turns, on_change: Callable[[], None] = lambda: None
    ) -> None:
        self._settings, self._chat, self._turns = settings, chat, turns
        self._on_change = on_change
        self._locks: WeakValueDictionary[int, asyncio.Lock] = WeakValueDictionary()
        """For each episode the lock under which its turns are opened, so that equal calls at once get turns of their
        own."""
        self._served: set[tuple[int, str]] = set()
        """Episode and request of each turn that a connection waits for."""
        self.waiting = 0
        """Number of calls that wait for tokens."""
        self.answered = 0
        """Number of answers that were completed."""
        self.application = Starlette(
            routes=[
                Route("/v1/chat/completions", self._chat_completions, methods=["POST"]),
                Route("/v1/completions", self._completions, methods=["POST"]),
                Route("/v1/models", self._models, methods=["GET"]),
            ],
            exception_handlers={
                ApiError: _error,
                HTTPException: _http_error,
                ClientDisconnect: _disconnected,
                Exception: _unexpected,
            },
        )

    async def _models(self, request: Request) -> Response:
        self._key(request)
        listed = [{"id": MODEL, "object": "model", "created": 0, "owned_by": "rrl"}]
        return JSONResponse({"object": "list", "data": listed})

    async def _chat_completions(self, request: Request) -> Response:
        return await self._answer(request, parse_chat)

    async def _completions(self, request: Request) -> Response:
        return await self._answer(request, parse_completion)

    async def _answer(self, request: Request, parse: Callable[[bytes, float], Call]) -> Response:
        key = self._key(request)
        call = parse(await _body(request), self._settings.temperature)
        repeated = request.headers.get(_RETRY_HEADER, "0") != "0"
        try:
            async with self._locks.setdefault(key.episode, asyncio.Lock()):
                opened = await self._open(key, call, repeated)
                served = {(key.episode, name) for name in opened.requests}
                self._served |= served
        except FencedAttempt as error:
            raise _old_attempt(error) from None
        reply = _Reply(call, opened, self._chat, self._follow)
        if call.stream:
            return StreamingResponse(self._serving(served, reply.events()), media_type="text/event-stream")
        return await self._whole(reply, served)

    def _key(self, request: Request) -> EpisodeKey:
        scheme, _, text = request.headers.get("authorization", "").partition(" ")
        key = decode_key(text.strip(), self._settings.run, self._settings.secret) if scheme == "Bearer" else None
        if key is None:
            message = "the API key is not one of an episode of this run; use the api_key that the agent was given"
            raise ApiError(401, message, code="invalid_api_key")
        return key

    # ── turns ──────────────────────────────────────────────────────────────────────────────────────────────────────
    async def _open(self, key: EpisodeKey, call: Call, repeated: bool) -> _Opened:
        """Open the turns of a call, or find those that an earlier try of it has opened."""
        episode = await self._turns.get_episode(key.episode)
        if episode.attempt != key.attempt:
            raise FencedAttempt(f"attempt {key.attempt} of this episode is over: the newest is {episode.attempt}")
        turns = [turn for turn in episode.turns if turn.attempt == key.attempt]
        earlier = [turn for turn in turns if turn.request.startswith(f"{call.digest}/")]
        number = self._joined(key, call, earlier) if repeated else None
        if number is not None:
            first = next(turn for turn in earlier if _number(turn) == number)
            tokens = Paths(turns).context(first.id)
            context = Context(first.parent, first.offset, first.given, first.messages, tokens)
        else:
            number = 1 + max((_number(turn) for turn in earlier), default=0)
            context = self._context(call, turns)
        left = self._settings.max_length - context.length
        if left < 1:
            raise ApiError(
                400, f"this model's maximum context length is {self._settings.max_length:g} tokens; the request has"
                f" {context.length}, and an answer needs at least one more", code="context_length_exceeded",
                param="messages" if call.messages is not None else "prompt",
            )  # fmt: skip
        max_new = int(min(self._settings.max_new, left, call.max_new or left))
        names = tuple(f"{call.digest}/{number}/{choice}" for choice in range(call.choices))
        opened = [
            await self._turns.open_turn(
                key.episode, key.attempt, name, context.parent, context.offset, context.given, max_new, context.messages
            )
            for name in names
        ]
        return _Opened(context.tokens, names, tuple(opened))

    def _context(self, call: Call, turns: Sequence[Turn]) -> Context:
        try:
            if call.messages is not None:
                return chat_context(call.messages, turns, self._chat)
            prompt = self._chat.tokenizer.encode(call.prompt) if isinstance(call.prompt, str) else call.prompt
        except ValueError as error:
            raise ApiError(400, str(error), code="invalid_value", param="messages") from None
        if any(token >= self._chat.tokenizer.size for token in prompt):
            raise ApiError(400, "prompt: a token id is beyond the vocabulary", code="invalid_value", param="prompt")
        return plain_context(prompt, turns)

    def _joined(self, key: EpisodeKey, call: Call, earlier: Sequence[Turn]) -> int | None:
        """Return the number of the call that a repeated request continues; None if no turn of it was opened.

        Of several equal calls it is the newest one that no connection waits for.
        """
        numbers = sorted({_number(turn) for turn in earlier}, reverse=True)
        free = [number for number in numbers if (key.episode, f"{call.digest}/{number}/0") not in self._served]
        return next(iter(free or numbers), None)

    async def _follow(self, turn: int) -> AsyncIterator[TurnTokens]:
        """Yield the tokens of a turn as they become durable."""
        offset = 0
        while True:
            tokens = await self._turns.follow(turn, offset, FOLLOW_WAIT_S)
            if tokens is None:
                continue
            offset += len(tokens.tokens)
            yield tokens
            if tokens.finished:
                self.answered += 1
                self._on_change()
                return

    # ── replies ────────────────────────────────────────────────────────────────────────────────────────────────────
    async def _whole(self, reply: _Reply, served: set[tuple[int, str]]) -> Response:
        """Return a reply without a stream: as a whole if it is soon complete, and otherwise after white space."""
        content = asyncio.ensure_future(self._complete(reply, served))
        await asyncio.wait([content], timeout=KEEP_ALIVE_S)
        if content.done():
            try:
                return Response(content.result(), media_type="application/json")
            except FencedAttempt as error:
                raise _old_attempt(error) from None

        async def padded() -> AsyncIterator[bytes]:
            try:
                while not content.done():
                    yield b" "
                    await asyncio.wait([content], timeout=KEEP_ALIVE_S)
                yield content.result()
            except FencedAttempt as error:
                raise _Abandoned(str(error)) from None
            finally:
                content.cancel()

        return StreamingResponse(padded(), media_type="application/json")

    async def _complete(self, reply: _Reply, served: set[tuple[int, str]]) -> bytes:
        with self._waits(served):
            return msgspec.json.encode(await reply.complete())

    async def _serving(self, served: set[tuple[int, str]], events: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        with self._waits(served):
            try:
                async for event in events:
                    yield event
            except FencedAttempt as error:
                raise _Abandoned(str(error)) from None

    @contextmanager
    def _waits(self, served: set[tuple[int, str]]) -> Iterator[None]:
        """Count a call that waits for tokens inside the block."""
        self.waiting += 1
        self._on_change()
        try:
            yield
        finally:
            self._served -= served
            self.waiting -= 1
            self._on_change()


class _Reply:
    """The reply to a call: its answers grow as their turns do."""

    def __init__(
        self, call: Call, opened: _Opened, chat: Chat, follow: Callable[[int], AsyncIterator[TurnTokens]]
    ) -> None:
        self._call, self._opened, self._follow = call, opened, follow
        self._answers = [SampledAnswer(call, index, chat.tokenizer) for index in range(call.choices)]
        kind = "text_completion" if call.messages is None else "chat.completion"
        self._head = {
            "id": f"{'cmpl' if call.messages is None else 'chatcmpl'}-{opened.turns[0]:x}",
            "object": f"{kind}.chunk" if call.stream and call.messages is not None else kind,
            "created": int(time.time()),
            "model": call.model,
        }

    async def complete(self) -> dict[str, Any]:
        """Wait for all answers, and return the reply."""
        await _all(self._grow(index) for index in range(len(self._answers)))
        return {
            **self._head,
            "choices": [answer.choice() for answer in self._answers],
            "usage": usage(len(self._opened.prompt), self._answers),
            **self._prompt_tokens(),
        }

    async def _grow(self, index: int) -> None:
        async for tokens in self._follow(self._opened.turns[index]):
            self._answers[index].grow(tokens.tokens, tokens.logprobs, tokens.finished)

    async def events(self) -> AsyncIterator[bytes]:
        """Yield the events of a stream, and a comment whenever there is none for :data:`KEEP_ALIVE_S`."""
        changed: asyncio.Queue[tuple[int, TurnTokens] | None] = asyncio.Queue(maxsize=1)

        async def watch(index: int) -> None:
            async for tokens in self._follow(self._opened.turns[index]):
                await changed.put((index, tokens))

        async def watch_all() -> None:
            await _all(watch(index) for index in range(len(self._answers)))
            await changed.put(None)

        watching = asyncio.ensure_future(watch_all())
        first = self._prompt_tokens()
        try:
            while True:
                taking = asyncio.ensure_future(changed.get())
                while not taking.done():
                    await asyncio.wait([taking, watching], timeout=KEEP_ALIVE_S, return_when=asyncio.FIRST_COMPLETED)
                    if watching.done() and watching.exception() is not None:
                        taking.cancel()
                        watching.result()
                    if not taking.done():
                        yield b": waiting\n\n"
                if (change := taking.result()) is None:
                    break
                index, tokens = change
                answer = self._answers[index]
                since = answer.length
                answer.grow(tokens.tokens, tokens.logprobs, tokens.finished)
                yield self._event([answer.delta(since)], first)
                first = {}
        finally:
            watching.cancel()
        if self._call.include_usage:
            yield self._event([], {"usage": usage(len(self._opened.prompt), self._answers)})
        yield b"data: [DONE]\n\n"

    def _event(self, choices: list[dict[str, Any]], more: dict[str, Any]) -> bytes:
        return b"data: " + msgspec.json.encode({**self._head, "choices": choices, **more}) + b"\n\n"

    def _prompt_tokens(self) -> dict[str, Any]:
        return {"prompt_token_ids": list(self._opened.prompt)} if self._call.return_token_ids else {}


def _number(turn: Turn) -> int:
    """Return the number of the call that opened a turn among the calls with the same body."""
    return int(turn.request.split("/")[1])


async def _all(coroutines: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Run coroutines at once; the first exception ends all of them."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


async def _body(request: Request) -> bytes:
    """Return the body of a request, which is bounded in size and time."""
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            async for piece in request.stream():
                body += piece
                if len(body) > MAX_BODY_BYTES:
                    raise ApiError(413, f"the body has more than {MAX_BODY_BYTES >> 20} MiB", code="request_too_large")
    except TimeoutError:
        raise ApiError(408, f"the body did not arrive within {BODY_TIMEOUT_S:g} s") from None
    return bytes(body)


def _old_attempt(error: FencedAttempt) -> ApiError:
    return ApiError(403, str(error), "permission_error", "attempt_over")


# ── errors ─────────────────────────────────────────────────────────────────────────────────────────────────────────
async def _error(_: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return JSONResponse(error.body, error.status)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path}: {error.detail}; {_SERVED}"
    return JSONResponse(ApiError(error.status_code, message, code="not_served").body, error.status_code)


async def _disconnected(_: Request, error: Exception) -> Response:
    return Response(status_code=400)  # nobody receives it


async def _unexpected(request: Request, error: Exception) -> Response:
    if isinstance(error, _Abandoned):
        _log.info("%s ended without an answer: %s", request.url.path, error)
        return Response(status_code=403)  # is not sent
    _log.error("%s %s failed", request.method, request.url.path, exc_info=error)
    return JSONResponse(ApiError(500, "the endpoint failed; its log has more", "server_error").body, 500)
