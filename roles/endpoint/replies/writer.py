"""The interface that turns sampled answers into the bytes of one API's form."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from msgspec import Struct

from ...models.conversation import Chat
from ..calls.call import Call
from .answer import SampledAnswer


class OpenedTurns(Struct, frozen=True):
    """The turns of a call."""

    number: int
    """Number of the call among the calls of the same meaning."""
    prompt: tuple[int, ...]
    """All tokens of the context."""
    requests: tuple[str, ...]
    turns: tuple[int, ...]
    chat: Chat
    """Format of the conversation, with its tools."""


class Writer(Protocol):
    """Writes the reply to one call: either :meth:`whole`, or the events of a stream.

    The events of a stream are ``opened``, then ``grew`` whenever an answer has grown, and ``ended`` after the end of
    all answers. ``alive`` may come anywhere between. All ids come from the turns, so that each time the same turns are
    written, the client gets the same ids. Nothing that was written is taken back: text is written when no further token
    can change it, and whatever ends the answer when all of it is durable.
    """

    def __init__(
        self, call: Call, opened: OpenedTurns, answers: Sequence[SampledAnswer], resumed: str | None = None
    ) -> None:
        """Prepare the reply.

        Args:
            call: The call.
            opened: Its turns.
            answers: The answers, which grow meanwhile.
            resumed: What :attr:`position` was at the end of the earlier stream that this one continues; None for a
                new stream.
        """

    def whole(self) -> bytes:
        """Return the complete reply as JSON; all answers are finished."""
        ...

    def opened(self) -> bytes:
        """Return the events that begin a stream; empty if it begins with the first token, or continues another one."""
        ...

    def grew(self, index: int) -> bytes:
        """Return the events for what was added to an answer; empty if nothing can be shown yet."""
        ...

    def ended(self) -> bytes:
        """Return the events that end a stream."""
        ...

    def alive(self) -> bytes:
        """Return a sign of life, at intervals of :data:`.reply.KEEP_ALIVE_S` in which nothing else was written."""
        ...

    @property
    def position(self) -> str:
        """What a later stream needs to continue this one, besides the tokens of each answer; a text without spaces."""
        ...

    @property
    def output(self) -> tuple[str, Sequence[dict[str, Any]]] | None:
        """Id and items of the complete reply, if a later request may name it; otherwise, and before its end, None."""
        ...
