"""Write answers as Anthropic's messages: one object, or a stream of events.

A client may keep every block that is complete, even if the stream breaks after it. So all blocks are completed at the
end of the stream only, in one write with the event that ends the message. Text is shown before, as it grows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from ...models.conversation import Message
from ..calls.call import Call
from ..calls.errors import ApiError
from ..calls.messages_body import NO_THREADS
from ..calls.reasoning import seal
from .answer import End, SampledAnswer
from .writer import OpenedTurns

_STOP_REASONS = {End.CALLS: "tool_use", End.MODEL: "end_turn", End.STOP_TEXT: "stop_sequence", End.LIMIT: "max_tokens"}
_ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    503: "overloaded_error",
}
"""Anthropic's types of errors by status; any other is an invalid request or, from 500 on, the server's own."""
_BEGUN, _TEXT_BEGUN = "m", "mt"
"""Positions of a stream: the message has begun, or also its text."""


class MessagesWriter:
    """The writer of messages (:class:`.writer.Writer`)."""

    output = None

    def __init__(
        self, call: Call, opened: OpenedTurns, answers: Sequence[SampledAnswer], resumed: str | None = None
    ) -> None:
        self._model, self._prompt = call.model, opened.prompt
        (self._answer,) = answers
        self._turn = f"{opened.turns[0]:x}"
        self.position = resumed if resumed in (_BEGUN, _TEXT_BEGUN) else ""
        self._shown: Message | None = None

    def whole(self) -> bytes:
        """Return the complete message."""
        shown = self._answer.shown()
        return msgspec.json.encode({**self._message(_blocks(shown)), **self._end(shown)})

    def opened(self) -> bytes:
        """Return the event that begins a message; the client refuses any event before it."""
        if self.position:
            return b""
        self.position = _BEGUN
        ends = {"stop_reason": None, "stop_sequence": None, "usage": self._usage(0)}
        return _event("message_start", message={**self._message([]), **ends})

    def grew(self, index: int) -> bytes:
        """Return the events for further text. The end of the answer, and what is no text, is left to :meth:`ended`."""
        if (part := self._answer.take()) is None:
            return b""
        self._shown = part.shown
        begun = self.position == _TEXT_BEGUN
        if not part.text or (part.shown is not None and not begun):
            return b""
        self.position = _TEXT_BEGUN
        begins = b"" if begun else _block_begins(0, {"type": "text", "text": ""})
        return begins + _delta(0, "text_delta", text=part.text)

    def ended(self) -> bytes:
        """Return the rest of all blocks, and the events that end the message."""
        shown = self._answer.shown() if self._shown is None else self._shown
        if self.position == _TEXT_BEGUN:
            events = _event("content_block_stop", index=0)
        else:
            events = b"".join(_block_events(index, block) for index, block in enumerate(_blocks(shown)))
        end = self._end(shown)
        usage = end.pop("usage")
        return events + _event("message_delta", delta=end, usage=usage) + _event("message_stop")

    def alive(self) -> bytes:
        """Return an event, because some clients count a stream that has only comments as idle."""
        return _event("ping")

    # ── the message and its blocks ─────────────────────────────────────────────────────────────────────────────────
    def _message(self, content: list[dict[str, Any]]) -> dict[str, Any]:
        head = {"id": f"msg_{self._turn}", "type": "message", "role": "assistant"}
        return {**head, "model": self._model, "content": content}

    def _end(self, shown: Message) -> dict[str, Any]:
        """Return why the message has ended, and the numbers of its tokens."""
        end = self._answer.end(shown)
        return {
            "stop_reason": _STOP_REASONS[end],
            "stop_sequence": self._answer.stopped_by if end is End.STOP_TEXT else None,
            "usage": self._usage(self._answer.length),
        }

    def _usage(self, sampled: int) -> dict[str, int]:
        cached = {"cache_creation_input_tokens": 0, "cache_read_input_tokens": 0}
        return {"input_tokens": len(self._prompt), **cached, "output_tokens": sampled}


def messages_error(error: ApiError) -> dict[str, Any]:
    """Return the body of an error."""
    kind = _ERROR_TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    content = error.body["error"]
    # Claude Code knows by these words that it must shorten the conversation.
    begin = "prompt is too long: " if content["code"] == "context_length_exceeded" else ""
    details = {"details": {"error_code": NO_THREADS}} if content["code"] == NO_THREADS else {}
    return {"type": "error", "error": {"type": kind, "message": begin + str(content["message"]), **details}}


def _blocks(shown: Message) -> list[dict[str, Any]]:
    """Return the blocks of a complete answer, which are never none."""
    blocks: list[dict[str, Any]] = []
    if shown.reasoning:
        blocks.append({"type": "thinking", "thinking": shown.reasoning, "signature": seal(shown.reasoning)})
    if shown.content or not shown.tool_calls:
        blocks.append({"type": "text", "text": shown.content})
    for call in shown.tool_calls:
        arguments = msgspec.Raw(call.arguments.encode())
        blocks.append({"type": "tool_use", "id": call.id, "name": call.name, "input": arguments})
    return blocks


def _block_events(index: int, block: dict[str, Any]) -> bytes:
    """Return all events of a block."""
    match block["type"]:
        case "thinking":
            begins = _block_begins(index, {**block, "thinking": "", "signature": ""})
            deltas = _delta(index, "thinking_delta", thinking=block["thinking"])
            deltas += _delta(index, "signature_delta", signature=block["signature"])
        case "text":
            begins = _block_begins(index, {**block, "text": ""})
            deltas = _delta(index, "text_delta", text=block["text"]) if block["text"] else b""
        case _:
            begins = _block_begins(index, {**block, "input": {}})
            deltas = _delta(index, "input_json_delta", partial_json=bytes(block["input"]).decode())
    return begins + deltas + _event("content_block_stop", index=index)


def _block_begins(index: int, block: dict[str, Any]) -> bytes:
    return _event("content_block_start", index=index, content_block=block)


def _delta(index: int, kind: str, **fields: str) -> bytes:
    return _event("content_block_delta", index=index, delta={"type": kind, **fields})


def _event(type: str, **fields: Any) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (type.encode(), msgspec.json.encode({"type": type, **fields}))
