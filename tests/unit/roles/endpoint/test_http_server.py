"""The endpoint's server stops although a call still waits for its reply."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from rrl.core.types import Incarnation, ProbeResult, ReplicaId
from rrl.roles.endpoint import http_server
from rrl.roles.endpoint.http_server import EndpointServer
from rrl.roles.worker.main_thread import ProbeResponder
from rrl.transport.messages import Probe, ProbeReply

TIMEOUT_S = 30.0


def test_stop_breaks_the_connection_of_a_waiting_call_without_a_reply() -> None:
    arrived = threading.Event()

    async def wait(_: Request) -> Response:
        arrived.set()
        await asyncio.sleep(2 * TIMEOUT_S)
        return Response()

    server = EndpointServer(Starlette(routes=[Route("/v1/models", wait)]))
    server.start()
    client = openai.OpenAI(base_url=server.base_url, api_key="any", max_retries=0)
    with ThreadPoolExecutor(1) as threads:
        call = threads.submit(client.models.list)
        assert arrived.wait(TIMEOUT_S)
        server.stop()
        with pytest.raises(openai.APIConnectionError):
            call.result(TIMEOUT_S)


# ── probes ───────────────────────────────────────────────────────────────────────────────────────────────────────────
ENDPOINT = Incarnation(ReplicaId("endpoint/0"), 1)


class ProbedProcess:
    """The probes of a process, and the calls of an application, which all wait until ``free`` is set."""

    def __init__(self) -> None:
        self.replies: list[ProbeReply] = []
        self.replied, self.registered, self.free = threading.Event(), threading.Event(), threading.Event()
        self._responder = ProbeResponder(self._reply)
        self.free.set()

    def _reply(self, reply: ProbeReply) -> None:
        self.replies.append(reply)
        self.replied.set()

    @property
    def probed(self) -> bool:
        return self._responder.pending

    def on_probe(self, handler: Callable[[], object]) -> None:
        self._responder.on_probe(handler)
        self.registered.set()

    def answer_probe(self) -> None:
        self._responder.answer()

    def probe(self, number: int) -> None:
        assert self.registered.wait(TIMEOUT_S)
        self._responder.on_request(Probe(ENDPOINT, number), ENDPOINT)

    async def models(self, _: Request) -> Response:
        self.free.wait()  # blocks the loop of the server
        return JSONResponse({})


def test_probe_is_answered_by_the_loop_that_serves_calls_and_not_while_it_hangs() -> None:
    me = ProbedProcess()
    server = EndpointServer(Starlette(routes=[Route("/v1/models", me.models)]))
    server.start(me)
    me.probe(1)
    assert me.replied.wait(TIMEOUT_S)
    assert [(reply.id, reply.result) for reply in me.replies] == [(1, ProbeResult.WORKS)]
    me.replied.clear()
    me.free.clear()
    me.probe(2)
    assert not me.replied.wait(3.0), "a loop that hangs answers probes"
    me.free.set()
    assert me.replied.wait(TIMEOUT_S)
    server.stop()


def test_probe_is_not_answered_while_the_rest_of_the_process_is_not_ready() -> None:
    me, asked, ready = ProbedProcess(), threading.Event(), threading.Event()

    async def wait() -> None:
        asked.set()
        while not ready.is_set():
            await asyncio.sleep(0.01)

    server = EndpointServer(Starlette(routes=[Route("/v1/models", me.models)]))
    server.start(me, wait)
    me.probe(1)
    assert asked.wait(TIMEOUT_S)
    assert not me.replies
    ready.set()
    assert me.replied.wait(TIMEOUT_S)
    server.stop()


def test_small_writes_do_not_wait_for_acknowledgements(monkeypatch: pytest.MonkeyPatch) -> None:
    options: list[int] = []

    def connection_made(self: http_server._BoundedProtocol, transport: asyncio.Transport) -> None:
        options.append(transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        made(self, transport)

    made = http_server._BoundedProtocol.connection_made
    monkeypatch.setattr(http_server._BoundedProtocol, "connection_made", connection_made)
    server = EndpointServer(Starlette())
    server.start()
    with pytest.raises(openai.NotFoundError):
        openai.OpenAI(base_url=server.base_url, api_key="any").models.list()
    server.stop()
    assert options == [1]
