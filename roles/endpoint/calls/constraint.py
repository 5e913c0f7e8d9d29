"""What an answer must be: JSON by a schema, or a call of a tool, as any form of request may demand.

A constraint is text: a sentence in the system part of the conversation, behind what the agent wrote there. The agent
does not send it back, so each call has it again; a conversation with another constraint is a branch. An engine may
also mask what does not fit (:mod:`..turns.constrained`); only what was sampled without a mask is trained. All functions
are pure.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from ...models.conversation import DEVELOPER, SYSTEM, Message
from .errors import unsupported, wrong

ANY_OBJECT = '{"type":"object"}'
"""Schema of any JSON object, which ``json_object`` demands."""
_REFUSED = 'constraints are refused by this job: remove the key, or set [roles.endpoint] constraints = "ask"'


class Constraint(Struct, frozen=True, omit_defaults=True):
    """What an answer must be; by default anything."""

    schema: str = ""
    """JSON schema of an answer that calls no tool; empty if it may be any text. Its keys keep their order, which is
    that of the answer's keys."""
    must_call: bool = False
    """True if the answer must call a tool."""
    names: tuple[str, ...] = ()
    """The only tools that may be called; empty for all that are offered."""

    def encode(self) -> str:
        """Return the constraint as JSON, for :attr:`.call.Call.constraint`; empty if it demands nothing."""
        return "" if self == Constraint() else msgspec.json.encode(self).decode()

    @staticmethod
    def decode(text: str) -> Constraint:
        """Return the constraint that :meth:`encode` has converted to ``text``."""
        return msgspec.json.decode(text, type=Constraint) if text else Constraint()


def answer_schema(given: Any, key: str, *, refused: bool) -> str:
    """Return the JSON schema that a format of answers demands, for :attr:`Constraint.schema`.

    Args:
        given: ``response_format`` of chat, ``text.format`` of Responses, or ``output_config.format`` of Messages; None
            for any text.
        key: Name of the key, for errors.
        refused: True if the job refuses constraints.

    Raises:
        ApiError: The format is invalid, unknown, or refused.
    """
    kind = given.get("type") if isinstance(given, dict) else None
    if given is None or kind == "text":
        return ""
    if kind not in ("json_object", "json_schema"):
        raise wrong(key, 'must be {"type": "text"}, {"type": "json_object"}, or {"type": "json_schema", ...}')
    if refused:
        raise unsupported(key, kind, _REFUSED)
    if kind == "json_object":
        return ANY_OBJECT
    holder = given.get("json_schema", given)  # only chat has a table of its own for the schema
    schema = holder.get("schema") if isinstance(holder, dict) else None
    if not isinstance(schema, dict):
        raise wrong(key, "a json_schema needs `schema`, a JSON schema that is an object")
    return msgspec.json.encode(schema).decode()


class ToolChoice(Struct, frozen=True):
    """What a request says about calls of tools."""

    may_call: bool
    must_call: bool = False
    names: tuple[str, ...] = ()
    """The only tools that may be called; empty for all that are offered."""


def read_tool_choice(given: Any, offered: Collection[str], *, refused: bool) -> ToolChoice:
    """Return what ``tool_choice`` says, which chat, Responses and Messages write in ways that exclude each other.

    Args:
        given: The value; None if the request has none.
        offered: Names of the tools that the model is offered.
        refused: True if the job refuses constraints.

    Raises:
        ApiError: The value is invalid or refused, or names a tool that is not offered.
    """
    table = given if isinstance(given, dict) else {"type": given}
    kind = table.get("type")
    if kind == "none" or (kind in (None, "auto") and not offered):
        return ToolChoice(may_call=False)
    if kind in (None, "auto"):
        return ToolChoice(may_call=True)
    if refused:
        raise unsupported("tool_choice", given, _REFUSED)
    must_call, named = True, [table] if kind in ("function", "custom", "tool") else []
    if not named and kind not in ("required", "any", "allowed_tools"):
        raise unsupported("tool_choice", given, "the kinds are auto, none, required (any), one tool, and allowed_tools")
    try:
        if kind == "allowed_tools":
            table = table.get(kind, table)
            named, must_call = table["tools"], table["mode"] == "required"
            if not named or table["mode"] not in ("auto", "required"):
                raise KeyError
        names = tuple(tool.get(tool.get("type"), tool)["name"] for tool in named)  # chat has a table inside a table
        unknown = [name for name in names if name not in offered]
    except (AttributeError, KeyError, TypeError):
        problem = "must give the `name` of each tool; allowed_tools has `mode`, auto or required, and at least one tool"
        raise wrong("tool_choice", problem) from None
    if not offered:
        raise wrong("tool_choice", "demands a call, but the request offers no tools")
    if unknown:
        raise wrong("tool_choice", f"names {unknown[0]!r}, which is none of the tools that the request offers")
    return ToolChoice(True, must_call, names)


def asked(messages: Sequence[Message], constraint: Constraint, *, has_tools: bool) -> tuple[Message, ...]:
    """Return a conversation whose system part also has the sentence of a constraint, at its end.

    Args:
        messages: The conversation.
        constraint: The constraint.
        has_tools: True if the model is offered tools.
    """
    text = _sentence(constraint, has_tools)
    if not text:
        return tuple(messages)
    count = next((place for place, each in enumerate(messages) if each.role not in (SYSTEM, DEVELOPER)), len(messages))
    if not count:
        return (Message(SYSTEM, text), *messages)
    last = messages[count - 1]
    joined = "\n\n".join(filter(None, (last.content, text)))
    longer = replace(last, content=joined, parts=(*last.parts, text) if last.parts else ())
    return (*messages[: count - 1], longer, *messages[count:])


def _sentence(constraint: Constraint, has_tools: bool) -> str:
    """Return what the model is told about a constraint; empty if there is nothing to tell."""
    sentences = []
    if constraint.must_call:
        among = f"one of these tools: {', '.join(constraint.names)}" if len(constraint.names) > 1 else "a tool"
        sentences.append(f"Call {f'the tool {constraint.names[0]}' if len(constraint.names) == 1 else among}.")
    elif constraint.names:
        sentences.append(f"Call no other tools than these: {', '.join(constraint.names)}.")
    if constraint.schema:
        begin = "Unless you call a tool, answer" if has_tools else "Answer"
        wanted = f"JSON that conforms to this JSON schema: {constraint.schema}"
        wanted = "a JSON object." if constraint.schema == ANY_OBJECT else wanted
        sentences.append(f"{begin} with nothing but {wanted}")
    return " ".join(sentences)
