"""The endpoint, served by its real server and called with OpenAI's real client."""

from __future__ import annotations

import asyncio
import http.client
import itertools
import json
import logging
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import httpx2
import msgspec
import openai
import pytest

from rrl.roles.endpoint import http_messages
from rrl.roles.endpoint.key import EpisodeKey, encode_key
from rrl.roles.endpoint.replies import reply as replies
from rrl.roles.models.tokenizer import EOS
from rrl.roles.trajectories.episodes.requests import Turn
from rrl.tests.support.roles.endpoint.served import CHAT, DEADLINE_S, MAX_LENGTH, SECRET, USER, Scene


@pytest.fixture
def scene() -> Iterator[Scene]:
    made = Scene()
    yield made
    made.server.stop()


def create(scene: Scene, messages: list[Any] = USER, **more: Any) -> Any:
    return scene.create(messages, **more)


def test_a_conversation_over_several_calls_keeps_the_sampled_tokens(scene: Scene) -> None:
    one, two = CHAT.tokenizer.encode("1") + CHAT.tokenizer.encode("2"), CHAT.tokenizer.encode("12")
    scene.policy = lambda turn: scene.turns.sample(turn.id, *one, EOS, finished=True)
    first = create(scene, extra_body={"return_token_ids": True})
    message = first.choices[0].message
    assert (message.content, first.choices[0].finish_reason) == ("12", "stop")
    assert first.usage.completion_tokens == 3
    second = create(scene, [*USER, message, {"role": "user", "content": "<"}], extra_body={"return_token_ids": True})
    assert second.prompt_token_ids == [
        *first.prompt_token_ids,
        *first.choices[0].token_ids,
        *CHAT.tokenizer.encode("?<="),
    ]
    assert tuple(first.choices[0].token_ids[:-1]) == one != two
    assert scene.opened[1].parent == scene.opened[0].id


def test_truncated_answer_gets_its_end_token_in_the_next_context(scene: Scene) -> None:
    scene.answers("12", end=None)
    first = create(scene, max_tokens=1)
    assert (first.choices[0].finish_reason, scene.turns.max_new[scene.opened[0].id]) == ("length", 1)
    create(scene, [*USER, first.choices[0].message, {"role": "user", "content": ">"}])
    assert scene.opened[1].given == (EOS, *CHAT.tokenizer.encode("?>="))


def test_several_choices_of_a_call_are_separate_turns_with_one_context(scene: Scene) -> None:
    scene.answers("1", "2", "3")
    reply = create(scene, n=3)
    assert [choice.message.content for choice in reply.choices] == ["1", "2", "3"]
    assert len({turn.id for turn in scene.opened}) == 3
    assert {scene.paths().context(turn.id) for turn in scene.opened} == {CHAT.tokenizer.encode("?7=")}
    assert reply.usage.completion_tokens == 6


def test_returned_logprobs_are_those_of_the_sampled_tokens(scene: Scene) -> None:
    scene.answers("34")
    content = create(scene, logprobs=True).choices[0].logprobs.content
    assert [(entry.token, entry.logprob) for entry in content] == [("3", -0.5), ("4", -0.5), ("", -0.5)]


def test_stream_sends_tokens_once_they_are_durable(scene: Scene) -> None:
    stream = create(scene, stream=True, stream_options={"include_usage": True})
    turn = scene.wait_opened(1)
    scene.turns.sample(turn.id, *CHAT.tokenizer.encode("5"))
    chunks = [next(stream)]
    assert (chunks[0].choices[0].delta.role, chunks[0].choices[0].delta.content) == ("assistant", "5")
    assert chunks[0].choices[0].finish_reason is None
    scene.turns.sample(turn.id, *CHAT.tokenizer.encode("6"), EOS, finished=True)
    chunks += list(stream)
    assert "".join(choice.delta.content for chunk in chunks for choice in chunk.choices) == "56"
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].usage.completion_tokens == 3


@pytest.mark.parametrize("stream", [False, True])
def test_call_that_lasts_longer_than_the_read_timeout_is_kept_alive(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    monkeypatch.setattr(replies, "KEEP_ALIVE_S", 0.1)
    read_timeout_s = 1.0
    scene.policy = lambda turn: threading.Timer(
        2 * read_timeout_s, scene.turns.sample, (turn.id, *CHAT.tokenizer.encode("8"), EOS), {"finished": True}
    ).start()
    client = scene.client(timeout=read_timeout_s, max_retries=0)
    reply = client.chat.completions.create(model="any", messages=USER, stream=stream)
    text = "".join(part.choices[0].delta.content for part in reply) if stream else reply.choices[0].message.content
    assert text == "8"
    assert len(scene.opened) == 1


def test_repeated_call_after_a_broken_connection_joins_its_turn(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    """The first connection goes through a relay, which closes it once the turn is open."""
    port = int(scene.server.base_url.rpartition(":")[2].partition("/")[0])
    with socket.create_server(("127.0.0.1", 0)) as listener:
        relay = threading.Thread(target=break_first, args=(listener, port, scene), daemon=True)
        relay.start()
        client = scene.client(base_url=f"http://127.0.0.1:{listener.getsockname()[1]}/v1")
        reply = client.chat.completions.create(model="any", messages=USER)
    assert reply.choices[0].message.content == "9"
    assert len(scene.turns.turns) == 1
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


def break_first(listener: socket.socket, port: int, scene: Scene) -> None:
    """Relay a first connection until its turn is open, break it, and relay the second one to its end."""
    client, _ = listener.accept()
    with client, socket.create_connection(("127.0.0.1", port)) as server:
        forward(client, server)
        turn = scene.wait_opened(1)
        for broken in (client, server):
            broken.shutdown(socket.SHUT_RDWR)
    scene.turns.sample(turn.id, *CHAT.tokenizer.encode("9"), EOS, finished=True)
    client, _ = listener.accept()
    with client, socket.create_connection(("127.0.0.1", port)) as server:
        forward(client, server)
        while data := server.recv(65536):
            client.sendall(data)


def forward(source: socket.socket, sink: socket.socket) -> None:
    """Start a thread that forwards everything that ``source`` receives, until ``source`` is closed."""

    def pump() -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                sink.sendall(data)

    threading.Thread(target=pump, daemon=True).start()


def test_concurrent_equal_calls_get_separate_turns(scene: Scene) -> None:
    scene.answers("1", "2", "3", "4")

    async def ask() -> list[str | None]:
        client = openai.AsyncOpenAI(base_url=scene.server.base_url, api_key=scene.key())
        async with client:
            calls = [client.chat.completions.create(model="any", messages=USER) for _ in range(4)]
            return [reply.choices[0].message.content for reply in await asyncio.gather(*calls)]

    assert sorted(map(str, asyncio.run(ask()))) == ["1", "2", "3", "4"]
    assert len({turn.request for turn in scene.opened}) == 4


def test_turns_of_another_episode_or_attempt_are_not_continued(scene: Scene) -> None:
    scene.answers("5")
    message = create(scene).choices[0].message
    conversation = [*USER, message, {"role": "user", "content": "<"}]
    other = scene.client(api_key=scene.key(episode=1))
    other.chat.completions.create(model="any", messages=conversation)
    scene.turns.begin_attempt(0, 2)
    later = scene.client(api_key=scene.key(attempt=2))
    later.chat.completions.create(model="any", messages=conversation)
    assert [turn.parent for turn in scene.opened] == [None, None, None]


def test_call_is_answered_while_the_parent_of_another_turn_is_not_replayed_yet(scene: Scene) -> None:
    """The conversations of an attempt were replayed in another order than they were recorded."""
    scene.answers("5")
    create(scene)
    first = scene.opened[0]
    scene.turns.recorded.append(msgspec.structs.replace(scene.turns.turns.pop(first.id), request="other/1/0"))
    later = msgspec.structs.replace(first, id=first.id + 1, parent=first.id, offset=2, given=(9,), request="later/1/0")
    scene.turns.adopt(later)
    conversation = [*USER, {"role": "assistant", "content": "5"}, {"role": "user", "content": "<"}]
    assert create(scene, conversation).choices[0].message.content == "5"
    assert (scene.opened[1].parent, scene.opened[1].offset) == (None, 0)


# ── refusals ─────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_key_of_another_run_is_refused(scene: Scene) -> None:
    for key in ("sk-other", scene.key(secret=bytes(32)), encode_key(EpisodeKey("guess-2", 0, 1), SECRET)):
        with pytest.raises(openai.AuthenticationError) as raised:
            scene.client(api_key=key).chat.completions.create(model="any", messages=USER)
        assert raised.value.code == "invalid_api_key"
    with pytest.raises(openai.AuthenticationError):
        scene.client(api_key="sk-other").models.list()
    assert scene.opened == []


def test_a_key_of_an_older_attempt_is_refused_at_once_and_in_the_middle_of_a_call(scene: Scene) -> None:
    def supersede(turn: Turn) -> None:
        scene.turns.begin_attempt(0, 2)

    scene.policy = supersede
    for _ in range(2):
        with pytest.raises(openai.PermissionDeniedError) as raised:
            create(scene)
        assert raised.value.code == "attempt_over"
    assert len(scene.opened) == 1


@pytest.mark.parametrize("stream", [False, True])
def test_call_of_an_ended_attempt_is_broken_off_and_its_repetition_is_refused(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, stream: bool
) -> None:
    monkeypatch.setattr(replies, "KEEP_ALIVE_S", 0.05)
    scene.policy = lambda turn: threading.Timer(1.0, scene.turns.begin_attempt, (0, 2)).start()
    expected = openai.APIConnectionError if stream else openai.PermissionDeniedError  # a stream is not repeated
    with pytest.raises(expected):
        list(create(scene, stream=stream))
    assert len(scene.opened) == 1
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("temperature", 0.5),
        ("top_p", 0.9),
        ("presence_penalty", 1),
        ("frequency_penalty", 0.1),
        ("seed", 1),
        ("stop", [1]),
        ("stop", ""),
        ("tool_choice", "required"),
        ("tools", [{"type": "function"}]),
        ("tools", [{"type": "function", "function": {"name": "f"}}]),
        ("logit_bias", {"1": 5}),
        ("response_format", "json"),
        ("top_logprobs", 3),
        ("min_p", 0.1),
        ("guided_json", {}),
        ("reasoning_effort", "low"),
        ("n", 0),
        ("n", 1000),
        ("max_tokens", -1),
        ("stream", 1),
        ("messages", []),
        ("messages", [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]),
        ("messages", [{"role": "tool", "content": "1", "tool_call_id": "a"}]),
        ("temperature", True),
    ],
)
def test_invalid_or_policy_changing_parameter_is_refused_by_name(scene: Scene, key: str, value: object) -> None:
    with pytest.raises(openai.BadRequestError) as raised:
        create(scene, extra_body={key: value})
    assert key in str(raised.value.param)
    assert key in str(raised.value)
    assert scene.opened == []


def test_parameters_with_no_effect_are_accepted(scene: Scene) -> None:
    scene.answers("1")
    create(scene, temperature=1.0, top_p=1, presence_penalty=0, stop=[], tools=[], user="me", extra_body={"seed": None})


def test_text_that_cannot_be_encoded_and_unknown_roles_are_refused(scene: Scene) -> None:
    for message, problem in (
        ({"role": "user", "content": "hello"}, "pieces"),
        ({"role": "critic", "content": "1"}, "role"),
    ):
        with pytest.raises(openai.BadRequestError, match=problem):
            create(scene, [message])


def test_context_without_space_for_an_answer_is_refused_as_context_length_exceeded(scene: Scene) -> None:
    scene.answers("1")
    fits = "1" * (MAX_LENGTH - 3)
    create(scene, [{"role": "user", "content": fits}])
    assert scene.turns.max_new[scene.opened[0].id] == 1
    with pytest.raises(openai.BadRequestError) as raised:
        create(scene, [{"role": "user", "content": fits + "1"}])
    assert raised.value.code == "context_length_exceeded"


# ── the rest of the API ──────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize("path", ["chat/completions", "responses", "messages", "messages/count_tokens", "completions"])
def test_deep_bodies_are_refused_in_every_form(scene: Scene, path: str) -> None:
    headers = {"authorization": f"bearer {scene.key()}"}  # the scheme has no case
    for depth, key in itertools.product((200, 950, 970, 990, 5000), (b"seed", b"tool_choice", b"unknown", b"input")):
        body = b'{"model": "any", "%s": %s%s}' % (key, b"[" * depth, b"]" * depth)
        reply = httpx2.post(f"{scene.server.base_url}/{path}", content=body, headers=headers, timeout=DEADLINE_S)
        assert (reply.status_code, "inside each other" in reply.json()["error"]["message"]) == (400, True)


def test_completions_take_text_or_tokens(scene: Scene) -> None:
    scene.answers("12")
    tokens = list(CHAT.tokenizer.encode("7<"))
    for prompt in ("7<", tokens):
        reply = scene.client().completions.create(
            model="any", prompt=prompt, logprobs=0, extra_body={"return_token_ids": True}
        )
        assert (reply.choices[0].text, reply.prompt_token_ids) == ("12", tokens)
        assert reply.choices[0].logprobs.token_logprobs == [-0.5, -0.5]
    stream = scene.client().completions.create(model="any", prompt=tokens, stream=True)
    assert "".join(part.choices[0].text for part in stream) == "12"
    for wrong in ([["1"]], "", [10**6], ["1", "2"]):
        with pytest.raises(openai.BadRequestError):
            scene.client().completions.create(model="any", prompt=wrong)
    with pytest.raises(openai.BadRequestError, match="logprobs"):
        scene.client().completions.create(model="any", prompt="7<", extra_body={"logprobs": False})


def test_models_are_listed_and_an_unknown_path_is_answered_with_the_valid_ones(scene: Scene) -> None:
    assert [model.id for model in scene.client().models.list()] == ["policy"]
    with pytest.raises(openai.NotFoundError, match="this server answers POST /v1/chat/completions"):
        scene.client().embeddings.create(model="any", input="hi")


def test_garbage_and_oversized_bodies_get_an_error_and_the_server_continues(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(http_messages, "MAX_BODY_BYTES", 1000)
    host = scene.server.base_url.removeprefix("http://").partition("/")[0]
    headers = {"authorization": f"Bearer {scene.key()}"}
    for body, status in ((b"\xff\x00", 400), (b"[1]", 400), (b"[" * 900, 400), (b" " * 2000, 413)):
        connection = http.client.HTTPConnection(host, timeout=DEADLINE_S)
        connection.request("POST", "/v1/chat/completions", body, headers)
        reply = connection.getresponse()
        assert reply.status == status
        assert "error" in json.loads(reply.read())
        connection.close()
    with socket.create_connection(tuple(host.split(":"))) as raw:  # type: ignore[arg-type]
        raw.sendall(b"\x00garbage\r\n\r\n")
        assert raw.recv(1000).startswith(b"HTTP/1.1 400")
    with socket.create_connection(tuple(host.split(":"))) as raw:  # type: ignore[arg-type]
        raw.sendall(b"POST /v1/messages HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\nno length\r\n")
        assert raw.recv(1000).startswith(b"HTTP/1.1 400")
    scene.answers("1")
    assert create(scene).choices[0].message.content == "1"
    assert not [record for record in caplog.records if record.levelname == "ERROR"]
