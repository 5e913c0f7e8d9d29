"""Bodies of Responses as real clients send them, and as nobody should."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rrl.roles.endpoint.calls.call import Call, Policy, ToolName
from rrl.roles.endpoint.calls.constraint import Constraint
from rrl.roles.endpoint.calls.errors import ApiError
from rrl.roles.endpoint.calls.reasoning import seal, unseal
from rrl.roles.endpoint.calls.responses_body import parse_responses
from rrl.roles.models.conversation import Message, ToolCall

LOOK = {"type": "function", "name": "look", "parameters": {"type": "object"}, "strict": True}
USER = {"role": "user", "content": "go"}


def parse(*items: Any, policy: Policy = Policy(1.0), **more: Any) -> Call:
    body = {"model": "policy", "input": list(items) or [USER], **more}
    return parse_responses(json.dumps(body).encode(), policy)


def refused(*items: Any, **more: Any) -> ApiError:
    with pytest.raises(ApiError) as raised:
        parse(*items, **more)
    assert "\n" not in str(raised.value)
    return raised.value


def reasoning(turn: str, text: str = "hm", **more: Any) -> dict[str, Any]:
    content = [{"type": "reasoning_text", "text": text}]
    return {"type": "reasoning", "id": f"rs_{turn}", "summary": [], "content": content} | more


def called(turn: str, place: int = 0, **more: Any) -> dict[str, Any]:
    ids = {"id": f"fc_{turn}_{place}", "call_id": f"call_{turn}_{place}"}
    return {"type": "function_call", **ids, "name": "look", "arguments": "{}"} | more


def answered(turn: str, text: str) -> dict[str, Any]:
    content = [{"type": "output_text", "text": text, "annotations": []}]
    return {"type": "message", "role": "assistant", "id": f"msg_{turn}", "content": content}


def output(turn: str, place: int = 0, text: Any = "a room") -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": f"call_{turn}_{place}", "output": text}


def test_texts_parts_and_items_without_a_type_are_messages() -> None:
    whole = parse_responses(b'{"model": "m", "input": "go", "instructions": "walk"}', Policy(1.0))
    assert whole.messages == (Message("system", "walk"), Message("user", "go"))
    assert (whole.wire, whole.model, whole.stream, whole.max_new) == ("responses", "m", False, None)
    parts = [{"type": "input_text", "text": "a"}, {"type": "text", "text": "b"}]
    call = parse({"role": "user", "content": parts}, answered("1", "c"), {"role": "assistant", "content": "d"})
    assert call.messages is not None
    assert [(each.role, each.content) for each in call.messages] == [
        ("user", "a\nb"),
        ("assistant", "c"),
        ("assistant", "d"),
    ]


def test_instructions_are_the_first_message_and_no_message_moves() -> None:
    developer = {"role": "developer", "content": "b"}
    call = parse(developer, USER, developer, instructions="a")
    later = Message("developer", "b")
    assert call.messages == (Message("system", "a"), later, Message("user", "go"), later)


def test_a_run_of_items_is_one_answer_whatever_their_order() -> None:
    one = Message("assistant", "look", tool_calls=(ToolCall("call_1f_0", "look", "{}"),), reasoning="hm")
    for items in (
        [reasoning("1f"), answered("1f", "look"), called("1f")],
        [reasoning("1f"), called("1f"), answered("1f", "look")],  # mini-swe-agent
        [reasoning("1f", id=None), {"role": "assistant", "content": "look"}, called("1f", id=None)],  # pydantic-ai
        [reasoning("1f", content=None, encrypted_content=seal("hm"), id=None), answered("", "look"), called("1f")],
        [
            reasoning("1f", content=[], summary=[{"type": "summary_text", "text": "hm"}]),
            answered("1f", "look"),
            called("1f"),
        ],
    ):
        assert parse(USER, *items, output("1f")).messages == (
            Message("user", "go"),
            one,
            Message("tool", "a room", tool_call_id="call_1f_0"),
        )


def test_calls_of_one_answer_are_one_message_even_if_their_outputs_are_between_them() -> None:
    call = parse(USER, called("1f"), output("1f"), called("1f", 1), output("1f", 1))
    assert call.messages == parse(USER, called("1f"), called("1f", 1), output("1f"), output("1f", 1)).messages


def test_two_answers_that_follow_each_other_stay_two() -> None:
    """After a broken stream, Codex keeps the finished items, and its next answer follows them."""
    for items in (
        [reasoning("1f"), answered("1f", "a"), reasoning("2f"), answered("2f", "b")],
        [answered("1f", "a"), reasoning("", id=None), {"role": "assistant", "content": "b"}],
        [answered("1f", "a"), answered("2f", "b")],
        [{"role": "assistant", "content": "a"}, {"role": "assistant", "content": "b"}],
    ):
        messages = parse(USER, *items).messages
        assert messages is not None
        assert [each.content for each in messages[1:]] == ["a", "b"]


def test_call_after_a_stream_that_broke_behind_the_reasoning_has_the_same_meaning() -> None:
    before = [USER, reasoning("1f"), called("1f"), output("1f")]
    asked = parse(*before)
    assert parse(*before, reasoning("2f")).digest == asked.digest
    assert parse(*before, reasoning("", id=None)).digest == asked.digest
    assert parse(*before, reasoning("2f"), answered("2f", "a")).digest != asked.digest


def test_reasoning_that_nobody_can_read_is_none() -> None:
    for garbage in ("enc", seal("hm")[:-3] + "%", "rrl1.____", 5, {"a": 1}, None):
        call = parse(USER, reasoning("1f", content=None, encrypted_content=garbage), answered("1f", "a"))
        assert call.messages == (Message("user", "go"), Message("assistant", "a"))
    assert unseal(seal("é\n")) == "é\n"


def test_tools_are_offered_as_chat_completions_have_them() -> None:
    grammar = {"type": "grammar", "syntax": "lark", "definition": 'start: "a"'}
    tools = [
        LOOK,
        {"type": "namespace", "name": "agents", "description": "x", "tools": [{"type": "function", "name": "wait"}]},
        {"type": "custom", "name": "patch", "description": "Edits.", "format": grammar},
        {"type": "web_search", "external_web_access": True},
    ]
    call = parse({"type": "additional_tools", "tools": tools[2:]}, USER, tools=tools[:2])
    text = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
    about = 'Edits.\n\nThe input follows this grammar (lark):\nstart: "a"'
    assert [each["function"] for each in json.loads(call.tools)] == [
        {"name": "look", "parameters": {"type": "object"}},
        {"name": "agents__wait"},
        {"name": "patch", "description": about, "parameters": text},
    ]
    assert call.tool_names == (ToolName("agents__wait", "wait", "agents"), ToolName("patch", "patch", custom=True))
    assert (call.may_call, call.ignored) == (True, ("tools of type 'web_search'",))
    assert (parse(tools=[]).may_call, parse(tools=tools[3:]).tools) == (False, "")
    back = parse(
        USER,
        called("1f", name="wait", namespace="agents"),
        {"type": "custom_tool_call", "call_id": "call_1f_1", "name": "patch", "input": "a"},
        output("1f", text=[{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]),
        {"type": "custom_tool_call_output", "call_id": "call_1f_1", "output": "done"},
    )
    assert back.messages is not None
    names = [(each.name, each.arguments) for each in back.messages[1].tool_calls]
    assert names == [("agents__wait", "{}"), ("patch", '{"input": "a"}')]
    assert [each.content for each in back.messages[2:]] == ["a\nb", "done"]


def test_what_cannot_change_the_answer_is_not_part_of_the_meaning() -> None:
    plain = parse(USER, answered("1f", "a"), USER, tools=[LOOK])
    other = parse(
        USER,
        answered("1f", "a") | {"status": "completed", "phase": None, "id": None},
        USER | {"id": "msg_7"},
        tools=[dict(reversed(LOOK.items())) | {"strict": False}],
        stream=True,
        store=False,
        include=["reasoning.encrypted_content"],
        client_metadata={"turn_id": "1"},
        prompt_cache_key="x",
        reasoning={"effort": "none"},
        text={"verbosity": "low"},
        parallel_tool_calls=True,
        frob=1,
    )
    assert other.digest == plain.digest
    assert (plain.ignored, other.ignored) == ((), ("frob",))
    for changed in ({"max_output_tokens": 9}, {"tool_choice": "required"}, {"instructions": "x"}, {"model": "aux"}):
        assert parse(USER, answered("1f", "a"), USER, tools=[LOOK], **changed).digest != plain.digest


def test_formats_and_choices_are_constraints() -> None:
    schema = {"type": "json_schema", "name": "x", "schema": {"type": "object"}, "strict": True}
    call = parse(text={"format": schema}, tools=[LOOK], tool_choice={"type": "function", "name": "look"})
    assert Constraint.decode(call.constraint) == Constraint('{"type":"object"}', True, ("look",))
    assert parse(tools=[LOOK], tool_choice="none").may_call is False
    refuses = Policy(1.0, constraints="refuse")
    assert refused(policy=refuses, text={"format": schema}).body["error"]["param"] == "text.format"
    assert refused(policy=refuses, tools=[LOOK], tool_choice="required").body["error"]["param"] == "tool_choice"


def test_other_sampling_is_foreign() -> None:
    assert refused(temperature=0.5).body["error"]["param"] == "temperature"
    assert parse(temperature=1.0, top_p=1).sampling is None
    sampling = parse(policy=Policy(1.0, foreign="context"), temperature=0.5).sampling
    assert sampling is not None
    assert sampling.temperature == 0.5
    assert parse(policy=Policy(1.0, foreign="override"), top_p=0.5).overridden == ("top_p",)


@pytest.mark.parametrize(
    ("items", "more", "param"),
    [
        ((), {"input": []}, "input"),
        ((), {"input": None}, "input"),
        ((), {"input": [{"type": "additional_tools", "tools": []}]}, "input"),
        ((), {"model": None}, "model"),
        ((), {"instructions": ["x"]}, "instructions"),
        ((), {"background": True}, "background"),
        ((), {"conversation": "conv_1"}, "conversation"),
        ((), {"prompt": {"id": "pmpt_1"}}, "prompt"),
        ((), {"text": "x"}, "text"),
        ((), {"text": {"format": {"type": "xml"}}}, "text.format"),
        ((), {"max_output_tokens": -1}, "max_output_tokens"),
        ((), {"stream": "yes"}, "stream"),
        ((), {"tools": {}}, "tools"),
        ((), {"tools": [{"type": "function", "function": {"name": "look"}}]}, "tools[0].name"),
        ((), {"tools": [LOOK | {"parameters": "x"}]}, "tools[0]"),
        ((), {"tools": [{"type": "namespace", "name": "x", "tools": [1]}]}, "tools[0].tools[0]"),
        ((), {"tools": [LOOK] * 3000}, "tools"),
        ((), {"tool_choice": {"type": "function", "name": "look"}}, "tool_choice"),
        ((), {"tools": [LOOK], "tool_choice": {"type": "web_search"}}, "tool_choice"),
        ((3,), {}, "input[0]"),
        ((USER, {"role": "tool", "content": "x"}), {}, "input[1].role"),
        (({"role": "user", "content": [{"type": "input_image", "image_url": "x"}]},), {}, "input[0].content"),
        ((USER, called("1f", arguments={})), {}, "input[1].arguments"),
        ((USER, called("1f", call_id=None)), {}, "input[1].call_id"),
        ((USER, output("1f", text={"a": 1})), {}, "input[1].output"),
        ((USER, {"type": "local_shell_call"}), {}, "input[1].type"),
        ((USER, {"type": "item_reference", "id": "x"}), {}, "input[1].type"),
        ((USER, {"type": "compaction", "encrypted_content": "x"}), {}, "input[1].type"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(items: Any, more: Any, param: str) -> None:
    error = refused(*items, **more)
    assert (error.status, error.body["error"]["param"]) == (400, param)


def test_ids_that_a_client_made_up_do_not_divide_or_join_answers() -> None:
    """Clients number the calls and messages of their examples themselves."""
    calls = [called("1", call_id=f"call_{number}", id=None) for number in (1, 2)]
    assert [len(message.tool_calls) for message in parse(USER, *calls).messages or ()] == [0, 2]
    same = parse(USER, answered("1", "a"), USER, answered("1", "b"), USER)
    assert [message.content for message in same.messages or ()] == ["go", "a", "go", "b", "go"]


@pytest.mark.parametrize(
    ("tools", "param"),
    [
        ([("a__b", "c"), ("a", "b__c")], "tools[1].tools[0].name"),
        ([("", "a__b"), ("a", "b")], "tools[1].tools[0].name"),
        ([("a", "b"), ("", "a__b")], "tools[1].name"),
    ],
)
def test_tools_that_the_model_would_know_by_one_name_are_refused(tools: list[tuple[str, str]], param: str) -> None:
    flat = [
        {"type": "namespace", "name": space, "tools": [LOOK | {"name": name}]} if space else LOOK | {"name": name}
        for space, name in tools
    ]
    assert refused(tools=flat).body["error"]["param"] == param


def test_a_namespace_within_a_namespace_is_refused() -> None:
    inner = {"type": "namespace", "name": "b", "tools": [LOOK]}
    assert "no namespace" in str(refused(tools=[{"type": "namespace", "name": "a", "tools": [inner]}]))


def test_calls_of_chat_in_a_message_are_refused() -> None:
    error = refused(USER, {"role": "assistant", "content": "a", "tool_calls": [{}]})
    assert error.body["error"]["param"] == "input[1].tool_calls"


def test_a_response_that_was_not_put_in_place_of_its_id_is_not_found() -> None:
    error = refused(previous_response_id="resp_1f")
    assert (error.status, error.body["error"]["code"]) == (404, "previous_response_not_found")


def test_bodies_of_other_forms_are_refused_in_one_line() -> None:
    with pytest.raises(ApiError, match="send it there") as raised:
        parse_responses(
            b'{"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "go"}]}', Policy(1.0)
        )
    assert raised.value.status == 400


KEYS = [
    *("model", "input", "instructions", "tools", "tool_choice", "text", "stream", "temperature", "background"),
    *("type", "role", "content", "summary", "encrypted_content", "id", "call_id", "name", "namespace", "arguments"),
    *("output", "format", "schema", "mode", "previous_response_id"),
]
VALUES = [
    *("message", "reasoning", "function_call", "custom_tool_call", "function_call_output", "additional_tools", "user"),
    *("assistant", "developer", "function", "custom", "namespace", "input_text", "refusal", "json_schema", "required"),
    *("allowed_tools", "a", "rs_1f", "call_1f_0", "rrl1.aGk="),
]
LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.sampled_from(VALUES) | st.text(max_size=3)
ANYTHING = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=6),
    max_leaves=40,
)
ITEMS = st.lists(st.dictionaries(st.sampled_from(KEYS), ANYTHING, max_size=7), max_size=4)


def outcome(body: bytes, policy: Policy) -> int:
    """Return the status with which a body is refused, or 200."""
    try:
        call = parse_responses(body, policy)
    except ApiError as error:
        msgspec.json.encode(error.body)
        return error.status
    assert call.messages
    return 200


@settings(max_examples=400, deadline=None)
@given(st.dictionaries(st.sampled_from(KEYS), ANYTHING, max_size=6), st.none() | ITEMS)
@example({"input": [{"type": []}]}, None)
@example({"tool_choice": {"type": ["function"]}, "tools": [LOOK]}, [USER])
def test_any_body_is_a_call_or_a_refusal(body: dict[str, Any], items: Any) -> None:
    given = json.dumps({"model": "m"} | body | ({} if items is None else {"input": items})).encode()
    for policy in (Policy(1.0), Policy(1.0, foreign="context", constraints="refuse")):
        assert outcome(given, policy) in (200, 400, 404)


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=40) | ANYTHING.map(lambda value: json.dumps(value).encode()))
def test_any_bytes_are_a_call_or_a_refusal(body: bytes) -> None:
    assert outcome(body, Policy(1.0)) in (200, 400, 404)


@pytest.mark.parametrize(
    "body",
    [
        '"input": "go", "tool_choice": {}',
        '"input": "go", "tools": [{{"type": "function", "name": "a", "parameters": {{"a": {}}}}}]',
        '"input": "go", "text": {{"format": {{"type": "json_schema", "schema": {{"a": {}}}}}}}',
        '"input": [{{"role": "user", "content": {}}}]',
    ],
)
def test_deep_bodies_are_a_call_or_a_refusal(body: str) -> None:
    for depth in (*range(100, 1300, 100), 100_000):
        deep = "[" * depth + "]" * depth
        assert outcome(f'{{"model": "m", {body.format(deep)}}}'.encode(), Policy(1.0)) in (200, 400)
