"""The agent's snapshot server: it owns the memory, and serves members on its own and on other nodes.

The server runs in a thread and event loop of its own, so that no copy delays a heartbeat. It listens on an abstract
Unix socket for members on this node (which receive descriptors) and on a TCP port for members on other nodes (which
receive bytes). A connection must prove that it belongs to the run before its first request is read.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import select
import threading
from collections.abc import Awaitable, Callable

import msgspec

from ...core.types import Incarnation, NodeName
from ...transport.keys import RunKeys
from ...transport.streams.connection import Connection, TransportError, deadline
from ...transport.streams.framing import (
    ANSWER_TIMEOUT_S,
    CHUNK_BYTES,
    receive_bulk,
    receive_message,
    send_bulk,
    send_message,
)
from ...transport.streams.unix import MAX_RUN_NAME_CHARS, UnixConnection, UnixListener
from ...transport.weights.protocol import Acceptor
from ...transport.weights.tcp import listen
from . import messages as msg
from .buffers import DoubleBuffer, SnapshotBuffers
from .connection import local_key, remote_key, socket_name
from .format import (
    HEAD_AREA_BYTES,
    HEAD_BYTES,
    MAX_META_BYTES,
    PAYLOAD_OFFSET,
    Digest,
    Fenced,
    Head,
    SnapshotError,
    SnapshotInfo,
)

_log = logging.getLogger("rrl.agent")

WRITER_END_TIMEOUT_S = 2.0
"""Seconds for which an attaching member waits for the end of its killed predecessor; after this time it gets new
memory."""
_WRITER_POLL_S = 0.02
"""Seconds between two checks whether the predecessor has ended."""
_NAME_RETRY_S = 1.0
"""Seconds between two attempts to bind the socket's name, which a frozen earlier agent may own until it is killed."""
_START_TIMEOUT_S = 10.0
"""Timeout (s) for the start of the server's thread."""
_STOP_TIMEOUT_S = 2.0
"""Timeout (s) for the end of the server's thread; transfers that still run are dropped."""


class SnapshotServer:
    """The snapshot server of a node. Its methods may be called in any thread.

    Args:
        run: Name of the run.
        node: Name of the node.
        keys: Keys of the run.
        host: Address at which the server listens for other nodes; if empty, it does not listen for them.
    """

    def __init__(self, run: str, node: NodeName, keys: RunKeys, host: str) -> None:
        self._secret, self._node, self._host = keys.secret, node, host
        self._name = socket_name(run, node, keys.secret)
        self._buffers = SnapshotBuffers(f"rrl/{run[:MAX_RUN_NAME_CHARS]}/snapshot")
        self.address = ""
        """``tcp://host:port`` once started; empty without a TCP listener."""
        self._loop = asyncio.new_event_loop()
        self._stop_requested = asyncio.Event()
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._main, name="rrl-snapshots", daemon=True)

    def start(self) -> None:
        """Start the thread. If one of the two sockets cannot listen, log the error and serve on the other socket."""
        self._thread.start()
        self._started.wait(_START_TIMEOUT_S)

    def fence(self, incarnation: Incarnation) -> None:
        """Refuse requests of this incarnation and of all earlier incarnations."""
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._buffers.fence, incarnation.gang.replica, incarnation.number + 1)

    def close(self) -> None:
        """Stop the server and free its memory."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._stop_requested.set)
        if self._thread.is_alive():
            self._thread.join(_STOP_TIMEOUT_S)

    # ── the server's thread ────────────────────────────────────────────────────────────────────────────────────────
    def _main(self) -> None:
        try:
            with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
                runner.run(self._serve())
        except Exception as error:  # the agent continues without snapshots
            _log.error("this node stores no snapshots: the snapshot server failed: %r", error)
        finally:
            self.address = ""
            self._started.set()

    async def _serve(self) -> None:
        handler = _RequestHandler(self._buffers)
        local = Acceptor(local_key(self._node, self._secret), handler.serve_local)
        remote = Acceptor(remote_key(self._secret), handler.serve_remote)
        server = None
        try:
            if self._host:
                try:
                    server, port = await listen(remote.accept, self._host)
                    self.address = f"tcp://{self._host}:{port}"
                except OSError as error:
                    failure = "this node stores no snapshots of other nodes: cannot listen at %s: %s"
                    _log.warning(failure, self._host, error)
            opening = asyncio.create_task(self._listen_local(local.accept))
            await asyncio.sleep(0)
            self._started.set()
            await self._stop_requested.wait()
            opening.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                (await opening).close()
        finally:
            if server is not None:
                server.close()
            await asyncio.gather(local.close(), remote.close())
            self._buffers.close()

    async def _listen_local(self, on_connection: Callable[[Connection], object]) -> UnixListener:
        reported = False
        while True:
            try:
                return UnixListener(self._name, on_connection)
            except OSError as error:
                if not reported:
                    _log.warning("cannot listen on the socket @%s: %s; trying again", self._name, error.strerror)
                reported = True
                await asyncio.sleep(_NAME_RETRY_S)


class _RequestHandler:
    """Serves the requests of all connections."""

    def __init__(self, buffers: SnapshotBuffers) -> None:
        self._buffers = buffers

    async def serve_local(self, connection: Connection) -> None:
        assert isinstance(connection, UnixConnection)
        try:
            while True:
                request = await receive_message(
                    connection, msg.Attach | msg.Resize | msg.MapSnapshot | msg.ListSnapshots | msg.Forget, None
                )
                await _send_answer(connection, self._answer_local(connection, request))
        finally:
            connection.abort()

    async def serve_remote(self, connection: Connection) -> None:
        while True:
            request = await receive_message(
                connection, msg.ListSnapshots | msg.Forget | msg.Upload | msg.Download, None
            )
            await _send_answer(connection, self._answer_remote(connection, request))

    async def _answer_local(self, connection: UnixConnection, request: msg.Request) -> msg.Answer | None:
        self._buffers.admit(request.member)
        match request:
            case msg.Attach():
                pair = await self._attach(connection, request)
                existing = [(slot, buffer) for slot, buffer in enumerate(pair.buffers) if buffer is not None]
                await _send_buffers(
                    connection, [(slot, buffer.capacity) for slot, buffer in existing], [b.fd for _, b in existing]
                )
            case msg.Resize():
                buffer = self._buffers.resize(request.member, request.slot, request.nbytes)
                await _send_buffers(connection, [(request.slot, buffer.capacity)], [buffer.fd])
            case msg.MapSnapshot():
                buffer = self._buffers.find(request.snapshot)
                fd = buffer.read_only()
                try:
                    await _send_buffers(connection, [(0, buffer.capacity)], [fd])
                finally:
                    os.close(fd)
            case _:
                return self._answer(request)
        return None

    async def _answer_remote(self, connection: Connection, request: msg.Request) -> msg.Answer | None:
        self._buffers.admit(request.member)
        match request:
            case msg.Upload():
                return await self._receive_upload(connection, request)
            case msg.Download():
                await self._send_snapshot(connection, request.snapshot)
                return None
            case _:
                return self._answer(request)

    def _answer(self, request: msg.Request) -> msg.Answer:
        if isinstance(request, msg.Forget):
            self._buffers.forget(request.member)
        return msg.SnapshotList(tuple(self._buffers.snapshots(request.member.gang)))

    # ── members on this node ───────────────────────────────────────────────────────────────────────────────────────
    async def _attach(self, connection: UnixConnection, request: msg.Attach) -> DoubleBuffer:
        """Wait for the end of the rank's previous member, whose memory can then be reused, and return the buffers."""
        before = self._buffers.attached(request.member)
        ended = before is None or before.member == request.member
        loop = asyncio.get_running_loop()
        give_up_at = loop.time() + WRITER_END_TIMEOUT_S
        while before is not None and not ended and before.writer is not None:
            ended = _has_ended(before.writer)
            if loop.time() > give_up_at:
                break
            if not ended:
                await asyncio.sleep(_WRITER_POLL_S)
        self._buffers.admit(request.member)  # a newer member may have attached during the wait
        ended = ended and self._buffers.attached(request.member) is before
        return self._buffers.attach(request.member, _pidfd(connection.pid), ended=ended)

    # ── other nodes ────────────────────────────────────────────────────────────────────────────────────────────────
    async def _receive_upload(self, connection: Connection, upload: msg.Upload) -> msg.Answer | None:
        """Receive a copy of a snapshot. At most two copies per rank are stored; an incomplete copy stays invalid."""
        snapshot = msgspec.structs.replace(upload.snapshot, own=False)
        if snapshot in self._buffers.snapshots(snapshot.gang):
            return msg.SnapshotList((snapshot,))
        if (snapshot.gang, snapshot.rank, snapshot.incarnation) != (
            upload.member.gang,
            upload.member.rank,
            upload.member.incarnation,
        ):
            raise SnapshotError(f"{snapshot} does not belong to the member that sent it")
        if upload.meta > MAX_META_BYTES:
            raise SnapshotError(
                f"the metadata of {snapshot} has {upload.meta} bytes, but at most {MAX_META_BYTES} are allowed"
            )
        buffer, sequence = self._buffers.allocate_copy(upload.member, snapshot)
        with buffer.in_use(writing=True) as fd:
            await send_message(connection, msg.ReadyForUpload())
            try:
                digest = await _write(connection, fd, upload.meta, snapshot.nbytes)
            except OSError as error:  # closes the connection, because its unread bytes are no request
                raise TransportError(f"a snapshot could not be received: {error}") from error
            if digest != snapshot.digest:
                raise SnapshotError(f"{snapshot} was received damaged: its bytes do not match its digest")
            self._buffers.admit(upload.member)  # the member may have been fenced during the transfer
            head = Head(sequence, snapshot.step, snapshot.incarnation, snapshot.nbytes, upload.meta, snapshot.digest)
            os.pwrite(fd, head.encode(), 0)
        return msg.SnapshotList((snapshot,))

    async def _send_snapshot(self, connection: Connection, snapshot: SnapshotInfo) -> None:
        buffer = self._buffers.find(snapshot)
        with buffer.in_use() as fd:
            head = Head.decode(os.pread(fd, HEAD_BYTES, 0))
            assert head is not None
            await send_message(connection, msg.SnapshotFound(head.meta))
            space = memoryview(bytearray(max(head.meta, min(CHUNK_BYTES, snapshot.nbytes))))
            for start, stop in _spans(head.meta, snapshot.nbytes):
                part = space[: stop - start]
                os.preadv(fd, [part], start)
                await send_bulk(connection, part)


async def _write(connection: Connection, fd: int, meta: int, nbytes: int) -> bytes:
    """Receive a snapshot into ``fd`` and return its digest.

    The bytes pass through a small buffer, because mapped memory would count as memory of the agent.
    """
    space = memoryview(bytearray(max(meta, min(CHUNK_BYTES, nbytes))))
    digest = None
    for start, stop in _spans(meta, nbytes):
        part = space[: stop - start]
        await receive_bulk(connection, part, lambda chunk: None)
        if os.pwrite(fd, part, start) < len(part):
            raise TransportError("the memory of this node is full")
        if digest is None:
            digest = Digest(part)
        else:
            digest.add(part)
    assert digest is not None
    return digest.value()


def _spans(meta: int, nbytes: int) -> list[tuple[int, int]]:
    """Return (start, stop) of ``meta`` in a buffer, followed by (start, stop) of each chunk of the snapshot's bytes."""
    chunks = [
        (PAYLOAD_OFFSET + at, PAYLOAD_OFFSET + min(at + CHUNK_BYTES, nbytes)) for at in range(0, nbytes, CHUNK_BYTES)
    ]
    return [(HEAD_AREA_BYTES, HEAD_AREA_BYTES + meta), *chunks]


async def _send_answer(connection: Connection, answering: Awaitable[msg.Answer | None]) -> None:
    """Send the answer, or a refusal if the request fails. If the answer is None, it was already sent."""
    try:
        answer = await answering
    except Fenced as error:
        answer = msg.Refused(str(error), fenced=True)
    except SnapshotError as error:
        answer = msg.Refused(str(error))
    except OSError as error:  # out of memory or descriptors
        answer = msg.Refused(f"the agent could not answer: {error.strerror or error}")
    if answer is not None:
        await send_message(connection, answer)


async def _send_buffers(connection: UnixConnection, slots: list[tuple[int, int]], fds: list[int]) -> None:
    await send_message(connection, msg.BuffersGranted(tuple(slots)))
    if fds:
        with deadline(connection, ANSWER_TIMEOUT_S):
            await connection.send_descriptors(fds)


def _has_ended(pidfd: int) -> bool:
    watched = select.poll()
    watched.register(pidfd, select.POLLIN)
    return bool(watched.poll(0))


def _pidfd(pid: int) -> int | None:
    """Return a pidfd of the process, or None if it cannot be opened."""
    try:
        return os.pidfd_open(pid) if pid > 0 else None
    except OSError:
        return None
