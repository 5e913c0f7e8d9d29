"""The nixl transport, on NVIDIA NIXL: control messages over plain TCP, data by one-sided reads of the source's memory.

NIXL's wheel contains the RDMA modules that the wheel of UCX lacks (docs/rdma.md). NIXL has neither a handshake nor
deadlines, and does not report the progress of a read to the source. rrl implements these three functions on the TCP
connection, which is authenticated like any other. A process that does not belong to the run cannot reach NIXL.

A send of more than INLINE_BYTES goes through slots, which are registered buffers. The source copies a part into a slot
and announces the slot's address. The receiver reads the slot and confirms the read, which frees the slot. (Reasons for
slots: :mod:`rrl.transport.weights.nixl_memory`.) If a late read happens after the source has reused the slot, the
chunk's digest detects it.
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

from ...core.run_spec import WeightTransportName
from ..streams.connection import HANDSHAKE_TIMEOUT_S, Connection, TransportError
from .base import installed_package
from .nixl_memory import SLOT_BYTES, BufferClaim, NixlRuntime, Remote, Slot
from .protocol import WeightClient, WeightServer
from .store import WeightStore
from .tcp import dial, listen
from .ucx import close_silent_connections

INLINE_BYTES = 64 * 2**10
"""Maximum size in bytes of a send whose data goes directly over TCP, which is faster than announcing an address."""
_FRAME = struct.Struct("<BQ")  # kind, bytes
_KIND_BYTES, _KIND_METADATA, _KIND_PIECE, _KIND_READ = 1, 2, 3, 4
"""Kinds of frames, in this order: data, NIXL's metadata, the address of a piece that the peer can read, and the
confirmation that the oldest piece was read."""
_ADDRESS = struct.Struct("<Q")
_NAME_BYTES, _MAC_BYTES = 16, 32
_METADATA_LABEL = b"rrl-nixl-1 reach"
_MAX_METADATA_BYTES = 2**20
"""Maximum size of the metadata in bytes. Measured: 320 bytes, plus 60 bytes for each slot."""
_MAX_UNREAD_SLOTS = 3
"""Maximum number of slots of one connection that are announced but not read: one is being read, one waits, one is being
filled."""
_MAX_STASHED, _MAX_STASHED_BYTES = 1024, 4096
"""Maximum number of requests that are stored while a connection waits for a slot, and maximum size of a request in
bytes (usually 49). Both limit the memory that a peer can make this process use."""
_CONNECT_TIMEOUT_S = 2 * HANDSHAKE_TIMEOUT_S
"""Seconds for which NIXL's ports accept connections after a peer was sent the metadata that it needs to connect."""
_MAX_THREADS = 16
"""Maximum number of copies and reads that run in parallel."""

T = TypeVar("T")


class _SharedRuntime:
    """The state that the connections of one transport share."""

    def __init__(self, runtime: NixlRuntime, threads: ThreadPoolExecutor) -> None:
        self.runtime = runtime
        self._threads = threads
        self._connecting: dict[_NixlConnection, None] = {}
        """Connections whose peers may be about to connect to NIXL's ports."""

    def start(self, work: Callable[..., T], *args: object) -> Future[T]:
        """Run ``work`` in a thread. Raises TransportError if the transport is closed."""
        try:
            return self._threads.submit(work, *args)
        except RuntimeError as error:
            raise TransportError("the weight transport is closed") from error

    def release_remote(self, remote: Remote) -> None:
        """Release a peer's :class:`Remote` in a thread."""
        with contextlib.suppress(TransportError):  # a closed transport has released all remotes
            self.start(self.runtime.release_remote, remote)

    def expect_connection(self, connection: _NixlConnection) -> None:
        """Open NIXL's ports for a limited time, in which the connection's peer may connect.

        A peer that connects too late tries again.
        """
        if not self._connecting:
            self.runtime.set_ports_open(True)
        self._connecting[connection] = None
        asyncio.get_running_loop().call_later(_CONNECT_TIMEOUT_S, self.on_connected, connection)

    def on_connected(self, connection: _NixlConnection) -> None:
        """Stop waiting for a connection's peer, because the peer has connected or can no longer connect.

        Closes NIXL's ports unless another peer is awaited.
        """
        if connection in self._connecting:
            del self._connecting[connection]
            if not self._connecting:
                self.runtime.set_ports_open(False)


class _NixlConnection:
    """A TCP connection that carries frames, and the slots that belong to it."""

    def __init__(self, tcp: Connection, nixl: _SharedRuntime, secret: bytes, *, dialled: bool) -> None:
        self._tcp = tcp
        self._nixl = nixl
        self._secret = secret
        self._dialled = dialled
        self._writing = asyncio.Lock()
        self._claim = BufferClaim()
        self._aborted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._reachable = 0
        """Number of slots in the metadata that the peer has received."""
        self._offered: deque[Slot] = deque()
        """Slots that the peer has not read yet, in order."""
        self._stash: deque[bytes] = deque()
        """Bytes that the peer sent while this end waited for a slot."""
        self._remote: Remote | None = None

    @property
    def broken(self) -> bool:
        """Return whether the connection was aborted or has failed."""
        return self._claim.revoked or self._tcp.broken

    def abort(self) -> None:
        """Close the connection at once, and give its slots back to the pool."""
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

    # ── sending ────────────────────────────────────────────────────────────────────────────────────────────────────
    async def send(self, data: bytes | memoryview) -> None:
        """Send all of ``data``: up to ``INLINE_BYTES`` in one message, more in pieces through registered slots.

        The peer reads each piece from its slot. Waits while too many slots are unread.
        """
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
            signed = self._nixl.runtime.name + metadata
            self._nixl.expect_connection(self)
            await self._write(_KIND_METADATA, len(signed) + _MAC_BYTES, signed + self._mac(signed))
        await self._write(_KIND_PIECE, data.nbytes, _ADDRESS.pack(slot.address))

    def _return_slot(self, filling: Future[Slot]) -> None:
        if not filling.cancelled() and filling.exception() is None:
            self._nixl.runtime.give_back(filling.result())

    async def _receive_frame(self) -> None:
        """Receive a frame while this end waits for a slot, and stash it if it is a request of the peer."""
        kind, nbytes = await self._head()
        if kind == _KIND_READ:
            self._on_slot_read()
        elif kind == _KIND_BYTES and nbytes <= _MAX_STASHED_BYTES and len(self._stash) < _MAX_STASHED:
            self._stash.append(await self._receive_bytes(nbytes))
        else:
            raise TransportError(f"the peer broke the protocol: unexpected frame of kind {kind}, {nbytes} bytes")

    def _on_slot_read(self) -> None:
        if not self._offered:
            raise TransportError("the peer confirmed the read of a slot that was not announced")
        self._nixl.runtime.give_back(self._offered.popleft())
        self._nixl.on_connected(self)

    # ── receiving ──────────────────────────────────────────────────────────────────────────────────────────────────
    async def receive(self, into: memoryview) -> None:
        """Receive bytes from the TCP connection or from the peer's slots until ``into`` is full."""
        received = 0
        while received < into.nbytes:
            if self._stash:
                kind, nbytes = _KIND_BYTES, len(self._stash[0])
            else:
                kind, nbytes = await self._head()
            if kind == _KIND_READ:
                self._on_slot_read()
            elif kind == _KIND_BYTES and nbytes == into.nbytes and not received:
                received = nbytes
                if self._stash:
                    into[:] = self._stash.popleft()
                else:
                    await self._tcp.receive(into)
            elif kind == _KIND_METADATA and self._dialled and _NAME_BYTES + _MAC_BYTES < nbytes <= _MAX_METADATA_BYTES:
                await self._add_remote(await self._receive_bytes(nbytes))
            elif (
                kind == _KIND_PIECE
                and self._remote is not None
                and 0 < nbytes <= min(into.nbytes - received, SLOT_BYTES)
            ):
                (address,) = _ADDRESS.unpack(await self._receive_bytes(_ADDRESS.size))
                piece = into[received : received + nbytes]
                await self._await_thread(
                    self._nixl.start(self._nixl.runtime.read_into, self._remote, address, piece, self._claim)
                )
                await self._write(_KIND_READ, 0, b"")
                received += nbytes
            else:
                raise TransportError(f"the peer broke the protocol: unexpected frame of kind {kind}, {nbytes} bytes")

    async def _add_remote(self, metadata: bytes) -> None:
        metadata, mac = metadata[:-_MAC_BYTES], metadata[-_MAC_BYTES:]
        if not hmac.compare_digest(mac, self._mac(metadata)):
            raise TransportError("the peer's NIXL metadata is not signed with this run's secret")
        adding = self._nixl.start(self._nixl.runtime.add_remote, metadata[:_NAME_BYTES], metadata[_NAME_BYTES:])
        try:
            remote = await self._await_thread(adding)
        except BaseException:
            adding.add_done_callback(self._release_remote)
            raise
        if self._remote is not None:  # the newer metadata, which have more slots, replace the old ones
            self._nixl.release_remote(self._remote)
        self._remote = remote

    def _mac(self, metadata: bytes) -> bytes:
        return hmac.digest(self._secret, _METADATA_LABEL + metadata, "sha256")

    def _release_remote(self, adding: Future[Remote]) -> None:
        if not adding.cancelled() and adding.exception() is None:
            self._nixl.release_remote(adding.result())

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
        """Return the result of ``work``, which runs in a thread.

        If this raises, the caller must free the result of ``work``, because :meth:`abort` frees only what the
        connection owns already.

        Raises:
            TransportError: This connection is aborted before ``work`` has ended.
        """
        waiting = asyncio.wrap_future(work)
        both: tuple[asyncio.Future[Any], ...] = waiting, self._aborted
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        if self._claim.revoked or not waiting.done():
            waiting.add_done_callback(lambda done: done.cancelled() or done.exception())
            raise TransportError("the connection was aborted")
        return waiting.result()


class NixlTransport:
    """A :class:`rrl.transport.weights.base.WeightTransport` with addresses ``nixl://host:port``.

    NIXL starts in a thread when the first connection needs it. The transport must be closed, because reads may
    otherwise keep the process from ending.

    Args:
        secret: HMAC secret of the run.
        trusted_host: See :class:`rrl.transport.weights.nixl_memory.NixlRuntime`.
        rdma_ports: Active RDMA ports of this machine.

    Raises:
        ImportError: NIXL is not installed.
    """

    kind: WeightTransportName = "nixl"

    def __init__(self, secret: bytes, trusted_host: str | None, rdma_ports: tuple[str, ...] = ()) -> None:
        if installed_package("nixl") is None:
            raise ImportError("the nixl transport needs NIXL: run pip install '.[nixl]' in rrl's clone")
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
        """Serve ``store`` over NIXL: see ``WeightTransport.serve``."""
        nixl = await self._nixl()
        weight_server = WeightServer(store, self._secret)
        server, port = await listen(
            lambda tcp: weight_server.accept(_NixlConnection(tcp, nixl, self._secret, dialled=False)), host
        )
        self._served.append((server, weight_server))
        return f"nixl://{host}:{port}"

    async def close(self) -> None:
        """Stop serving, drop every connection and end NIXL; may be called again."""
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
            raise TransportError("the weight transport is closed")
        if self._starting is None:
            self._starting = asyncio.get_running_loop().create_task(self._start())
        return await asyncio.shield(self._starting)

    async def _start(self) -> _SharedRuntime:
        runtime = await asyncio.to_thread(NixlRuntime, self._trusted_host, self._rdma_ports)
        self._silent_guard = asyncio.get_running_loop().create_task(close_silent_connections(lambda: runtime.ports))
        return _SharedRuntime(runtime, self._threads)
