"""Serves an application in a thread with an event loop of its own.

Therefore agents whose code blocks their event loop delay only themselves, never an answer. Anyone may connect to the
port. So there are limits for the number of connections, and for the size and the arrival time of a request's head.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, Protocol

import uvicorn
from starlette.applications import Starlette
from uvicorn.protocols.http.h11_impl import H11Protocol

LOOPBACK = "127.0.0.1"
ON_RESET = "rrl.on_reset"
"""Key of a scope for a function, which is called if the connection is reset before the client has sent another request.
A client that has read the whole answer closes its connection in an orderly way."""
HEAD_TIMEOUT_S = 20.0
"""Seconds in which a new connection must send the head of its first request."""
_MAX_CONNECTIONS = 8192
"""Maximum number of concurrent connections; further connections get 503. An agent has one or two connections for each
of its calls."""
_MAX_HEADER_BYTES = 64 * 2**10
"""Maximum size (bytes) of a header that is buffered."""
IDLE_S = 75.0
"""Seconds in which a connection must send the next request. Clients keep idle connections for a shorter time, so the
server never closes a connection that a client is about to use."""
_SEND_BUFFER_BYTES = 128 * 2**10
"""Number of bytes that the kernel buffers for a client that does not read. The kernel's default is megabytes, but a
stream has only hundreds of bytes per second."""
_STOP_TIMEOUT_S = 5.0
"""Seconds to wait for the end of open calls when the server is stopped."""


_PROBE_POLL_S = 0.5
"""Seconds between two checks whether a probe waits for its answer."""


class Probed(Protocol):
    """The part of :class:`rrl.Worker` by which a server answers probes."""

    @property
    def probed(self) -> bool:
        """Whether a probe waits for its answer."""
        ...

    def on_probe(self, handler: Callable[[], object]) -> None:
        """Answer probes in the calling thread."""
        ...

    def answer_probe(self) -> None:
        """Answer a probe that waits."""
        ...


class EndpointServer:
    """A server of the application.

    Args:
        application: The application.
        host: Address at which it listens.
        port: Port at which it listens; 0 selects a free port.

    Raises:
        OSError: The port cannot be bound.
    """

    def __init__(self, application: Starlette, host: str = LOOPBACK, port: int = 0) -> None:
        self._socket = socket.create_server((host, port), backlog=1024)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)  # also of its connections
        # asyncio sets this only for sockets whose protocol is named. Without it, a body waits 40 ms for the head's ACK.
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.base_url = f"http://{host}:{self._socket.getsockname()[1]}/v1"
        """Base URL for OpenAI's clients."""
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)  # the application logs its own errors
        self._server = uvicorn.Server(
            uvicorn.Config(
                application,
                log_config=None,
                access_log=False,
                lifespan="off",
                ws="none",
                http=_BoundedProtocol,
                loop="asyncio",
                proxy_headers=False,
                server_header=False,
                limit_concurrency=_MAX_CONNECTIONS,
                h11_max_incomplete_event_size=_MAX_HEADER_BYTES,
                timeout_keep_alive=int(IDLE_S),
                timeout_graceful_shutdown=1,
            )
        )
        self._thread: threading.Thread | None = None

    def start(self, me: Probed | None = None, ready: Callable[[], Awaitable[None]] | None = None) -> None:
        """Start the thread. Connections are accepted from now on, and served as soon as the loop runs.

        Args:
            me: The process whose probes the loop answers, by a request to itself; None if it answers none.
            ready: Waits in the loop until the rest of the process could do its work, too.
        """
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._serve(me, ready)), name="endpoint", daemon=True
        )
        self._thread.start()

    async def _serve(self, me: Probed | None, ready: Callable[[], Awaitable[None]] | None) -> None:
        answering = None if me is None else asyncio.create_task(self._answer_probes(me, ready))
        await self._server.serve([self._socket])
        if answering is not None:
            answering.cancel()

    async def _answer_probes(self, me: Probed, ready: Callable[[], Awaitable[None]] | None) -> None:
        me.on_probe(lambda: "the endpoint has answered a request")
        while True:
            await asyncio.sleep(_PROBE_POLL_S)
            if not me.probed:
                continue
            with suppress(OSError):  # the next request may be answered
                reader, writer = await asyncio.open_connection(*self._socket.getsockname()[:2])
                writer.write(b"GET /v1/models HTTP/1.1\r\nHost: probe\r\nConnection: close\r\n\r\n")
                answered = await reader.readline()
                writer.close()
                if answered and ready is not None:
                    await ready()
                if answered:
                    me.answer_probe()

    def stop(self) -> None:
        """Close all connections and end the thread."""
        self._server.should_exit = self._server.force_exit = True
        if self._thread is not None:
            self._thread.join(_STOP_TIMEOUT_S)
        self._socket.close()


class _JoinedWrites:
    """A transport that sends what one callback of the event loop writes as one segment.

    uvicorn writes the end of a body by itself, and between two writes another thread may run. A client that closes its
    connection at the last event would then get the end on a closed connection, and the endpoint a reset: as if the
    answer had not arrived.

    Args:
        transport: The transport.
        loop: The event loop.
    """

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport, self._loop, self._written = transport, loop, bytearray()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        if not self._written:
            self._loop.call_soon(self._send)
        self._written += data
        if len(self._written) > _SEND_BUFFER_BYTES:
            self._send()  # so that the transport can say that the client does not read

    def close(self) -> None:
        self._send()
        self._transport.close()

    def _send(self) -> None:
        if self._written:
            self._transport.write(self._written)
            self._written = bytearray()


class _BoundedProtocol(H11Protocol):
    """A connection that is closed if the head of a request does not arrive in time, or if the server stops.

    uvicorn itself has no deadline for the first request. Its deadline for a later request applies only until the first
    byte arrives.
    """

    _head_deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for the first request."""
        super().connection_made(_JoinedWrites(transport, self.loop))  # type: ignore[arg-type]
        self._wait_for_head(HEAD_TIMEOUT_S)

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the deadline for the head of the next request, and say if the client may lack the newest answer."""
        self._head_arrived()
        if exc is not None and self.scope is not None:
            on_reset: Callable[[], None] | None = self.scope.get(ON_RESET)  # type: ignore[assignment]
            if on_reset is not None:
                on_reset()
        super().connection_lost(exc)

    def shutdown(self) -> None:
        """Close the connection, but abort it if a call has no complete answer yet.

        After an abort, the client repeats the call. uvicorn's own shutdown would answer the call with status 500.
        """
        if self.cycle is None or self.cycle.response_complete:
            super().shutdown()
        else:
            self.transport.abort()

    def handle_events(self) -> None:
        """Check whether the received bytes complete the head of a request."""
        super().handle_events()
        if self.cycle is not None and not self.cycle.response_complete:
            self._head_arrived()

    def on_response_complete(self) -> None:
        """Begin to wait for the next request, unless its head has arrived already."""
        self._wait_for_head(IDLE_S)
        super().on_response_complete()

    def _wait_for_head(self, timeout: float) -> None:
        self._head_arrived()
        self._head_deadline = self.loop.call_later(timeout, self._cut_off)

    def _head_arrived(self) -> None:
        if self._head_deadline is not None:
            self._head_deadline.cancel()
            self._head_deadline = None

    def _cut_off(self) -> None:
        if not self.transport.is_closing():
            self.transport.abort()
