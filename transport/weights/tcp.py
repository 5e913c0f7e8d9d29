"""The plain TCP transport: always available, and the reference for the other transports."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Sequence

from ...core.run_spec import INTEROPERABLE_TRANSPORTS, WeightTransportName
from ..streams.connection import CONNECT_TIMEOUT_S, Connection, TransportError, authenticate, deadline
from .base import parse_address
from .offers import TCP_ONLY, send_offer
from .protocol import WeightClient, WeightServer
from .store import WeightStore

_SLICE_BYTES = 256 * 2**10
"""Maximum number of bytes passed to asyncio's transport in one call. asyncio copies the bytes that the kernel does not
take at once (Python 3.11)."""
_SPARE_BYTES = 4 * 2**10
"""Size in bytes of the buffer for data that arrives while nothing is being received. It is small, because an
unauthenticated peer must not cost much memory; a request has 49 bytes."""
_MAX_ACCEPTS_PER_TURN = 16
"""Maximum number of connections that asyncio accepts in one iteration of the loop. asyncio takes this number from its
``backlog`` argument."""
_BACKLOG = 1024
"""Maximum number of connections that the kernel holds until they are accepted, since many processes pull a new version
at once."""
_KEEPALIVE = ((socket.TCP_KEEPIDLE, 5), (socket.TCP_KEEPINTVL, 1), (socket.TCP_KEEPCNT, 3))
"""TCP keepalive options, by which a cut link is noticed on an idle connection in 8 s. Only deadlines detect a hung
peer."""


_NOTHING = memoryview(b"")


class TcpConnection(asyncio.BufferedProtocol):
    """One connection; the kernel writes directly into the buffer that is being filled.

    Data that arrives while nothing is being received goes to a small spare buffer, and then reading pauses.
    """

    def __init__(self, on_connection: Callable[[Connection], object] | None = None) -> None:
        self._on_connection = on_connection
        self._transport: asyncio.Transport | None = None
        self._failure: str | None = None
        """Reason of the failure as text; None while the connection has not failed. A stored exception would keep its
        stack frames alive, and with them this object."""
        self._spare = self._stash = _NOTHING
        self._target: memoryview | None = None
        self._received: asyncio.Future[None] | None = None
        self._drained: asyncio.Future[None] | None = None
        self._full = False

    # ── Connection ─────────────────────────────────────────────────────────────────────────────────────────────────
    async def send(self, data: bytes | memoryview) -> None:
        """Send all of ``data``."""
        view = memoryview(data)
        for start in range(0, view.nbytes, _SLICE_BYTES):
            transport = self._open_transport()
            transport.write(view[start : start + _SLICE_BYTES])
            if self._full:
                self._drained = asyncio.get_running_loop().create_future()
                await self._drained

    async def receive(self, into: memoryview) -> None:
        """Receive bytes until ``into`` is full."""
        stashed = min(len(self._stash), into.nbytes)
        into[:stashed] = self._stash[:stashed]
        self._stash = self._stash[stashed:]
        if stashed == into.nbytes:
            return
        transport = self._open_transport()
        self._target = into[stashed:]
        self._received = asyncio.get_running_loop().create_future()
        transport.resume_reading()
        try:
            await self._received
        finally:
            self._target = self._received = None

    def abort(self) -> None:
        """Close the connection at once."""
        self._fail("the connection was aborted")
        if self._transport is not None:
            self._transport.abort()

    @property
    def broken(self) -> bool:
        """Return whether the connection was aborted or has failed."""
        return self._failure is not None

    # ── asyncio ────────────────────────────────────────────────────────────────────────────────────────────────────
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Set the socket options, and call ``on_connection`` if this end listens (called by asyncio)."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        transport.set_write_buffer_limits(high=0)
        sock = transport.get_extra_info("socket")
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # asyncio omits this for a listener made elsewhere
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _KEEPALIVE:
            sock.setsockopt(socket.IPPROTO_TCP, option, value)
        if self._on_connection is not None:
            self._on_connection(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """Fail all pending operations (called by asyncio)."""
        self._fail(f"the connection was lost: {exc or 'closed by the peer'}")

    def get_buffer(self, sizehint: int) -> memoryview:
        """Return the buffer for the next data (called by asyncio)."""
        if self._target is not None:
            return self._target
        self._spare = memoryview(bytearray(_SPARE_BYTES))
        return self._spare

    def buffer_updated(self, nbytes: int) -> None:
        """Complete a receive, or stash data that was not requested (called by asyncio)."""
        if self._target is None:
            self._stash = self._spare[:nbytes]
            if self._transport is not None:
                self._transport.pause_reading()
            return
        self._target = self._target[nbytes:]
        if not self._target and self._received is not None:
            self._target = None
            if not self._received.done():
                self._received.set_result(None)

    def pause_writing(self) -> None:
        """Record that asyncio's write buffer is full (called by asyncio)."""
        self._full = True

    def resume_writing(self) -> None:
        """Continue a send (called by asyncio)."""
        self._full = False
        if self._drained is not None and not self._drained.done():
            self._drained.set_result(None)

    def _open_transport(self) -> asyncio.Transport:
        if self._failure is not None or self._transport is None or self._transport.is_closing():
            # asyncio reports a failed write one iteration of the loop later
            raise TransportError(self._failure or "the connection was closed")
        return self._transport

    def _fail(self, reason: str) -> None:
        if self._failure is None:
            self._failure = reason
            for waiting in (self._received, self._drained):
                if waiting is not None and not waiting.done():
                    waiting.set_exception(TransportError(reason))


async def listen(on_connection: Callable[[Connection], object], host: str) -> tuple[asyncio.Server, int]:
    """Listen on a free port of ``host``, and call ``on_connection`` with each connection. Return (server, port)."""
    listening = socket.create_server((host, 0))
    server = await asyncio.get_running_loop().create_server(
        lambda: TcpConnection(on_connection), sock=listening, backlog=_MAX_ACCEPTS_PER_TURN
    )
    listening.listen(_BACKLOG)
    return server, int(listening.getsockname()[1])


async def dial(address: str, kinds: Sequence[str]) -> TcpConnection:
    """Connect to an address.

    Raises:
        TransportError: The connection fails, or the kind of the address is not among ``kinds``.
    """
    host, port = parse_address(address, kinds)
    try:
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            _, connection = await asyncio.get_running_loop().create_connection(TcpConnection, host, port)
    except (OSError, TimeoutError) as error:
        raise TransportError(f"{address} cannot be reached: {error or type(error).__name__}") from error
    return connection


class TcpTransport:
    """A :class:`rrl.transport.weights.base.WeightTransport` with addresses ``tcp://host:port``.

    It can also pull from a UCX transport, which serves clients without UCX over TCP.
    """

    kind: WeightTransportName = "tcp"

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        self._client = client = WeightClient(self._dial, secret)
        self.manifest, self.fetch, self.disconnect = client.manifest, client.fetch, client.disconnect
        self._served: list[tuple[asyncio.Server, WeightServer]] = []

    async def serve(self, store: WeightStore, host: str) -> str:
        """Serve ``store`` over TCP: see ``WeightTransport.serve``."""
        weight_server = WeightServer(store, self._secret)
        server, port = await listen(weight_server.accept, host)
        self._served.append((server, weight_server))
        return f"tcp://{host}:{port}"

    async def close(self) -> None:
        """Stop serving and drop every connection; may be called again."""
        await self._client.close()
        for server, weight_server in self._served:
            server.close()
            await weight_server.close()
        self._served.clear()

    async def _dial(self, address: str) -> TcpConnection:
        connection = await dial(address, sorted(INTEROPERABLE_TRANSPORTS))
        if address.startswith("ucx:"):  # the peer waits for the address of a UCX worker
            await authenticate(connection, self._secret, dialled=True)
            with deadline(connection, CONNECT_TIMEOUT_S):
                await send_offer(connection, TCP_ONLY)
        return connection
