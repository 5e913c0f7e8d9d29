"""Bodies of ``/v1/messages`` as calls."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rrl.roles.endpoint.calls.call import Call, Policy
from rrl.roles.endpoint.calls.constraint import Constraint
from rrl.roles.endpoint.calls.errors import ApiError
from rrl.roles.endpoint.calls.messages_body import parse_messages
from rrl.roles.endpoint.calls.reasoning import seal
from rrl.roles.models.conversation import Message, ToolCall
from rrl.roles.trajectories.types import Sampling

POLICY = Policy(1.0)
USER = {"role": "user", "content": "hello"}
RESULT = {"type": "tool_result"}
TOOL = {"name": "Bash", "description": "Runs.", "input_schema": {"type": "object"}}


def text(content: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": content, **more}


def parse(policy: Policy = POLICY, **changed: Any) -> Call:
    body = {"model": "m", "max_tokens": 9, "messages": [USER], **changed}
    return parse_messages(json.dumps(body).encode(), policy)


def of_claude(billing: str, cached: int, **more: Any) -> dict[str, Any]:
    """Return a call of Claude Code 2.1.332, shortened: what changes from call to call is given."""
    messages: list[Any] = [
        {"role": "user", "content": [text("<system-reminder>"), text("Look.")]},
        {"role": "system", "content": [text("# Environment")]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "sig2"},
                {"type": "tool_use", "id": "toolu_2", "name": "Bash", "input": {"command": "ls", "about": "look"}},
            ],
        },
        {
            "role": "user",
            "content": [{"tool_use_id": "toolu_2", "type": "tool_result", "content": "room 1", "is_error": False}],
        },
    ]
    messages[cached]["content"][-1]["cache_control"] = {"type": "ephemeral"}
    system = [text(f"x-anthropic-billing-header: {billing}"), text("You are an agent."), text("\nYou work.")]
    return {
        "messages": messages,
        "system": system,
        "tools": [{**TOOL, "defer_loading": True, "strict": True}],
        "metadata": {"user_id": billing},
        "max_tokens": 32000,
        "thinking": {"type": "adaptive", "display": "omitted"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "high"},
        "stream": True,
        **more,
    }


def test_call_of_claude_code_is_translated() -> None:
    call = parse(**of_claude("cc_version=2.1.332.bb9", 3))
    arguments = '{"command":"ls","about":"look"}'
    assert call.messages == (
        Message("system", "You are an agent.\n\nYou work.", parts=("You are an agent.", "\nYou work.")),
        Message("user", "<system-reminder>\nLook.", parts=("<system-reminder>", "Look.")),
        Message("system", "# Environment"),
        Message("assistant", "", tool_calls=(ToolCall("toolu_2", "Bash", arguments),), reasoning="hm"),
        Message("tool", "room 1", tool_call_id="toolu_2"),
    )
    function = {"name": "Bash", "description": "Runs.", "parameters": {"type": "object"}}
    assert json.loads(call.tools) == [{"type": "function", "function": function}]
    assert (call.wire, call.model, call.max_new, call.stream, call.may_call) == ("messages", "m", 32000, True, True)
    assert (call.ignored, call.sampling, call.constraint) == ((), None, "")


def test_what_changes_from_call_to_call_is_not_the_meaning() -> None:
    first = parse(**of_claude("cc_version=2.1.332.bb9", 3))
    again = of_claude("cc_version=2.1.332.e8f", 0, metadata={"user_id": "other"}, stream=False, thinking=None)
    again["messages"][1] = {"role": "system", "content": "# Environment", "output_config": {"effort": "low"}}
    assert parse(**again).digest == first.digest
    again["messages"][1]["content"] = "# Other"
    assert parse(**again).digest != first.digest


@pytest.mark.parametrize("role", ["system", "ctx", "msg"])
def test_roles_of_the_system(role: str) -> None:
    assert parse(messages=[USER, {"role": role, "content": "Hurry."}]).messages == (
        Message("user", "hello"),
        Message("system", "Hurry."),
    )


def test_results_of_tools_become_messages_in_their_order() -> None:
    results = [
        {"type": "tool_result", "tool_use_id": "a", "content": [text("x"), text("y")]},
        {"type": "tool_result", "tool_use_id": "b", "content": "no such file", "is_error": True},
        {"type": "tool_result", "tool_use_id": "c", "content": "Error: no", "is_error": True},
        {"type": "tool_result", "tool_use_id": "d", "is_error": True},
        {"type": "tool_result", "tool_use_id": "e", "content": [{"type": "tool_reference", "tool_name": "Read"}]},
        {"type": "tool_result", "tool_use_id": "f"},
        text("Go on."),
    ]
    assert parse(messages=[{"role": "user", "content": results}]).messages == (
        Message("tool", "x\ny", tool_call_id="a", parts=("x", "y")),
        Message("tool", "Error: no such file", tool_call_id="b"),
        Message("tool", "Error: no", tool_call_id="c"),
        Message("tool", "Error", tool_call_id="d"),
        Message("tool", "Read", tool_call_id="e"),
        Message("tool", "", tool_call_id="f"),
        Message("user", "Go on."),
    )


@pytest.mark.parametrize(
    "block",
    [
        {"type": "thinking", "thinking": "hm", "signature": "other"},
        {"type": "thinking", "thinking": "", "signature": seal("hm")},
        {"type": "thinking", "signature": seal("hm")},
        {"type": "redacted_thinking", "data": seal("hm")},
    ],
)
def test_reasoning_is_read_from_its_text_or_its_signature(block: dict[str, Any]) -> None:
    messages = parse(messages=[USER, {"role": "assistant", "content": [block, text("hi")]}, USER]).messages
    assert messages is not None
    assert messages[1] == Message("assistant", "hi", reasoning="hm")


def test_hosted_tools_and_unknown_keys_are_ignored_by_name() -> None:
    call = parse(tools=[{"type": "web_search_20250305", "name": "web_search"}], later={"a": 1})
    assert (call.tools, call.ignored) == ("", ("later", "tools of type 'web_search_20250305'"))


def test_older_name_of_the_format_is_a_constraint() -> None:
    wanted = {"type": "json_schema", "schema": {"type": "array"}}
    assert parse(output_format=wanted) == parse(output_config={"format": wanted})


def test_constraints_and_foreign_sampling_are_those_of_all_forms() -> None:
    schema = {"type": "object", "properties": {"a": {}}}
    call = parse(output_config={"format": {"type": "json_schema", "schema": schema}})
    assert json.loads(Constraint.decode(call.constraint).schema) == schema
    for choice, constraint in (
        ({"type": "any"}, Constraint(must_call=True)),
        ({"type": "tool", "name": "Bash"}, Constraint(must_call=True, names=("Bash",))),
        ({"type": "auto", "disable_parallel_tool_use": True}, Constraint()),
    ):
        assert Constraint.decode(parse(tools=[TOOL], tool_choice=choice).constraint) == constraint
    assert not parse(tools=[TOOL], tool_choice={"type": "none"}).may_call
    assert parse(temperature=1.0).sampling is None
    assert parse(Policy(1.0, "context"), temperature=0.5, top_k=3).sampling == Sampling(temperature=0.5, top_k=3)
    assert parse(Policy(1.0, "override"), top_p=0.5).overridden == ("top_p",)


@pytest.mark.parametrize(
    ("changed", "param", "problem"),
    [
        ({"messages": []}, "messages", "must be a list"),
        ({"messages": None, "input": "hello"}, "messages", "input belongs to /v1/responses"),
        ({"messages": [USER, {"role": "tool", "content": "x"}]}, "messages[1].role", "belongs to /v1/chat/completions"),
        ({"messages": [USER, {"role": "assistant", "content": "{"}]}, "messages[1]", "not be the assistant's"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0].type", "image"),
        ({"messages": [{"role": "ctx", "content": [{"type": "document"}]}]}, "messages[0].content[0].type", "document"),
        ({"messages": [{"role": "user", "content": [RESULT]}]}, "messages[0].content[0].tool_use_id", ""),
        ({"messages": [{"role": "assistant", "content": [{"type": "tool_use"}]}]}, "messages[0].content[0].input", ""),
        ({"system": 1}, "system[0].text", "must be a text"),
        ({"tools": [{"type": "function", "function": TOOL}]}, "tools[0]", "input_schema"),
        ({"tools": [{"name": "a"}]}, "tools[0]", "input_schema"),
        ({"tools": [TOOL] * 2049}, "tools", "too many"),
        ({"tool_choice": {"type": "any"}}, "tool_choice", "offers no tools"),
        ({"temperature": 0.5}, "temperature", "remove the key"),
        ({"logit_bias": {"5": 1}}, "logit_bias", "remove the key"),
        ({"max_tokens": -1}, "max_tokens", "whole number"),
        ({"output_config": 1}, "output_config", "object"),
        ({"output_format": {"type": "xml"}}, "output_format", "json_schema"),
        ({"messages": [{"role": "assistant", "content": "a", "tool_calls": [{}]}]}, "messages[0].tool_calls", "chat"),
        ({"model": None}, "model", "text"),
    ],
)  # fmt: skip
def test_what_cannot_be_served_is_refused_by_name(changed: dict[str, Any], param: str, problem: str) -> None:
    with pytest.raises(ApiError) as raised:
        parse(**changed)
    assert (raised.value.status, raised.value.body["error"]["param"]) == (400, param)
    assert problem in str(raised.value)


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


def tables(required: dict[str, Any], **optional: Any) -> Any:
    """Return tables with some of these keys, each with a value of the right kind or with any value."""
    return st.fixed_dictionaries(
        {key: value | values for key, value in required.items()},
        optional={key: value | values for key, value in optional.items()},
    )


kinds = ("text", "thinking", "redacted_thinking", "tool_use", "tool_result", "tool_reference", "image")
blocks: Any = st.deferred(
    lambda: tables(
        {"type": st.sampled_from(kinds)},
        text=st.text(max_size=4),
        thinking=st.text(max_size=4),
        signature=st.just(seal("hm")),
        tool_use_id=st.just("a"),
        id=st.just("a"),
        name=st.just("b"),
        tool_name=st.just("b"),
        is_error=st.booleans(),
        input=st.dictionaries(st.text(max_size=4), values, max_size=2),
        content=st.text(max_size=4) | st.lists(blocks, max_size=2),
    )
)
roles = st.sampled_from(["user", "assistant", "system", "ctx", "msg", "tool"])
bodies = tables(
    {
        "model": st.just("m"),
        "messages": st.lists(
            tables({"role": roles, "content": st.text(max_size=4) | st.lists(blocks, max_size=3)}), max_size=4
        ),
    },
    system=st.text(max_size=4) | st.lists(blocks, max_size=2),
    tools=st.lists(tables({"name": st.just("b"), "input_schema": st.just({})}, type=st.just("custom")), max_size=2),
    tool_choice=tables({"type": st.sampled_from(["auto", "any", "tool", "none"])}, name=st.just("b")),
    output_config=tables({}, format=tables({"type": st.just("json_schema")}, schema=st.just({}))),
    max_tokens=st.integers(),
    stop_sequences=st.lists(st.text(max_size=3), max_size=2),
    stream=st.booleans(),
    temperature=st.floats(allow_nan=False),
)


@given(bodies)
def test_any_json_is_a_call_or_refused(body: Any) -> None:
    with suppress(ApiError):
        call = parse_messages(json.dumps(body).encode(), POLICY)
        assert call.messages
        assert call.digest


@given(st.binary(max_size=40))
def test_any_bytes_are_refused(body: bytes) -> None:
    with pytest.raises(ApiError):
        parse_messages(body, POLICY)


def test_deep_bodies_are_refused() -> None:
    deep = b'{"model": "m", "messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "b"'
    for depth in (500, 5000, 500_000):
        with suppress(ApiError):
            nested = b'{"a":' * depth + b"1" + b"}" * depth
            parse_messages(deep + b', "input": ' + nested + b'}]}, {"role": "user", "content": "c"}]}', POLICY)
