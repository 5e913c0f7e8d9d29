"""The UCX pipe, on ucxx. Where RDMA-capable UCX is installed this is the fast one; on TCP it equals the plain pipe.

Settings and rules were measured in docs/sources.md, UCX:
thread progress with Python futures (everything else spins a core); endpoint error handling always on (without it a
dead peer hangs its survivor); an abort before a buffer is given up (else UCX goes on writing into freed memory);
deadlines of our own everywhere (UCX never notices a stopped peer).
UCX's own listener binds 0.0.0.0 and never lets go of a connection that sends it garbage (ucxx 0.52: one descriptor and
2 KiB each, for good). It lives as long as any connection made through it. So the kernel drops whatever comes there, but
for the moments in which somebody who has proved itself at a plain TCP door connects to it.

ucxx's own ``create_endpoint`` and listener handlers break the third rule: at their connect timeout they let go of 16
bytes that UCX still writes to. So a stopped peer crashed those who dialled it (ucxx 0.52: SIGSEGV or SIGBUS in 6 of 6
runs of 3 to 20 dials to a stopped process; in none of 6 with the endpoint closed first). Connections are therefore made
here, on ucxx's core objects.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import struct
import threading
from collections.abc import Callable
from typing import Any

from rrl.transport.connections import deaf, listening
from rrl.transport.weights.calls import Calls, Desk, Reception
from rrl.transport.weights.pipe import CONNECT_BY, HANDSHAKE_BY, Line, PipeError, deadline, shake_hands, split_address
from rrl.transport.weights.store import WeightStore
from rrl.transport.weights.tcp import TcpLine, dial, listen
from rrl.transport.weights.ucx_ports import cut_off_the_silent

SETTINGS = {
    "UCX_TCP_RX_SEG_SIZE": "512K",  # defaults of 64K and 8K cost a factor of 3.5 to 4
    "UCX_TCP_TX_SEG_SIZE": "512K",
    "UCX_TCP_CM_REUSEADDR": "y",  # else a port is busy for 62 s after a kill -9
    "UCX_TCP_KEEPIDLE": "5s",  # measured with 1 s: a cut link is noticed in 3.6 s, by default in 28; so 5 + 3 s here
    "UCX_TCP_KEEPINTVL": "1s",
    "UCX_TCP_KEEPCNT": "3",
    "UCX_POSIX_ERROR_HANDLING": "y",  # else shared memory is silently left out
    "UCX_WARN_UNUSED_ENV_VARS": "n",
    "UCX_LOG_LEVEL": "error",  # it warns, on stdout, of every stranger that hangs up: a flood in the role's log
}
"""Set before ucxx is imported, unless the environment says otherwise."""
_TAG = struct.Struct("<Q")
_PORT = struct.Struct("<H")
_LET_IN_BY = 2 * HANDSHAKE_BY
"""s for who was told UCX's port to have connected there and hung up"""
_ABORT_NS = 10**10
"""how long an abort may wait for UCX's progress thread; measured 0 to 2 ms"""

_log = logging.getLogger(__name__)


class _Runtime:
    """ucxx's context, one per process: started by the first pipe, shut down by the last.

    Its notifier thread belongs to one asyncio loop.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._context: Any = None
        self.ports: frozenset[int] = frozenset()
        """that UCX listens at by itself"""

    def start(self) -> Any:
        """UCX's worker for the running loop. Raises ImportError, or RuntimeError when another loop has it."""
        loop = asyncio.get_running_loop()
        with self._lock:
            if self._users and self._loop is not loop:
                raise RuntimeError("UCX serves one asyncio loop per process, and another one is using it")
            if self._context is None:
                for name, value in SETTINGS.items():
                    os.environ.setdefault(name, value)
                try:
                    import ucxx  # noqa: F401
                    from ucxx._lib_async.application_context import ApplicationContext
                except ImportError as error:
                    raise ImportError("the ucx pipe needs ucxx: pip install '.[ucx]' in rrl's clone") from error
                before = listening()
                self._context = ApplicationContext(progress_mode="thread", enable_python_future=True)
                self.ports = listening() - before
            self._users += 1
            self._loop = loop
            return self._context.worker

    def stop(self) -> None:
        """Blocks for up to 1 s (the notifier thread's own period): not to be called on the loop's thread."""
        with self._lock:
            self._users -= 1
            if not self._users:
                self._context.stop_notifier_thread()
                self._context = None
                gc.collect()  # ucxx's objects hang in reference cycles


_runtime = _Runtime()


class _UcxLine:
    """One endpoint. Tag messages keep their boundaries: each receive matches one send of the same length."""

    def __init__(self, endpoint: Any, door: TcpLine | None = None) -> None:
        self._endpoint = endpoint
        self._door = door
        """of who dialled: hung up once we are connected, and the listener behind it may close"""
        self._gone = False
        self._mine = self._theirs = 0

    async def open(self) -> None:
        """Tell each other a random tag. The listener speaks first, and nobody has two stream operations under way."""
        from ucxx._lib.arr import Array

        self._mine = int.from_bytes(os.urandom(_TAG.size), "little")
        mine, theirs = _TAG.pack(self._mine), bytearray(_TAG.size)
        steps: list[Callable[[], Any]] = [
            lambda: self._endpoint.stream_send(Array(mine)),
            lambda: self._endpoint.stream_recv(Array(theirs)),
        ]
        for step in steps if self._door is None else reversed(steps):
            await self._done(step)
        (self._theirs,) = _TAG.unpack(theirs)
        if self._door is not None:
            self._door.abort()

    async def send(self, data: bytes | memoryview) -> None:
        from ucxx._lib.arr import Array
        from ucxx.types import Tag

        if len(data):
            await self._done(lambda: self._endpoint.tag_send(Array(data), Tag(self._theirs)))

    async def receive(self, into: memoryview) -> None:
        from ucxx._lib.arr import Array
        from ucxx.types import Tag

        if into.nbytes:
            await self._done(lambda: self._endpoint.tag_recv(Array(into), Tag(self._mine)))

    async def _done(self, start: Callable[[], Any]) -> None:
        """One operation. However it fails, the endpoint is closed before anybody can let go of the buffer."""
        if self._gone:
            raise PipeError("the connection was aborted")
        try:
            self._endpoint.raise_on_error()
            request = start()
            await request.wait()
        except Exception as error:  # ucxx raises a family of its own, RuntimeError and MemoryError
            self.abort()
            # ucxx never lets go of a failed request's future: through it, every frame passed would keep its buffers
            error.__traceback__ = None
            raise PipeError(f"ucx: {type(error).__name__}: {error}") from error
        except BaseException:  # cancelled
            self.abort()
            raise
        if self._gone:
            raise PipeError("the connection was aborted")

    def abort(self) -> None:
        if not self._gone:
            self._gone = True
            self._endpoint.close_blocking(period=_ABORT_NS, max_attempts=1)
            self._endpoint.remove_close_callback()
            if self._door is not None:
                self._door.abort()

    @property
    def broken(self) -> bool:
        return self._gone or not self._endpoint.alive


class _Door:
    """What is open at all times: plain TCP. Who proves itself there is told UCX's port, which hears for the
    milliseconds that it takes to connect there. (It proves itself again on that connection: a stranger may have been
    faster.)"""

    def __init__(self, secret: bytes, listener: Any) -> None:
        self._listener = listener
        """kept: without it nobody listens"""
        self._told: dict[Line, None] = {}
        """who were told the port and have not connected yet, oldest first"""
        self._reception = Reception(secret, self._let_in)
        self._server: asyncio.Server | None = None

    async def open(self, host: str) -> int:
        """Returns the port."""
        self._hear(False)
        self._server, port = await listen(self._reception.meet, host)
        return port

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        await self._reception.close()

    def connected(self) -> None:
        """Somebody has connected at UCX's port. Were it not who was told, that one dials again."""
        if self._told:
            self._gone(next(iter(self._told)))

    async def _let_in(self, line: Line) -> None:
        if not self._told:
            self._hear(True)
        self._told[line] = None
        try:
            with deadline(line, _LET_IN_BY):
                await line.send(_PORT.pack(self._listener.port))
                await line.receive(memoryview(bytearray(1)))  # it says no more: it hangs up
        finally:
            self._gone(line)

    def _gone(self, line: Line) -> None:
        if line in self._told:
            del self._told[line]
            if not self._told:
                self._hear(False)

    def _hear(self, hears: bool) -> None:
        try:
            deaf(self._listener.port, not hears)
        except OSError as error:  # a kernel without socket filters
            _log.warning("UCX's port %d cannot be closed to strangers: %s", self._listener.port, error)


class UcxPipe:
    """See :class:`rrl.transport.weights.pipe.Pipe`. Addresses are ``ucx://host:port``.

    To be made in the loop that uses it, and to be closed: else ucxx's notifier thread keeps the process from ending,
    unless that loop runs in a daemon thread. Raises ImportError when ucxx is not installed.
    """

    kind = "ucx"

    def __init__(self, secret: bytes) -> None:
        self._worker = _runtime.start()
        self._secret = secret
        self._calls = calls = Calls(self._dial, secret)
        self.manifest, self.fetch, self.hang_up = calls.manifest, calls.fetch, calls.hang_up
        self._served: list[tuple[_Door, Desk]] = []
        self._closed = False
        self._guard = asyncio.get_running_loop().create_task(cut_off_the_silent(_runtime.ports))

    async def serve(self, store: WeightStore, host: str) -> str:
        from ucxx._lib.libucxx import UCXListener

        desk = Desk(store, self._secret)
        loop = asyncio.get_running_loop()

        def met(endpoint: Any) -> None:
            door.connected()
            desk.meet(_UcxLine(endpoint))

        def meet(endpoint: Any) -> None:  # on UCX's progress thread
            loop.call_soon_threadsafe(met, endpoint)

        listener = UCXListener.create(worker=self._worker, port=0, cb_func=meet, deliver_endpoint=True)
        door = _Door(self._secret, listener)
        self._served.append((door, desk))
        return f"ucx://{host}:{await door.open(host)}"

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._guard.cancel()
        await self._calls.close()
        for door, desk in self._served:
            await door.close()
            await desk.close()
        self._served.clear()
        self._worker = None
        await asyncio.to_thread(_runtime.stop)

    async def _dial(self, at: str) -> _UcxLine:
        """Past the door; whether UCX is reached behind it shows in ``open``, under the handshake's deadline."""
        from ucxx._lib.libucxx import UCXEndpoint

        host, _ = split_address(at, self.kind)
        door = await dial(at, self.kind)
        await shake_hands(door, self._secret, dialled=True)
        with deadline(door, CONNECT_BY):
            told = bytearray(_PORT.size)
            await door.receive(memoryview(told))
            try:
                endpoint = UCXEndpoint.create(self._worker, host, *_PORT.unpack(told), True)
            except Exception as error:
                raise PipeError(f"{at} cannot be reached: {type(error).__name__}: {error}") from error
        return _UcxLine(endpoint, door)
