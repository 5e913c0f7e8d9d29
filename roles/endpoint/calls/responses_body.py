"""Translate the bodies of ``/v1/responses``, of which each has the whole conversation.

An answer is a run of items here: reasoning, a message, calls of tools. A run becomes one message again, as the model
wrote it. The items have the ids that the endpoint gave them, with the number of the turn, so that two answers in
succession stay two.
"""

from __future__ import annotations

import json
import re
from typing import Any

from msgspec import Struct

from ...models.conversation import ASSISTANT, DEVELOPER, SYSTEM, Message, ToolCall
from .call import (
    Call,
    Policy,
    ToolName,
    as_table,
    encoded_tools,
    identified,
    take_count,
    take_flag,
    take_model,
    text_at,
)
from .constraint import Constraint, answer_schema, read_tool_choice
from .errors import ApiError, unsupported, wrong
from .reasoning import unseal
from .sampling import take_sampling

_ROLES = ("user", SYSTEM, DEVELOPER, ASSISTANT)
_TEXTS = ("input_text", "output_text", "text", "refusal")
"""Kinds of the pieces of a content."""
_STORED = ("background", "conversation", "prompt")
"""Keys that need stored responses or prompts."""
_IGNORED = frozenset(
    {
        "client_metadata",
        "context_management",
        "include",
        "max_tool_calls",
        "metadata",
        "parallel_tool_calls",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "reasoning",
        "safety_identifier",
        "service_tier",
        "store",
        "stream_options",
        "top_logprobs",
        "truncation",
        "user",
    }
)
"""Keys of the API that do not change the answer. Any other key without an effect is named in the log."""
_TURN = re.compile(r"(?:(?:rs|msg)_([0-9a-f]{1,16})|(?:fc|ctc|call)_([0-9a-f]{1,16})_[0-9]+)")
"""An id that the endpoint gave to an item of a turn's answer."""
_TOOL_SHAPE = '{"type": "function", "name": "...", "description": "...", "parameters": {...}}'


class _Answer(Struct):
    """The items of one answer of the model."""

    turn: str = ""
    """Number of its turn, as in the ids of its items; empty if none has such an id."""
    reasoning: str = ""
    text: str | None = None
    calls: tuple[ToolCall, ...] = ()

    def takes(self, kind: str) -> bool:
        """Return whether an item of this kind may belong to the answer, if it directly follows the answer's items."""
        if kind == "reasoning":
            return False  # the model writes it first
        return kind != "message" or self.text is None

    @property
    def is_cut(self) -> bool:
        """Whether only its reasoning is there. If a stream breaks behind it, Codex repeats the call with this item."""
        return self.text is None and not self.calls

    def message(self) -> Message:
        return Message(ASSISTANT, self.text or "", tool_calls=self.calls, reasoning=self.reasoning)


class _Offered(Struct):
    """The tools that a body offers to the model."""

    tools: list[dict[str, Any]]
    """As chat completions have them."""
    others: list[str]
    """Kinds of the tools that the model is not offered."""
    own: dict[str, ToolName]
    """The tools by their names for the model."""

    def add(self, given: Any, where: str, namespace: str = "") -> None:
        """Add a list of tools. Raises ApiError."""
        if given is not None and not isinstance(given, list):
            raise wrong(where, f"must be a list of {_TOOL_SHAPE}")
        for place, tool in enumerate(given or ()):
            kind = tool.get("type") if isinstance(tool, dict) else None
            if not isinstance(kind, str):
                raise wrong(f"{where}[{place}]", f"must be {_TOOL_SHAPE}")
            if kind not in ("function", "custom", "namespace"):
                self.others.append(kind)
                continue
            if not isinstance(name := tool.get("name"), str) or not name:
                raise wrong(f"{where}[{place}].name", f"must be a text: {_TOOL_SHAPE}")
            if kind == "namespace":
                if namespace:
                    raise wrong(f"{where}[{place}]", "a namespace has functions and custom tools, and no namespace")
                self.add(tool.get("tools"), f"{where}[{place}].tools", name)
            else:
                self._add(tool, name, namespace, f"{where}[{place}]")

    def _add(self, tool: dict[str, Any], name: str, namespace: str, where: str) -> None:
        about, parameters = tool.get("description") or "", tool.get("parameters")
        if custom := tool["type"] == "custom":
            parameters = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
            form = tool.get("format")
            if isinstance(form, dict) and isinstance(grammar := form.get("definition"), str):
                about = f"{about}\n\nThe input follows this grammar ({form.get('syntax')}):\n{grammar}".lstrip()
        if not isinstance(about, str) or not (parameters is None or isinstance(parameters, dict)):
            raise wrong(where, f"must be {_TOOL_SHAPE}")
        known = flat_name(namespace, name)
        named = ToolName(known, name, namespace, custom)
        if self.own.setdefault(known, named) != named:
            problem = f"the model would know two tools as {known!r}, and its calls could not be told apart; rename one"
            raise wrong(f"{where}.name", problem)
        function = {"name": known, "description": about or None, "parameters": parameters}
        shown = {key: value for key, value in function.items() if value is not None}
        self.tools.append({"type": "function", "function": shown})


def parse_responses(body: bytes, policy: Policy) -> Call:
    """Return the request in the body of ``/v1/responses``.

    Args:
        body: The body.
        policy: The job's settings of sampling.

    Raises:
        ApiError: The request cannot be served.
    """
    return identified(_parse(as_table(body), policy))


def _parse(given: dict[str, Any], policy: Policy) -> Call:
    if "input" not in given and "messages" in given:
        problem = "is missing: this body has messages, as for /v1/chat/completions and /v1/messages; send it there"
        raise wrong("input", problem)
    for key in _STORED:
        if value := given.pop(key, None):
            raise unsupported(key, value, "nothing is stored for later requests; remove the key")
    if given.pop("previous_response_id", None) is not None:
        problem = "no such response is known here in this attempt; send the whole conversation as input"
        raise ApiError(404, problem, code="previous_response_not_found", param="previous_response_id")
    refused = policy.constraints == "refuse"
    text, offered = given.pop("text", None) or {}, _Offered([], [], {})
    if not isinstance(text, dict):
        raise wrong("text", 'must be an object: {"format": {...}}')
    offered.add(given.pop("tools", None), "tools")
    messages = _messages(given.pop("instructions", None), given.pop("input", None), offered)
    choice = read_tool_choice(given.pop("tool_choice", None), offered.own, refused=refused)
    schema = answer_schema(text.get("format"), "text.format", refused=refused)
    sampling, overridden = take_sampling(given, policy)
    return Call(
        wire="responses",
        model=take_model(given),
        messages=messages,
        max_new=take_count(given, "max_output_tokens", None, least=0),
        tools=encoded_tools(offered.tools),
        tool_names=tuple(tool for tool in offered.own.values() if tool.namespace or tool.custom),
        may_call=choice.may_call,
        constraint=Constraint(schema, choice.must_call, choice.names).encode(),
        sampling=sampling,
        overridden=overridden,
        stream=take_flag(given, "stream"),
        ignored=tuple(sorted({f"tools of type {kind!r}" for kind in offered.others} | (given.keys() - _IGNORED))),
    )


def _messages(instructions: Any, given: Any, offered: _Offered) -> tuple[Message, ...]:
    """Return the conversation, and add the tools that its items offer. Raises ApiError."""
    if not isinstance(instructions, str | None):
        raise wrong("instructions", "must be a text")
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    if not isinstance(items, list) or not items:
        raise wrong("input", 'must be a text, or a list of items: [{"role": "user", "content": "..."}]')
    made: list[Message | _Answer] = [Message(SYSTEM, instructions)] if instructions else []
    for place, item in enumerate(items):
        _add_item(made, item, f"input[{place}]", offered)
    if made and isinstance(made[-1], _Answer) and made[-1].is_cut:
        made.pop()
    if not made:
        raise wrong("input", "has no message")
    return tuple(each.message() if isinstance(each, _Answer) else each for each in made)


def _add_item(made: list[Message | _Answer], item: Any, where: str, offered: _Offered) -> None:
    """Add an item to the conversation ``made``. Raises ApiError."""
    kind = item.get("type") or "message" if isinstance(item, dict) else None
    match kind:
        case "message":
            role, parts = item.get("role"), _texts(item.get("content"), f"{where}.content")
            if role not in _ROLES:
                raise wrong(f"{where}.role", f"must be one of {', '.join(_ROLES)}")
            if item.get("tool_calls"):
                raise wrong(f"{where}.tool_calls", "belongs to /v1/chat/completions; here each call is an item")
            if role != ASSISTANT:
                several = parts if len(parts) > 1 else ()
                made.append(Message(role, "\n".join(parts), parts=several))
            else:
                answer = _answer_of(made, item, kind)
                answer.text = "\n".join((*filter(None, [answer.text]), *parts))
        case "reasoning":
            if reasoning := _reasoning(item):
                _answer_of(made, item, kind).reasoning = reasoning
        case "function_call" | "custom_tool_call":
            key = "arguments" if kind == "function_call" else "input"
            call_id, name, value = (text_at(item, each, where) for each in ("call_id", "name", key))
            name = flat_name(item.get("namespace"), name)
            arguments = value if kind == "function_call" else json.dumps({"input": value})
            answer = _answer_of(made, item, kind)
            answer.calls = (*answer.calls, ToolCall(call_id, name, arguments))
        case "function_call_output" | "custom_tool_call_output":
            parts = _texts(item.get("output"), f"{where}.output")
            content, several = "\n".join(parts), parts if len(parts) > 1 else ()
            made.append(Message("tool", content, tool_call_id=text_at(item, "call_id", where), parts=several))
        case "additional_tools":
            offered.add(item.get("tools"), f"{where}.tools")
        case str():
            problem = (
                "this endpoint has messages, reasoning, and calls of functions and custom tools with their outputs"
            )
            raise unsupported(f"{where}.type", kind, problem)
        case _:
            raise wrong(where, 'must be an item: {"role": "user", "content": "..."}')


def _answer_of(made: list[Message | _Answer], item: dict[str, Any], kind: str) -> _Answer:
    """Return the answer to which an item of an answer belongs, and begin it if it is another one than the newest."""
    ids = (item.get("id"), item.get("call_id"))
    found = [match[1] or match[2] for each in ids if isinstance(each, str) and (match := _TURN.fullmatch(each))]
    turn = found[0] if found else ""
    newest = next((each for each in reversed(made) if isinstance(each, _Answer) or each.role != "tool"), None)
    if isinstance(newest, _Answer):
        directly = newest is made[-1]
        if newest.turn == turn if newest.turn and turn else directly and newest.takes(kind):
            newest.turn = newest.turn or turn
            return newest
    made.append(begun := _Answer(turn))
    return begun


def _reasoning(item: dict[str, Any]) -> str:
    """Return the text of an item of reasoning; empty if it has none that can be read."""

    def texts(key: str) -> str:
        pieces = item.get(key)
        texts = [piece.get("text") for piece in pieces if isinstance(piece, dict)] if isinstance(pieces, list) else []
        return "\n".join(text for text in texts if isinstance(text, str))

    return texts("content") or unseal(item.get("encrypted_content")) or texts("summary")


def _texts(content: Any, where: str) -> tuple[str, ...]:
    """Return the pieces of a content, which is a text or a list of pieces of text. Raises ApiError."""
    made = []
    for piece in content if isinstance(content, list) else [] if content is None else [content]:
        kind = piece.get("type") if isinstance(piece, dict) else None
        text = piece.get("refusal" if kind == "refusal" else "text") if kind in _TEXTS else piece
        if not isinstance(text, str):
            shown = f"{kind!r} is not served; " if isinstance(kind, str) and kind not in _TEXTS else ""
            raise wrong(where, f'{shown}it must be a text, or a list of {{"type": "input_text", "text": "..."}}')
        made.append(text)
    return tuple(made)


def flat_name(namespace: Any, name: str) -> str:
    """Return the name by which the model knows a tool; ``namespace`` is None or empty if the tool is in none."""
    return f"{namespace}__{name}" if isinstance(namespace, str) and namespace else name
