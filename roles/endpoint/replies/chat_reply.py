"""Write answers as OpenAI's chat completions and completions."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import msgspec

from ...models.conversation import Message
from ..calls.call import Call
from .answer import End, SampledAnswer
from .writer import OpenedTurns

_FINISH_REASONS = {End.CALLS: "tool_calls", End.MODEL: "stop", End.STOP_TEXT: "stop", End.LIMIT: "length"}


class ChatWriter:
    """The writer of chat completions and, for a plain prompt, of completions (:class:`.writer.Writer`)."""

    output = None

    def __init__(
        self, call: Call, opened: OpenedTurns, answers: Sequence[SampledAnswer], resumed: str | None = None
    ) -> None:
        self._call, self._prompt, self._answers = call, opened.prompt, answers
        self._is_chat = call.messages is not None
        kind = "chat.completion" if self._is_chat else "text_completion"
        self._head = {
            "id": f"{'chatcmpl' if self._is_chat else 'cmpl'}-{opened.turns[0]:x}",
            "object": f"{kind}.chunk" if call.stream and self._is_chat else kind,
            "created": int(time.time()),
            "model": call.model,
        }
        self._first = self._prompt_tokens() if resumed is None else {}

    def whole(self) -> bytes:
        """Return the complete reply."""
        choices = [self._choice(index) for index in range(len(self._answers))]
        return msgspec.json.encode({**self._head, "choices": choices, "usage": self._usage(), **self._prompt_tokens()})

    def opened(self) -> bytes:
        """Return nothing: a stream begins with the first token."""
        return b""

    def grew(self, index: int) -> bytes:
        """Return the event for what was added to an answer."""
        if (part := self._answers[index].take()) is None:
            return b""
        content: dict[str, Any] = {"text": part.text}
        if self._is_chat:
            delta: dict[str, Any] = {"role": "assistant"} if part.since == 0 else {}
            content = {"delta": delta | {"content": part.text}}
            if part.shown is not None and part.shown.reasoning:
                content["delta"]["reasoning_content"] = part.shown.reasoning
            if part.shown is not None and part.shown.tool_calls:
                calls = range(len(part.shown.tool_calls))
                content["delta"]["tool_calls"] = [{"index": each, **_tool_call(part.shown, each)} for each in calls]
        first, self._first = self._first, {}
        return self._event([self._object(index, content, part.since, part.shown)], first)

    def ended(self) -> bytes:
        """Return the numbers of tokens, if the client wants them, and the end of the stream."""
        counted = self._event([], {"usage": self._usage()}) if self._call.include_usage else b""
        return counted + b"data: [DONE]\n\n"

    def alive(self) -> bytes:
        """Return a comment."""
        return b": waiting\n\n"

    @property
    def position(self) -> str:
        """Nothing: the tokens of each answer suffice."""
        return ""

    def _event(self, choices: list[dict[str, Any]], more: dict[str, Any]) -> bytes:
        return b"data: " + msgspec.json.encode({**self._head, "choices": choices, **more}) + b"\n\n"

    def _prompt_tokens(self) -> dict[str, Any]:
        return {"prompt_token_ids": list(self._prompt)} if self._call.return_token_ids else {}

    def _usage(self) -> dict[str, int]:
        prompt, sampled = len(self._prompt), sum(answer.length for answer in self._answers)
        return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}

    def _choice(self, index: int) -> dict[str, Any]:
        shown = self._answers[index].shown()
        content: dict[str, Any] = {"text": shown.content}
        if self._is_chat:
            # A message with only tool calls has no content, as in OpenAI's API.
            message: dict[str, Any] = {
                "role": "assistant",
                "content": None if shown.tool_calls and not shown.content else shown.content,
            }
            if shown.reasoning:
                message["reasoning_content"] = shown.reasoning
            message["refusal"] = None
            if shown.tool_calls:
                message["tool_calls"] = [_tool_call(shown, each) for each in range(len(shown.tool_calls))]
            content = {"message": message}
        return self._object(index, content, 0, shown)

    def _object(self, index: int, content: dict[str, Any], since: int, shown: Message | None) -> dict[str, Any]:
        answer = self._answers[index]
        choice = {"index": index, **content, "finish_reason": None, "logprobs": None}
        if shown is not None:
            choice["finish_reason"] = _FINISH_REASONS[answer.end(shown)]
        tokens, logprobs = answer.tokens[since:], answer.logprobs[since:]
        if self._call.logprobs:
            choice["logprobs"] = self._logprob_object(answer.token_texts(tokens), logprobs)
        if self._call.return_token_ids:
            choice["token_ids"] = list(tokens)
        return choice

    def _logprob_object(self, texts: Sequence[str], logprobs: Sequence[float]) -> dict[str, Any]:
        if not self._is_chat:
            return {"tokens": texts, "token_logprobs": list(logprobs), "top_logprobs": None, "text_offset": []}
        return {
            "content": [
                {"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []}
                for text, logprob in zip(texts, logprobs, strict=True)
            ],
            "refusal": None,
        }


def _tool_call(shown: Message, index: int) -> dict[str, Any]:
    call = shown.tool_calls[index]
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
