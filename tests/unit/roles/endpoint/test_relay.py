"""The relay between OpenAI's real client and fake replicas of the endpoint that break connections.

In ``test_relay_processes.py`` the endpoint is real, in processes that are killed.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
import threading
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any

import pytest
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from rrl.roles.endpoint import http_messages, relay
from rrl.roles.endpoint.calls.errors import ApiError
from rrl.roles.endpoint.forms import FORMS
from rrl.roles.endpoint.http_server import EndpointServer
from rrl.roles.endpoint.relay import Relay
from rrl.tests.support.roles.endpoint.fake_endpoint import (
    DONE,
    Act,
    FakeEndpoint,
    breaks,
    completion,
    event,
    plain,
    replies,
    streams,
)

openai = pytest.importorskip("openai")

DEADLINE_S = 60.0
"""Time limit in seconds, which only a broken build reaches."""
USER: list[Any] = [{"role": "user", "content": "7"}]
FENCED = {"error": {"message": "attempt 1 is over", "type": "permission_error", "param": None, "code": "attempt_over"}}


class Scene:
    """A relay, and the replicas whose addresses it finds."""

    def __init__(self) -> None:
        self.replicas: list[FakeEndpoint] = []
        self.addresses: list[str] = []
        self.over = False
        self.server = EndpointServer(Relay(lambda: (tuple(self.addresses), self.over)).application)
        self.server.start()

    def replica(self, *acts: Act) -> FakeEndpoint:
        """Start a replica whose address the relay does not find yet."""
        self.replicas.append(FakeEndpoint(*acts))
        return self.replicas[-1]

    def serves(self, *acts: Act) -> FakeEndpoint:
        """Start a replica, and let the relay find only this one."""
        made = self.replica(*acts)
        self.addresses = [made.base_url]
        return made

    def client(self, **more: Any) -> Any:
        options: dict[str, Any] = {"base_url": self.server.base_url, "api_key": "rrl-k", "timeout": DEADLINE_S}
        return openai.OpenAI(**options | more)

    def create(self, **more: Any) -> Any:
        return self.client(max_retries=0).chat.completions.create(model="m", messages=USER, **more)

    def raw_stream(self, path: str) -> bytes:
        host = self.server.base_url.removeprefix("http://").removesuffix("/v1")
        connection = http.client.HTTPConnection(host, timeout=DEADLINE_S)
        connection.request("POST", path, b'{"stream": true}', {})
        return connection.getresponse().read()

    def stream(self, path: str) -> tuple[str, Any]:
        """Return name and data of the only event of a stream."""
        lines = self.raw_stream(path).decode().splitlines()
        name = [line.removeprefix("event: ") for line in lines if line.startswith("event: ")]
        (data,) = (json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: "))
        return "".join(name), data

    def post(self, path: str, headers: Mapping[str, str] = {}, content: bytes = b"{}") -> tuple[int, Any]:
        host = self.server.base_url.removeprefix("http://").removesuffix("/v1")
        connection = http.client.HTTPConnection(host, timeout=DEADLINE_S)
        connection.request("POST", path, content, dict(headers))
        got = connection.getresponse()
        return got.status, json.loads(got.read())


@pytest.fixture
def scene() -> Iterator[Scene]:
    made = Scene()
    yield made
    made.server.stop()
    for replica in made.replicas:
        replica.stop()


def headers_of(replica: FakeEndpoint, number: int = 0) -> dict[str, str]:
    return replica.requests[number][1]


def texts(stream: Any) -> list[str]:
    return [chunk.choices[0].delta.content for chunk in stream]


def test_call_and_answer_pass_the_relay_unchanged(scene: Scene) -> None:
    replica = scene.serves()
    got = scene.create(extra_headers={"x-rrl-sent": "9", "x-mine": "1"})
    assert got.choices[0].message.content == "5"
    path, headers, body = replica.requests[0]
    assert (path, json.loads(body)) == ("/v1/chat/completions", {"model": "m", "messages": USER})
    assert (headers["authorization"], headers["x-mine"], headers["x-rrl-relay"]) == ("Bearer rrl-k", "1", "1")
    assert headers["x-stainless-retry-count"] == "0"
    assert "x-rrl-sent" not in headers, "a header of the agent set the position that the relay has"
    assert scene.client().models.with_raw_response.list().http_response.status_code == 200
    assert replica.requests[1][0] == "/v1/models"


@pytest.mark.parametrize("stream", [False, True])
def test_a_refusal_of_the_endpoint_keeps_its_status_and_object(scene: Scene, stream: bool) -> None:
    scene.serves(replies(FENCED, 403))
    with pytest.raises(openai.PermissionDeniedError) as refused:
        scene.create(stream=stream)
    assert refused.value.body["code"] == "attempt_over"


def test_plain_answer_that_breaks_off_is_requested_again_as_joined_and_sent_once(scene: Scene) -> None:
    broken = scene.serves(breaks(b"  ", json.dumps(completion("4")).encode()[:40]))
    other = scene.replica(replies(completion("5")))

    def moves() -> None:
        broken.wait_requests(1, DEADLINE_S)
        broken.stop()
        scene.addresses = [other.base_url]

    mover = threading.Thread(target=moves)
    mover.start()
    assert scene.create().choices[0].message.content == "5"
    mover.join()
    assert headers_of(other)["x-stainless-retry-count"] == "1", (
        "the repeated call is not marked as repeated, so that no endpoint joins it to its turn"
    )
    assert other.requests[0][2] == broken.requests[0][2]


def test_a_call_that_no_replica_has_received_is_not_repeated_as_joined(scene: Scene) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        # an address that refuses connections after the end of this block
        gone = f"http://127.0.0.1:{taken.getsockname()[1]}/v1"
    scene.addresses = [gone]
    replica = scene.replica()
    threading.Timer(5.0, lambda: setattr(scene, "addresses", [replica.base_url])).start()
    # the call succeeds because signs of life arrive: its read timeout is shorter than the outage
    assert scene.client(max_retries=0, timeout=3.0).chat.completions.create(model="m", messages=USER).choices
    assert headers_of(replica)["x-stainless-retry-count"] == "0"


def test_interrupted_stream_continues_after_the_last_token_that_the_agent_has(scene: Scene) -> None:
    begun = (event("1", 3, "2"), b": waiting\n\n", event("2", 3, "5"), event("lost")[:-1])
    first = scene.serves(breaks(*begun, media_type="text/event-stream"))
    second = scene.replica(streams(event("3", 3, "6"), event("4", 3, "9"), DONE))
    stream = scene.create(stream=True)
    got = [next(stream).choices[0].delta.content]
    first.stop()
    scene.addresses = [second.base_url]
    assert [*got, *texts(stream)] == ["1", "2", "3", "4"]
    repeated = headers_of(second)
    assert (repeated["x-stainless-retry-count"], repeated["x-rrl-call"], repeated["x-rrl-sent"]) == ("1", "3", "5")
    assert "x-rrl-call" not in headers_of(first)


def test_an_event_whose_position_was_lost_is_not_sent_twice(scene: Scene) -> None:
    scene.serves(
        breaks(event("1", 1, "1"), event("2"), media_type="text/event-stream"), streams(event("2", 1, "2"), DONE)
    )
    assert texts(scene.create(stream=True)) == ["1", "2"]


def test_the_end_of_a_response_that_was_lost_in_part_is_sent_once(scene: Scene) -> None:
    def named(kind: str, number: int, position: str = "") -> bytes:
        content = {"type": f"response.{kind}", "sequence_number": number, "response": {"id": "resp_1", "output": []}}
        sent = f": rrl 1 {position}\n\n".encode() if position else b""
        return f"event: response.{kind}\ndata: {json.dumps(content)}\n\n".encode() + sent

    begun = named("created", 0, "0:1")
    rest = (named("output_item.added", 1), named("output_item.done", 2))
    lost, end = breaks(begun, *rest, media_type="text/event-stream"), named("completed", 3)
    replica = scene.serves(lost, streams(named("in_progress", 1, "2.:2"), *rest), streams(*rest, end))
    stream = scene.client(max_retries=0).responses.create(model="m", input="7", stream=True)
    kinds = [event.type.removeprefix("response.") for event in stream]
    assert kinds == ["created", "in_progress", "output_item.added", "output_item.done", "completed"]
    assert [headers_of(replica, number).get("x-rrl-sent") for number in range(3)] == [None, "0:1", "2.:2"]


def test_stream_without_its_last_event_is_requested_again(scene: Scene) -> None:
    replica = scene.serves(streams(event("1", 1, "1")), streams(event("2", 1, "2"), DONE))
    assert texts(scene.create(stream=True)) == ["1", "2"]
    assert headers_of(replica, 1)["x-rrl-sent"] == "1"


def test_interrupted_stream_of_an_ended_attempt_is_cut(scene: Scene) -> None:
    scene.serves(breaks(event("1", 1, "1"), media_type="text/event-stream"), replies(FENCED, 403))
    stream = scene.create(stream=True)
    assert next(stream).choices[0].delta.content == "1"
    with pytest.raises(openai.APIConnectionError):
        next(stream)
    with pytest.raises(openai.PermissionDeniedError):
        scene.create(stream=True)


def test_interrupted_plain_answer_of_an_ended_attempt_becomes_the_refusal(scene: Scene) -> None:
    scene.serves(breaks(b" "), replies(FENCED, 403))
    with pytest.raises(openai.PermissionDeniedError):
        scene.client().chat.completions.create(model="m", messages=USER)  # the client repeats the broken call by itself


def test_a_call_that_a_stopped_replica_interrupts_is_repeated(scene: Scene) -> None:
    failed = {"error": {"message": "the endpoint failed", "type": "server_error", "param": None, "code": None}}
    acts = [plain(503, "full"), plain(500, "interrupted"), replies(completion("5")), replies(failed, 500)]
    replica = scene.serves(*acts)
    assert scene.create().choices[0].message.content == "5"
    counts = [headers["x-stainless-retry-count"] for _, headers, _ in replica.requests]
    assert counts == ["0", "0", "1"], "a call that a full replica refused must not count as begun"
    with pytest.raises(openai.InternalServerError, match="the endpoint failed"):
        scene.create()
    assert len(replica.requests) == 4


def test_calls_of_an_episode_go_to_one_replica_until_it_is_gone(scene: Scene) -> None:
    one, two = scene.replica(), scene.replica()
    scene.addresses = [one.base_url, two.base_url]
    for _ in range(4):
        scene.create()
    first, second = (one, two) if one.requests else (two, one)
    assert (len(first.requests), len(second.requests)) == (4, 0)
    first.stop()
    scene.create()
    assert len(second.requests) == 1


def test_an_opened_episode_gets_the_relay_as_its_base_url_and_is_opened_once(scene: Scene) -> None:
    opened = {"episode": 4, "attempt": 1, "item": "7", "api_key": "rrl-x", "base_url": "http://10.0.0.4:4001/v1"}
    replica = scene.serves(breaks(b"{"), replies(opened))
    status, got = scene.post("/rrl/v1/episodes", {"Authorization": "Bearer rrl-run"})
    assert (status, got) == (200, opened | {"base_url": scene.server.base_url})
    keys = [headers["idempotency-key"] for _, headers, _ in replica.requests]
    assert len(keys) == 2
    assert len({*keys}) == 1
    scene.post("/rrl/v1/episodes", {"Authorization": "Bearer rrl-run"})
    assert headers_of(replica, 2)["idempotency-key"] not in keys, "two calls have one idempotency key"
    scene.post("/rrl/v1/episodes", {"Idempotency-Key": "mine"})
    assert headers_of(replica, 3)["idempotency-key"] == "mine"


def test_answer_no_episode_is_passed_on_and_answer_busy_is_retried(scene: Scene) -> None:
    none = {"error": {"message": "no episode", "type": "server_error", "param": None, "code": "no_episode"}}
    replica = scene.serves(
        replies("busy", 503), replies("bad gateway", 502), replies(none, 503, **{"retry-after": "1"})
    )
    assert scene.post("/rrl/v1/episodes") == (503, none)
    assert len(replica.requests) == 3


def test_a_call_of_an_ended_run_is_refused(scene: Scene) -> None:
    scene.over = True
    with pytest.raises(openai.APIStatusError) as plain:
        scene.create()
    assert (plain.value.status_code, plain.value.body["code"]) == (410, "run_ended")


def test_interrupted_stream_of_an_ended_run_is_cut(scene: Scene) -> None:
    replica = scene.serves(breaks(event("1", 1, "1"), media_type="text/event-stream"))
    stream = scene.create(stream=True)
    assert next(stream).choices
    scene.addresses, scene.over = [], True
    replica.stop()
    with pytest.raises(openai.APIConnectionError):
        next(stream)


def slowly(act: Act) -> Act:
    """Answer later than the relay begins a stream."""

    async def slow(request: Request) -> Response:
        await asyncio.sleep(3 * relay.KEEP_ALIVE_S)
        return await act(request)

    return slow


@pytest.mark.parametrize("root", ["/v1", ""])
@pytest.mark.parametrize("wire", FORMS)
def test_error_that_comes_after_the_relay_has_begun_its_stream_is_an_event_of_the_form(
    scene: Scene, root: str, wire: str
) -> None:
    form, error = FORMS[wire], ApiError(400, "the prompt has 9 tokens\nor more", code="context_length_exceeded")
    scene.serves(slowly(replies(form.error(error), 400)))
    name, data = scene.stream(root + form.path)
    assert name == {"responses": "response.failed", "messages": "error"}.get(wire, "")
    assert "the prompt has 9 tokens" in data["error"]["message"]
    if wire == "responses":
        assert data["response"]["error"]["code"] == "context_length_exceeded"
    if wire == "messages":
        assert data["type"] == "error"


@pytest.mark.parametrize("wire", ["responses", "messages"])
def test_waiting_stream_is_kept_alive_in_its_form(scene: Scene, wire: str) -> None:
    alive = {"responses": b"event: response.in_progress\ndata: {}", "messages": b"event: ping\ndata: {}"}[wire]
    begun = breaks(alive + b"\n\n: rrl 1 0:2\n\n", media_type="text/event-stream")
    last = FORMS[wire].last[0] + b"\ndata: {}\n\n"
    scene.serves(begun, slowly(streams(last)))
    sent = scene.raw_stream(f"/v1{FORMS[wire].path}")
    assert sent.count(alive) >= 2
    assert sent.endswith(last)


@pytest.mark.parametrize(("wire", "status"), [("chat", 503), ("messages", 529)])
def test_call_is_repeated_while_its_replica_is_replaced(scene: Scene, wire: str, status: int) -> None:
    replaced = replies({"error": {"message": "replaced"}}, status, **{"retry-after": "1"})
    replica = scene.serves(replaced, replies(completion("5")))
    assert scene.post(f"/v1{FORMS[wire].path}") == (200, completion("5"))
    assert headers_of(replica, 1)["x-stainless-retry-count"] == "1"


def test_header_that_says_what_is_not_trained_passes_the_relay(scene: Scene) -> None:
    replica = scene.serves()
    scene.create(extra_headers={"x-rrl-train": "0"})
    assert headers_of(replica)["x-rrl-train"] == "0"


def test_headers_beyond_ascii_and_bodies_that_only_the_endpoint_refuses_pass_the_relay(scene: Scene) -> None:
    replica = scene.serves(replies(FENCED, 403))
    assert scene.post("/v1/messages", {"user-agent": "Zoë"}, b'{"a":' + b"[" * 5000) == (403, FENCED)
    assert headers_of(replica)["user-agent"] == "Zoë"


def test_agent_that_stops_reading_stops_the_replica_from_sending(scene: Scene) -> None:
    piece, sent, stopped = event("x" * 2**16, 1, "1"), 0, threading.Event()

    async def flood(request: Request) -> Response:
        async def content() -> AsyncIterator[bytes]:
            nonlocal sent
            try:
                for _ in range(2000):
                    yield piece
                    sent += len(piece)
            finally:
                stopped.set()

        return StreamingResponse(content(), media_type="text/event-stream")

    scene.serves(flood)
    host = scene.server.base_url.removeprefix("http://").removesuffix("/v1")
    connection = http.client.HTTPConnection(host, timeout=DEADLINE_S)
    connection.request("POST", "/v1/chat/completions", b'{"stream": true}')
    response = connection.getresponse()
    assert response.read(10)

    async def still() -> int:
        before = -1
        while sent != before:  # the kernel's buffers of two connections fill up, after which no byte moves
            before = sent
            await asyncio.sleep(1.0)
        return sent

    assert asyncio.run(asyncio.wait_for(still(), DEADLINE_S)) < 32 * 2**20
    assert not stopped.is_set()
    connection.close()
    response.close()
    assert stopped.wait(DEADLINE_S), "the call at the replica has not ended after its agent was gone"


def test_call_whose_agent_has_disconnected_ends_at_the_replica(scene: Scene) -> None:
    ended = threading.Event()

    async def waits(request: Request) -> Response:
        async def content() -> AsyncIterator[bytes]:
            try:
                while True:
                    yield b" "
                    await asyncio.sleep(0.1)
            finally:
                ended.set()

        return StreamingResponse(content(), media_type="application/json")

    replica = scene.serves(waits)
    host = scene.server.base_url.removeprefix("http://").removesuffix("/v1")
    connection = http.client.HTTPConnection(host, timeout=DEADLINE_S)
    connection.request("POST", "/v1/chat/completions", b"{}")
    replica.wait_requests(1, DEADLINE_S)
    assert not ended.is_set()
    connection.close()
    assert ended.wait(DEADLINE_S)


def test_size_of_each_body_and_of_all_bodies_together_is_bounded(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    replica = scene.serves()
    monkeypatch.setattr(http_messages, "MAX_BODY_BYTES", 1000)
    assert scene.post("/v1/chat/completions", content=b"x" * 1001)[0] == 413
    monkeypatch.setattr(relay, "MAX_MEMORY_BYTES", 500)
    status, got = scene.post("/v1/chat/completions", content=b"x" * 501)
    assert (status, got["error"]["code"]) == (503, "relay_busy")
    monkeypatch.setattr(relay, "MAX_MEMORY_BYTES", 1000)
    for _ in range(5):  # each call frees the memory that its body took
        assert scene.post("/v1/chat/completions", content=b"x" * 600)[0] == 200
    assert len(replica.requests) == 5
