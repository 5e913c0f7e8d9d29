"""The nixl pipe, on NVIDIA NIXL: what is said goes over plain TCP, the bytes by one-sided reads of the holder's memory.

NIXL's wheel carries the RDMA modules that the wheel of UCX lacks (docs/rdma.md). It has neither a handshake of its own
nor a deadline, and it tells nobody how far a read has come: all of that is ours, on the TCP connection, which shakes
hands as every line does. A stranger never gets to NIXL.

A send of more than INLINE_BYTES goes slot by slot: the holder copies a part into a slot and says where that lies, the
receiver reads it and says so, and the slot is free again. (Why slots: :mod:`rrl.transport.weights.nixl_memory`.)
A read may be late: its holder may have given the slot to somebody else. The chunk's digest tells.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import struct
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from .base import HANDSHAKE_TIMEOUT_S, Connection, TransportError, installed_package
from .nixl_memory import SLOT_BYTES, BufferClaim, NixlRuntime, Remote, Slot
from .protocol import WeightClient, WeightServer
from .store import WeightStore
from .tcp import dial, listen
from .ucx import close_silent_connections

INLINE_BYTES = 64 * 2**10
"""what is not more than this is sent as it is: for less, saying where it lies takes longer than sending it"""
_FRAME = struct.Struct("<BQ")  # kind, bytes
_KIND_BYTES, _KIND_METADATA, _KIND_PIECE, _KIND_READ = 1, 2, 3, 4
"""the bytes themselves follow; how NIXL reaches us follows; where so many bytes can be read follows; the oldest piece
has been read"""
_ADDRESS = struct.Struct("<Q")
_NAME_BYTES, _MAC_BYTES = 16, 32
_METADATA_LABEL = b"rrl-nixl-1 reach"
_MAX_METADATA_BYTES = 2**20
"""bytes; measured 320 and 60 more for each slot"""
_MAX_UNREAD_SLOTS = 3
"""slots of one line that are told of and not read yet: one is read, one waits, one is filled"""
_MAX_STASHED, _MAX_STASHED_BYTES = 1024, 4096
"""requests that wait while a slot is waited for, and the size of one: 33 bytes; bounds what a peer can make us keep"""
_CONNECT_TIMEOUT_S = 2 * HANDSHAKE_TIMEOUT_S
"""s that NIXL's ports hear for the sake of one who was told of them"""
_MAX_THREADS = 16
"""copies and reads at once"""

T = TypeVar("T")


class _SharedRuntime:
    """What the lines of one pipe share."""

    def __init__(self, runtime: NixlRuntime, threads: ThreadPoolExecutor) -> None:
        self.runtime = runtime
        self._threads = threads
        self._connecting: dict[_NixlConnection, None] = {}
        """who may be about to connect to NIXL's ports"""

    def start(self, work: Callable[..., T], *args: object) -> Future[T]:
        try:
            return self._threads.submit(work, *args)
        except RuntimeError as error:
            raise TransportError("the pipe is closed") from error

    def release_remote(self, remote: Remote) -> None:
        with contextlib.suppress(TransportError):  # the pipe is closed: they all are forgotten
            self.start(self.runtime.release_remote, remote)

    def expect_connection(self, connection: _NixlConnection) -> None:
        """It is told now how to connect. Not for long: who is late asks again."""
        if not self._connecting:
            self.runtime.set_ports_open(True)
        self._connecting[connection] = None
        asyncio.get_running_loop().call_later(_CONNECT_TIMEOUT_S, self.on_connected, connection)

    def on_connected(self, connection: _NixlConnection) -> None:
        """Or it never will be."""
        if connection in self._connecting:
            del self._connecting[connection]
            if not self._connecting:
                self.runtime.set_ports_open(False)


class _NixlConnection:
    """A TCP connection, in frames, and the slots that go with it."""

    def __init__(self, tcp: Connection, nixl: _SharedRuntime, secret: bytes, *, dialled: bool) -> None:
        self._tcp = tcp
        self._nixl = nixl
        self._secret = secret
        self._dialled = dialled
        self._writing = asyncio.Lock()
        self._claim = BufferClaim()
        self._aborted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._reachable = 0
        """slots that the other end has heard of"""
        self._offered: deque[Slot] = deque()
        """those that it has not read yet, in order"""
        self._stash: deque[bytes] = deque()
        """what it has said meanwhile"""
        self._remote: Remote | None = None

    async def open(self) -> None:
        """Nothing to agree on before they know each other."""

    @property
    def broken(self) -> bool:
        return self._claim.revoked or self._tcp.broken

    def abort(self) -> None:
        if self._claim.revoked:
            return
        self._claim.revoke()
        self._tcp.abort()
        if not self._aborted.done():
            self._aborted.set_result(None)
        self._nixl.on_connected(self)
        while self._offered:
            self._nixl.runtime.give_back(self._offered.popleft())
        if self._remote is not None:
            self._nixl.release_remote(self._remote)

    # ── who sends ──────────────────────────────────────────────────────────────────────────────────────────────────
    async def send(self, data: bytes | memoryview) -> None:
        view = memoryview(data)
        if 0 < view.nbytes <= INLINE_BYTES:
            await self._write(_KIND_BYTES, view.nbytes, bytes(view))
            return
        for start in range(0, view.nbytes, SLOT_BYTES):
            while len(self._offered) >= _MAX_UNREAD_SLOTS:
                await self._receive_frame()
            await self._offer(view[start : start + SLOT_BYTES])

    async def _offer(self, data: memoryview) -> None:
        filling = self._nixl.start(self._nixl.runtime.fill, data)
        try:
            slot = await self._await_thread(filling)
        except BaseException:
            filling.add_done_callback(self._return_slot)
            raise
        self._offered.append(slot)
        if slot.number >= self._reachable:
            self._reachable, metadata = await self._await_thread(self._nixl.start(self._nixl.runtime.local_metadata))
            reach = self._nixl.runtime.name + metadata
            self._nixl.expect_connection(self)
            await self._write(_KIND_METADATA, len(reach) + _MAC_BYTES, reach + self._mac(reach))
        await self._write(_KIND_PIECE, data.nbytes, _ADDRESS.pack(slot.address))

    def _return_slot(self, filling: Future[Slot]) -> None:
        if not filling.cancelled() and filling.exception() is None:
            self._nixl.runtime.give_back(filling.result())

    async def _receive_frame(self) -> None:
        """The next frame, while all slots of this line wait to be read."""
        kind, nbytes = await self._head()
        if kind == _KIND_READ:
            self._on_slot_read()
        elif kind == _KIND_BYTES and nbytes <= _MAX_STASHED_BYTES and len(self._stash) < _MAX_STASHED:
            self._stash.append(await self._receive_bytes(nbytes))
        else:
            raise TransportError(f"a frame that was not due: kind {kind}, {nbytes} bytes")

    def _on_slot_read(self) -> None:
        if not self._offered:
            raise TransportError("a slot was read that nobody told of")
        self._nixl.runtime.give_back(self._offered.popleft())
        self._nixl.on_connected(self)

    # ── who receives ───────────────────────────────────────────────────────────────────────────────────────────────
    async def receive(self, into: memoryview) -> None:
        got = 0
        while got < into.nbytes:
            if self._stash:
                kind, nbytes = _KIND_BYTES, len(self._stash[0])
            else:
                kind, nbytes = await self._head()
            if kind == _KIND_READ:
                self._on_slot_read()
            elif kind == _KIND_BYTES and nbytes == into.nbytes and not got:
                got = nbytes
                if self._stash:
                    into[:] = self._stash.popleft()
                else:
                    await self._tcp.receive(into)
            elif kind == _KIND_METADATA and self._dialled and _NAME_BYTES + _MAC_BYTES < nbytes <= _MAX_METADATA_BYTES:
                await self._add_remote(await self._receive_bytes(nbytes))
            elif kind == _KIND_PIECE and self._remote is not None and 0 < nbytes <= min(into.nbytes - got, SLOT_BYTES):
                (address,) = _ADDRESS.unpack(await self._receive_bytes(_ADDRESS.size))
                piece = into[got : got + nbytes]
                await self._await_thread(
                    self._nixl.start(self._nixl.runtime.read_into, self._remote, address, piece, self._claim)
                )
                await self._write(_KIND_READ, 0, b"")
                got += nbytes
            else:
                raise TransportError(f"a frame that was not due: kind {kind}, {nbytes} bytes")

    async def _add_remote(self, metadata: bytes) -> None:
        metadata, mac = metadata[:-_MAC_BYTES], metadata[-_MAC_BYTES:]
        if not hmac.compare_digest(mac, self._mac(metadata)):
            raise TransportError("how NIXL reaches the other end is not signed with this run's secret")
        meeting = self._nixl.start(self._nixl.runtime.add_remote, metadata[:_NAME_BYTES], metadata[_NAME_BYTES:])
        try:
            remote = await self._await_thread(meeting)
        except BaseException:
            meeting.add_done_callback(self._release_remote)
            raise
        if self._remote is not None:  # it has more slots by now
            self._nixl.release_remote(self._remote)
        self._remote = remote

    def _mac(self, metadata: bytes) -> bytes:
        return hmac.digest(self._secret, _METADATA_LABEL + metadata, "sha256")

    def _release_remote(self, meeting: Future[Remote]) -> None:
        if not meeting.cancelled() and meeting.exception() is None:
            self._nixl.release_remote(meeting.result())

    # ── frames and threads ─────────────────────────────────────────────────────────────────────────────────────────
    async def _write(self, kind: int, nbytes: int, data: bytes) -> None:
        async with self._writing:
            await self._tcp.send(_FRAME.pack(kind, nbytes) + data)

    async def _head(self) -> tuple[int, int]:
        kind, nbytes = _FRAME.unpack(await self._receive_bytes(_FRAME.size))
        return kind, nbytes

    async def _receive_bytes(self, nbytes: int) -> bytes:
        buffer = bytearray(nbytes)
        await self._tcp.receive(memoryview(buffer))
        return bytes(buffer)

    async def _await_thread(self, work: Future[T]) -> T:
        """What the thread returns, unless this line is aborted before the caller has it: then who asked for it cleans
        up, for the abort has done so already for all that the line had."""
        waiting = asyncio.wrap_future(work)
        both: tuple[asyncio.Future[Any], ...] = waiting, self._aborted
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        if self._claim.revoked or not waiting.done():
            waiting.add_done_callback(lambda done: done.cancelled() or done.exception())
            raise TransportError("the connection was aborted")
        return waiting.result()


class NixlTransport:
    """See :class:`rrl.transport.weights.base.Pipe`. Addresses are ``nixl://host:port``.

    ``trusted_host`` and ``rdma_ports``: as of :class:`rrl.transport.weights.nixl_memory.Reads`.
    NIXL starts in a thread, when the first connection needs it. To be closed: else its reads may keep the process from
    ending. Raises ImportError when NIXL is not installed.
    """

    kind = "nixl"

    def __init__(self, secret: bytes, trusted_host: str | None, rdma_ports: tuple[str, ...] = ()) -> None:
        if installed_package("nixl") is None:
            raise ImportError("the nixl pipe needs NIXL: pip install '.[nixl]' in rrl's clone")
        self._secret = secret
        self._trusted_host, self._rdma_ports = trusted_host, rdma_ports
        self._threads = ThreadPoolExecutor(_MAX_THREADS, "nixl")
        self._client = client = WeightClient(self._dial, secret)
        self.manifest, self.fetch, self.disconnect = client.manifest, client.fetch, client.disconnect
        self._served: list[tuple[asyncio.Server, WeightServer]] = []
        self._starting: asyncio.Task[_SharedRuntime] | None = None
        self._silent_guard: asyncio.Task[None] | None = None
        self._closed = False

    async def serve(self, store: WeightStore, host: str) -> str:
        nixl = await self._nixl()
        weight_server = WeightServer(store, self._secret)
        server, port = await listen(
            lambda tcp: weight_server.accept(_NixlConnection(tcp, nixl, self._secret, dialled=False)), host
        )
        self._served.append((server, weight_server))
        return f"nixl://{host}:{port}"

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        await self._client.close()
        for server, weight_server in self._served:
            server.close()
            await weight_server.close()
        self._served.clear()
        if self._silent_guard is not None:
            self._silent_guard.cancel()
        await asyncio.to_thread(self._threads.shutdown)
        if self._starting is not None:
            nixl = (await asyncio.gather(self._starting, return_exceptions=True))[0]
            if isinstance(nixl, _SharedRuntime):
                await asyncio.to_thread(nixl.runtime.close)

    async def _dial(self, address: str) -> _NixlConnection:
        nixl = await self._nixl()
        return _NixlConnection(await dial(address, (self.kind,)), nixl, self._secret, dialled=True)

    async def _nixl(self) -> _SharedRuntime:
        if self._closed:
            raise TransportError("the pipe is closed")
        if self._starting is None:
            self._starting = asyncio.get_running_loop().create_task(self._start())
        return await asyncio.shield(self._starting)

    async def _start(self) -> _SharedRuntime:
        reads = await asyncio.to_thread(NixlRuntime, self._trusted_host, self._rdma_ports)
        self._silent_guard = asyncio.get_running_loop().create_task(close_silent_connections(lambda: reads.ports))
        return _SharedRuntime(reads, self._threads)
