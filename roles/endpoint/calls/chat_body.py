"""Translate the bodies of ``/v1/chat/completions`` and ``/v1/completions``."""

from __future__ import annotations

from typing import Any

import msgspec

from ...models.conversation import ASSISTANT, Message, ToolCall
from .call import (
    MAX_CHOICES,
    Call,
    Policy,
    as_table,
    encoded_tools,
    identified,
    take_count,
    take_flag,
    take_model,
    take_stop,
)
from .constraint import Constraint, answer_schema, read_tool_choice
from .errors import wrong
from .sampling import foreign_sampling

_NO_VALUES: tuple[Any, ...] = (None, "", [], {})
"""The values with which a key is ignored, whatever its name: clients send back all keys of an answer."""
_PLAIN_KEYS = {"role", "content"}
"""The keys of most messages."""


class _Function(msgspec.Struct, frozen=True):
    """The function of a tool call, as OpenAI's clients send it."""

    name: str
    arguments: str


def parse_chat(body: bytes, policy: Policy) -> Call:
    """Return the request in the body of ``/v1/chat/completions``.

    Args:
        body: The body.
        policy: The job's settings of sampling.

    Raises:
        ApiError: The request cannot be served.
    """
    given = as_table(body)
    messages = given.pop("messages", None)
    if not isinstance(messages, list) or not messages:
        raise wrong("messages", 'must be a list of messages: [{"role": "user", "content": "..."}]')
    max_new = take_count(given, "max_completion_tokens", None, least=0)
    older_name = take_count(given, "max_tokens", None, least=0)
    refused, (tools, names) = policy.constraints == "refuse", _take_tools(given)
    schema = answer_schema(given.pop("response_format", None), "response_format", refused=refused)
    choice = read_tool_choice(given.pop("tool_choice", None), names, refused=refused)
    call = Call(
        wire="chat",
        messages=tuple(parse_message(message, index) for index, message in enumerate(messages)),
        logprobs=take_flag(given, "logprobs"),
        max_new=older_name if max_new is None else max_new,
        tools=tools,
        may_call=choice.may_call,
        constraint=Constraint(schema, choice.must_call, choice.names).encode(),
        **_common(given, policy),
    )
    return identified(call)


def parse_completion(body: bytes, policy: Policy) -> Call:
    """Return the request in the body of ``/v1/completions``; arguments and errors are as for :func:`parse_chat`."""
    given = as_table(body)
    prompt = given.pop("prompt", None)
    if isinstance(prompt, list) and prompt and all(type(token) is int and token >= 0 for token in prompt):
        prompt = tuple(prompt)
    elif not isinstance(prompt, str) or not prompt:
        raise wrong("prompt", "must be one text, or one list of token ids")
    logprobs = given.pop("logprobs", None)
    if isinstance(logprobs, bool) or logprobs not in (None, 0):
        raise wrong("logprobs", "only the sampled token's log-probability is known; write 0")
    call = Call(
        wire="completions",
        messages=None,
        prompt=prompt,
        logprobs=logprobs is not None,
        max_new=take_count(given, "max_tokens", None, least=0),
        **_common(given, policy),
    )
    return identified(call)


def _common(given: dict[str, Any], policy: Policy) -> dict[str, Any]:
    """Return the keys that both kinds of requests have, as arguments of :class:`Call`; refuse every other key."""
    model, options = take_model(given), given.pop("stream_options", None) or {}
    if not isinstance(options, dict):
        raise wrong("stream_options", "must be an object")
    choices = take_count(given, "n", 1)
    if choices is not None and choices > MAX_CHOICES:
        raise wrong("n", f"must be at most {MAX_CHOICES}")
    made = {
        "model": model,
        "choices": choices,
        "stop": take_stop(given, "stop"),
        "stream": take_flag(given, "stream"),
        "include_usage": options.get("include_usage") is True,
        "return_token_ids": take_flag(given, "return_token_ids"),
    }
    sampling, overridden = foreign_sampling(given, policy)
    return made | {"sampling": sampling, "overridden": overridden}


# ── messages and tools ────────────────────────────────────────────────────────────────────────────────────────────────
def parse_message(given: Any, index: int) -> Message:
    """Return a message of a conversation as a checked value.

    Args:
        given: The message as it was sent.
        index: Number of the message in the conversation, for the text of an error.

    Raises:
        ApiError: The message is invalid.
    """
    where = f"messages[{index}]"
    if not isinstance(given, dict) or not isinstance(given.get("role"), str):
        raise wrong(where, 'must have a role and a content: {"role": "user", "content": "..."}')
    if given.keys() == _PLAIN_KEYS and isinstance(given["content"], str):  # long conversations have hundreds of these
        return Message(given["role"], given["content"])
    role, texts = given["role"], {"name": "", "tool_call_id": "", "reasoning_content": ""}
    parts = _parts(given.get("content"), where)
    calls: tuple[ToolCall, ...] = ()
    for key, value in given.items():
        if key in ("role", "content") or value in _NO_VALUES:
            continue
        if key in texts and isinstance(value, str) and (key != "reasoning_content" or role == ASSISTANT):
            texts[key] = value
        elif key == "reasoning" and value == given.get("reasoning_content"):
            continue
        elif key == "tool_calls" and role == ASSISTANT:
            calls = _tool_calls(value, where)
        else:
            problem = "is not supported; a message has role, content, name, tool_calls and tool_call_id"
            raise wrong(f"{where}.{key}", problem)
    return Message(
        role,
        "\n".join(parts),
        texts["name"],
        calls,
        texts["tool_call_id"],
        texts["reasoning_content"],
        parts if len(parts) > 1 else (),
    )


def _parts(content: Any, where: str) -> tuple[str, ...]:
    """Return the pieces of a message's ``content``, which is a text or a list of pieces of text."""
    pieces = content if isinstance(content, list) else [] if content is None else [content]
    texts = [
        piece.get("text") if isinstance(piece, dict) and piece.get("type") == "text" else piece for piece in pieces
    ]
    if not all(isinstance(text, str) for text in texts):
        raise wrong(f"{where}.content", 'must be a text, or a list of {"type": "text", "text": "..."}')
    return tuple(map(str, texts))


def _tool_calls(given: Any, where: str) -> tuple[ToolCall, ...]:
    made: list[ToolCall] = []
    calls: list[Any] = given if isinstance(given, list) else [given]
    for call in calls:
        try:
            function = msgspec.convert(call["function"], _Function)
            made.append(ToolCall(msgspec.convert(call["id"], str), function.name, function.arguments))
        except (msgspec.ValidationError, KeyError, TypeError):
            shape = '{"id": "...", "type": "function", "function": {"name": "...", "arguments": "{...}"}}'
            raise wrong(f"{where}.tool_calls", f"must be a list of {shape}") from None
    return tuple(made)


def _take_tools(given: dict[str, Any]) -> tuple[str, tuple[str, ...]]:
    """Remove the list of tools from a body, and return it as JSON, empty if there is none, and the tools' names."""
    tools = given.pop("tools", None) or []
    if not isinstance(tools, list) or not all(map(_is_tool, tools)):
        shape = '{"type": "function", "function": {"name": "...", "description": "...", "parameters": {...}}}'
        raise wrong("tools", f"must be a list of {shape}")
    return encoded_tools(tools), tuple(tool["function"]["name"] for tool in tools)


def _is_tool(tool: Any) -> bool:
    if not isinstance(tool, dict) or tool.get("type") != "function" or not isinstance(tool.get("function"), dict):
        return False
    function = tool["function"]
    name, parameters = function.get("name"), function.get("parameters")
    return isinstance(name, str) and bool(name) and (parameters is None or isinstance(parameters, dict))
