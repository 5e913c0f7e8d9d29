"""Anthropic's own client: ``create`` and ``stream`` of messages, ``count_tokens`` and ``models``."""

from __future__ import annotations

import sys

import anthropic
import httpx2

from rrl.tests.support.clients.house import LOOK, MODEL, SYSTEM, TASK, look, report, until_whole

CLIENT = anthropic.Anthropic()
BROKEN = anthropic.APIConnectionError, httpx2.TransportError
TOOLS = [{"name": "look", "description": "Look into a floor.", "input_schema": LOOK}]
mode = sys.argv[1]
messages = [{"role": "user", "content": TASK}]
given = {"model": MODEL, "system": SYSTEM, "messages": messages, "tools": TOOLS}


def call():
    if mode == "stream":
        with CLIENT.messages.stream(**given, max_tokens=1000) as stream:
            return stream.get_final_message()
    return CLIENT.messages.create(**given, max_tokens=1000)


if mode == "create":
    assert CLIENT.messages.count_tokens(**given).input_tokens > 0
    assert [model.id for model in CLIENT.models.list()]
while (answer := until_whole(call, *BROKEN)).stop_reason == "tool_use":
    results = [
        {"type": "tool_result", "tool_use_id": block.id, "content": look(**block.input)}
        for block in answer.content
        if block.type == "tool_use"
    ]
    messages += [{"role": "assistant", "content": answer.content}, {"role": "user", "content": results}]
report("".join(block.text for block in answer.content if block.type == "text"))
