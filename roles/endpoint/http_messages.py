"""Parts that all routes of the endpoint share: keys and bodies of requests, and errors as replies."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable
from typing import Any

from h11 import LocalProtocolError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from ..trajectories.client import Fenced, FencedAttempt, NoAnswer, Refused
from .calls.errors import ApiError
from .forms import OVERLOADED, error_reply
from .key import EpisodeKey, decode_key

_log = logging.getLogger("rrl.endpoint")

MAX_BODY_BYTES = 16 * 2**20
"""Maximum size (bytes) of a body: a conversation of 1 M tokens has about 4 MB of text."""
BODY_TIMEOUT_S = 60.0
"""Seconds in which a body must arrive, so that slow senders do not occupy memory indefinitely."""
_SERVED = (
    "this server answers POST /v1/chat/completions, POST /v1/responses, POST /v1/messages, POST /v1/completions,"
    " GET /v1/models and POST /rrl/v1/episodes"
)


class Abandoned(Exception):
    """A reply that has begun cannot be completed: its connection is closed, so that the agent repeats the call."""


def bearer_key(request: Request, run: str, secret: bytes) -> EpisodeKey:
    """Return the content of a request's API key, which OpenAI's and Anthropic's clients send in different headers.

    Args:
        request: The request.
        run: Name of the run directory.
        secret: The secret of the run.

    Raises:
        ApiError: This run has not issued the key.
    """
    scheme, _, text = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not text.strip():
        text = request.headers.get("x-api-key", "")
    key = decode_key(text.strip(), run, secret)
    if key is None:
        message = "the API key is not one of this run; use the api_key that the agent was given"
        raise ApiError(401, message, code="invalid_api_key")
    return key


async def read_body(request: Request, limit: float = math.inf, take: Callable[[int], None] = lambda _: None) -> bytes:
    """Return the body of a request; refuse a body that is too large or arrives too slowly.

    Args:
        request: The request.
        limit: Maximum number of bytes, if it is less than :data:`MAX_BODY_BYTES`.
        take: Called with the number of bytes of each piece, before the piece is kept.

    Raises:
        ApiError: The body is too large, or arrives too slowly.
    """
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            async for piece in request.stream():
                take(len(piece))
                body += piece
                check_size(body, limit)
    except TimeoutError:
        raise ApiError(408, f"the body did not arrive within {BODY_TIMEOUT_S:g} s") from None
    return bytes(body)


def check_size(body: bytes | bytearray, limit: float) -> None:
    """Refuse a body of more bytes than ``limit`` or :data:`MAX_BODY_BYTES`. Raises ApiError."""
    limit = int(min(limit, MAX_BODY_BYTES))
    if len(body) > limit:
        raise ApiError(413, f"the body has more than {limit >> 10:,} KiB", code="request_too_large")


async def _error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    status, body = error_reply(request.url.path, error)
    wait = {"retry-after": "1"} if status == OVERLOADED else {}  # Anthropic's clients expect it with this status
    return JSONResponse(body, status, wait | error.headers)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path}: {error.detail}; {_SERVED}"
    return await _error(request, ApiError(error.status_code, message, code="not_served"))


async def _disconnected(_: Request, error: Exception) -> Response:
    return Response(status_code=400)  # the client has disconnected, so this reply is not sent


async def _attempt_over(request: Request, error: Exception) -> Response:
    return await _error(request, ApiError(403, str(error), "permission_error", "attempt_over"))


async def _refused(request: Request, error: Exception) -> Response:
    status, code = (409, "no_answer") if isinstance(error, NoAnswer) else (400, "refused")
    return await _error(request, ApiError(status, str(error), code=code))


async def _superseded(request: Request, error: Exception) -> Response:
    message = "this endpoint is being replaced; repeat the request"
    return await _error(request, ApiError(503, message, "server_error", "endpoint_replaced"))


async def _unexpected(request: Request, error: Exception) -> Response:
    if isinstance(error, Abandoned | LocalProtocolError):  # uvicorn has answered a body that is not HTTP
        _log.info("a call of %s ended without an answer: %s", request.url.path, error)
        return Response(status_code=403)  # this reply is not sent: the connection is closed
    _log.error("%s %s failed", request.method, request.url.path, exc_info=error)
    return await _error(request, ApiError(500, "the endpoint failed; see its log", "server_error"))


EXCEPTION_HANDLERS: dict[Any, Any] = {
    ApiError: _error,
    FencedAttempt: _attempt_over,
    Fenced: _superseded,
    Refused: _refused,
    HTTPException: _http_error,
    ClientDisconnect: _disconnected,
    Exception: _unexpected,
}
"""Functions that turn an exception into the reply to the request, by the type of the exception."""
