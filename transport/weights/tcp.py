"""The plain TCP pipe: always there, and the yardstick for the others."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Sequence

from .base import CONNECT_BY, Line, PipeError, deadline, shake_hands, split_address
from .offers import PLAIN, send_offer
from .protocol import Calls, Desk
from .store import WeightStore

_SLICE = 256 * 2**10
"""bytes handed to the transport at once: it copies what the kernel does not take (Python 3.11)"""
_SPARE = 4 * 2**10
"""bytes of what comes while nothing is being received: requests are 33; a stranger must not cost more"""
_AT_ONCE = 16
"""connections that asyncio accepts in one go: it takes as many as the backlog that it is given before anybody looks"""
_BACKLOG = 1024
"""connections that the kernel holds until they are accepted: a new version is pulled by many at once"""
_KEEPALIVE = ((socket.TCP_KEEPIDLE, 5), (socket.TCP_KEEPINTVL, 1), (socket.TCP_KEEPCNT, 3))
"""an idle connection over a cut link is noticed in 8 s; a hung peer only by our own deadlines"""


_NOTHING = memoryview(b"")


class TcpLine(asyncio.BufferedProtocol):
    """One connection; the kernel writes straight into the buffer that is being received.

    What comes when nothing is being received goes to a small spare buffer, and then reading pauses.
    """

    def __init__(self, meet: Callable[[Line], object] | None = None) -> None:
        self._meet = meet
        self._transport: asyncio.Transport | None = None
        self._failure: str | None = None
        """text, not an exception: one that is kept holds on to every frame that it passed, and so to us"""
        self._spare = self._stash = _NOTHING
        self._target: memoryview | None = None
        self._received: asyncio.Future[None] | None = None
        self._drained: asyncio.Future[None] | None = None
        self._full = False

    # ── Line ───────────────────────────────────────────────────────────────────────────────────────────────────────
    async def open(self) -> None:
        """Nothing to agree on."""

    async def send(self, data: bytes | memoryview) -> None:
        view = memoryview(data)
        for start in range(0, view.nbytes, _SLICE):
            transport = self._alive()
            transport.write(view[start : start + _SLICE])
            if self._full:
                self._drained = asyncio.get_running_loop().create_future()
                await self._drained

    async def receive(self, into: memoryview) -> None:
        have = min(len(self._stash), into.nbytes)
        into[:have] = self._stash[:have]
        self._stash = self._stash[have:]
        if have == into.nbytes:
            return
        transport = self._alive()
        self._target = into[have:]
        self._received = asyncio.get_running_loop().create_future()
        transport.resume_reading()
        try:
            await self._received
        finally:
            self._target = self._received = None

    def abort(self) -> None:
        self._fail("the connection was aborted")
        if self._transport is not None:
            self._transport.abort()

    @property
    def broken(self) -> bool:
        return self._failure is not None

    # ── asyncio ────────────────────────────────────────────────────────────────────────────────────────────────────
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        transport.set_write_buffer_limits(high=0)
        sock = transport.get_extra_info("socket")
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # asyncio leaves it out where we made the listener
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _KEEPALIVE:
            sock.setsockopt(socket.IPPROTO_TCP, option, value)
        if self._meet is not None:
            self._meet(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._fail(f"the connection was lost: {exc or 'closed by the other end'}")

    def get_buffer(self, sizehint: int) -> memoryview:
        if self._target is not None:
            return self._target
        self._spare = memoryview(bytearray(_SPARE))
        return self._spare

    def buffer_updated(self, nbytes: int) -> None:
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
        self._full = True

    def resume_writing(self) -> None:
        self._full = False
        if self._drained is not None and not self._drained.done():
            self._drained.set_result(None)

    def _alive(self) -> asyncio.Transport:
        if self._failure is not None or self._transport is None or self._transport.is_closing():
            raise PipeError(self._failure or "not connected any more")  # asyncio tells of a failed write a turn later
        return self._transport

    def _fail(self, why: str) -> None:
        if self._failure is None:
            self._failure = why
            for waiting in (self._received, self._drained):
                if waiting is not None and not waiting.done():
                    waiting.set_exception(PipeError(why))


async def listen(meet: Callable[[Line], object], host: str) -> tuple[asyncio.Server, int]:
    """A server on a free port of ``host``, and the port. ``meet`` is given each connection."""
    listening = socket.create_server((host, 0))
    server = await asyncio.get_running_loop().create_server(lambda: TcpLine(meet), sock=listening, backlog=_AT_ONCE)
    listening.listen(_BACKLOG)
    return server, int(listening.getsockname()[1])


async def dial(at: str, kinds: Sequence[str]) -> TcpLine:
    """Raises PipeError, also for an address of a pipe that is none of ``kinds``."""
    host, port = split_address(at, kinds)
    try:
        async with asyncio.timeout(CONNECT_BY):
            _, line = await asyncio.get_running_loop().create_connection(TcpLine, host, port)
    except (OSError, TimeoutError) as error:
        raise PipeError(f"{at} cannot be reached: {error or type(error).__name__}") from error
    return line


class TcpPipe:
    """See :class:`rrl.transport.weights.base.Pipe`. Addresses are ``tcp://host:port``. It also pulls from a UCX pipe,
    which serves over TCP whoever has no UCX."""

    kind = "tcp"

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        self._calls = calls = Calls(self._dial, secret)
        self.manifest, self.fetch, self.hang_up = calls.manifest, calls.fetch, calls.hang_up
        self._served: list[tuple[asyncio.Server, Desk]] = []

    async def serve(self, store: WeightStore, host: str) -> str:
        desk = Desk(store, self._secret)
        server, port = await listen(desk.meet, host)
        self._served.append((server, desk))
        return f"tcp://{host}:{port}"

    async def close(self) -> None:
        await self._calls.close()
        for server, desk in self._served:
            server.close()
            await desk.close()
        self._served.clear()

    async def _dial(self, at: str) -> TcpLine:
        line = await dial(at, ("tcp", "ucx"))
        if at.startswith("ucx:"):  # its other end waits for the address of a UCX worker
            await shake_hands(line, self._secret, dialled=True)
            with deadline(line, CONNECT_BY):
                await send_offer(line, PLAIN)
        return line
