"""The reply to a call: its answers grow as tokens are added to their turns, and a writer shows them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from typing import Any

from ..calls.call import Call
from .answer import SampledAnswer
from .writer import OpenedTurns, Writer

KEEP_ALIVE_S = 0.5
"""Seconds between two signs of life of a waiting answer. It is short, because the read timeout of a client may be only
1 s."""

Grow = Callable[[SampledAnswer], AsyncIterator[None]]
"""Adds the tokens of a turn to its answer as they become durable, and yields after each addition."""


class Reply:
    """The reply to a call.

    Args:
        call: The call.
        opened: The turns of the call.
        writer: The writer of the call's form.
        grow: Adds the tokens of a turn to an answer.
        relayed: True if the client is a relay, which gets the position of a stream after each event.
        resumed: Position after which a stream continues, as the earlier stream sent it; empty for a new stream.
    """

    def __init__(
        self,
        call: Call,
        opened: OpenedTurns,
        writer: type[Writer],
        grow: Grow,
        relayed: bool = False,
        resumed: str = "",
    ) -> None:
        self._number, self._grow, self._relayed = opened.number, grow, relayed
        of_answers, _, of_writer = resumed.partition(":")
        positions = _positions(of_answers, call.choices)
        self._answers = [
            SampledAnswer(call, turn, opened.prompt, opened.chat, *(positions[index] if positions else ()))
            for index, turn in enumerate(opened.turns)
        ]
        self._writer = writer(call, opened, self._answers, of_writer if positions else None)
        self.is_written = False
        """True once the end of the reply was written to the connection."""
        self.is_torn = False
        """True once the connection was reset."""

    @property
    def output(self) -> tuple[str, Sequence[dict[str, Any]]] | None:
        """As :attr:`.writer.Writer.output`."""
        return self._writer.output

    @property
    def is_delivered(self) -> bool:
        """Whether the client has got the end of the reply, as far as its connection tells."""
        return self.is_written and not self.is_torn

    async def complete(self) -> bytes:
        """Wait for all answers, and return the reply."""
        await _all(self._complete(answer) for answer in self._answers)
        return self._writer.whole()

    async def _complete(self, answer: SampledAnswer) -> None:
        async for _ in self._grow(answer):
            pass

    async def events(self) -> AsyncIterator[bytes]:
        """Yield the events of a stream, and a sign of life whenever there was no event for :data:`KEEP_ALIVE_S`.

        Tokens of a turn are requested only as fast as the client reads the events.
        """
        changed: asyncio.Queue[int | None] = asyncio.Queue(maxsize=1)

        async def watch(index: int) -> None:
            async for _ in self._grow(self._answers[index]):
                await changed.put(index)

        async def watch_all() -> None:
            await _all(watch(index) for index in range(len(self._answers)))
            await changed.put(None)

        watching = asyncio.ensure_future(watch_all())
        taking: asyncio.Future[Any] = watching
        try:
            if opened := self._writer.opened():
                yield self._positioned(opened)
            while True:
                taking = asyncio.ensure_future(changed.get())
                while not taking.done():
                    await asyncio.wait([taking, watching], timeout=KEEP_ALIVE_S, return_when=asyncio.FIRST_COMPLETED)
                    if watching.done() and watching.exception() is not None:
                        watching.result()
                    if not taking.done() and (alive := self._writer.alive()):
                        yield self._positioned(alive)
                if (index := taking.result()) is None:
                    break
                if events := self._writer.grew(index):
                    yield self._positioned(events)
        finally:
            watching.cancel()
            taking.cancel()
        yield self._writer.ended()
        self.is_written = True

    def _positioned(self, events: bytes) -> bytes:
        """Return events and, for a relay, the position after them."""
        if not self._relayed:
            return events
        position = ",".join(answer.position for answer in self._answers)
        if own := self._writer.position:
            position += f":{own}"
        return events + f": rrl {self._number} {position}\n\n".encode()


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
