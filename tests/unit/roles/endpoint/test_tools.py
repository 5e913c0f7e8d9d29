"""Agents with tools, through OpenAI's real client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from rrl.core.run_spec import ModelSpec
from rrl.roles.models.chat import open_chat
from rrl.tests.support.roles.endpoint.served import Scene, ToolScene
from rrl.tests.support.roles.endpoint.tool_folders import make

TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {}}}}}
]
ASKED: list[Any] = [{"role": "user", "content": "what is 12?"}]
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 12, "b": [1]}}\n</tool_call>'


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("model"))


@pytest.fixture
def scene(folder: Path) -> Iterator[ToolScene]:
    made = ToolScene(open_chat(ModelSpec(str(folder), chat=True)), max_new=200, max_length=8000)
    yield made
    made.server.stop()


def result(call: Any, content: str = "it is 12") -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call.id, "content": content}


def test_call_after_a_tool_result_continues_the_sampled_tokens_of_the_tool_call(scene: ToolScene) -> None:
    scene.says(f"I add.\n{CALL}", "12")
    first = scene.create(ASKED, tools=TOOLS).choices[0]
    (call,) = first.message.tool_calls
    assert (first.finish_reason, first.message.content) == ("tool_calls", "I add.")
    assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"a": 12, "b": [1]})
    second = scene.create([*ASKED, first.message, result(call)], tools=TOOLS, tool_choice="auto").choices[0]
    assert (second.finish_reason, second.message.content, second.message.tool_calls) == ("stop", "12", None)
    turn = scene.opened[1]
    assert turn.parent == scene.opened[0].id
    path = scene.paths().path(scene.opened[0].id)
    assert scene.paths().context(turn.id)[: len(path)] == path
    assert "<tool_response>\nit is 12" in scene.chat.tokenizer.decode(turn.given)
    assert scene.chat.tokenizer.encode(f"I add.\n{CALL}") != scene.sampled(0)[:-1]


def test_tool_call_with_reformatted_arguments_is_recognised(scene: ToolScene) -> None:
    scene.says(CALL)
    message = scene.create(ASKED, tools=TOOLS).choices[0].message.model_dump()
    function = message["tool_calls"][0]["function"]
    function["arguments"] = json.dumps(dict(reversed(json.loads(function["arguments"]).items())), indent=1)
    tool = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "it is 12"}
    scene.create([*ASKED, message, tool], tools=TOOLS)
    assert scene.opened[1].parent == scene.opened[0].id
    assert scene.opened[1].offset == len(scene.paths().path(scene.opened[0].id))
    function["arguments"] = '{"a": 13}'
    scene.create([*ASKED, message, tool], tools=TOOLS)
    assert scene.opened[2].offset < len(scene.paths().path(scene.opened[0].id)), "an edited tool call is not a branch"


@pytest.mark.parametrize("added", [{"name": "walker"}, {"content": "\n"}])
def test_an_answer_to_which_the_agent_adds_its_name_or_white_space_is_recognised(
    scene: ToolScene, added: dict[str, str]
) -> None:
    scene.says(CALL)
    message = scene.create(ASKED, tools=TOOLS).choices[0].message
    scene.create([*ASKED, message.model_dump() | added, result(message.tool_calls[0])], tools=TOOLS)
    first, second = scene.opened
    assert (second.parent, second.offset) == (first.id, len(scene.paths().path(first.id)))


def test_tool_result_continues_the_one_of_several_equal_answers_with_its_call_id(scene: ToolScene) -> None:
    scene.says(CALL)
    choices = scene.create(ASKED, tools=TOOLS, n=3).choices
    assert len({choice.message.tool_calls[0].id for choice in choices}) == 3
    message = choices[2].message
    scene.create([*ASKED, message, result(message.tool_calls[0])], tools=TOOLS)
    assert scene.opened[3].parent == scene.opened[2].id


def test_stream_sends_tool_calls_at_its_end(scene: ToolScene) -> None:
    scene.says(f"I add.\n{CALL}\n{CALL}")
    chunks = list(scene.create(ASKED, tools=TOOLS, stream=True))
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert "".join(delta.content or "" for delta in deltas) == "I add."
    calls = [call for delta in deltas for call in delta.tool_calls or []]
    assert [(call.index, call.function.name) for call in calls] == [(0, "add"), (1, "add")]
    assert chunks[-1].choices[0].finish_reason == "tool_calls"
    whole = scene.create(ASKED, tools=TOOLS).choices[0].message
    assert [call.function.arguments for call in whole.tool_calls] == [call.function.arguments for call in calls]


def test_reasoning_is_a_separate_key_that_the_next_request_may_omit(scene: ToolScene) -> None:
    scene.says(f"<think>\nhm\n</think>\n\n{CALL}", "12")
    message = scene.create(ASKED, tools=TOOLS).choices[0].message
    assert (message.reasoning_content, message.content) == ("hm", None)
    sent = message.model_dump()
    kept = [*ASKED, sent, result(message.tool_calls[0])]
    left_out = [*ASKED, {key: value for key, value in sent.items() if key != "reasoning_content"}, kept[-1]]
    for messages in (kept, left_out):
        scene.create(messages, tools=TOOLS)
    one, two, three = scene.opened
    assert (two.parent, two.offset, two.given) == (three.parent, three.offset, three.given)
    assert (two.parent, two.offset) == (one.id, len(scene.paths().path(one.id)))
    scene.create([*kept, {"role": "assistant", "content": "12"}, {"role": "user", "content": "sure?"}], tools=TOOLS)
    assert scene.opened[3].offset < len(scene.paths().path(two.id)), (
        "a new question, which drops the reasoning, is not a branch"
    )


def test_tool_choice_none_returns_tool_calls_as_text(scene: ToolScene) -> None:
    scene.says(CALL)
    choice = scene.create(ASKED, tools=TOOLS, tool_choice="none").choices[0]
    assert (choice.message.content, choice.message.tool_calls, choice.finish_reason) == (CALL, None, "stop")


def test_call_with_other_tools_starts_another_conversation(scene: ToolScene) -> None:
    scene.says(CALL, "12")
    message = scene.create(ASKED, tools=TOOLS).choices[0].message
    other = [{"type": "function", "function": {"name": "subtract"}}]
    scene.create([*ASKED, message, result(message.tool_calls[0])], tools=other)
    assert scene.opened[1].offset < len(scene.opened[0].given)


def test_a_stop_text_ends_an_answer_before_a_call(scene: ToolScene) -> None:
    scene.says(f"I add 12 to it.\n{CALL}")
    choice = scene.create(ASKED, tools=TOOLS, stop=" to").choices[0]
    assert (choice.message.content, choice.message.tool_calls, choice.finish_reason) == ("I add 12", None, "stop")
    scene.create([*ASKED, choice.message, {"role": "user", "content": "go on"}], tools=TOOLS, stop=" to")
    assert scene.opened[1].parent == scene.opened[0].id


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "assistant", "content": "", "tool_calls": [{"id": "a"}]}, "messages[0].tool_calls"),
        ({"role": "assistant", "content": "", "tool_calls": "x"}, "messages[0].tool_calls"),
        ({"role": "user", "content": "", "tool_calls": [{}]}, "messages[0].tool_calls"),
        ({"role": "user", "content": "a", "reasoning_content": "b"}, "messages[0].reasoning_content"),
        ({"role": "tool", "content": "a", "tool_call_id": 3}, "messages[0].tool_call_id"),
    ],
)
def test_a_message_with_a_malformed_call_is_refused_by_name(scene: ToolScene, message: Any, param: str) -> None:
    with pytest.raises(openai.BadRequestError) as raised:
        scene.create([message], tools=TOOLS)
    assert raised.value.param == param


def test_tools_of_a_model_without_a_parser_are_refused_in_one_line() -> None:
    scene = Scene()
    try:
        with pytest.raises(
            openai.BadRequestError, match="tools: a model that rrl builds cannot be offered tools"
        ) as raised:
            scene.create(tools=TOOLS)
        assert (raised.value.param, scene.opened) == ("tools", [])
    finally:
        scene.server.stop()
