"""The answers to a call while they are sampled, in no API's form."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

from msgspec import Struct

from ...models.conversation import Chat, Message
from ..calls.call import Call
from ..turns.shown_answer import AnswerFormat, GrowingText, end_at_stop, shown_answer, stable_text


class End(StrEnum):
    """Why an answer has ended."""

    CALLS = "calls"
    """The answer has tool calls."""
    MODEL = "model"
    """The model has ended it."""
    STOP_TEXT = "stop_text"
    LIMIT = "limit"


class Part(Struct, frozen=True):
    """The next part of a stream."""

    since: int
    """Number of tokens of the answer that the stream had before this part."""
    text: str
    """Text that this part adds."""
    shown: Message | None
    """The complete answer, with its last part; None before."""


class SampledAnswer:
    """One answer, which grows token by token.

    Args:
        call: The request.
        turn: Number of the answer's turn.
        context: The tokens before the answer.
        chat: Format of the conversation, with its tools.
        resumed: Number of tokens that an earlier stream has sent; 0 if there was none.
        ended: True if the earlier stream has also sent its end.
    """

    def __init__(
        self, call: Call, turn: int, context: tuple[int, ...], chat: Chat, resumed: int = 0, ended: bool = False
    ) -> None:
        self.turn, self._context, self._chat = turn, context, chat
        self._form = answer_format(call)
        self._growing = GrowingText(chat.tokenizer, self._form.stop)
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.stopped_by = ""
        """The stop text with which the answer has ended; empty if it has not, or otherwise."""
        self._reported, self._end_reported = resumed, ended
        self._sent: str | None = None if resumed else ""
        """Text that the stream has sent; None until all tokens that an earlier stream has sent were added."""
        self.finished = False

    @property
    def length(self) -> int:
        """Number of tokens that the answer has so far."""
        return len(self.tokens)

    @property
    def position(self) -> str:
        """The position of the stream: the number of tokens that it has sent, and a dot if it has sent the end."""
        return f"{self._reported}{'.' * self._end_reported}"

    def grow(self, tokens: Sequence[int], logprobs: Sequence[float], finished: bool) -> bool:
        """Add tokens, and return whether they contain a stop text, with which the answer ends."""
        self.tokens += tokens
        self.logprobs += logprobs
        stopped = bool(self._form.stop) and self._grown().stopped
        end = end_at_stop(self.tokens, self._form.stop, self._chat.tokenizer) if stopped or finished else None
        if end is not None:
            del self.tokens[end.length :], self.logprobs[end.length :]
        self.stopped_by = "" if end is None else end.stop
        self.finished = finished or end is not None
        return end is not None

    def take(self) -> Part | None:
        """Return the next part of a stream; None if there is nothing new.

        Text that the next token may change is held back until that token is known. If the answer may call tools, all of
        its text is held back until the answer's end, because a tool call is not sent as text.
        """
        if self.length < self._reported or (self.length == self._reported and not self._ends_now()):
            return None
        if self._sent is None:
            sent = self.tokens[: self._reported]
            self._sent = "" if self._form.calls else stable_text(sent, self._form.stop, self._chat.tokenizer)
        since, self._reported = self._reported, self.length
        shown = self.shown() if self.finished else None
        content = shown.content if shown is not None else "" if self._form.calls else self._grown().stable()
        added = content[len(self._sent) :] if content.startswith(self._sent) else ""
        self._sent += added
        self._end_reported = self.finished
        return Part(since, added, shown)

    def _ends_now(self) -> bool:
        return self.finished and not self._end_reported

    def _grown(self) -> GrowingText:
        """Return the text of the tokens so far."""
        self._growing.add(self.tokens[self._growing.length :])
        return self._growing

    def shown(self) -> Message:
        """Return the complete answer."""
        return shown_answer(self.turn, self._context, self.tokens, self._form, self._chat)

    def end(self, shown: Message) -> End:
        """Return why the complete answer ``shown`` has ended."""
        if shown.tool_calls:
            return End.CALLS
        if self.stopped_by:
            return End.STOP_TEXT
        ended = bool(self.tokens) and self.tokens[-1] in self._chat.tokenizer.stop_tokens
        return End.MODEL if ended else End.LIMIT

    def token_texts(self, tokens: Sequence[int]) -> list[str]:
        """Return the text of each token by itself."""
        return [self._chat.tokenizer.decode([token]) for token in tokens]


def answer_format(call: Call) -> AnswerFormat:
    """Return the format in which the agent gets the answers to a call."""
    return AnswerFormat(call.stop, call.may_call, "toolu" if call.wire == "messages" else "call")
