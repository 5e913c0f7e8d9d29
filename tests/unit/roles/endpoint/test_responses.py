"""Responses through OpenAI's real client, and their streams, wherever they are cut."""

from __future__ import annotations

import http.client
import json
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from openai._models import construct_type_unchecked
from openai.lib.streaming.responses._responses import ResponseStreamState
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter

from rrl.core.run_spec import ModelSpec
from rrl.roles.endpoint.calls.call import Call, ToolName
from rrl.roles.endpoint.replies import reply as replies
from rrl.roles.endpoint.replies.answer import SampledAnswer
from rrl.roles.endpoint.replies.responses_reply import ResponsesWriter
from rrl.roles.endpoint.replies.writer import OpenedTurns
from rrl.roles.models.chat import open_chat
from rrl.roles.models.conversation import Message, ModelChat
from rrl.tests.support.roles.endpoint.served import DEADLINE_S, ToolScene
from rrl.tests.support.roles.endpoint.tool_folders import END, make

LOOK: dict[str, Any] = {
    "type": "function",
    "name": "look",
    "parameters": {
        "type": "object",
        "properties": {"place": {"type": "integer"}},
        "required": ["place"],
        "additionalProperties": False,
    },
    "strict": True,
}
ANY_EVENT: Any = ResponseStreamEvent
EVENT: TypeAdapter[Any] = TypeAdapter(ANY_EVENT)


def call_of(name: str = "look", **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> ModelChat:
    folder: Path = make(tmp_path_factory.mktemp("model"))
    return open_chat(ModelSpec(str(folder), chat=True))


@pytest.fixture
def scene(chat: ModelChat) -> Iterator[ToolScene]:
    made = ToolScene(chat, max_new=400, max_length=8000)
    yield made
    made.server.stop()


def create(scene: ToolScene, given: Any = "go", **more: Any) -> Any:
    return scene.client(max_retries=0).responses.create(model="any", input=given, **more)


def kinds(response: Any) -> list[str]:
    return [item.type for item in response.output]


class Report(BaseModel):
    chairs: int


def played(scene: ToolScene, how: str) -> Any:
    """Play an episode of three turns with a tool, as an agent does that sends back the items of each answer.

    An agent that names the earlier response (``named``) sends only what is new; Vercel's AI SDK names its items.
    """
    items: list[Any] = [{"role": "user", "content": "look"}]
    asked: dict[str, Any] = {"model": "any", "instructions": "walk", "tools": [LOOK], "input": items}
    client = scene.client(max_retries=0).responses
    for _ in range(9):
        if how == "stream":
            with client.stream(**asked) as stream:
                response = stream.get_final_response()
        else:
            response = client.parse(**asked, text_format=Report) if how == "parse" else client.create(**asked)
        items += response.output
        if how == "items":
            items[-len(response.output) :] = [{"type": "item_reference", "id": item.id} for item in response.output]
        if how == "named":
            items = []
            asked |= {"input": items, "previous_response_id": response.id}
        calls = [item for item in response.output if item.type == "function_call"]
        if not calls:
            return response
        items += [{"type": "function_call_output", "call_id": call.call_id, "output": "12 chairs"} for call in calls]
    raise AssertionError("the agent did not end")


@pytest.mark.parametrize("how", ["create", "stream", "parse", "named", "items"])
def test_an_episode_with_tools_is_one_branch_without_a_token_that_is_encoded_again(scene: ToolScene, how: str) -> None:
    think = "<think>\nroom 12\n</think>\n\n"
    begin = "" if how == "parse" else "I look.\n"  # the client parses all text
    scene.says(f"{think}{begin}{call_of(place=1)}", f"{think}{call_of(place=12)}\n{call_of(place=3)}", '{"chairs": 12}')
    response = played(scene, how)
    assert json.loads(response.output_text) == {"chairs": 12}
    assert (response.status, response.model) == ("completed", "any")
    one, two, three = scene.opened
    assert (two.parent, three.parent) == (one.id, two.id)
    for before, turn in ((one, two), (two, three)):
        assert turn.offset == len(scene.paths().path(before.id)), "an earlier answer was encoded again"
    usage = response.usage
    assert usage.input_tokens == len(scene.paths().context(three.id))
    assert usage.output_tokens == len(scene.sampled(2))


def test_an_answer_is_an_item_of_reasoning_a_message_and_calls_with_ids_of_its_turn(scene: ToolScene) -> None:
    scene.says(f"<think>\nhm\n</think>\n\nI look.\n{call_of(place=12)}")
    response = create(scene, tools=[LOOK])
    turn = f"{scene.opened[0].id:x}"
    reasoning, message, call = response.output
    assert (response.id, reasoning.id, message.id) == (f"resp_{turn}", f"rs_{turn}", f"msg_{turn}")
    assert (call.id, call.call_id, call.name) == (f"fc_{turn}_0", f"call_{turn}_0", "look")
    assert (reasoning.content[0].text, message.content[0].text) == ("hm", "I look.")
    assert json.loads(call.arguments) == {"place": 12}
    assert 0 < response.usage.output_tokens_details.reasoning_tokens < response.usage.output_tokens
    only_sealed = {"type": "reasoning", "summary": [], "encrypted_content": reasoning.encrypted_content}
    for carried in ([reasoning], [only_sealed], [], [only_sealed | {"encrypted_content": "garbage"}]):
        items = [{"role": "user", "content": "go"}, *carried, message, call]
        output = {"type": "function_call_output", "call_id": call.call_id, "output": "12 chairs"}
        create(scene, [*items, output], tools=[LOOK])
        assert scene.opened[-1].parent == scene.opened[0].id
        assert scene.opened[-1].offset == len(scene.paths().path(scene.opened[0].id))


def test_tools_in_a_namespace_and_custom_tools_come_back_as_the_client_knows_them(scene: ToolScene) -> None:
    tools: list[Any] = [
        {"type": "namespace", "name": "agents", "description": "", "tools": [{"type": "function", "name": "wait"}]},
        {"type": "custom", "name": "patch"},
        {"type": "web_search"},
    ]
    scene.says(f"{call_of('agents__wait', id=12)}\n{call_of('patch', input='a 12')}\n{call_of('patch', text='b')}")
    response = create(scene, tools=tools)
    wait, patch, odd = response.output
    assert (wait.type, wait.namespace, wait.name) == ("function_call", "agents", "wait")
    assert (patch.type, patch.name, patch.input) == ("custom_tool_call", "patch", "a 12")
    assert json.loads(odd.input) == {"text": "b"}
    scene.says(f"{call_of('agents__wait', id=12)}\n{call_of('patch', input='a 12')}")
    wait, patch = create(scene, "again", tools=tools).output
    outputs = [
        {"type": "function_call_output", "call_id": wait.call_id, "output": "x"},
        {"type": "custom_tool_call_output", "call_id": patch.call_id, "output": "y"},
    ]
    create(scene, [{"role": "user", "content": "again"}, wait, patch, *outputs], tools=tools)
    assert scene.opened[2].parent == scene.opened[1].id
    assert scene.opened[2].offset == len(scene.paths().path(scene.opened[1].id))


@pytest.mark.parametrize(
    "arguments", [{"text": "12"}, {"input": "12", "more": 1}, {"input": 12}, {"input": '{"a": 1}'}]
)
def test_a_conversation_continues_after_any_arguments_of_a_custom_tool(scene: ToolScene, arguments: Any) -> None:
    tools, asked = [{"type": "custom", "name": "patch"}], {"role": "user", "content": "go"}
    scene.says(call_of("patch", **arguments))
    (call,) = create(scene, [asked], tools=tools).output
    output = {"type": "custom_tool_call_output", "call_id": call.call_id, "output": "x"}
    create(scene, [asked, call, output], tools=tools)
    assert scene.opened[1].parent == scene.opened[0].id
    assert scene.opened[1].offset == len(scene.paths().path(scene.opened[0].id))


@pytest.mark.parametrize(
    "call",
    [
        '{"name": "\\ud800", "arguments": {}}',
        '{"name": "look", "arguments": {"place": "\\ud800"}}',
        f'{{"name": "look", "arguments": {{"place": {"[" * 200}{"]" * 200}}}}}',
    ],
)
def test_a_call_that_no_client_could_send_back_is_text(scene: ToolScene, call: str) -> None:
    scene.says(f"<tool_call>\n{call}\n</tool_call>")
    response = create(scene, tools=[LOOK])
    assert kinds(response) == ["message"]
    assert call in response.output_text


def test_text_is_streamed_as_it_grows_and_everything_is_done_in_one_write_at_the_end(scene: ToolScene) -> None:
    encode = scene.chat.tokenizer.encode
    with create(scene, stream=True) as stream:
        events = [next(stream), next(stream)]
        turn = scene.wait_opened(1)
        scene.turns.sample(turn.id, *encode("ab"))
        while events[-1].type != "response.output_text.delta":
            events.append(next(stream))
        scene.turns.sample(turn.id, *encode("c"), *encode(END), finished=True)
        events += list(stream)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type.removeprefix("response.") for event in events if event.type != "response.in_progress"] == [
        "created",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "completed",
    ]
    assert events[1].type == "response.in_progress"
    assert events[-1].response.output_text == "abc"


def test_items_that_are_no_text_are_streamed_at_the_end(scene: ToolScene) -> None:
    scene.says(f"<think>\nhm\n</think>\n\nI look.\n{call_of(place=1)}\n{call_of('patch', input='x')}")
    events = list(create(scene, tools=[LOOK, {"type": "custom", "name": "patch"}], stream=True))
    assert [event.type.removeprefix("response.") for event in events if event.type != "response.in_progress"] == [
        "created",
        # OpenAI's client for Node refuses text of reasoning before its part
        *("output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.done"),
        *("content_part.done", "output_item.done"),
        *("output_item.added", "content_part.added", "output_text.delta", "output_text.done", "content_part.done"),
        "output_item.done",
        *("output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"),
        *("output_item.added", "custom_tool_call_input.delta", "custom_tool_call_input.done", "output_item.done"),
        "completed",
    ]


def test_an_answer_that_reaches_its_limit_is_incomplete(scene: ToolScene) -> None:
    scene.policy = lambda turn: scene.turns.sample(turn.id, *scene.chat.tokenizer.encode("abc"), finished=True)
    response = create(scene, max_output_tokens=3)
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert scene.turns.max_new[scene.opened[0].id] == 3
    assert response.output_text == "abc"
    assert [*create(scene, stream=True)][-1].type == "response.incomplete"


def test_an_empty_answer_is_an_empty_message_and_an_unreadable_call_is_text(scene: ToolScene) -> None:
    scene.says("")
    response = create(scene, tools=[LOOK])
    assert (kinds(response), response.output_text) == (["message"], "")
    create(
        scene, [{"role": "user", "content": "go"}, *response.output, {"role": "user", "content": "on"}], tools=[LOOK]
    )
    assert scene.opened[1].parent == scene.opened[0].id
    scene.says("<tool_call>\n{not JSON\n</tool_call>")
    response = create(scene, tools=[LOOK])
    assert (kinds(response), response.output_text) == (["message"], "<tool_call>\n{not JSON\n</tool_call>")


def test_a_waiting_stream_has_events_because_comments_do_not_keep_every_client(
    scene: ToolScene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replies, "KEEP_ALIVE_S", 0.02)
    with create(scene, tools=[LOOK], stream=True) as stream:
        kinds_of_events = [next(stream).type for _ in range(12)]
        assert kinds_of_events == ["response.created", *["response.in_progress"] * 11]
        scene.turns.sample(scene.wait_opened(1).id, *scene.chat.tokenizer.encode(END), finished=True)
        assert [*stream][-1].type == "response.completed"


def test_the_stream_of_an_ended_attempt_is_cut(scene: ToolScene) -> None:
    with create(scene, stream=True) as stream:
        assert next(stream).type == "response.created"
        scene.turns.begin_attempt(0, 2)
        with pytest.raises((openai.APIConnectionError, httpx2.TransportError)):
            list(stream)
    with pytest.raises(openai.PermissionDeniedError):
        create(scene, stream=True)


def test_paths_without_a_version_and_probes_for_a_web_socket_are_answered(scene: ToolScene) -> None:
    scene.says("ok")
    host = scene.server.base_url.removeprefix("http://").removesuffix("/v1")
    plain = scene.client(base_url=f"http://{host}")
    assert plain.responses.create(model="m", input="go").output_text == "ok"
    statuses = []
    for headers in ({"Upgrade": "websocket", "Connection": "Upgrade"}, {}):
        connection = http.client.HTTPConnection(host, timeout=DEADLINE_S)
        connection.request("GET", "/v1/responses", headers=headers)
        reply = connection.getresponse()
        statuses.append((reply.status, "message" in json.loads(reply.read())["error"]))
        connection.close()
    assert statuses == [(426, True), (405, True)]


def test_refusals_have_openais_form(scene: ToolScene) -> None:
    missing: Any
    long: Any
    with pytest.raises(openai.NotFoundError) as missing:
        create(scene, previous_response_id="resp_1f")
    assert missing.value.body["code"] == "previous_response_not_found"
    with pytest.raises(openai.BadRequestError) as long:
        create(scene, "a" * 9000)
    assert long.value.body["code"] == "context_length_exceeded"


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_that_names_a_response_is_the_call_with_its_conversation(scene: ToolScene, stream: bool) -> None:
    scene.says("12 one", "12 two", "12 three", "12 four")
    client = scene.client(max_retries=0).responses

    def ask(given: Any, **more: Any) -> Any:
        if not stream:
            return client.create(model="any", input=given, **more)
        with client.stream(model="any", input=given, **more) as events:
            return events.get_final_response()

    first = ask("go")
    second = ask("on", previous_response_id=first.id)
    third = ask([{"role": "user", "content": "and on"}], previous_response_id=second.id)
    assert [turn.parent for turn in scene.opened] == [None, scene.opened[0].id, scene.opened[1].id]
    users = [{"role": "user", "content": text} for text in ("go", "on", "and on")]
    again = ask([users[0], *first.output, users[1], *second.output, users[2]])  # a further answer: the third was given
    assert scene.opened[3].conversation == scene.opened[2].conversation
    assert {third.output_text, again.output_text} == {"12 three", "12 four"}


def test_a_response_is_known_to_its_attempt_only_and_only_if_it_may_be_stored(scene: ToolScene) -> None:
    scene.says("ok")
    stored, unstored = create(scene), create(scene, "else", store=False)
    client = scene.client(max_retries=0, api_key=scene.key(attempt=2)).responses
    for asked in (unstored.id, "resp_fff"):
        with pytest.raises(openai.NotFoundError):
            create(scene, "on", previous_response_id=asked)
    scene.turns.begin_attempt(0, 2)
    with pytest.raises(openai.NotFoundError):
        client.create(model="any", input="on", previous_response_id=stored.id)


def test_what_is_ignored_is_logged_once(scene: ToolScene, caplog: pytest.LogCaptureFixture) -> None:
    scene.says("ok")
    with caplog.at_level(logging.INFO, "rrl.endpoint"):
        for _ in range(2):
            create(scene, tools=[LOOK, {"type": "web_search"}], extra_body={"frob": 1}, store=False)
    assert sorted(record.getMessage() for record in caplog.records if "ignored" in record.getMessage()) == [
        "a call of 'any' has frob, which is ignored, as in any call",
        "a call of 'any' has tools of type 'web_search', which is ignored, as in any call",
    ]


# ── streams that are cut ───────────────────────────────────────────────────────────────────────────────────────────
TEXTS = [
    "",
    "a stream of text, é",
    "<think>\nhm\n</think>\n\n",
    f"<think>\nhm\n</think>\n\nI look.\n{call_of(place=12)}\n{call_of('patch', input='é')}",
    call_of("ns__look", place=1),
    "<tool_call>\n{not JSON\n</tool_call>",
]
NAMES = (ToolName("ns__look", "look", "ns"), ToolName("patch", "patch", custom=True))


class CutStream:
    """A stream that a relay continues after each cut, as the endpoint writes it."""

    def __init__(self, chat: ModelChat, text: str, may_call: bool, ends: bool) -> None:
        messages = (Message("user", "go"),)
        self.call = Call("responses", "any", messages, may_call=may_call, tool_names=NAMES, stream=True)
        tools = json.dumps([{"type": "function", "function": {"name": "look"}}])
        self.chat = chat.with_tools(tools) if may_call else chat
        self.opened = OpenedTurns(1, tuple(self.chat.prompt(messages)), ("r",), (2**40 + 7,), self.chat)
        self.tokens = (*chat.tokenizer.encode(text), *(chat.tokenizer.encode(END) if ends else ()))
        self.durable = 0
        self.written = b""
        self._connect((), None)
        self.written += self.writer.opened()

    def _connect(self, resumed: Sequence[Any], position: str | None) -> None:
        self.answer = SampledAnswer(self.call, self.opened.turns[0], self.opened.prompt, self.chat, *resumed)
        self.writer = ResponsesWriter(self.call, self.opened, [self.answer], position)

    def cut(self, end_is_lost: bool = False) -> None:
        sent, position = self.answer.position, self.writer.position
        if end_is_lost:
            self.writer.ended()
        self._connect((int(sent.removesuffix(".")), sent.endswith(".")), position)
        assert self.writer.opened() == b""
        self._grow(0)

    def grow(self, count: int) -> None:
        self._grow(min(count, len(self.tokens) - 1 - self.durable) if self.tokens else 0)

    def _grow(self, count: int, finished: bool = False) -> None:
        had = self.answer.length
        self.durable += max(count, 0)
        new = self.tokens[had : self.durable]
        self.answer.grow(new, [-0.5] * len(new), finished)
        self.written += self.writer.grew(0)

    def end(self) -> None:
        self.durable = len(self.tokens)
        self._grow(0, finished=True)

    def events(self) -> list[dict[str, Any]]:
        blocks = self.written.decode().strip().split("\n\n")
        events = [json.loads(block.partition("\ndata: ")[2]) for block in blocks]
        assert [f"event: {event['type']}" for event in events] == [block.partition("\n")[0] for block in blocks]
        return events


@settings(max_examples=250, deadline=None)
@given(
    st.sampled_from(TEXTS),
    st.booleans(),
    st.booleans(),
    st.lists(st.sampled_from(["alive", "cut", 1, 2, 5, 40]), max_size=20),
    st.integers(0, 2),
)
@example(TEXTS[1], False, True, [1, "cut", 2, "alive", "cut", 40, "cut"], 2)
def test_a_stream_has_the_same_ids_and_items_wherever_it_is_cut(
    chat: ModelChat, text: str, may_call: bool, ends: bool, steps: list[Any], cuts_of_the_end: int
) -> None:
    stream = CutStream(chat, text, may_call, ends)
    for step in steps:
        if step == "alive":
            stream.written += stream.writer.alive()
        elif step == "cut":
            stream.cut()
        else:
            stream.grow(step)
    stream.end()
    last = SampledAnswer(stream.call, stream.opened.turns[0], stream.opened.prompt, stream.chat)
    last.grow(stream.tokens, [-0.5] * len(stream.tokens), True)
    whole = json.loads(ResponsesWriter(stream.call, stream.opened, [last]).whole())
    for _ in range(cuts_of_the_end):
        stream.cut(end_is_lost=True)
        stream.end()
    stream.written += stream.writer.ended()
    events = stream.events()
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    state: Any = ResponseStreamState(input_tools=openai.omit, text_format=openai.omit)
    for event in events:
        EVENT.validate_python(event)
        state.handle_event(construct_type_unchecked(value=event, type_=ANY_EVENT))
    final = events[-1]["response"]
    assert final | {"created_at": 0} == whole | {"created_at": 0}
    Response.model_validate(final)
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == final["output"]
    deltas = "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")
    assert deltas == "".join(item["content"][0]["text"] for item in done if item["type"] == "message")
