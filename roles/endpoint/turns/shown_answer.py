"""An answer as an agent gets it: its text, cut before a stop text, and its tool calls.

What the agent gets depends only on the sampled tokens and the ``options`` of the turn. It is therefore the same each
time, and can be recognised in a later request. All functions here are pure.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from msgspec import Struct

from ...models.conversation import ASSISTANT, Chat, Message, ToolCall
from ...models.tokenizer import Tokenizer

INCOMPLETE = "\ufffd"
"""Character that stands for bytes which are not yet a character: the next token may complete them."""


class AnswerFormat(Struct, frozen=True, omit_defaults=True):
    """The settings of a request that determine the form of its answers."""

    stop: tuple[str, ...] = ()
    calls: bool = False
    """True if the agent gets tool calls as ``tool_calls``; False if it gets them as text."""
    call_ids: str = "call"
    """Beginning of the ids of tool calls."""

    def encode(self) -> str:
        """Return the format as text, which is recorded as the ``options`` of a turn; empty for the default format."""
        return "" if self == AnswerFormat() else msgspec.json.encode(self).decode()

    @staticmethod
    def decode(options: str) -> AnswerFormat:
        """Return the format that :meth:`encode` has converted to the text ``options``."""
        return msgspec.json.decode(options, type=AnswerFormat) if options else AnswerFormat()


class StopEnd(Struct, frozen=True):
    """The end of an answer at a stop text."""

    length: int
    """Number of tokens up to and including the token that completes the stop text."""
    text: str
    """Text before the stop text."""
    stop: str
    """The stop text."""


def end_at_stop(tokens: Sequence[int], stop: Sequence[str], tokenizer: Tokenizer) -> StopEnd | None:
    """Return where the first stop text ends an answer; None if the answer contains no stop text."""
    if not stop or (cut := _first_stop(tokenizer.decode(tokens), stop)) is None:
        return None
    low, high = 0, len(tokens)  # with ``low`` tokens the text has no stop text, with ``high`` it has one
    while high - low > 1:
        middle = (low + high) // 2
        found = _first_stop(_stable(tokenizer.decode(tokens[:middle])), stop)
        low, high = (middle, high) if found is None else (low, middle)
    text = tokenizer.decode(tokens[:high])
    first = _first_stop(text, stop)
    begin = cut if first is None else first
    return StopEnd(
        high, text[:begin], next((each for each in stop if text[begin : begin + len(each)] == each), stop[0])
    )


def _first_stop(text: str, stop: Sequence[str]) -> int | None:
    places = [place for place in map(text.find, stop) if place >= 0]
    return min(places, default=None)


def _stable(text: str) -> str:
    """Return the text without characters that the next token may change."""
    return text.rstrip(INCOMPLETE)


def stable_text(tokens: Sequence[int], stop: Sequence[str], tokenizer: Tokenizer) -> str:
    """Return the beginning of an unfinished answer's text that no further token or stop text can change."""
    text = _stable(tokenizer.decode(tokens))
    held = max((_overlap(text, end) for end in stop), default=0)
    return text[: len(text) - held]


def _overlap(text: str, stop: str) -> int:
    """Return how many characters at the end of a text are the beginning of a stop text."""
    return next((size for size in range(min(len(stop) - 1, len(text)), 0, -1) if text[-size:] == stop[:size]), 0)


def shown_answer(
    turn: int, context: tuple[int, ...], sampled: Sequence[int], form: AnswerFormat, chat: Chat
) -> Message:
    """Return a complete answer as the agent sees it.

    Args:
        turn: Number of the turn, from which the ids of tool calls are made.
        context: The tokens before the answer.
        sampled: The tokens of the answer, up to a stop text.
        form: The form of the answer.
        chat: Format of the conversation, with the tools that were offered.
    """
    end = end_at_stop(sampled, form.stop, chat.tokenizer)
    text = chat.tokenizer.decode(sampled) if end is None else end.text
    if not form.calls:
        return Message(ASSISTANT, text)
    kept = tuple(sampled) if end is None else _tokens_of(text, sampled, chat.tokenizer)
    read = chat.read(context, kept)
    calls = tuple(
        ToolCall(f"{form.call_ids}_{turn:x}_{index}", name, arguments)
        for index, (name, arguments) in enumerate(read.calls)
    )
    rest = "" if end is None or calls else text[len(chat.tokenizer.decode(kept)) :]
    return Message(ASSISTANT, read.content + rest, tool_calls=calls, reasoning=read.reasoning)


def _tokens_of(text: str, sampled: Sequence[int], tokenizer: Tokenizer) -> tuple[int, ...]:
    """Return the longest prefix of the sampled tokens whose text is a prefix of ``text``."""
    length = len(sampled)
    while length and (part := tokenizer.decode(sampled[:length])) != text[: len(part)]:
        length -= 1
    return tuple(sampled[:length])
