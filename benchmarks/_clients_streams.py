"""Recorded streams, read again by the stream accumulators of OpenAI's and Anthropic's own clients."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx2
import openai

from rrl.benchmarks._clients_proxy import Stream


def violations(stream: Stream) -> list[str]:
    """Return what is wrong with a stream: the exception of the client's accumulator, and ids that change in it."""
    try:
        events = _read(stream)
    except Exception as error:
        return [f"{type(error).__name__}: {error}"[:300]]
    numbers = [each.sequence_number for each in events if hasattr(each, "sequence_number")]
    if numbers != sorted(set(numbers)):
        return [f"the sequence numbers do not rise: {numbers}"]
    return list(_changed_ids(events))


def _read(stream: Stream) -> list[Any]:
    """Read a stream as the client of its form does; the last element is the final object."""
    headers = {"content-type": "text/event-stream"}
    transport = httpx2.MockTransport(lambda _: httpx2.Response(200, headers=headers, content=stream.events))
    http = httpx2.Client(transport=transport)
    given: dict[str, Any] = {"base_url": "http://recorded", "api_key": "none", "http_client": http, "max_retries": 0}
    if stream.path.endswith("/messages"):
        messages: Any = anthropic.Anthropic(**given).messages
        with messages.stream(model="policy", max_tokens=1, messages=[]) as events:
            return [*events, events.get_final_message()]
    if stream.path.endswith("/responses"):
        with openai.OpenAI(**given).responses.stream(model="policy", input="") as read:
            return [*read, read.get_final_response()]
    with openai.OpenAI(**given).chat.completions.stream(model="policy", messages=[]) as chunks:
        return [*chunks, chunks.get_final_completion()]


def _changed_ids(events: list[Any]) -> Iterator[str]:
    """Yield each id of an answer, an item or a call that is in an event, but not in the final object."""
    *shown, final = (event.model_dump(mode="json", warnings=False) for event in events)
    known = set(_ids(final))
    for event in shown:
        for name in _ids(event):
            if name not in known:
                yield f"{name} is not in the final object: {json.dumps(event)[:200]}"


def _ids(value: Any) -> Iterator[str]:
    """Yield every id in a value; ``sequence_number`` and places are none."""
    if isinstance(value, dict):
        for key, each in value.items():
            if key in ("id", "item_id", "call_id") and isinstance(each, str) and each:
                yield each
            else:
                yield from _ids(each)
    elif isinstance(value, list):
        for each in value:
            yield from _ids(each)
