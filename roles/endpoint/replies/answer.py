"""Make OpenAI's answer objects for agents from the sampled tokens of turns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...models.conversation import Chat, Message
from ..calls.call import Call
from ..turns.shown_answer import AnswerFormat, end_at_stop, shown_answer, stable_text


class SampledAnswer:
    """One answer, which grows token by token.

    Args:
        call: The request.
        index: Number of the answer among the answers to the request.
        turn: Number of the answer's turn.
        context: The tokens before the answer.
        chat: Format of the conversation, with its tools.
        resumed: Number of tokens that an earlier stream has sent; 0 if there was none.
        ended: True if the earlier stream has also sent its end.
    """

    def __init__(
        self,
        call: Call,
        index: int,
        turn: int,
        context: tuple[int, ...],
        chat: Chat,
        resumed: int = 0,
        ended: bool = False,
    ) -> None:
        self._call, self._index, self._turn, self._context, self._chat = call, index, turn, context, chat
        self._form = answer_format(call)
        self._tokens: list[int] = []
        self._logprobs: list[float] = []
        self._stopped = False
        self._reported, self._end_reported = resumed, ended
        self._sent: str | None = None if resumed else ""
        """Text that the stream has sent; None until all tokens that an earlier stream has sent were added."""
        self.finished = False

    @property
    def length(self) -> int:
        """Number of tokens that the answer has so far."""
        return len(self._tokens)

    @property
    def position(self) -> str:
        """The position of the stream: the number of tokens that it has sent, and a dot if it has sent the end."""
        return f"{self._reported}{'.' * self._end_reported}"

    def grow(self, tokens: Sequence[int], logprobs: Sequence[float], finished: bool) -> bool:
        """Add tokens, and return whether they contain a stop text, with which the answer ends."""
        self._tokens += tokens
        self._logprobs += logprobs
        end = end_at_stop(self._tokens, self._form.stop, self._chat.tokenizer)
        if end is not None:
            del self._tokens[end.length :], self._logprobs[end.length :]
        self._stopped = end is not None
        self.finished = finished or self._stopped
        return self._stopped

    def choice(self) -> dict[str, Any]:
        """Return the complete answer."""
        shown = self._shown()
        if self._call.messages is None:
            content: dict[str, Any] = {"text": shown.content}
        else:
            content = {"message": {"role": "assistant", **_content(shown), "refusal": None}}
            if shown.tool_calls:
                content["message"]["tool_calls"] = [_tool_call(shown, index) for index in range(len(shown.tool_calls))]
        return self._object(content, 0, shown)

    def delta(self) -> dict[str, Any] | None:
        """Return the next part of a stream; None if there is nothing new.

        Text that the next token may change is held back until that token is known. If the answer may call tools, all of
        its text is held back until the answer's end, because a tool call is not sent as text.
        """
        if self.length < self._reported or (self.length == self._reported and not self._ends_now()):
            return None
        if self._sent is None:
            self._sent = self._text(self._reported)
        since, self._reported = self._reported, self.length
        shown = self._shown() if self.finished else None
        text = self._text(self.length) if shown is None else shown.content
        begins = len(self._sent)
        added = text[begins:] if text[:begins] == self._sent else ""
        self._sent += added
        if self._call.messages is None:
            content: dict[str, Any] = {"text": added}
        else:
            delta: dict[str, Any] = {"role": "assistant"} if since == 0 else {}
            content = {"delta": delta | {"content": added}}
            if shown is not None and shown.reasoning:
                content["delta"]["reasoning_content"] = shown.reasoning
            if shown is not None and shown.tool_calls:
                calls = range(len(shown.tool_calls))
                content["delta"]["tool_calls"] = [{"index": index, **_tool_call(shown, index)} for index in calls]
        self._end_reported = self.finished
        return self._object(content, since, shown)

    def _ends_now(self) -> bool:
        return self.finished and not self._end_reported

    def _text(self, length: int) -> str:
        """Return the text of the first ``length`` tokens of an unfinished answer, as far as a stream may send it."""
        return "" if self._form.calls else stable_text(self._tokens[:length], self._form.stop, self._chat.tokenizer)

    def _shown(self) -> Message:
        return shown_answer(self._turn, self._context, self._tokens, self._form, self._chat)

    def _object(self, content: dict[str, Any], since: int, shown: Message | None) -> dict[str, Any]:
        choice = {"index": self._index, **content, "finish_reason": None, "logprobs": None}
        if shown is not None:
            choice["finish_reason"] = self._finish_reason(shown)
        tokens, logprobs = self._tokens[since:], self._logprobs[since:]
        if self._call.logprobs:
            choice["logprobs"] = self._logprob_object(tokens, logprobs)
        if self._call.return_token_ids:
            choice["token_ids"] = list(tokens)
        return choice

    def _finish_reason(self, shown: Message) -> str:
        if shown.tool_calls:
            return "tool_calls"
        ended = bool(self._tokens) and self._tokens[-1] in self._chat.tokenizer.stop_tokens
        return "stop" if ended or self._stopped else "length"

    def _logprob_object(self, tokens: Sequence[int], logprobs: Sequence[float]) -> dict[str, Any]:
        texts = [self._chat.tokenizer.decode([token]) for token in tokens]
        if self._call.messages is None:
            return {"tokens": texts, "token_logprobs": list(logprobs), "top_logprobs": None, "text_offset": []}
        return {
            "content": [
                {"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []}
                for text, logprob in zip(texts, logprobs, strict=True)
            ],
            "refusal": None,
        }


def answer_format(call: Call) -> AnswerFormat:
    """Return the format in which the agent gets the answers to a call."""
    return AnswerFormat(call.stop, call.may_call)


def _content(shown: Message) -> dict[str, Any]:
    """Return content and reasoning of a message; if it has only tool calls, the content is null as in OpenAI's API."""
    content: dict[str, Any] = {"content": None if shown.tool_calls and not shown.content else shown.content}
    return content | ({"reasoning_content": shown.reasoning} if shown.reasoning else {})


def _tool_call(shown: Message, index: int) -> dict[str, Any]:
    call = shown.tool_calls[index]
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def usage(prompt_tokens: int, answers: Sequence[SampledAnswer]) -> dict[str, int]:
    """Return the numbers of tokens of a request and its answers."""
    sampled = sum(answer.length for answer in answers)
    return {"prompt_tokens": prompt_tokens, "completion_tokens": sampled, "total_tokens": prompt_tokens + sampled}
