"""OpenAI's own client: ``create``, ``stream`` and ``parse`` of chat completions and of responses."""

from __future__ import annotations

import json
import sys

import httpx2
import openai
from pydantic import BaseModel

from rrl.tests.support.clients.house import LOOK, MODEL, SYSTEM, TASK, look, report, until_whole

CLIENT = openai.OpenAI()
BROKEN = openai.APIConnectionError, httpx2.TransportError
CHAT_TOOLS = [{"type": "function", "function": {"name": "look", "parameters": LOOK, "strict": True}}]
TOOLS = [{"type": "function", "name": "look", "parameters": LOOK, "strict": True}]


class House(BaseModel):
    """The report in the mode ``parse``."""

    chairs: int


def chat(mode: str) -> str:
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": TASK}]
    options = {"model": MODEL, "messages": messages, "tools": CHAT_TOOLS}

    def call():
        if mode == "stream":
            with CLIENT.chat.completions.stream(**options) as stream:
                return stream.get_final_completion()
        if mode == "parse":
            return CLIENT.chat.completions.parse(**options, response_format=House)
        return CLIENT.chat.completions.create(**options)

    while True:
        message = until_whole(call, *BROKEN).choices[0].message
        messages.append(message)
        if not message.tool_calls:
            return str(message.parsed.chairs) if mode == "parse" else message.content
        for each in message.tool_calls:
            result = look(**json.loads(each.function.arguments))
            messages.append({"role": "tool", "tool_call_id": each.id, "content": result})


def responses(mode: str) -> str:
    items = [{"role": "user", "content": TASK}]
    options = {"model": MODEL, "instructions": SYSTEM, "input": items, "tools": TOOLS, "store": False}

    def call():
        if mode == "stream":
            with CLIENT.responses.stream(**options) as stream:
                for _ in stream:
                    pass
                return stream.get_final_response()
        if mode == "parse":
            return CLIENT.responses.parse(**options, text_format=House)
        return CLIENT.responses.create(**options)

    while True:
        response = until_whole(call, *BROKEN)
        items += response.output
        calls = [item for item in response.output if item.type == "function_call"]
        if not calls:
            return str(response.output_parsed.chairs) if mode == "parse" else response.output_text
        for each in calls:
            result = look(**json.loads(each.arguments))
            items.append({"type": "function_call_output", "call_id": each.call_id, "output": result})


form, how = sys.argv[1:]
report({"chat": chat, "responses": responses}[form](how))
