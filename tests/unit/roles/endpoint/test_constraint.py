from __future__ import annotations

from collections.abc import Collection
from typing import Any

import pytest

from rrl.roles.endpoint.calls.constraint import (
    ANY_OBJECT,
    Constraint,
    ToolChoice,
    answer_schema,
    asked,
    read_tool_choice,
)
from rrl.roles.endpoint.calls.errors import ApiError
from rrl.roles.models.conversation import DEVELOPER, SYSTEM, Message

_SCHEMA = {"type": "object", "properties": {"b": {"type": "string"}, "a": {"type": "integer"}}}
_ENCODED = '{"type":"object","properties":{"b":{"type":"string"},"a":{"type":"integer"}}}'
_USER = Message("user", "hello")
_TOOLS = ("look_up", "add")


@pytest.mark.parametrize(
    ("given", "schema"),
    [
        (None, ""),
        ({"type": "text"}, ""),
        ({"type": "json_object"}, ANY_OBJECT),
        ({"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": _SCHEMA}}, _ENCODED),  # chat
        ({"type": "json_schema", "name": "x", "strict": True, "schema": _SCHEMA}, _ENCODED),  # Responses
        ({"type": "json_schema", "schema": _SCHEMA}, _ENCODED),  # Messages
    ],
)
def test_a_format_of_any_form_is_one_schema_with_its_keys_in_their_order(given: Any, schema: str) -> None:
    assert answer_schema(given, "text.format", refused=False) == schema


@pytest.mark.parametrize(
    "given", ["json", {}, {"type": "xml"}, {"type": "json_schema"}, {"type": "json_schema", "schema": True}]
)
def test_an_invalid_format_is_refused_with_its_key(given: Any) -> None:
    with pytest.raises(ApiError, match=r"^response_format: ") as caught:
        answer_schema(given, "response_format", refused=False)
    assert caught.value.status == 400


@pytest.mark.parametrize(
    ("given", "choice"),
    [
        (None, ToolChoice(True)),
        ("auto", ToolChoice(True)),
        ("none", ToolChoice(False)),
        ("required", ToolChoice(True, True)),
        ({"type": "function", "function": {"name": "add"}}, ToolChoice(True, True, ("add",))),  # chat
        ({"type": "function", "name": "add"}, ToolChoice(True, True, ("add",))),  # Responses
        ({"type": "custom", "custom": {"name": "add"}}, ToolChoice(True, True, ("add",))),
        ({"type": "tool", "name": "add", "disable_parallel_tool_use": True}, ToolChoice(True, True, ("add",))),
        ({"type": "any"}, ToolChoice(True, True)),  # Messages
        ({"type": "auto"}, ToolChoice(True)),
        ({"type": "none"}, ToolChoice(False)),
        (
            {
                "type": "allowed_tools",
                "allowed_tools": {"mode": "auto", "tools": [{"type": "function", "function": {"name": "add"}}]},
            },
            ToolChoice(True, False, ("add",)),
        ),
        (
            {
                "type": "allowed_tools",
                "mode": "required",
                "tools": [{"type": "function", "name": "add"}, {"type": "function", "name": "look_up"}],
            },
            ToolChoice(True, True, ("add", "look_up")),
        ),
    ],
)
def test_a_tool_choice_of_any_form(given: Any, choice: ToolChoice) -> None:
    assert read_tool_choice(given, _TOOLS, refused=False) == choice


@pytest.mark.parametrize(
    ("given", "offered", "problem"),
    [
        ("required", (), "no tools"),
        ("always", _TOOLS, "the kinds are"),
        (7, _TOOLS, "the kinds are"),
        ({"type": "web_search"}, _TOOLS, "the kinds are"),
        ({"type": "function"}, _TOOLS, "`name`"),
        ({"type": "function", "function": "add"}, _TOOLS, "`name`"),
        ({"type": "function", "name": ["add"]}, dict.fromkeys(_TOOLS), "`name`"),
        ({"type": "tool", "name": "divide"}, _TOOLS, "'divide'"),
        ({"type": "allowed_tools"}, _TOOLS, "`mode`"),
        ({"type": "allowed_tools", "mode": "auto", "tools": []}, _TOOLS, "at least one tool"),
        ({"type": "allowed_tools", "mode": "never", "tools": [{"name": "add"}]}, _TOOLS, "auto or required"),
        ({"type": "allowed_tools", "mode": "auto", "tools": ["add"]}, _TOOLS, "`name`"),
    ],
)
def test_an_invalid_tool_choice_is_refused(given: Any, offered: Collection[str], problem: str) -> None:
    with pytest.raises(ApiError, match=f"tool_choice.*{problem}"):
        read_tool_choice(given, offered, refused=False)


def test_without_tools_nothing_may_be_called() -> None:
    assert [read_tool_choice(given, (), refused=False).may_call for given in (None, "auto", "none")] == [False] * 3


def test_a_job_that_refuses_constraints_refuses_only_them_and_names_the_key() -> None:
    assert answer_schema({"type": "text"}, "text.format", refused=True) == ""
    assert read_tool_choice("auto", _TOOLS, refused=True) == ToolChoice(True)
    with pytest.raises(ApiError, match=r"^text.format = .*constraints = \"ask\""):
        answer_schema({"type": "json_object"}, "text.format", refused=True)
    with pytest.raises(ApiError, match=r"^tool_choice = .*constraints = \"ask\""):
        read_tool_choice({"type": "any"}, _TOOLS, refused=True)


def test_a_constraint_survives_its_encoding() -> None:
    for constraint in (Constraint(), Constraint(_ENCODED), Constraint(must_call=True, names=("add",))):
        assert Constraint.decode(constraint.encode()) == constraint
    assert Constraint().encode() == ""


@pytest.mark.parametrize(
    ("constraint", "has_tools", "sentence"),
    [
        (Constraint(ANY_OBJECT), False, "Answer with nothing but a JSON object."),
        (Constraint(_ENCODED), False, f"Answer with nothing but JSON that conforms to this JSON schema: {_ENCODED}"),
        (Constraint(ANY_OBJECT), True, "Unless you call a tool, answer with nothing but a JSON object."),
        (Constraint(must_call=True), True, "Call a tool."),
        (Constraint(must_call=True, names=("add",)), True, "Call the tool add."),
        (Constraint(must_call=True, names=_TOOLS), True, "Call one of these tools: look_up, add."),
        (Constraint(names=_TOOLS), True, "Call no other tools than these: look_up, add."),
    ],
)
def test_the_model_reads_a_sentence(constraint: Constraint, has_tools: bool, sentence: str) -> None:
    assert asked([_USER], constraint, has_tools=has_tools) == (Message(SYSTEM, sentence), _USER)


def test_the_sentence_is_at_the_end_of_the_system_part() -> None:
    first, last = Message(SYSTEM, "a\nb", parts=("a", "b")), Message(DEVELOPER, "c")
    call = Constraint(must_call=True)
    assert asked([first, last, _USER], call, has_tools=True) == (first, Message(DEVELOPER, "c\n\nCall a tool."), _USER)
    (longer, _) = asked([first, _USER], call, has_tools=True)
    assert longer == Message(SYSTEM, "a\nb\n\nCall a tool.", parts=("a", "b", "Call a tool."))
    assert asked([first, _USER], Constraint(), has_tools=True) == (first, _USER)
