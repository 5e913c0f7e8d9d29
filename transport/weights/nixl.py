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

from .base import HANDSHAKE_BY, Line, PipeError, package
from .nixl_memory import SLOT_BYTES, Claim, Reads, Remote, Slot
from .protocol import Calls, Desk
from .store import WeightStore
from .tcp import dial, listen
from .ucx import cut_off_the_silent

INLINE_BYTES = 64 * 2**10
"""what is not more than this is sent as it is: for less, saying where it lies takes longer than sending it"""
_FRAME = struct.Struct("<BQ")  # kind, bytes
_BYTES, _REACH, _PIECE, _READ = 1, 2, 3, 4
"""the bytes themselves follow; how NIXL reaches us follows; where so many bytes can be read follows; the oldest piece
has been read"""
_ADDRESS = struct.Struct("<Q")
_NAME, _MAC = 16, 32
_REACH_LABEL = b"rrl-nixl-1 reach"
_REACH_MAX = 2**20
"""bytes; measured 320 and 60 more for each slot"""
_AHEAD = 3
"""slots of one line that are told of and not read yet: one is read, one waits, one is filled"""
_STASH, _STASHED_BYTES = 1024, 4096
"""requests that wait while a slot is waited for, and the size of one: 33 bytes; bounds what a peer can make us keep"""
_CONNECT_BY = 2 * HANDSHAKE_BY
"""s that NIXL's ports hear for the sake of one who was told of them"""
_THREADS = 16
"""copies and reads at once"""

T = TypeVar("T")


class _Nixl:
    """What the lines of one pipe share."""

    def __init__(self, reads: Reads, threads: ThreadPoolExecutor) -> None:
        self.reads = reads
        self._threads = threads
        self._told: dict[_NixlLine, None] = {}
        """who may be about to connect to NIXL's ports"""

    def start(self, work: Callable[..., T], *args: object) -> Future[T]:
        try:
            return self._threads.submit(work, *args)
        except RuntimeError as error:
            raise PipeError("the pipe is closed") from error

    def leave(self, remote: Remote) -> None:
        with contextlib.suppress(PipeError):  # the pipe is closed: they all are forgotten
            self.start(self.reads.leave, remote)

    def expect(self, line: _NixlLine) -> None:
        """It is told now how to connect. Not for long: who is late asks again."""
        if not self._told:
            self.reads.hear(True)
        self._told[line] = None
        asyncio.get_running_loop().call_later(_CONNECT_BY, self.connected, line)

    def connected(self, line: _NixlLine) -> None:
        """Or it never will be."""
        if line in self._told:
            del self._told[line]
            if not self._told:
                self.reads.hear(False)


class _NixlLine:
    """A TCP connection, in frames, and the slots that go with it."""

    def __init__(self, tcp: Line, nixl: _Nixl, secret: bytes, *, dialled: bool) -> None:
        self._tcp = tcp
        self._nixl = nixl
        self._secret = secret
        self._dialled = dialled
        self._writing = asyncio.Lock()
        self._claim = Claim()
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
        return self._claim.gone or self._tcp.broken

    def abort(self) -> None:
        if self._claim.gone:
            return
        self._claim.give_up()
        self._tcp.abort()
        if not self._aborted.done():
            self._aborted.set_result(None)
        self._nixl.connected(self)
        while self._offered:
            self._nixl.reads.give_back(self._offered.popleft())
        if self._remote is not None:
            self._nixl.leave(self._remote)

    # ── who sends ──────────────────────────────────────────────────────────────────────────────────────────────────
    async def send(self, data: bytes | memoryview) -> None:
        view = memoryview(data)
        if 0 < view.nbytes <= INLINE_BYTES:
            await self._write(_BYTES, view.nbytes, bytes(view))
            return
        for start in range(0, view.nbytes, SLOT_BYTES):
            while len(self._offered) >= _AHEAD:
                await self._hear()
            await self._offer(view[start : start + SLOT_BYTES])

    async def _offer(self, part: memoryview) -> None:
        filling = self._nixl.start(self._nixl.reads.fill, part)
        try:
            slot = await self._until(filling)
        except BaseException:
            filling.add_done_callback(self._unwanted)
            raise
        self._offered.append(slot)
        if slot.number >= self._reachable:
            self._reachable, told = await self._until(self._nixl.start(self._nixl.reads.told))
            reach = self._nixl.reads.name + told
            self._nixl.expect(self)
            await self._write(_REACH, len(reach) + _MAC, reach + self._mac(reach))
        await self._write(_PIECE, part.nbytes, _ADDRESS.pack(slot.address))

    def _unwanted(self, filling: Future[Slot]) -> None:
        if not filling.cancelled() and filling.exception() is None:
            self._nixl.reads.give_back(filling.result())

    async def _hear(self) -> None:
        """The next frame, while all slots of this line wait to be read."""
        kind, nbytes = await self._head()
        if kind == _READ:
            self._was_read()
        elif kind == _BYTES and nbytes <= _STASHED_BYTES and len(self._stash) < _STASH:
            self._stash.append(await self._take(nbytes))
        else:
            raise PipeError(f"a frame that was not due: kind {kind}, {nbytes} bytes")

    def _was_read(self) -> None:
        if not self._offered:
            raise PipeError("a slot was read that nobody told of")
        self._nixl.reads.give_back(self._offered.popleft())
        self._nixl.connected(self)

    # ── who receives ───────────────────────────────────────────────────────────────────────────────────────────────
    async def receive(self, into: memoryview) -> None:
        got = 0
        while got < into.nbytes:
            if self._stash:
                kind, nbytes = _BYTES, len(self._stash[0])
            else:
                kind, nbytes = await self._head()
            if kind == _READ:
                self._was_read()
            elif kind == _BYTES and nbytes == into.nbytes and not got:
                got = nbytes
                if self._stash:
                    into[:] = self._stash.popleft()
                else:
                    await self._tcp.receive(into)
            elif kind == _REACH and self._dialled and _NAME + _MAC < nbytes <= _REACH_MAX:
                await self._meet(await self._take(nbytes))
            elif kind == _PIECE and self._remote is not None and 0 < nbytes <= min(into.nbytes - got, SLOT_BYTES):
                (address,) = _ADDRESS.unpack(await self._take(_ADDRESS.size))
                part = into[got : got + nbytes]
                await self._until(self._nixl.start(self._nixl.reads.land, self._remote, address, part, self._claim))
                await self._write(_READ, 0, b"")
                got += nbytes
            else:
                raise PipeError(f"a frame that was not due: kind {kind}, {nbytes} bytes")

    async def _meet(self, reach: bytes) -> None:
        reach, mac = reach[:-_MAC], reach[-_MAC:]
        if not hmac.compare_digest(mac, self._mac(reach)):
            raise PipeError("how NIXL reaches the other end is not signed with this run's secret")
        meeting = self._nixl.start(self._nixl.reads.meet, reach[:_NAME], reach[_NAME:])
        try:
            remote = await self._until(meeting)
        except BaseException:
            meeting.add_done_callback(self._unmet)
            raise
        if self._remote is not None:  # it has more slots by now
            self._nixl.leave(self._remote)
        self._remote = remote

    def _mac(self, reach: bytes) -> bytes:
        return hmac.digest(self._secret, _REACH_LABEL + reach, "sha256")

    def _unmet(self, meeting: Future[Remote]) -> None:
        if not meeting.cancelled() and meeting.exception() is None:
            self._nixl.leave(meeting.result())

    # ── frames and threads ─────────────────────────────────────────────────────────────────────────────────────────
    async def _write(self, kind: int, nbytes: int, data: bytes) -> None:
        async with self._writing:
            await self._tcp.send(_FRAME.pack(kind, nbytes) + data)

    async def _head(self) -> tuple[int, int]:
        kind, nbytes = _FRAME.unpack(await self._take(_FRAME.size))
        return kind, nbytes

    async def _take(self, nbytes: int) -> bytes:
        buffer = bytearray(nbytes)
        await self._tcp.receive(memoryview(buffer))
        return bytes(buffer)

    async def _until(self, work: Future[T]) -> T:
        """What the thread returns, unless this line is aborted before the caller has it: then who asked for it cleans
        up, for the abort has done so already for all that the line had."""
        waiting = asyncio.wrap_future(work)
        both: tuple[asyncio.Future[Any], ...] = waiting, self._aborted
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        if self._claim.gone or not waiting.done():
            waiting.add_done_callback(lambda done: done.cancelled() or done.exception())
            raise PipeError("the connection was aborted")
        return waiting.result()


class NixlPipe:
    """See :class:`rrl.transport.weights.base.Pipe`. Addresses are ``nixl://host:port``.

    ``trusted_host`` and ``rdma_ports``: as of :class:`rrl.transport.weights.nixl_memory.Reads`.
    NIXL starts in a thread, when the first connection needs it. To be closed: else its reads may keep the process from
    ending. Raises ImportError when NIXL is not installed.
    """

    kind = "nixl"

    def __init__(self, secret: bytes, trusted_host: str | None, rdma_ports: tuple[str, ...] = ()) -> None:
        if package("nixl") is None:
            raise ImportError("the nixl pipe needs NIXL: pip install '.[nixl]' in rrl's clone")
        self._secret = secret
        self._trusted_host, self._rdma_ports = trusted_host, rdma_ports
        self._threads = ThreadPoolExecutor(_THREADS, "nixl")
        self._calls = calls = Calls(self._dial, secret)
        self.manifest, self.fetch, self.hang_up = calls.manifest, calls.fetch, calls.hang_up
        self._served: list[tuple[asyncio.Server, Desk]] = []
        self._starting: asyncio.Task[_Nixl] | None = None
        self._guard: asyncio.Task[None] | None = None
        self._closed = False

    async def serve(self, store: WeightStore, host: str) -> str:
        nixl = await self._nixl()
        desk = Desk(store, self._secret)
        server, port = await listen(lambda tcp: desk.meet(_NixlLine(tcp, nixl, self._secret, dialled=False)), host)
        self._served.append((server, desk))
        return f"nixl://{host}:{port}"

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        await self._calls.close()
        for server, desk in self._served:
            server.close()
            await desk.close()
        self._served.clear()
        if self._guard is not None:
            self._guard.cancel()
        await asyncio.to_thread(self._threads.shutdown)
        if self._starting is not None:
            nixl = (await asyncio.gather(self._starting, return_exceptions=True))[0]
            if isinstance(nixl, _Nixl):
                await asyncio.to_thread(nixl.reads.close)

    async def _dial(self, at: str) -> _NixlLine:
        nixl = await self._nixl()
        return _NixlLine(await dial(at, (self.kind,)), nixl, self._secret, dialled=True)

    async def _nixl(self) -> _Nixl:
        if self._closed:
            raise PipeError("the pipe is closed")
        if self._starting is None:
            self._starting = asyncio.get_running_loop().create_task(self._start())
        return await asyncio.shield(self._starting)

    async def _start(self) -> _Nixl:
        reads = await asyncio.to_thread(Reads, self._trusted_host, self._rdma_ports)
        self._guard = asyncio.get_running_loop().create_task(cut_off_the_silent(lambda: reads.ports))
        return _Nixl(reads, self._threads)
