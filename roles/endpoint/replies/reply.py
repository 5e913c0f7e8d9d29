"""The reply to a call. Its answers grow as tokens are added to their turns."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from typing import Any

import msgspec
from msgspec import Struct

from ...models.conversation import Chat
from ..calls.call import Call
from .answer import SampledAnswer, usage

KEEP_ALIVE_S = 0.5
"""Seconds between two signs of life of a waiting answer. It is short, because the read timeout of a client may be only
1 s."""

Grow = Callable[[int, SampledAnswer], AsyncIterator[None]]
"""Adds the tokens of a turn to an answer as they become durable, and yields after each addition."""


class OpenedTurns(Struct, frozen=True):
    """The turns of a call."""

    number: int
    """Number of the call among the calls with the same body."""
    prompt: tuple[int, ...]
    """All tokens of the context."""
    requests: tuple[str, ...]
    turns: tuple[int, ...]
    chat: Chat
    """Format of the conversation, with its tools."""


class Reply:
    """The reply to a call.

    Args:
        call: The call.
        opened: The turns of the call.
        grow: Adds the tokens of a turn to an answer.
        relayed: True if the client is a relay, which gets the position of a stream after each event.
        resumed: Position after which a stream continues, as the earlier stream sent it; empty for a new stream.
    """

    def __init__(self, call: Call, opened: OpenedTurns, grow: Grow, relayed: bool = False, resumed: str = "") -> None:
        self._call, self._opened, self._grow, self._relayed = call, opened, grow, relayed
        positions = _positions(resumed, call.choices)
        self._resumed = positions is not None
        self._answers = [
            SampledAnswer(call, index, turn, opened.prompt, opened.chat, *(positions[index] if positions else ()))
            for index, turn in enumerate(opened.turns)
        ]
        self.delivered = any(sent for sent, _ in positions or ())
        """True if the client has got something of the answers."""
        kind = "text_completion" if call.messages is None else "chat.completion"
        self._head = {
            "id": f"{'cmpl' if call.messages is None else 'chatcmpl'}-{opened.turns[0]:x}",
            "object": f"{kind}.chunk" if call.stream and call.messages is not None else kind,
            "created": int(time.time()),
            "model": call.model,
        }

    async def complete(self) -> dict[str, Any]:
        """Wait for all answers, and return the reply."""
        await _all(self._complete(index) for index in range(len(self._answers)))
        return {
            **self._head,
            "choices": [answer.choice() for answer in self._answers],
            "usage": usage(len(self._opened.prompt), self._answers),
            **self._prompt_tokens(),
        }

    async def _complete(self, index: int) -> None:
        async for _ in self._grow(self._opened.turns[index], self._answers[index]):
            pass

    async def events(self) -> AsyncIterator[bytes]:
        """Yield the events of a stream, and a comment whenever there was no event for :data:`KEEP_ALIVE_S`.

        Tokens of a turn are requested only as fast as the client reads the events.
        """
        changed: asyncio.Queue[int | None] = asyncio.Queue(maxsize=1)

        async def watch(index: int) -> None:
            async for _ in self._grow(self._opened.turns[index], self._answers[index]):
                await changed.put(index)

        async def watch_all() -> None:
            await _all(watch(index) for index in range(len(self._answers)))
            await changed.put(None)

        watching = asyncio.ensure_future(watch_all())
        first = {} if self._resumed else self._prompt_tokens()
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
                if (index := taking.result()) is None:
                    break
                if (part := self._answers[index].delta()) is not None:
                    yield self._event([part], first)
                    first = {}
                    self.delivered |= _has_answer(part)
        finally:
            watching.cancel()
        if self._call.include_usage:
            yield self._event([], {"usage": usage(len(self._opened.prompt), self._answers)})
        yield b"data: [DONE]\n\n"

    def _event(self, choices: list[dict[str, Any]], more: dict[str, Any]) -> bytes:
        event = b"data: " + msgspec.json.encode({**self._head, "choices": choices, **more}) + b"\n\n"
        if not self._relayed:
            return event
        sent = ",".join(answer.position for answer in self._answers)
        return event + f": rrl {self._opened.number} {sent}\n\n".encode()

    def _prompt_tokens(self) -> dict[str, Any]:
        return {"prompt_token_ids": list(self._opened.prompt)} if self._call.return_token_ids else {}


def _has_answer(choice: dict[str, Any]) -> bool:
    """Return whether a part of a stream has something of the answer: text, tokens, or the end with its tool calls."""
    text = choice.get("text") or choice.get("delta", {}).get("content")
    return bool(text or choice["finish_reason"] or choice["logprobs"] or choice.get("token_ids"))


def _positions(resumed: str, choices: int) -> Sequence[tuple[int, bool]] | None:
    """Return, for each answer, the number of tokens that an earlier stream has sent, and whether it has sent the end.

    Return None if ``resumed``, the text of these positions, is empty or invalid.
    """
    parts = resumed.split(",")
    numbers = [part.removesuffix(".") for part in parts]
    if len(parts) != choices or not all(
        number.isascii() and number.isdecimal() and len(number) < 10 for number in numbers
    ):
        return None
    return [(int(number), part.endswith(".")) for number, part in zip(numbers, parts, strict=True)]


async def _all(coroutines: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Run coroutines concurrently; the first exception ends all of them."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
