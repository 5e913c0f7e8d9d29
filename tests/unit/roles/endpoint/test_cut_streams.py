"""Where an answer cannot go on: 403 before a stream, and a connection that is cut in it, at the level of bytes."""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Iterator
from typing import Any

import pytest

from rrl.roles.endpoint.forms import FORMS
from rrl.roles.models.tokenizer import EOS
from rrl.tests.support.listening_manager import wait_until
from rrl.tests.support.roles.endpoint.cut_streams import CutStreams
from rrl.tests.support.roles.endpoint.served import BODIES, CHAT, DEADLINE_S, Scene


@pytest.fixture
def scene() -> Iterator[Scene]:
    made = Scene()
    yield made
    made.server.stop()


@pytest.fixture(params=FORMS)
def wire(request: pytest.FixtureRequest) -> str:
    return str(request.param)


class Connection:
    """A connection on which a call is made, byte by byte."""

    def __init__(self, scene: Scene, wire: str, *, stream: bool = True, kept: bool = False) -> None:
        host, _, port = scene.server.base_url.removeprefix("http://").removesuffix("/v1").partition(":")
        body = json.dumps({"model": "any", "stream": stream, **BODIES[wire]})
        self._socket = socket.create_connection((host, int(port)), DEADLINE_S)
        head = f"POST /v1{FORMS[wire].path} HTTP/1.1\r\nhost: {host}\r\n"
        head += "" if kept else "connection: close\r\n"
        self._socket.sendall(
            f"{head}authorization: Bearer {scene.key()}\r\ncontent-length: {len(body)}\r\n\r\n{body}".encode()
        )
        self.received = b""

    def read_until(self, part: bytes) -> None:
        while part not in self.received:
            read = self._socket.recv(65536)
            assert read, self.received
            self.received += read

    def read_to_end(self) -> bytes:
        """Return all bytes up to the end of the connection."""
        try:
            while read := self._socket.recv(65536):
                self.received += read
        except ConnectionResetError:
            pass
        return self.received

    def close(self) -> None:
        self._socket.close()

    def reset(self) -> None:
        """Close the connection as the kernel does for a client that has not read everything."""
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._socket.close()


def check_cut(received: bytes, wire: str) -> None:
    """Check that a stream has neither an end in its form nor the end of its chunked body."""
    assert b"transfer-encoding: chunked" in received.lower()
    assert not received.endswith(b"0\r\n\r\n")
    assert not any(last in received for last in FORMS[wire].last)
    assert b'"error": {' not in received
    assert b'"error":{' not in received


def test_stream_of_an_attempt_that_is_over_is_cut_and_the_repeated_call_gets_403(scene: Scene, wire: str) -> None:
    call = Connection(scene, wire)
    turn = scene.wait_opened(1)
    scene.turns.sample(turn.id, *CHAT.tokenizer.encode("1"))
    call.read_until(b"\n\n\r\n" if wire in ("responses", "messages") else b'"1"')
    scene.turns.begin_attempt(0, 2)
    check_cut(call.read_to_end(), wire)
    again = Connection(scene, wire)
    again.read_to_end()
    assert again.received.startswith(b"HTTP/1.1 403 ")
    assert b"permission_error" in again.received


def test_stream_of_an_endpoint_that_ends_is_cut(scene: Scene, wire: str) -> None:
    call = Connection(scene, wire)
    turn = scene.wait_opened(1)
    scene.turns.sample(turn.id, *CHAT.tokenizer.encode("1"))
    call.read_until(b"data: ")
    scene.server.stop()
    check_cut(call.read_to_end(), wire)


def test_plain_answer_of_an_attempt_that_is_over_is_cut(scene: Scene, wire: str) -> None:
    call = Connection(scene, wire, stream=False)
    scene.wait_opened(1)
    call.read_until(b"\r\n\r\n1\r\n ")
    scene.turns.begin_attempt(0, 2)
    assert not call.read_to_end().endswith(b"0\r\n\r\n")


def test_repeated_call_of_each_form_gets_the_same_turn_and_ids_as_stream_and_as_object(scene: Scene, wire: str) -> None:
    broken = Connection(scene, wire)
    turn = scene.wait_opened(1)
    broken.read_until(b"\r\n\r\n")
    broken.close()
    wait_until(lambda: scene.turns.marked == [(turn.id, False, False)] and not scene.endpoint.waiting)
    scene.turns.sample(turn.id, *CHAT.tokenizer.encode("12"), EOS, finished=True)
    plain = Connection(scene, wire, stream=False)
    plain.read_to_end()
    answered = json.loads(plain.received.partition(b"\r\n\r\n")[2])
    assert "12" in json.dumps(answered)
    streamed = Connection(scene, wire)
    wait_until(lambda: len(scene.opened) == 2)  # the first answer was delivered
    streamed.close()
    assert f"{turn.id:x}" in answered["id"]


@pytest.mark.parametrize("stream", [False, True])
def test_answer_whose_connection_is_reset_after_its_end_is_undelivered_and_goes_once_to_an_equal_call(
    scene: Scene, wire: str, stream: bool
) -> None:
    """A proxy or network may lose the end that the endpoint has written."""
    scene.answers("12")
    cut = Connection(scene, wire, stream=stream, kept=True)
    wait_until(lambda: scene.endpoint.answered == 1 and not scene.endpoint.waiting)
    cut.reset()
    wait_until(lambda: scene.turns.marked == [(scene.opened[0].id, False, False)])
    assert b'12"' in Connection(scene, wire, stream=False).read_to_end()
    assert len(scene.opened) == 1
    Connection(scene, wire).read_to_end()
    assert len(scene.opened) == 2, "the second answer was read to its end"


def test_end_of_a_stream_arrives_with_its_last_event(scene: Scene, wire: str) -> None:
    """A client that closes its connection at the last event would otherwise reset it, as if it lacked the event."""
    number = 20
    scene.answers(*["12"] * number)
    for _ in range(number):
        call = Connection(scene, wire, kept=True)
        call.read_until(FORMS[wire].last[0])
        assert call.received.endswith(b"0\r\n\r\n")


@pytest.mark.parametrize("tokens_at_once", [1, 4])
def test_stream_that_is_cut_after_any_event_is_never_sampled_again(
    scene: Scene, wire: str, tokens_at_once: int
) -> None:
    """The first calls are cut after 0, 1, 2, ... events; the first one that is not gets the whole answer."""
    scene.endpoint.application.add_middleware(CutStreams, cuts=list(range(40)))
    tokens = (*CHAT.tokenizer.encode("123"), EOS)

    def policy(turn: Any) -> None:
        for first in range(0, len(tokens), tokens_at_once):
            part = tokens[first : first + tokens_at_once]
            scene.turns.sample(turn.id, *part, finished=first + len(part) == len(tokens))

    scene.policy = policy
    for _ in range(40):
        received = Connection(scene, wire).read_to_end()
        if received.endswith(b"0\r\n\r\n"):
            break
        assert not any(last in received for last in FORMS[wire].last)
        wait_until(lambda: not scene.endpoint.waiting and not scene.endpoint._reports)
    assert any(last in received for last in FORMS[wire].last)
    assert len(scene.opened) == 1
