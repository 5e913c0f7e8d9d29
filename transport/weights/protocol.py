"""Both ends of the request protocol that all weight transports share.

A request consists of kind, version, offset, length and base; a reply consists of a status, a length, and that many
bytes. A request for a chunk may name the digest of a base, from which the receiver can make the chunk by a delta. The
reply then is a frame (:mod:`.delta`), the whole chunk if the frame would be too large, or NO_BASE.
Replies come in the order of the requests. A client may send further requests before the reply to an earlier request. A
source that is still receiving the requested chunk replies NOT_READY until it has the chunk. A source that sends nothing
is dead or hung. A connection answers one request at a time, so a waiting request blocks the connection. Each NOT_READY
costs nine bytes. The protocol sends lengths in every transport, since UCX reports neither the length of a short message
nor whether a completed send has arrived. Only a chunk's digest proves that the chunk has arrived.
"""

from __future__ import annotations

import asyncio
import logging
import struct
from collections.abc import Awaitable, Callable
from enum import Enum
from functools import partial
from typing import TypeVar

from ...core.types import Version
from ..streams.connection import (
    CONNECT_TIMEOUT_S,
    MAX_DEADLINE_EXTENSIONS,
    TIMER_SLACK_S,
    Connection,
    TransportError,
    authenticate,
    deadline,
)
from . import manifest as manifests
from .base import STARVATION_TIMEOUT_S, BaseUnknown, VersionUnavailable
from .changes import UnknownBase
from .manifest import Manifest
from .store import NotReady, VersionEvicted, VersionUnknown, WeightStore

_REQUEST = struct.Struct("<BqqQQ16s")  # kind, version's step and incarnation, offset, bytes, digest of the base
_ANSWER = struct.Struct("<BQ")  # status, bytes
ANSWER_BYTES = _ANSWER.size
_NO_BASE = bytes(16)
"""In a request, instead of the digest of a base: the receiver has none."""
_KIND_MANIFEST, _KIND_RANGE, _KIND_BYE = 1, 2, 3
_STATUS_OK, _STATUS_UNAVAILABLE, _STATUS_NOT_READY, _STATUS_DELTA, _STATUS_NO_BASE = 0, 1, 2, 3, 4
_MAX_MANIFEST_BYTES = 64 * 2**20
"""Maximum size of a manifest or frame in bytes, which limits the memory that a peer can make this process allocate."""
_SEND_TIMEOUT_S = 30.0
"""Timeout (s) for sending one reply. A client that does not accept the reply in time is disconnected, so that it cannot
keep an evicted version in memory."""
NOT_READY_INTERVAL_S = 0.05
"""Seconds between two NOT_READY replies. Several fit into the shortest timeout of a client
(pull.MIN_CHUNK_TIMEOUT_S)."""
UNKNOWN_VERSION_TIMEOUT_S = 1.0
"""Seconds for which a request for a manifest waits if the source does not know the version yet. The manager announces a
version to one process after the other, so a source may be requested before the announcement reaches it. Chunks are
requested only from sources that sent the manifest."""
_MAX_UNAUTHENTICATED = 128
"""Maximum number of unauthenticated connections; when another one arrives, the oldest is closed."""

T = TypeVar("T")

_log = logging.getLogger("rrl.weights")


class Acceptor:
    """Serves each accepted connection in a task, and limits the number of unauthenticated connections.

    A connection that authenticates is passed to ``serve``, and closed when ``serve`` returns or raises TransportError.
    """

    def __init__(self, secret: bytes, serve: Callable[[Connection], Awaitable[None]]) -> None:
        self._secret = secret
        self._serve = serve
        self._unauthenticated: dict[Connection, None] = {}
        """Connections that have not authenticated, oldest first."""
        self._tasks: set[asyncio.Task[None]] = set()

    def accept(self, connection: Connection) -> asyncio.Task[None]:
        """Start a task that serves a new connection until either end closes it, and return the task.

        If there are too many unauthenticated connections, the oldest is closed, because a process of the run
        authenticates within milliseconds.
        """
        if len(self._unauthenticated) >= _MAX_UNAUTHENTICATED:
            next(iter(self._unauthenticated)).abort()
            del self._unauthenticated[next(iter(self._unauthenticated))]
        self._unauthenticated[connection] = None
        task = asyncio.get_running_loop().create_task(self._receive(connection))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def close(self) -> None:
        """Close all connections."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for connection in self._unauthenticated:  # connections whose tasks were cancelled before they began
            connection.abort()
        self._unauthenticated.clear()

    async def _receive(self, connection: Connection) -> None:
        try:
            try:
                await authenticate(connection, self._secret, dialled=False)
            finally:
                self._unauthenticated.pop(connection, None)
            await self._serve(connection)
        except TransportError as error:
            _log.debug("a weight connection ended: %s", error)
        finally:
            connection.abort()


class WeightServer:
    """The serving end: all connections of one store."""

    def __init__(self, store: WeightStore, secret: bytes) -> None:
        self._store = store
        acceptor = Acceptor(secret, self._serve)
        self.accept = acceptor.accept
        self.close = acceptor.close

    async def _serve(self, connection: Connection) -> None:
        try:
            while await self._answer(connection):
                pass
        finally:
            self._store.on_reader_left(connection)

    async def _answer(self, connection: Connection) -> bool:
        request = bytearray(_REQUEST.size)
        await connection.receive(memoryview(request))  # no deadline: a client may have no request for hours
        kind, step, incarnation, offset, nbytes, base = _REQUEST.unpack(request)
        version, status = Version(step, incarnation), _STATUS_OK
        body: bytes | memoryview | None = None
        if kind == _KIND_MANIFEST:
            described = await self._when_ready(
                connection, partial(self._store.manifest, version), UNKNOWN_VERSION_TIMEOUT_S
            )
            body = None if described is None else manifests.encode(described)
        elif kind == _KIND_RANGE:
            status, body = await self._chunk(connection, version, range(offset, offset + nbytes), base)
        else:
            return False
        with deadline(connection, _SEND_TIMEOUT_S):
            await connection.send(_ANSWER.pack(_STATUS_UNAVAILABLE if body is None else status, len(body or b"")))
            if body:
                await connection.send(body)
        self._store.on_sent(connection)
        return True

    async def _chunk(
        self, connection: Connection, version: Version, span: range, base: bytes
    ) -> tuple[int, bytes | memoryview | None]:
        """Return status and bytes of the reply to a request for a chunk."""
        names_base = base != _NO_BASE
        try:
            if names_base:
                self._store.changes(version, span.start, base)  # before the chunk is awaited
            chunk = await self._when_ready(connection, partial(self._store.read, version, span, connection), 0.0)
            if names_base and chunk is not None and self._store.changes(version, span.start, base) is not None:
                frame = await asyncio.to_thread(self._store.frame, version, span.start, base, chunk)
                return (_STATUS_OK, chunk) if frame is None else (_STATUS_DELTA, frame)
        except UnknownBase:
            return _STATUS_NO_BASE, b""
        return _STATUS_OK, chunk

    async def _when_ready(self, connection: Connection, read: Callable[[], T], unknown_timeout: float) -> T | None:
        """Return the result of ``read`` once it is ready, and send NOT_READY repeatedly until it is.

        Return None if the version has been evicted, or is still unknown after ``unknown_timeout`` s.
        """
        now = asyncio.get_running_loop().time
        since = now()
        while True:
            try:
                return await self._store.wait_until_ready(NOT_READY_INTERVAL_S, read)
            except NotReady as error:
                if isinstance(error, VersionUnknown) and now() >= since + unknown_timeout:
                    return None
            except VersionEvicted:
                return None
            with deadline(connection, _SEND_TIMEOUT_S):
                await connection.send(_ANSWER.pack(_STATUS_NOT_READY, 0))


class _Refused(Enum):
    """A reply without bytes."""

    UNAVAILABLE = _STATUS_UNAVAILABLE
    NOT_READY = _STATUS_NOT_READY
    NO_BASE = _STATUS_NO_BASE


_REFUSALS = {refused.value: refused for refused in _Refused}


class _ClientConnection:
    """The requesting end of one connection."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self._sending = asyncio.Lock()
        self._turn: asyncio.Future[None] | None = None

    async def request(
        self,
        kind: int,
        version: Version,
        span: range,
        into: memoryview | None,
        timeout: float,
        starvation_timeout: float,
        base: bytes | None = None,
    ) -> bytearray | None:
        """Send a request and return the bytes of the reply; None if they were written to the buffer ``into``.

        If this raises another exception than VersionUnavailable or BaseUnknown, the connection has been aborted, so
        that all waiting requests on it fail too.
        """
        header = _REQUEST.pack(kind, version.step, version.incarnation, span.start, len(span), base or _NO_BASE)
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        async with self._sending:
            previous, self._turn = self._turn, done
            try:
                with deadline(self.connection, timeout):
                    await self.connection.send(header)
            except BaseException:
                done.set_result(None)
                raise
        try:
            if previous is not None:
                await asyncio.shield(previous)
            body = await self._answer(into, timeout, starvation_timeout)
            if base is None and (body is _Refused.NO_BASE or (into is not None and isinstance(body, bytearray))):
                raise TransportError("received a reply about a base, but none was requested")
        except BaseException:
            self.connection.abort()  # otherwise the next request would receive the reply to this one
            raise
        finally:
            done.set_result(None)
        if body is _Refused.UNAVAILABLE:
            raise VersionUnavailable(f"the source does not have {version}")
        if isinstance(body, _Refused):
            raise BaseUnknown("the source does not know this base")
        return body

    async def _answer(
        self, into: memoryview | None, timeout: float, starvation_timeout: float
    ) -> bytearray | _Refused | None:
        now = asyncio.get_running_loop().time
        since: float | None = None
        while True:
            with deadline(self.connection, timeout):
                if (body := await self._body(into)) is not _Refused.NOT_READY:
                    return body
            since = now() if since is None else since
            if now() > since + starvation_timeout:
                raise TransportError(f"the source replied only NOT_READY for {starvation_timeout:.3g} s")

    async def _body(self, into: memoryview | None) -> bytearray | _Refused | None:
        """Return the body of the next reply; None if it was written to ``into``."""
        head = bytearray(_ANSWER.size)
        await self.connection.receive(memoryview(head))
        status, nbytes = _ANSWER.unpack(head)
        if nbytes == 0 and (refused := _REFUSALS.get(status)) is not None:
            return refused
        is_frame = status == _STATUS_DELTA and into is not None and 0 < nbytes <= max(into.nbytes, _MAX_MANIFEST_BYTES)
        is_whole = status == _STATUS_OK and (nbytes <= _MAX_MANIFEST_BYTES if into is None else nbytes == into.nbytes)
        if not is_frame and not is_whole:
            raise TransportError(f"received an unexpected reply: status {status}, {nbytes} bytes")
        if into is not None and is_whole:
            await self.connection.receive(into)
            return None
        body = bytearray(nbytes)
        await self.connection.receive(memoryview(body))
        return body


class WeightClient:
    """The requesting end: one connection per address, opened when needed and dropped on error."""

    def __init__(self, dial: Callable[[str], Awaitable[Connection]], secret: bytes) -> None:
        self._dial = dial
        self._secret = secret
        self._connections: dict[str, _ClientConnection] = {}
        self._dialling: dict[str, asyncio.Task[_ClientConnection | str]] = {}
        """Connection attempts in progress. The result of a failed attempt is the reason as text, from which each
        waiting task raises its own exception."""

    async def manifest(
        self, address: str, version: Version, timeout: float, starvation_timeout: float = STARVATION_TIMEOUT_S
    ) -> Manifest:
        """Return the verified manifest of a version: see ``WeightTransport.manifest``."""
        data = await (await self._connection_to(address, timeout)).request(
            _KIND_MANIFEST, version, range(0), None, timeout, starvation_timeout
        )
        try:
            return manifests.decode(data or b"", version, self._secret)
        except ValueError as error:
            self.disconnect(address)
            raise TransportError(str(error)) from error

    async def fetch(
        self,
        address: str,
        version: Version,
        span: range,
        into: memoryview,
        timeout: float,
        starvation_timeout: float = STARVATION_TIMEOUT_S,
        base: bytes | None = None,
    ) -> bytearray | None:
        """Fetch bytes of a version: see ``WeightTransport.fetch``."""
        return await (await self._connection_to(address, timeout)).request(
            _KIND_RANGE, version, span, into, timeout, starvation_timeout, base
        )

    def disconnect(self, address: str) -> None:
        """Drop the connection to an address."""
        if (client := self._connections.pop(address, None)) is not None:
            client.connection.abort()

    async def close(self) -> None:
        """Tell the sources that this client leaves, then drop every connection."""
        dialling = list(self._dialling.values())
        for attempt in dialling:
            attempt.cancel()
        await asyncio.gather(*dialling, return_exceptions=True)
        for client in list(self._connections.values()):  # a copy: a pull that is still running may add a connection
            try:
                if not client.connection.broken:
                    with deadline(client.connection, CONNECT_TIMEOUT_S):
                        await client.connection.send(_REQUEST.pack(_KIND_BYE, 0, 0, 0, 0, _NO_BASE))
            except TransportError:
                pass
            client.connection.abort()
        self._connections.clear()

    async def _connection_to(self, address: str, timeout: float) -> _ClientConnection:
        """Return the connection to an address, after at most ``timeout`` s.

        All tasks that need the connection wait for the same attempt, so that a hung source costs only one timeout. A
        task that has waited for ``timeout`` s uses another source. The attempt has its own deadlines, and may still
        provide the connection for a later task.
        """
        client = self._connections.get(address)
        if client is not None and not client.connection.broken:
            return client
        loop = asyncio.get_running_loop()
        dialling = self._dialling.get(address)
        if dialling is None:
            dialling = self._dialling[address] = loop.create_task(self._connect(address))
            dialling.add_done_callback(lambda _: self._dialling.pop(address))
        for _ in range(1 + MAX_DEADLINE_EXTENSIONS):
            due = loop.time() + timeout
            await asyncio.wait([dialling], timeout=timeout)
            if dialling.done() or loop.time() <= due + TIMER_SLACK_S:
                break
        if dialling.cancelled():
            raise TransportError("the weight transport is closed")
        connected = dialling.result() if dialling.done() else f"no connection to {address} within {timeout:.3g} s"
        if isinstance(connected, str):
            raise TransportError(connected)
        return connected

    async def _connect(self, address: str) -> _ClientConnection | str:
        for key in [key for key, client in self._connections.items() if client.connection.broken]:
            del self._connections[key]
        try:
            connection = await self._dial(address)
            await authenticate(connection, self._secret, dialled=True)
        except TransportError as error:
            return str(error)
        client = self._connections[address] = _ClientConnection(connection)
        return client
