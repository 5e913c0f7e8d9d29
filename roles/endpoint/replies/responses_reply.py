"""Write answers as OpenAI's Responses: one object, or a stream of events.

A client keeps every item that is done, even if the stream breaks after it. So all items are done at the end of the
stream only, in one write with the event that completes the response. Text is shown before, as it grows.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Sequence
from typing import Any

import msgspec

from ...models.conversation import Message, ToolCall
from ..calls.call import Call, ToolName
from ..calls.reasoning import seal
from .answer import End, SampledAnswer
from .writer import OpenedTurns

_POSITION = re.compile(r"([0-9]{1,9})(m?)")
"""Position of a stream: the next sequence number, and whether the message has begun."""


class ResponsesWriter:
    """The writer of Responses (:class:`.writer.Writer`)."""

    output: tuple[str, Sequence[dict[str, Any]]] | None = None

    def __init__(
        self, call: Call, opened: OpenedTurns, answers: Sequence[SampledAnswer], resumed: str | None = None
    ) -> None:
        self._model, self._prompt, self._tokenizer = call.model, opened.prompt, opened.chat.tokenizer
        self._names = {tool.name: tool for tool in call.tool_names}
        (self._answer,) = answers
        self._turn = f"{opened.turns[0]:x}"
        self._created = int(time.time())
        position = _POSITION.fullmatch(resumed or "")
        self._sequence = int(position[1]) if position else 0
        self._text_begun = bool(position and position[2])
        self._shown: Message | None = None

    def whole(self) -> bytes:
        """Return the complete response."""
        return msgspec.json.encode(self._ended(self._answer.shown()))

    def opened(self) -> bytes:
        """Return the events that begin a response."""
        if self._sequence:
            return b""
        return self._event("response.created", response=self._response("in_progress")) + self.alive()

    def grew(self, index: int) -> bytes:
        """Return the event for further text. The end of the answer, and what is no text, is left to :meth:`ended`."""
        if (part := self._answer.take()) is None:
            return b""
        self._shown = part.shown
        if not part.text or (part.shown is not None and not self._text_begun):
            return b""
        begun = b"" if self._text_begun else self._message_begun(0, self._message("", "in_progress"))
        self._text_begun = True
        return begun + self._text_delta(0, part.text)

    def ended(self) -> bytes:
        """Return the rest of all items, and the event that completes the response."""
        response = self._ended(self._answer.shown() if self._shown is None else self._shown)
        items = [self._item_events(place, item) for place, item in enumerate(response["output"])]
        return b"".join(items) + self._event(f"response.{response['status']}", response=response)

    def alive(self) -> bytes:
        """Return an event, because Codex counts a stream that has only comments as idle."""
        return self._event("response.in_progress", response=self._response("in_progress"))

    @property
    def position(self) -> str:
        """The next sequence number, and whether the message has begun."""
        return f"{self._sequence}{'m' * self._text_begun}"

    # ── the response and its items ─────────────────────────────────────────────────────────────────────────────────
    def _response(self, status: str, **more: Any) -> dict[str, Any]:
        return {
            "id": f"resp_{self._turn}",
            "object": "response",
            "created_at": self._created,
            "status": status,
            "model": self._model,
            "output": [],
            "error": None,
            "incomplete_details": None,
            "instructions": None,
            "metadata": {},
            "parallel_tool_calls": True,
            "previous_response_id": None,
            "store": False,
            "temperature": None,
            "text": {"format": {"type": "text"}},
            "tool_choice": "auto",
            "tools": [],
            "top_p": None,
            "usage": None,
            **more,
        }

    def _ended(self, shown: Message) -> dict[str, Any]:
        """Return the complete response."""
        cut = self._answer.end(shown) is End.LIMIT
        status = "incomplete" if cut else "completed"
        output: list[dict[str, Any]] = []
        if shown.reasoning:
            output.append(
                {
                    "id": f"rs_{self._turn}",
                    "type": "reasoning",
                    "summary": [],
                    "content": [{"type": "reasoning_text", "text": shown.reasoning}],
                    "encrypted_content": seal(shown.reasoning),
                    "status": status,
                }
            )
        if shown.content or not shown.tool_calls:  # a response without any item is an error for some clients
            output.append(self._message(shown.content, status))
        output += [self._call(place, call, status) for place, call in enumerate(shown.tool_calls)]
        self.output = f"resp_{self._turn}", output
        details = {"reason": "max_output_tokens"} if cut else None
        return self._response(status, output=output, incomplete_details=details, usage=self._usage(shown))

    def _usage(self, shown: Message) -> dict[str, Any]:
        prompt, sampled = len(self._prompt), self._answer.length
        reasoning = len(self._tokenizer.encode(shown.reasoning)) if shown.reasoning else 0  # about what was sampled
        return {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": sampled,
            "output_tokens_details": {"reasoning_tokens": min(reasoning, sampled)},
            "total_tokens": prompt + sampled,
        }

    def _message(self, text: str, status: str) -> dict[str, Any]:
        head = {"id": f"msg_{self._turn}", "type": "message", "role": "assistant", "status": status}
        return {**head, "content": [_text_part(text)]}

    def _call(self, place: int, call: ToolCall, status: str) -> dict[str, Any]:
        tool = self._names.get(call.name, ToolName(call.name, call.name))
        named = {"call_id": call.id, "name": tool.own, "status": status}
        if tool.namespace:
            named["namespace"] = tool.namespace
        if not tool.custom:
            head = {"id": f"fc_{self._turn}_{place}", "type": "function_call"}
            return {**head, **named, "arguments": call.arguments}
        head = {"id": f"ctc_{self._turn}_{place}", "type": "custom_tool_call"}
        return {**head, **named, "input": _custom_input(call.arguments)}

    # ── events ─────────────────────────────────────────────────────────────────────────────────────────────────────
    def _event(self, kind: str, **fields: Any) -> bytes:
        content = msgspec.json.encode({"type": kind, "sequence_number": self._sequence, **fields})
        self._sequence += 1
        return b"event: %s\ndata: %s\n\n" % (kind.encode(), content)

    def _item_events(self, index: int, item: dict[str, Any]) -> bytes:
        """Return the events of a complete item, after those that were sent when its text grew."""
        at: dict[str, Any] = {"item_id": item["id"], "output_index": index}
        done = self._event
        begun = {**item, "status": "in_progress"}
        match item["type"]:
            case "message":
                part = item["content"][0]
                events = b"" if self._text_begun else self._message_begun(index, begun)
                if part["text"] and not self._text_begun:
                    events += self._text_delta(index, part["text"])
                at["content_index"] = 0
                events += done("response.output_text.done", **at, text=part["text"], logprobs=[])
                events += done("response.content_part.done", **at, part=part)
            case "reasoning":
                part = item["content"][0]
                events = self._begun(index, {**begun, "content": [], "encrypted_content": None})
                at["content_index"] = 0
                events += done("response.content_part.added", **at, part={**part, "text": ""})
                events += done("response.reasoning_text.delta", **at, delta=part["text"])
                events += done("response.reasoning_text.done", **at, text=part["text"])
                events += done("response.content_part.done", **at, part=part)
            case "function_call":
                events = self._begun(index, {**begun, "arguments": ""})
                events += done("response.function_call_arguments.delta", **at, delta=item["arguments"])
                whole = {"name": item["name"], "arguments": item["arguments"]}
                events += done("response.function_call_arguments.done", **at, **whole)
            case _:
                events = self._begun(index, {**begun, "input": ""})
                events += done("response.custom_tool_call_input.delta", **at, delta=item["input"])
                events += done("response.custom_tool_call_input.done", **at, input=item["input"])
        return events + done("response.output_item.done", output_index=index, item=item)

    def _begun(self, index: int, item: dict[str, Any]) -> bytes:
        return self._event("response.output_item.added", output_index=index, item=item)

    def _message_begun(self, index: int, item: dict[str, Any]) -> bytes:
        at = {"item_id": item["id"], "output_index": index, "content_index": 0}
        added = self._begun(index, {**item, "content": []})
        return added + self._event("response.content_part.added", **at, part=_text_part(""))

    def _text_delta(self, index: int, text: str) -> bytes:
        at = {"item_id": f"msg_{self._turn}", "output_index": index, "content_index": 0}
        return self._event("response.output_text.delta", **at, delta=text, logprobs=[])


def _text_part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _custom_input(arguments: str) -> str:
    """Return the input of a custom tool, which the model was offered as a function with one text."""
    try:
        match given := json.loads(arguments):
            case {"input": str(text)} if len(given) == 1:  # anything else comes back only if it is sent as it is
                return text
    except (ValueError, RecursionError):
        pass
    return arguments
