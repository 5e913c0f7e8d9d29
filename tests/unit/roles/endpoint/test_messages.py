"""Anthropic's Messages, served by the real server. The real clients are in tests/clients."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from rrl.core.run_spec import ModelSpec
from rrl.roles.endpoint.calls.errors import ApiError
from rrl.roles.endpoint.calls.reasoning import seal, unseal
from rrl.roles.endpoint.forms import error_reply
from rrl.roles.endpoint.key import EpisodeKey, encode_key
from rrl.roles.endpoint.replies import reply as replies
from rrl.roles.models.chat import open_chat
from rrl.roles.models.hf_tokenizer import FolderTokenizer
from rrl.roles.trajectories.client import Fenced
from rrl.roles.trajectories.episodes.requests import Turn
from rrl.tests.support.roles.endpoint.served import DEADLINE_S, RUN, SECRET, Scene
from rrl.tests.support.roles.endpoint.tool_folders import END, make

TOOLS: list[Any] = [{"name": "add", "input_schema": {"type": "object", "properties": {"a": {}}}}]
ASKED: list[Any] = [{"role": "user", "content": "what is 12?"}]
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 12, "b": [1]}}\n</tool_call>'
THOUGHT = f"<think>\nI think.\n</think>\n\nI add.\n{CALL}"


class MessagesScene(Scene):
    """An endpoint of a model with tools, called over plain HTTP."""

    def says(self, *texts: str) -> None:
        """Answer each new turn with the next of these texts, in tokens that differ from those of the encoded text."""
        waiting = list(texts)

        def sample(turn: Turn) -> None:
            text = waiting.pop(0) if len(waiting) > 1 else waiting[0]
            self.turns.sample(turn.id, *self.tokens(text, ends=True), finished=True)

        self.policy = sample

    def tokens(self, text: str, *, ends: bool = False) -> tuple[int, ...]:
        encode = self.chat.tokenizer.encode
        tokens = tuple(token for piece in text.replace("12", "1|2").split("|") for token in encode(piece))
        return tokens + encode(END) * ends

    def request(self, method: str, path: str, headers: dict[str, str] | None = None, **more: Any) -> httpx2.Response:
        root = self.server.base_url.removesuffix("/v1")
        given = {"authorization": f"Bearer {self.key()}"} if headers is None else headers
        return httpx2.request(method, root + path, headers=given, timeout=DEADLINE_S, **more)

    def post(self, path: str = "/v1/messages?beta=true", headers: dict[str, str] | None = None, **body: Any) -> Any:
        given = {"model": "mine", "max_tokens": 100, "messages": ASKED, **body}
        headers = {"authorization": f"Bearer {self.key()}"} | (headers or {})
        return self.request("POST", path, headers, json=given)

    def decode_all(self, tokens: tuple[int, ...]) -> str:
        tokenizer = self.chat.tokenizer
        assert isinstance(tokenizer, FolderTokenizer)
        return tokenizer.decode_all(tokens)

    def begin(self, text: str) -> None:
        """Sample the beginning of each new turn only."""
        self.policy = lambda turn: self.turns.sample(turn.id, *self.tokens(text))

    def end(self, text: str) -> None:
        """Sample the rest of the newest turn."""
        self.turns.sample(self.opened[-1].id, *self.tokens(text, ends=True), finished=True)

    def pieces(self, headers: dict[str, str] | None = None) -> Iterator[str]:
        """Yield what a stream brings."""
        given = {"authorization": f"Bearer {self.key()}"} | (headers or {})
        body = {"model": "mine", "max_tokens": 100, "messages": ASKED, "stream": True}
        url = f"{self.server.base_url}/messages"
        with httpx2.stream("POST", url, headers=given, json=body, timeout=DEADLINE_S) as reply:
            yield from reply.iter_text()

    def stream(self, headers: dict[str, str] | None = None, **body: Any) -> str:
        return str(self.post(headers=headers, stream=True, **body).text)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("model"))


@pytest.fixture
def scene(folder: Path) -> Iterator[MessagesScene]:
    made = MessagesScene(open_chat(ModelSpec(str(folder), chat=True)), max_new=200, max_length=2000)
    yield made
    made.server.stop()


def events(stream: str) -> list[dict[str, Any]]:
    """Return the events of a stream, each of which names its type twice."""
    made = []
    for event in stream.strip().split("\n\n"):
        if not event.startswith(":"):
            name, data = event.split("\n")
            made.append(json.loads(data.removeprefix("data: ")))
            assert name == f"event: {made[-1]['type']}"
    return made


def gathered(stream: str) -> dict[str, Any]:
    """Return the message of a stream, as the clients gather it. Each event must be allowed where it is."""
    first, *rest = [event for event in events(stream) if event["type"] != "ping"]
    assert first["type"] == "message_start"
    message: dict[str, Any] = first["message"]
    is_open = False
    for event in rest:
        match event["type"]:
            case "content_block_start":
                assert (is_open, event["index"]) == (False, len(message["content"]))
                is_open = True
                message["content"].append({**event["content_block"], "json": ""})
            case "content_block_delta":
                assert (is_open, event["index"]) == (True, len(message["content"]) - 1)
                for key, value in event["delta"].items():
                    if key != "type":
                        key = "json" if key == "partial_json" else key
                        message["content"][-1][key] += value
            case "content_block_stop":
                assert (is_open, event["index"]) == (True, len(message["content"]) - 1)
                is_open = False
            case "message_delta":
                message |= event["delta"]
                message["usage"] |= event["usage"]
            case kind:
                assert (kind, event, is_open) == ("message_stop", rest[-1], False)
    for block in message["content"]:
        if given := block.pop("json"):
            block["input"] = json.loads(given)
    return message


def test_message_has_thinking_text_and_tool_use_in_this_order(scene: MessagesScene) -> None:
    scene.says(THOUGHT)
    message = scene.post(tools=TOOLS).json()
    turn = scene.opened[0]
    usage = message.pop("usage")
    assert usage["input_tokens"] == len(turn.given)
    assert usage["output_tokens"] == len(scene.tokens(THOUGHT)) + 1
    assert message == {
        "id": f"msg_{turn.id:x}",
        "type": "message",
        "role": "assistant",
        "model": "mine",
        "content": [
            {"type": "thinking", "thinking": "I think.", "signature": seal("I think.")},
            {"type": "text", "text": "I add."},
            {"type": "tool_use", "id": f"toolu_{turn.id:x}_0", "name": "add", "input": {"a": 12, "b": [1]}},
        ],
        "stop_reason": "tool_use",
        "stop_sequence": None,
    }


@pytest.mark.parametrize("tools", [[], TOOLS])
@pytest.mark.parametrize("says", [THOUGHT, "fine 12", "", f"{CALL}\n{CALL}"])
def test_stream_is_gathered_to_the_message(scene: MessagesScene, says: str, tools: list[Any]) -> None:
    scene.says(says)
    whole = scene.post(tools=tools).json()
    streamed = gathered(scene.stream(tools=tools))
    assert whole["content"]
    for message in (whole, streamed):
        del message["id"]
        for block in message["content"]:
            block.pop("id", None)
    assert streamed == whole


def test_text_of_a_stream_is_shown_as_it_grows_and_its_block_ends_with_the_message(scene: MessagesScene) -> None:
    scene.begin("a")
    got: list[str] = []
    for piece in scene.pieces():
        got.append(piece)
        if "text_delta" in piece and '"a"' in piece:
            scene.end("b")
    kinds = [event["type"] for event in events("".join(got)) if event["type"] != "ping"]
    delta = "content_block_delta"
    ends = ["content_block_stop", "message_delta", "message_stop"]
    assert kinds == ["message_start", "content_block_start", delta, delta, *ends]
    assert sum("message_stop" in piece and "content_block_stop" in piece for piece in got) == 1


def test_waiting_stream_has_pings_after_its_beginning(scene: MessagesScene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replies, "KEEP_ALIVE_S", 0.01)
    got, ended = "", False
    for piece in scene.pieces():
        got += piece
        if got.count("event: ping") >= 3 and not ended:
            ended = True
            scene.end("fine")
    assert gathered(got)["content"] == [{"type": "text", "text": "fine"}]


def test_why_a_message_ends(scene: MessagesScene) -> None:
    scene.says("ab<cd")
    message = scene.post(stop_sequences=["x", "<c", "<"]).json()
    assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", "<")
    assert message["content"] == [{"type": "text", "text": "ab"}]
    message = gathered(scene.stream(stop_sequences=["b<c"]))
    assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", "b<c")
    message = scene.post().json()
    assert (message["stop_reason"], message["stop_sequence"]) == ("end_turn", None)
    scene.policy = lambda turn: scene.turns.sample(turn.id, *scene.tokens("ab"), finished=True)
    assert scene.post(max_tokens=2).json()["stop_reason"] == "max_tokens"
    assert scene.turns.max_new[scene.opened[-1].id] == 2


@pytest.mark.parametrize("streamed", [False, True])
def test_episode_with_tools_is_one_branch_without_tokens_encoded_again(scene: MessagesScene, streamed: bool) -> None:
    scene.says(f"I add.\n{CALL}", f"<think>\nAgain.\n</think>\n\n{CALL}", "12")
    messages = [*ASKED]
    billing = 0
    while True:
        billing += 1
        system = [{"type": "text", "text": f"x-anthropic-billing-header: {billing}"}, {"type": "text", "text": "Be."}]
        asked: dict[str, Any] = {"messages": messages, "tools": TOOLS, "system": system}
        message = gathered(scene.stream(**asked)) if streamed else scene.post(**asked).json()
        calls = [block["id"] for block in message["content"] if block["type"] == "tool_use"]
        if not calls:
            break
        results = [{"type": "tool_result", "tool_use_id": each, "content": "it is 12"} for each in calls]
        results[-1]["cache_control"] = {"type": "ephemeral"}
        hurry = {"role": "system", "content": "Hurry."}
        messages = [
            *messages,
            {"role": "assistant", "content": message["content"]},
            {"role": "user", "content": results},
        ]
        messages.append(hurry)
    paths = scene.paths()
    assert [turn.parent for turn in scene.opened] == [None, *(turn.id for turn in scene.opened[:-1])]
    for before, turn in zip(scene.opened, scene.opened[1:], strict=False):
        assert turn.offset == len(paths.path(before.id))
        text = scene.decode_all(turn.given)
        assert "<tool_response>\nit is 12" in text
        assert "<|im_start|>system\nHurry.<|im_end|>" in text


def test_relayed_stream_continues_where_it_broke(scene: MessagesScene) -> None:
    scene.begin("a1")
    whole = ""
    for piece in scene.pieces({"x-rrl-relay": "1"}):
        whole += piece
        if "text_delta" in piece and '"a1"' in piece:
            scene.end("2bc")
    places = [line.split()[-1] for line in whole.splitlines() if line.startswith(": rrl ")]
    assert {"0:m", "2:mt", "6.:mt"} <= {*places}
    for place in places:
        cut = whole.index(f": rrl 1 {place}\n")
        rest = scene.stream({"x-rrl-relay": "1", "x-rrl-call": "1", "x-rrl-sent": place})
        assert gathered(whole[:cut] + rest) == gathered(whole), place
    assert len(scene.opened) == 1


def test_reasoning_in_a_signature_alone_continues_the_answer(scene: MessagesScene) -> None:
    scene.says(THOUGHT)
    content = scene.post(tools=TOOLS).json()["content"]
    assert unseal(content[0]["signature"]) == "I think."
    content[0]["thinking"] = ""
    result = {"type": "tool_result", "tool_use_id": content[-1]["id"], "content": "12"}
    scene.post(
        messages=[*ASKED, {"role": "assistant", "content": content}, {"role": "user", "content": [result]}], tools=TOOLS
    )
    assert scene.opened[1].parent == scene.opened[0].id
    assert scene.opened[1].offset == len(scene.paths().path(scene.opened[0].id))


def test_stream_of_an_ended_attempt_is_cut_and_not_ended(scene: MessagesScene) -> None:
    scene.begin("a")
    got: list[str] = []

    def read() -> None:
        for piece in scene.pieces():
            got.append(piece)
            if "text_delta" in piece:
                scene.turns.attempts[0] = 2

    with pytest.raises(httpx2.RemoteProtocolError):
        read()
    assert "message_stop" not in "".join(got)
    assert "content_block_stop" not in "".join(got)


# ── beside the answers ───────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize("root", ["", "/v1"])
def test_tokens_are_counted_without_opening_a_turn(scene: MessagesScene, root: str) -> None:
    body: dict[str, Any] = {"tools": TOOLS, "system": "Be."}
    counted = scene.post(f"{root}/messages/count_tokens", **body).json()
    assert scene.opened == []
    scene.says(CALL)
    message = scene.post(**body).json()
    assert counted == {"input_tokens": message["usage"]["input_tokens"]}
    result = {"type": "tool_result", "tool_use_id": message["content"][0]["id"], "content": "12"}
    longer = [*ASKED, {"role": "assistant", "content": message["content"]}, {"role": "user", "content": [result]}]
    counted = scene.post(f"{root}/messages/count_tokens", **body, messages=longer).json()
    assert counted == {"input_tokens": scene.post(**body, messages=longer).json()["usage"]["input_tokens"]}
    assert len(scene.opened) == 2
    assert scene.endpoint.answered == 2
    scene.turns.begin_attempt(0, 2)
    refused = scene.post(f"{root}/messages/count_tokens", **body)
    assert (refused.status_code, refused.json()["error"]["type"]) == (403, "permission_error")


def test_models_have_the_keys_of_both_apis(scene: MessagesScene) -> None:
    listed = scene.request("GET", "/v1/models?limit=20").json()
    assert (listed["object"], listed["has_more"], listed["first_id"], listed["last_id"]) == (
        "list",
        False,
        "policy",
        "policy",
    )
    (model,) = listed["data"]
    assert {"id": "policy", "object": "model", "type": "model", "display_name": "policy"}.items() <= model.items()
    assert scene.request("GET", "/v1/models/policy").json() == model
    assert scene.request("GET", "/v1/models/some/other").json()["id"] == "some/other"
    assert scene.request("GET", "/v1/models/policy", {}).status_code == 401


def test_either_header_may_have_the_key(scene: MessagesScene) -> None:
    right, wrong = scene.key(), encode_key(EpisodeKey(RUN, 0, 1), SECRET[::-1])
    for headers, status in (
        ({"x-api-key": right}, 200),
        ({"authorization": f"Bearer {right}", "x-api-key": wrong}, 200),
        ({"authorization": f"Bearer {wrong}", "x-api-key": right}, 401),
        ({"x-api-key": wrong}, 401),
        ({}, 401),
    ):
        assert scene.request("GET", "/v1/models", headers).status_code == status, headers


def test_a_client_may_ask_whether_there_is_a_server(scene: MessagesScene) -> None:
    for path in ("/", "/api/hello"):
        reply = scene.request("HEAD", path, {})
        assert (reply.status_code, reply.content) == (200, b"")


def test_errors_have_the_form_of_the_path(scene: MessagesScene) -> None:
    def error(reply: httpx2.Response) -> tuple[int, str, str]:
        body = reply.json()
        assert body["type"] == "error"
        return reply.status_code, body["error"]["type"], body["error"]["message"]

    assert error(scene.post(messages=[]))[:2] == (400, "invalid_request_error")
    long = [{"role": "user", "content": "x" * 3000}]
    for path in ("/v1/messages", "/messages/count_tokens"):
        status, kind, message = error(scene.post(path, messages=long))
        assert (status, kind) == (400, "invalid_request_error")
        assert message.startswith("prompt is too long: ")
    assert error(scene.request("POST", "/v1/messages", {}, json={}))[:2] == (401, "authentication_error")
    assert error(scene.request("GET", "/v1/messages"))[:2] == (405, "invalid_request_error")
    assert error(scene.request("GET", "/v1/messages/batches"))[:2] == (404, "not_found_error")
    scene.turns.attempts[0] = 2
    assert error(scene.post())[:2] == (403, "permission_error")
    assert "type" not in scene.request("POST", "/v1/chat/completions", {}, json={}).json()


def test_a_thread_is_refused_by_the_code_at_which_the_client_sends_all_messages(scene: MessagesScene) -> None:
    for thread in ({"type": "create"}, {"type": "continue", "previous_message_id": "msg_1"}):
        reply = scene.post(thread=thread)
        details = reply.json()["error"]["details"]
        assert (reply.status_code, details) == (400, {"error_code": "thread_unsupported_request"})
    assert not scene.opened


def test_overloaded_is_529_in_messages_only() -> None:
    error = ApiError(503, "busy", "server_error", retry_after=1)
    body = {"type": "error", "error": {"type": "overloaded_error", "message": "busy"}}
    assert error_reply("/messages", error) == (529, body)
    assert error_reply("/v1/chat/completions", error) == (503, error.body)


def test_a_client_of_an_endpoint_that_is_replaced_waits(scene: MessagesScene, monkeypatch: pytest.MonkeyPatch) -> None:
    async def replaced(*_: Any) -> Any:
        raise Fenced("there is a newer one")

    monkeypatch.setattr(scene.endpoint, "_context", replaced)
    reply = scene.post()
    assert (reply.status_code, reply.headers["retry-after"]) == (529, "1")
    assert reply.json()["error"]["type"] == "overloaded_error"
