"""The UCX pipe, on ucxx. Where RDMA-capable UCX is installed this is the fast one; on TCP it equals the plain pipe.

Settings and rules were measured in facts/ucx.md:
thread progress with Python futures (everything else spins a core); endpoint error handling always on (without it a
dead peer hangs its survivor); an abort before a buffer is given up (else UCX goes on writing into freed memory);
deadlines of our own everywhere (UCX never notices a stopped peer).
The listener binds 0.0.0.0, ucxx has no address argument: the handshake is what keeps strangers out.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import threading
from typing import Any

from rrl.spec.words import Version
from rrl.transport.weights.calls import Calls, Desk
from rrl.transport.weights.manifest import Manifest
from rrl.transport.weights.pipe import CONNECT_BY, PipeError, split_address
from rrl.transport.weights.store import WeightStore

SETTINGS = {
    "UCX_TCP_RX_SEG_SIZE": "512K",  # defaults of 64K and 8K cost a factor of 3.5 to 4
    "UCX_TCP_TX_SEG_SIZE": "512K",
    "UCX_TCP_CM_REUSEADDR": "y",  # else a port is busy for 62 s after a kill -9
    "UCX_TCP_KEEPIDLE": "5s",  # measured with 1 s: a cut link is noticed in 3.6 s, by default in 28; so 5 + 3 s here
    "UCX_TCP_KEEPINTVL": "1s",
    "UCX_TCP_KEEPCNT": "3",
    "UCX_POSIX_ERROR_HANDLING": "y",  # else shared memory is silently left out
    "UCX_WARN_UNUSED_ENV_VARS": "n",
}
"""Set before ucxx is imported, unless the environment says otherwise."""
_RETIRE_BY = 3 * CONNECT_BY
"""s that a close waits for ucxx's handlers, each of which has a deadline of CONNECT_BY for either direction"""
_RETIRE_LOOK = 0.01

_log = logging.getLogger(__name__)


class _Runtime:
    """ucxx's one context per process: started by the first pipe, shut down by the last.

    Its notifier thread belongs to one asyncio loop and would keep the process from ending.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self) -> Any:
        """The ucxx module, initialised for the running loop. Raises ImportError, RuntimeError (two loops)."""
        loop = asyncio.get_running_loop()
        with self._lock:
            if self._users and self._loop is not loop:
                raise RuntimeError("UCX serves one asyncio loop per process, and another one is using it")
            for name, value in SETTINGS.items():
                os.environ.setdefault(name, value)
            try:
                import ucxx
            except ImportError as error:
                raise ImportError(f"the ucx pipe needs ucxx: pip install 'rrl-slurm[ucx]' ({error})") from error
            if not self._users:
                ucxx.init(progress_mode="thread", enable_python_future=True, connect_timeout=CONNECT_BY)
            self._users += 1
            self._loop = loop
            return ucxx

    def stop(self, ucxx: Any) -> None:
        """Blocks for up to 1 s (the notifier thread's own period): not to be called on the loop's thread."""
        with self._lock:
            self._users -= 1
            if self._users:
                return
            self._loop = None
            gc.collect()  # endpoints of finished tasks must be gone before
            try:
                ucxx.reset()
            except ucxx.exceptions.UCXError as error:  # its threads are stopped; memory goes with the last reference
                _log.warning("UCX could not be shut down completely: %s", error)


_runtime = _Runtime()


class _UcxLine:
    """One endpoint. Tag messages keep their boundaries: each receive matches one send of the same length."""

    def __init__(self, endpoint: Any) -> None:
        self._endpoint = endpoint
        self._gone = False

    async def send(self, data: bytes | memoryview) -> None:
        if not len(data):
            return
        try:
            await self._alive().send(data)
        except Exception as error:  # ucxx raises a family of its own, RuntimeError and MemoryError
            raise PipeError(f"ucx: {type(error).__name__}: {error}") from error
        if self._gone:
            raise PipeError("the connection was aborted")  # ucxx tells a cancelled send as a sent one

    async def receive(self, into: memoryview) -> None:
        if not into.nbytes:
            return
        try:
            await self._alive().recv(into)
        except Exception as error:
            raise PipeError(f"ucx: {type(error).__name__}: {error}") from error
        if self._gone:
            raise PipeError("the connection was aborted")

    def abort(self) -> None:
        if not self._gone:
            self._gone = True
            self._endpoint.abort()

    @property
    def broken(self) -> bool:
        return self._gone or not self._endpoint.alive

    def _alive(self) -> Any:
        if self._gone:
            raise PipeError("the connection was aborted")
        return self._endpoint


class UcxPipe:
    """See :class:`rrl.transport.weights.pipe.Pipe`. Addresses are ``ucx://host:port``.

    To be made in the loop that uses it. Raises ImportError when ucxx is not installed.
    """

    kind = "ucx"

    def __init__(self, secret: bytes) -> None:
        self._ucxx = _runtime.start()
        self._secret = secret
        self._calls = Calls(self._dial, secret)
        self._served: list[tuple[Any, Desk]] = []
        self._closed = False

    async def serve(self, store: WeightStore, host: str) -> str:
        desk = Desk(store, self._secret)

        async def meet(endpoint: Any) -> None:
            await asyncio.wait([desk.meet(_UcxLine(endpoint))])

        listener = self._ucxx.create_listener(meet, 0, endpoint_error_handling=True, connect_timeout=CONNECT_BY)
        self._served.append((listener, desk))
        return f"ucx://{host}:{listener.port}"

    async def manifest(self, at: str, version: Version, by: float) -> Manifest:
        return await self._calls.manifest(at, version, by)

    async def fetch(self, at: str, version: Version, span: range, into: memoryview, by: float) -> None:
        await self._calls.fetch(at, version, span, into, by)

    def hang_up(self, at: str) -> None:
        self._calls.hang_up(at)

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        await self._calls.close()
        for listener, desk in self._served:
            await desk.close()
            await self._retired(listener)
            listener.close()
        self._served.clear()
        await asyncio.to_thread(_runtime.stop, self._ucxx)

    async def _retired(self, listener: Any) -> None:
        """ucxx's handlers end a little after our tasks, and hold its context until then."""
        end = asyncio.get_running_loop().time() + _RETIRE_BY
        while listener.active_clients and asyncio.get_running_loop().time() < end:
            await asyncio.sleep(_RETIRE_LOOK)

    async def _dial(self, at: str) -> _UcxLine:
        host, port = split_address(at, self.kind)
        try:
            async with asyncio.timeout(2 * CONNECT_BY):
                endpoint = await self._ucxx.create_endpoint(
                    host, port, endpoint_error_handling=True, connect_timeout=CONNECT_BY
                )
        except Exception as error:
            raise PipeError(f"{at} cannot be reached: {type(error).__name__}: {error}") from error
        return _UcxLine(endpoint)
