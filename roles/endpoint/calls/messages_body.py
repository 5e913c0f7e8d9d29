"""Translate the bodies of ``/v1/messages``, Anthropic's API."""

from __future__ import annotations

from typing import Any

import msgspec

from ...models.conversation import ASSISTANT, SYSTEM, USER, Message, ToolCall
from .call import (
    Call,
    Policy,
    as_table,
    encoded_tools,
    identified,
    take_count,
    take_flag,
    take_model,
    take_stop,
    text_at,
)
from .constraint import Constraint, answer_schema, read_tool_choice
from .errors import ApiError, unsupported, wrong
from .reasoning import unseal
from .sampling import take_sampling

_ROLES = {"user": USER, "assistant": ASSISTANT, "system": SYSTEM, "ctx": SYSTEM, "msg": SYSTEM}
"""The role that each role of a message has for the model; Claude Code sends all of these."""
_BILLING = "x-anthropic-billing-header:"
"""Beginning of a block that Claude Code puts before the system's text, and changes from call to call."""
_IGNORED = frozenset(
    {
        "anthropic_beta",
        "anthropic_version",
        "betas",
        "cache_control",
        "container",
        "context_management",
        "inference_geo",
        "metadata",
        "service_tier",
        "speed",
        "thinking",
    }
)
"""Keys of the API that do not change the answer. Any other key without an effect is named in the log."""
NO_THREADS = "thread_unsupported_request"
"""Code of the error at which Anthropic's clients send the whole conversation instead of its newest messages."""
_TOOL_SHAPE = '{"name": "...", "description": "...", "input_schema": {...}}'
_OTHER_FORMS = {"input": "/v1/responses", "prompt": "/v1/completions"}
"""Keys in the place of ``messages``, and the path where bodies with such a key belong."""


def parse_messages(body: bytes, policy: Policy) -> Call:
    """Return the request in the body of ``/v1/messages``.

    Args:
        body: The body.
        policy: The job's settings of sampling.

    Raises:
        ApiError: The request cannot be served.
    """
    return identified(_parse(as_table(body), policy))


def _parse(given: dict[str, Any], policy: Policy) -> Call:
    if given.pop("thread", None) is not None:
        problem = "thread: messages are not stored; send the whole conversation"
        raise ApiError(400, problem, code=NO_THREADS, param="thread")
    messages, system = given.pop("messages", None), _texts(given.pop("system", None), "system")
    if not isinstance(messages, list) or not messages:
        other = next((f"; {key} belongs to {path}" for key, path in _OTHER_FORMS.items() if key in given), "")
        raise wrong("messages", f'must be a list of messages: [{{"role": "user", "content": "..."}}]{other}')
    made = [_message(SYSTEM, system)] if system else []
    for place, message in enumerate(messages):
        made += _read_message(message, f"messages[{place}]")
    if made[-1].role == ASSISTANT:
        problem = "the last message must not be the assistant's: an answer that is begun by the agent is not sampled"
        raise wrong(f"messages[{len(messages) - 1}]", problem)
    tools, others = _read_tools(given.pop("tools", None))
    names = tuple(tool["function"]["name"] for tool in tools)
    refused, config = policy.constraints == "refuse", given.pop("output_config", None) or {}
    if not isinstance(config, dict):
        raise wrong("output_config", "must be an object")
    older = given.pop("output_format", None)  # its name before it was part of output_config
    at = "output_config.format" if older is None else "output_format"
    schema = answer_schema(config.get("format", older), at, refused=refused)
    choice = read_tool_choice(given.pop("tool_choice", None), names, refused=refused)
    sampling, overridden = take_sampling(given, policy)
    return Call(
        wire="messages",
        model=take_model(given),
        messages=tuple(made),
        max_new=take_count(given, "max_tokens", None, least=0),
        stop=take_stop(given, "stop_sequences"),
        tools=encoded_tools(tools),
        may_call=choice.may_call,
        constraint=Constraint(schema, choice.must_call, choice.names).encode(),
        sampling=sampling,
        overridden=overridden,
        stream=take_flag(given, "stream"),
        ignored=tuple(sorted({f"tools of type {kind!r}" for kind in others} | (given.keys() - _IGNORED))),
    )


# ── messages ──────────────────────────────────────────────────────────────────────────────────────────────────────────
def _read_message(given: Any, where: str) -> list[Message]:
    """Return a message: as several, if it has results of tools. Raises ApiError."""
    role = given.get("role") if isinstance(given, dict) else None
    if not isinstance(role, str) or role not in _ROLES:
        problem = f"must be one of {', '.join(_ROLES)}"
        if role in ("tool", "developer"):
            problem += "; a conversation with this role belongs to /v1/chat/completions"
        raise wrong(f"{where}.role", problem)
    if given.get("tool_calls"):
        raise wrong(f"{where}.tool_calls", "belongs to /v1/chat/completions; here a call is a block of the content")
    content = given.get("content")
    blocks = content if isinstance(content, list) else [{"type": "text", "text": content}]
    if role == "assistant":
        return [_answer(blocks, f"{where}.content")]
    if role != "user":
        return [_message(SYSTEM, _texts(content, f"{where}.content"))]
    made: list[Message] = []
    texts: list[str] = []
    for place, block in enumerate(blocks):
        at = f"{where}.content[{place}]"
        if not isinstance(block, dict) or block.get("type") != "tool_result":
            texts.append(_text_of(block, at))
            continue
        if texts:
            made.append(_message(USER, texts))
            texts = []
        parts = _texts(block.get("content"), f"{at}.content")
        if block.get("is_error") is True and "error" not in "".join(parts).lower():
            parts = [f"Error: {parts[0]}" if parts else "Error", *parts[1:]]
        made.append(_message("tool", parts, tool_call_id=text_at(block, "tool_use_id", at)))
    return [*made, _message(USER, texts)] if texts or not made else made


def _answer(blocks: list[Any], where: str) -> Message:
    """Return an answer of the model. Raises ApiError."""
    texts: list[str] = []
    reasoning: list[str] = []
    calls: list[ToolCall] = []
    for place, block in enumerate(blocks):
        at = f"{where}[{place}]"
        match block.get("type") if isinstance(block, dict) else None:
            case "thinking":
                shown = text_at(block, "thinking", at) if "thinking" in block else ""
                reasoning.append(shown or unseal(block.get("signature")))
            case "redacted_thinking":
                reasoning.append(unseal(block.get("data")))
            case "tool_use":
                if not isinstance(given := block.get("input"), dict):
                    raise wrong(f"{at}.input", "must be an object")
                arguments = msgspec.json.encode(given).decode()
                calls.append(ToolCall(text_at(block, "id", at), text_at(block, "name", at), arguments))
            case _:
                texts.append(_text_of(block, at))
    return Message(ASSISTANT, "\n".join(texts), tool_calls=tuple(calls), reasoning="\n".join(filter(None, reasoning)))


def _message(role: str, texts: list[str], tool_call_id: str = "") -> Message:
    parts = tuple(texts) if len(texts) > 1 else ()
    return Message(role, "\n".join(texts), tool_call_id=tool_call_id, parts=parts)


def _texts(content: Any, where: str) -> list[str]:
    """Return the pieces of a content, a text or a list of blocks, without those about billing. Raises ApiError."""
    blocks = content if isinstance(content, list) else [] if content is None else [{"type": "text", "text": content}]
    pieces = [_text_of(block, f"{where}[{place}]") for place, block in enumerate(blocks)]
    return [piece for piece in pieces if not piece.startswith(_BILLING)]


def _text_of(block: Any, where: str) -> str:
    """Return the text of a block. Raises ApiError."""
    kind = block.get("type") if isinstance(block, dict) else None
    if kind == "text":
        return text_at(block, "text", where)
    if kind == "tool_reference":
        return text_at(block, "tool_name", where)
    if isinstance(kind, str):
        raise unsupported(f"{where}.type", kind, "blocks of text, thinking, tool_use and tool_result are served here")
    raise wrong(where, 'must be a block: {"type": "text", "text": "..."}')


# ── tools ─────────────────────────────────────────────────────────────────────────────────────────────────────────────
def _read_tools(given: Any) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the tools as chat completions have them, and the types of the hosted ones. Raises ApiError."""
    if not isinstance(given, list | None):
        raise wrong("tools", f"must be a list of {_TOOL_SHAPE}")
    tools: list[dict[str, Any]] = []
    others: list[str] = []
    for place, tool in enumerate(given or ()):
        kind = (tool.get("type") or "custom") if isinstance(tool, dict) else None
        if isinstance(kind, str) and kind not in ("custom", "function"):
            others.append(kind)
            continue
        name, schema = (tool.get(key) for key in ("name", "input_schema")) if kind == "custom" else (None, None)
        about = tool.get("description") or "" if kind == "custom" else ""
        if not (isinstance(name, str) and name and isinstance(about, str) and isinstance(schema, dict)):
            raise wrong(f"tools[{place}]", f"must be {_TOOL_SHAPE}")
        described = {"description": about} if about else {}
        tools.append({"type": "function", "function": {"name": name, **described, "parameters": schema}})
    return tools, others
