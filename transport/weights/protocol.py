"""What is said on a line, both ends, alike for every pipe: request and answer, strictly in order.

A request is kind, version, offset, bytes; an answer is a status and a length, then that many bytes. Requests may be
sent ahead of the answers. Who is asked for what it is still receiving says "not yet" until it has it: whoever says
nothing at all is dead or hangs. A request that waits costs its connection, which answers one at a time, and nine bytes
now and then. Lengths are ours in every pipe: UCX neither tells the length of a short message nor whether
a completed send has arrived. What has arrived is known by its digest, which is the acknowledgement.
"""

from __future__ import annotations

import asyncio
import logging
import struct
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TypeVar

from ...core.types import Version
from . import manifest as manifests
from .base import (
    CONNECT_TIMEOUT_S,
    MAX_DEADLINE_EXTENSIONS,
    STARVATION_TIMEOUT_S,
    TIMER_SLACK_S,
    Connection,
    TransportError,
    VersionUnavailable,
    authenticate,
    deadline,
)
from .manifest import Manifest
from .store import NotReady, VersionEvicted, VersionUnknown, WeightStore

_REQUEST = struct.Struct("<BqqQQ")  # kind, version's step and incarnation, offset, bytes
_ANSWER = struct.Struct("<BQ")  # status, bytes
_KIND_MANIFEST, _KIND_RANGE, _KIND_BYE = 1, 2, 3
_STATUS_OK, _STATUS_UNAVAILABLE, _STATUS_NOT_READY = 0, 1, 2
_MAX_MANIFEST_BYTES = 64 * 2**20
"""bytes; bounds what a peer can make us allocate"""
_SEND_TIMEOUT_S = 30.0
"""s for one answer: who does not take it by then is cut off, so that it cannot hold an evicted version in memory"""
NOT_READY_INTERVAL_S = 0.05
"""s between two "not yet": several within the shortest patience of who asks (pull.LEAST)"""
UNKNOWN_VERSION_TIMEOUT_S = 1.0
"""s that a request for the manifest of a version waits which the holder has not heard of yet: the manager tells one
after the other. Chunks are asked of those who have given the manifest"""
_MAX_UNAUTHENTICATED = 128
"""connections that have not proved themselves yet, at most; at a further one the oldest is dropped"""

T = TypeVar("T")

_log = logging.getLogger("rrl.weights")


class Acceptor:
    """Where connections come in: a task for each, few strangers at once; who proves itself is handed to ``serve``,
    whose return (or PipeError) ends the connection."""

    def __init__(self, secret: bytes, serve: Callable[[Connection], Awaitable[None]]) -> None:
        self._secret = secret
        self._serve = serve
        self._unauthenticated: dict[Connection, None] = {}
        """oldest first"""
        self._tasks: set[asyncio.Task[None]] = set()

    def accept(self, connection: Connection) -> asyncio.Task[None]:
        """A connection came in: serve it until either end leaves, in the task that is returned. The oldest stranger
        makes room for it, if need be: a member has proved itself within milliseconds, who has not by now is none."""
        if len(self._unauthenticated) >= _MAX_UNAUTHENTICATED:
            next(iter(self._unauthenticated)).abort()
            del self._unauthenticated[next(iter(self._unauthenticated))]
        self._unauthenticated[connection] = None
        task = asyncio.get_running_loop().create_task(self._receive(connection))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for connection in self._unauthenticated:  # of a task that was cancelled before its first step
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
            _log.debug("a weights connection ended: %s", error)
        finally:
            connection.abort()


class WeightServer:
    """The answering end: all connections of one store."""

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
        await connection.receive(
            memoryview(request)
        )  # no deadline: a holder's clients may have nothing to ask for hours
        kind, step, incarnation, offset, nbytes = _REQUEST.unpack(request)
        version = Version(step, incarnation)
        body: bytes | memoryview | None = None
        if kind == _KIND_MANIFEST:
            described = await self._when_ready(
                connection, partial(self._store.manifest, version), UNKNOWN_VERSION_TIMEOUT_S
            )
            body = None if described is None else manifests.encode(described)
        elif kind == _KIND_RANGE:
            span = range(offset, offset + nbytes)
            body = await self._when_ready(connection, partial(self._store.read, version, span, connection), 0.0)
        else:
            return False
        with deadline(connection, _SEND_TIMEOUT_S):
            if body is None:
                await connection.send(_ANSWER.pack(_STATUS_UNAVAILABLE, 0))
            else:
                await connection.send(_ANSWER.pack(_STATUS_OK, len(body)))
                await connection.send(body)
        self._store.on_sent(connection)
        return True

    async def _when_ready(self, connection: Connection, read: Callable[[], T], unknown_timeout: float) -> T | None:
        """What is asked for, once it is here; None when it does not come, or is not heard of within so many s."""
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


class _Unavailable:
    """An answer."""


class _ClientConnection:
    """The asking end of one connection."""

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
    ) -> bytearray:
        """Returns the answer's bytes, or an empty one where they went ``into`` a buffer.

        When this raises anything but NotHeld, the line has been aborted, and with it all that were waiting on it.
        """
        header = _REQUEST.pack(kind, version.step, version.incarnation, span.start, len(span))
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        async with self._sending:
            before, self._turn = self._turn, done
            try:
                with deadline(self.connection, timeout):
                    await self.connection.send(header)
            except BaseException:
                done.set_result(None)
                raise
        try:
            if before is not None:
                await asyncio.shield(before)
            body = await self._answer(into, timeout, starvation_timeout)
        except BaseException:
            self.connection.abort()  # also when cancelled while waiting: the answer to come would be taken for the next one
            raise
        finally:
            done.set_result(None)
        if isinstance(body, _Unavailable):
            raise VersionUnavailable(f"{version} is not held there")
        return body

    async def _answer(
        self, into: memoryview | None, timeout: float, starvation_timeout: float
    ) -> bytearray | _Unavailable:
        now = asyncio.get_running_loop().time
        since: float | None = None
        while True:
            with deadline(self.connection, timeout):
                if (body := await self._body(into)) is not None:
                    return body
            since = now() if since is None else since
            if now() > since + starvation_timeout:
                raise TransportError(f"for {starvation_timeout:.3g} s it only said that it is waiting itself")

    async def _body(self, into: memoryview | None) -> bytearray | _Unavailable | None:
        """One answer; None: not yet."""
        head = bytearray(_ANSWER.size)
        await self.connection.receive(memoryview(head))
        status, nbytes = _ANSWER.unpack(head)
        if status in (_STATUS_UNAVAILABLE, _STATUS_NOT_READY):
            return _Unavailable() if status == _STATUS_UNAVAILABLE else None
        if status != _STATUS_OK or (nbytes > _MAX_MANIFEST_BYTES if into is None else nbytes != into.nbytes):
            raise TransportError(f"an answer that was not asked for: status {status}, {nbytes} bytes")
        body = bytearray(0 if into is not None else nbytes)
        await self.connection.receive(memoryview(body) if into is None else into)
        return body


class WeightClient:
    """The asking end: one kept connection per address, made when needed, dropped on error."""

    def __init__(self, dial: Callable[[str], Awaitable[Connection]], secret: bytes) -> None:
        self._dial = dial
        self._secret = secret
        self._connections: dict[str, _ClientConnection] = {}
        self._dialling: dict[str, asyncio.Task[_ClientConnection | str]] = {}
        """why it came to nothing is a text: whoever waits raises an exception of its own"""

    async def manifest(
        self, address: str, version: Version, timeout: float, starvation_timeout: float = STARVATION_TIMEOUT_S
    ) -> Manifest:
        data = await (await self._connection_to(address, timeout)).request(
            _KIND_MANIFEST, version, range(0), None, timeout, starvation_timeout
        )
        try:
            return manifests.decode(data, version, self._secret)
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
    ) -> None:
        await (await self._connection_to(address, timeout)).request(
            _KIND_RANGE, version, span, into, timeout, starvation_timeout
        )

    def disconnect(self, address: str) -> None:
        if (call := self._connections.pop(address, None)) is not None:
            call.connection.abort()

    async def close(self) -> None:
        """Say bye to those who still listen, then drop every connection."""
        dialling = list(self._dialling.values())
        for attempt in dialling:
            attempt.cancel()
        await asyncio.gather(*dialling, return_exceptions=True)
        for call in list(self._connections.values()):  # a pull that is still running may dial meanwhile
            try:
                if not call.connection.broken:
                    with deadline(call.connection, CONNECT_TIMEOUT_S):
                        await call.connection.send(_REQUEST.pack(_KIND_BYE, 0, 0, 0, 0))
            except TransportError:
                pass
            call.connection.abort()
        self._connections.clear()

    async def _connection_to(self, address: str, timeout: float) -> _ClientConnection:
        """All who ask for one meanwhile wait for the same attempt: a source that hangs costs its patience once. Who
        has waited for ``by`` s goes elsewhere; the attempt has its own deadlines, and may serve the next one."""
        call = self._connections.get(address)
        if call is not None and not call.connection.broken:
            return call
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
            raise TransportError("the pipe is closed")
        connected = dialling.result() if dialling.done() else f"{address} is not connected within {timeout:.3g} s"
        if isinstance(connected, str):
            raise TransportError(connected)
        return connected

    async def _connect(self, address: str) -> _ClientConnection | str:
        for broken in [key for key, kept in self._connections.items() if kept.connection.broken]:
            del self._connections[broken]
        try:
            connection = await self._dial(address)
            await authenticate(connection, self._secret, dialled=True)
        except TransportError as error:
            return str(error)
        call = self._connections[address] = _ClientConnection(connection)
        return call
