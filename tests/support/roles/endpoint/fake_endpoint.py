"""A stand-in for a replica of the endpoint, which answers as the test demands and can break connections."""

from __future__ import annotations

import json
import threading
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from rrl.roles.endpoint.http_server import EndpointServer

Act = Callable[[Request], Awaitable[Response]]


class FakeEndpoint:
    """Answers each request by the next one of ``acts``, and repeats the last one.

    Without acts, each answer has the text "5".
    """

    def __init__(self, *acts: Act) -> None:
        self._acts = deque(acts)
        self.requests: list[tuple[str, dict[str, str], bytes]] = []
        """Path, headers and body of each request."""
        self._changed = threading.Condition()
        routes = [Route("/{path:path}", self._answer, methods=["GET", "POST"])]
        self._server = EndpointServer(Starlette(routes=routes))
        self.base_url = self._server.base_url
        self._server.start()

    def stop(self) -> None:
        self._server.stop()

    def wait_requests(self, count: int, seconds: float) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.requests) >= count, seconds), self.requests

    async def _answer(self, request: Request) -> Response:
        body = await request.body()
        with self._changed:
            self.requests.append((request.url.path, dict(request.headers), body))
            self._changed.notify_all()
        if not self._acts:
            return JSONResponse(completion("5"))
        return await (self._acts.popleft() if len(self._acts) > 1 else self._acts[0])(request)


class _BrokenOff(Exception):
    """Raised to close a connection in the middle of a response's content."""


def replies(content: Any, status: int = 200, **headers: str) -> Act:
    async def act(request: Request) -> Response:
        return JSONResponse(content, status, headers)

    return act


def plain(status: int, text: str) -> Act:
    """Answer with a plain body, as the endpoint's server does."""

    async def act(request: Request) -> Response:
        return Response(text, status, media_type="text/plain")

    return act


def breaks(*pieces: bytes, media_type: str = "application/json") -> Act:
    """Send the first pieces of a response's content, and then close the connection."""

    async def act(request: Request) -> Response:
        async def content() -> AsyncIterator[bytes]:
            for piece in pieces:
                yield piece
            raise _BrokenOff

        return StreamingResponse(content(), media_type=media_type)

    return act


def streams(*pieces: bytes) -> Act:
    async def act(request: Request) -> Response:
        async def content() -> AsyncIterator[bytes]:
            for piece in pieces:
                yield piece

        return StreamingResponse(content(), media_type="text/event-stream")

    return act


def completion(text: str) -> dict[str, Any]:
    message = {"role": "assistant", "content": text, "refusal": None}
    choice = {"index": 0, "message": message, "finish_reason": "stop", "logprobs": None}
    return {"id": "c", "object": "chat.completion", "created": 0, "model": "policy", "choices": [choice]}


def event(text: str, call: int | None = None, sent: str = "") -> bytes:
    """Return an event of a stream of a chat completion.

    With ``call`` (a number), the comment follows by which the endpoint reports that the agent has ``sent`` tokens.
    """
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": None, "logprobs": None}
    chunk = {"id": "c", "object": "chat.completion.chunk", "created": 0, "model": "policy", "choices": [choice]}
    position = b"" if call is None else b": rrl %d %s\n\n" % (call, sent.encode())
    return b"data: " + json.dumps(chunk).encode() + b"\n\n" + position


DONE = b"data: [DONE]\n\n"
