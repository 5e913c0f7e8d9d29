"""The relay: an HTTP proxy for an agent outside of the run. It holds the agent's calls while the endpoint restarts.

It passes every call to a replica of the endpoint. If that replica is lost, the relay looks for the address again and
repeats the call. The endpoint then continues the turn that the call has opened. While a call waits, the relay sends
white space before a JSON answer, and comments in a stream, so that no read timeout of the agent expires. The relay does
not interpret tokens. After each event of a stream, the endpoint sends the number of the call and the number of tokens
that the agent has by then (``: rrl CALL SENT``). The relay repeats a call with these two numbers.

A relay keeps the body of each call, one event or the end of each stream, and every answer that is not a stream until it
is complete. Together they take at most :data:`MAX_MEMORY_BYTES` of memory. If an agent reads slowly, only its own
answer is delayed, at the relay and at the endpoint.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
import uuid
import zlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import aclosing, contextmanager, suppress
from typing import Any, TypeVar

import httpx2
import msgspec
from msgspec import Struct
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Mount
from starlette.types import Receive, Scope, Send

from .calls.errors import ApiError
from .forms import form_at
from .http_messages import EXCEPTION_HANDLERS, Abandoned, read_body

_log = logging.getLogger("rrl.relay")

MAX_EVENT_BYTES = 16 * 2**20
"""Maximum size (bytes) of an event of a stream. It suffices, because one event has at most the tokens of a prompt and
of a segment."""
MAX_MEMORY_BYTES = 512 * 2**20
"""Maximum number of bytes that all calls together may keep; a call that needs more gets 503, and its client repeats it
later."""
KEEP_ALIVE_S = 0.5
"""Seconds between two signs of life of a waiting answer; the endpoint sends them at the same interval."""
SILENCE_S = 15.0
"""Seconds without a byte of the answer to a completion, after which the replica counts as lost. A working replica sends
two signs of life per second."""
OPENING_SILENCE_S = 60.0
"""Seconds without a byte of the answer to a call that is not a completion, after which the replica counts as lost.
It is longer than :data:`SILENCE_S`, because such an answer has no signs of life: opening an episode may take 30 s."""
CONNECT_TIMEOUT_S = 5.0
"""Timeout (s) of connecting to a replica, because a node that is gone does not refuse connections."""
RETRY_S = 0.3
"""Seconds between two attempts to reach the endpoint while it is unavailable."""
LOOK_INTERVAL_S = 1.0
"""Seconds between two reads of the endpoint's addresses from the run directory."""
_EPISODES = "/rrl/v1/episodes"
_RETRY_HEADER = "x-stainless-retry-count"
_NOT_PASSED = frozenset(
    {
        "connection",
        "content-length",
        "date",
        "expect",
        "host",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "proxy-connection",
        "server",
        "te",
        "trailer",
        "transfer-encoding",
        "accept-encoding",
    }
)
"""Headers that the relay does not pass on, because they concern a single connection, or would request compressed
answers."""
_OWN_HEADERS = frozenset({"x-rrl-relay", "x-rrl-call", "x-rrl-sent"})
"""Headers that only a relay sends."""
_EVENT_STREAM = "text/event-stream"
_POSITION = b": rrl "
T = TypeVar("T")
Take = Callable[[int], None]
"""Reserves further bytes of the relay's memory for a call. Raises ApiError if too few are left."""


class _Streamed(Struct):
    """The part of a body that says whether the answer is a stream."""

    stream: bool | None = False


class _Answer(Struct, frozen=True):
    """A complete answer of the endpoint."""

    status: int
    headers: dict[str, str]
    content: bytes


class _Memory:
    """Counts the bytes that all calls keep."""

    def __init__(self) -> None:
        self._taken = 0

    @contextmanager
    def share(self) -> Iterator[Take]:
        """Yield a function that reserves further bytes; release all reserved bytes at the end of the block.

        The function raises ApiError if all calls together would keep too much.
        """
        mine = 0

        def take(count: int) -> None:
            nonlocal mine
            if self._taken + count > MAX_MEMORY_BYTES:
                raise ApiError(
                    503, "the relay has no memory left for this call; repeat it later", "server_error", "relay_busy"
                )
            mine += count
            self._taken += count

        try:
            yield take
        finally:
            self._taken -= mine


class _Call:
    """A call of an agent, as the relay sends it to the endpoint."""

    def __init__(self, request: Request, target: str, body: bytes) -> None:
        self.method, self.target, self.body = request.method, target, body
        self.path = target.partition("?")[0]
        form = form_at(self.path) if self.method == "POST" else None
        self.form = form if form is not None and self.path.endswith(form.path) else None
        """The API of a call that asks for an answer; None for any other call."""
        self.alive = b": waiting\n\n"
        """Event or comment that says that the stream is alive."""
        passed = {name: value for name, value in request.headers.items() if name not in _NOT_PASSED}
        self._headers = {name: value for name, value in passed.items() if name not in _OWN_HEADERS}
        self._headers |= {"x-rrl-relay": "1", "accept-encoding": "identity"}
        if self.opens_episode:  # a repeated request must not open another episode
            self._headers.setdefault("idempotency-key", uuid.uuid4().hex)
        self.repeated = False
        """True if a replica may have begun to work on the call."""
        self.position: tuple[str, str] | None = None
        """What the endpoint last reported: the number of the call, and how many tokens of each answer the agent has.
        None before the first report."""
        self.upstream: httpx2.Response | None = None
        """The newest answer of a replica."""
        self._task: asyncio.Future[Any] | None = None

    @property
    def owner(self) -> int:
        """A number made from the API key. It selects the replica that gets all calls of an episode, while it is up."""
        key = self._headers.get("authorization") or self._headers.get("x-api-key", "")
        return zlib.crc32(key.encode())

    @property
    def opens_episode(self) -> bool:
        """True if the agent asks for an episode."""
        return self.method == "POST" and self.path == _EPISODES

    @property
    def is_completion(self) -> bool:
        """True if the agent asks for an answer of the model.

        The endpoint sends signs of life while such a call waits for its answer. If the call is repeated, the endpoint
        continues the answer.
        """
        return self.form is not None

    @property
    def is_stream(self) -> bool:
        """True if the agent asks for a stream."""
        try:
            return self.is_completion and bool(msgspec.json.decode(self.body, type=_Streamed).stream)
        except (msgspec.MsgspecError, RecursionError):
            return False  # the endpoint refuses it

    def start(self, work: Coroutine[Any, Any, T]) -> asyncio.Future[T]:
        """Start the work on the call; :meth:`close` cancels it."""
        self._task = task = asyncio.ensure_future(work)
        return task

    async def close(self) -> None:
        """End the work on the call, and its connection to a replica."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        if self.upstream is not None:
            await self.upstream.aclose()

    def headers(self) -> httpx2.Headers:
        """Return the headers of the next try."""
        headers = dict(self._headers)
        if self.repeated and headers.get(_RETRY_HEADER, "0") == "0":
            headers[_RETRY_HEADER] = "1"
        if self.position is not None:
            headers["x-rrl-call"], headers["x-rrl-sent"] = self.position
        return httpx2.Headers(headers, encoding="latin-1")  # as starlette has decoded them


class Relay:
    """The HTTP application of the relay, for use only in the event loop that serves it.

    Args:
        look: Returns the base URLs of the endpoint's replicas, as far as they are known now, and whether the run has
            ended. It may block; it is called in threads, and never twice at the same time.
    """

    def __init__(self, look: Callable[[], tuple[Sequence[str], bool]]) -> None:
        self._look = look
        self._addresses: Sequence[str] = ()
        self._over = False
        self._looking = asyncio.Lock()
        self._looked_at = -math.inf
        self._memory = _Memory()
        self._client = httpx2.AsyncClient(limits=httpx2.Limits(), trust_env=False)
        self.application = Starlette(
            routes=[Mount("/", app=self._serve)], exception_handlers=EXCEPTION_HANDLERS | {Exception: _unexpected}
        )

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        target = scope["raw_path"].decode("ascii")
        if not target.startswith("/"):
            raise ApiError(400, f"{target!r} is not a path of this server; a path begins with /", code="invalid_value")
        if request.url.query:
            target += f"?{request.url.query}"
        with self._memory.share() as take:
            call = _Call(request, target, await read_body(request, take=take))
            try:
                if call.is_stream:
                    response = await self._stream(call, take)
                elif call.is_completion:
                    response = await self._padded(call, take)
                else:
                    response = await self._held(call, request, take)
                await response(scope, receive, send)
            finally:
                await call.close()

    # ── replies ────────────────────────────────────────────────────────────────────────────────────────────────────
    async def _held(self, call: _Call, request: Request, take: Take) -> Response:
        """Return the complete answer to a call that is not a completion.

        If the agent closes its connection before the answer is complete, the wait ends with ClientDisconnect.
        """
        fetching = call.start(self._fetch(call, take))
        while not fetching.done():
            await asyncio.wait([fetching], timeout=KEEP_ALIVE_S)
            if not fetching.done() and await request.is_disconnected():
                raise ClientDisconnect()
        answer = fetching.result()
        if call.opens_episode and answer.status == 200:
            answer = _with_base_url(answer, f"http://{request.headers.get('host', '')}/v1")
        return Response(answer.content, answer.status, answer.headers)

    async def _padded(self, call: _Call, take: Take) -> Response:
        """Return the answer to a completion that is not a stream; if it takes long, send white space before it."""
        fetching = call.start(self._fetch(call, take))
        await asyncio.wait([fetching], timeout=KEEP_ALIVE_S)
        if fetching.done():
            answer = fetching.result()
            return Response(answer.content, answer.status, answer.headers)

        async def padded() -> AsyncIterator[bytes]:
            try:
                while not fetching.done():
                    yield b" "
                    await asyncio.wait([fetching], timeout=KEEP_ALIVE_S)
                answer = fetching.result()
            except ApiError as error:
                raise Abandoned(str(error)) from None
            if answer.status != 200:  # the client repeats the call and then gets the status
                raise Abandoned(f"the endpoint has answered with status {answer.status}")
            yield answer.content

        return StreamingResponse(padded(), media_type="application/json")

    async def _stream(self, call: _Call, take: Take) -> Response:
        """Return the answer to a completion that is a stream."""
        opening = call.start(self._open(call))
        await asyncio.wait([opening], timeout=KEEP_ALIVE_S)
        if opening.done() and opening.result().status_code != 200:
            answer = await self._fetch(call, take, opening.result())
            return Response(answer.content, answer.status, answer.headers)
        return StreamingResponse(_kept_alive(call, self._events(call, opening, take)), media_type=_EVENT_STREAM)

    async def _events(self, call: _Call, opening: asyncio.Future[httpx2.Response], take: Take) -> AsyncGenerator[bytes]:
        """Yield the events of a stream up to its end, even if several replicas send parts of it.

        An error is an event only if it is the first one. Otherwise the stream breaks: a client may take an error for
        the end of the answer. The client repeats the call, and then gets the status.
        """
        assert call.form is not None
        begun = False
        try:
            upstream = await opening
            while upstream.status_code == 200:
                with suppress(httpx2.TransportError):
                    async with aclosing(_tracked_events(call, upstream, take)) as events:
                        async for event in events:
                            begun = True
                            yield event
                            if event.startswith(call.form.alive):
                                call.alive = event
                            if event.startswith(call.form.last):
                                return
                if begun and call.position is None:
                    raise Abandoned(
                        "the endpoint did not report how much of its answer the agent has received, so"
                        " another replica cannot continue the answer"
                    )
                upstream = await self._open_again(call)
            refused = (await self._fetch(call, take, upstream)).content
        except ApiError as error:
            refused = msgspec.json.encode(call.form.error(error))
        if begun:
            raise Abandoned(f"the answer cannot be continued: {refused.decode()}")
        yield call.form.failed % {b"members": refused.replace(b"\n", b" ").strip()[1:-1]}

    # ── the endpoint ───────────────────────────────────────────────────────────────────────────────────────────────
    async def _fetch(self, call: _Call, take: Take, upstream: httpx2.Response | None = None) -> _Answer:
        """Return the complete answer to a call, and repeat the call whenever its answer breaks off.

        ``upstream`` is the first answer; if it is None, the call is sent first.
        """
        if upstream is None:
            upstream = await self._open(call)
        while True:
            try:
                content = await _content(upstream, take)
            except httpx2.TransportError:
                upstream = await self._open_again(call)
            else:
                return _Answer(upstream.status_code, _passed_headers(upstream), content)

    async def _open_again(self, call: _Call) -> httpx2.Response:
        """Repeat a call whose replica was lost in the middle of its answer."""
        _log.info("%s: a replica was lost in the middle of its answer; the call is repeated", call.path)
        call.repeated = True
        await asyncio.sleep(RETRY_S)
        return await self._open(call)

    async def _open(self, call: _Call) -> httpx2.Response:
        """Send a call until a replica answers it, and return the answer, whose content is not read yet.

        Raises:
            ApiError: The run has ended.
        """
        timeout = httpx2.Timeout(
            CONNECT_TIMEOUT_S, read=SILENCE_S if call.is_completion else OPENING_SILENCE_S, write=SILENCE_S, pool=None
        )
        while True:
            for root in await self._roots(call.owner):
                request = self._client.build_request(
                    call.method, root + call.target, headers=call.headers(), content=call.body, timeout=timeout
                )
                try:
                    upstream = await self._client.send(request, stream=True)
                except (httpx2.ConnectError, httpx2.ConnectTimeout):
                    continue  # the replica has not received the call
                except httpx2.TransportError:
                    call.repeated = True
                    continue
                call.upstream = upstream
                if not _is_unavailable(call, upstream):
                    return upstream
                # a 503 without JSON means too many connections: the replica has not begun to work on the call
                call.repeated |= upstream.status_code != 503 or _is_json(upstream)
                await upstream.aclose()
            if self._over:
                raise ApiError(410, "the run has ended", code="run_ended")
            await asyncio.sleep(RETRY_S)

    async def _roots(self, owner: int) -> Sequence[str]:
        """Return the replicas' addresses without a path; the first replica is the one for the calls of ``owner``."""
        async with self._looking:
            if time.monotonic() - self._looked_at >= LOOK_INTERVAL_S:
                self._addresses, self._over = await asyncio.to_thread(self._look)
                self._looked_at = time.monotonic()
        roots = [address.removesuffix("/v1") for address in self._addresses]
        first = owner % len(roots) if roots else 0
        return roots[first:] + roots[:first]


# ── streams ────────────────────────────────────────────────────────────────────────────────────────────────────────
async def _kept_alive(call: _Call, events: AsyncGenerator[bytes]) -> AsyncIterator[bytes]:
    """Yield events and, whenever there was no event for :data:`KEEP_ALIVE_S`, that the stream is alive."""
    async with aclosing(events):
        while True:
            taking = asyncio.ensure_future(anext(events, None))
            try:
                while not taking.done():
                    await asyncio.wait([taking], timeout=KEEP_ALIVE_S)
                    if not taking.done():
                        yield call.alive
            finally:
                if not taking.done():
                    taking.cancel()
                    await asyncio.wait([taking])
            if (event := taking.result()) is None:
                return
            yield event


async def _tracked_events(call: _Call, upstream: httpx2.Response, take: Take) -> AsyncGenerator[bytes]:
    """Yield the events of a replica's stream, without the comments.

    Each event is held back until the stream's position after this event is known, or until the last event has arrived:
    the endpoint writes the end of an answer at once. If the replica is lost, events that are still held back are not
    yielded, because the answer to the repeated call contains them again.
    """
    held: list[bytes] = []
    last = call.form.last if call.form is not None else ()
    async with aclosing(_blocks(upstream, take)) as blocks:
        async for block in blocks:
            lines = block.split(b"\n")
            if event := b"\n".join(line for line in lines if not line.startswith(b":")):
                held.append(event + b"\n\n")
            position = next((line for line in lines if line.startswith(_POSITION)), None)
            if position is not None:
                number, _, sent = position.removeprefix(_POSITION).decode("ascii", "replace").partition(" ")
                call.position = number, sent
            if position is not None or event.startswith(last):
                for one in held:
                    yield one
                held = []


async def _blocks(upstream: httpx2.Response, take: Take) -> AsyncGenerator[bytes]:
    """Yield the blocks between the blank lines of an upstream's stream."""
    buffered, taken = bytearray(), 0
    try:
        async for piece in upstream.aiter_raw():
            buffered += piece
            if len(buffered) > taken:
                take(len(buffered) - taken)
                taken = len(buffered)
            while (end := buffered.find(b"\n\n")) >= 0:
                yield bytes(buffered[:end])
                del buffered[: end + 2]
            if len(buffered) > MAX_EVENT_BYTES:
                raise Abandoned(f"an event of the endpoint has more than {MAX_EVENT_BYTES >> 20} MiB")
    finally:
        await upstream.aclose()


# ── bodies and contents ────────────────────────────────────────────────────────────────────────────────────────────
async def _content(upstream: httpx2.Response, take: Take) -> bytes:
    """Return the content of a replica's answer, without the white space that was sent before the content.

    Raises:
        httpx2.TransportError: The replica was lost before the end of the answer.
    """
    content = bytearray()
    try:
        async for piece in upstream.aiter_raw():
            added = piece if content else piece.lstrip(b" ")
            take(len(added))
            content += added
    finally:
        await upstream.aclose()
    return bytes(content)


def _is_unavailable(call: _Call, upstream: httpx2.Response) -> bool:
    """Return whether a replica could not accept a call, or was stopped before it began its answer.

    A 503 with ``Retry-After`` is the answer that no episode is free, and a 500 with an error object is an answer, too.
    A replica that is replaced says so by the status of the form. Any other 5xx comes from the HTTP server that runs the
    application; the application has not answered the call.
    """
    if upstream.status_code in (503, 529):
        return not call.opens_episode or "retry-after" not in upstream.headers
    return upstream.status_code == 502 or (upstream.status_code >= 500 and not _is_json(upstream))


def _is_json(upstream: httpx2.Response) -> bool:
    """Return whether an answer is from the application; the HTTP server that runs it answers with plain text."""
    content_type: str = upstream.headers.get("content-type", "")
    return content_type.startswith("application/json")


def _with_base_url(answer: _Answer, base_url: str) -> _Answer:
    """Return the answer that opens an episode, with the relay's base URL in place of the endpoint's."""
    try:
        opened = msgspec.json.decode(answer.content, type=dict[str, Any])
    except msgspec.MsgspecError:
        return answer
    return _Answer(answer.status, answer.headers, msgspec.json.encode(opened | {"base_url": base_url}))


def _passed_headers(upstream: httpx2.Response) -> dict[str, str]:
    return {name: value for name, value in upstream.headers.items() if name not in _NOT_PASSED}


# ── errors ─────────────────────────────────────────────────────────────────────────────────────────────────────────
async def _unexpected(request: Request, error: Exception) -> Response:
    if isinstance(error, Abandoned):
        _log.info("a call of %s ended without an answer: %s", request.url.path, error)
        return Response(status_code=502)  # this reply is not sent: the connection is closed
    _log.error("%s %s failed", request.method, request.url.path, exc_info=error)
    return JSONResponse(ApiError(500, "the relay failed; see its output", "server_error").body, 500)
