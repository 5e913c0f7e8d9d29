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
from .base import AGAIN, CONNECT_BY, LATE, STARVED_BY, Line, NotHeld, PipeError, deadline, shake_hands
from .manifest import Manifest
from .store import Gone, NotYet, Unheard, WeightStore

_REQUEST = struct.Struct("<BqqQQ")  # kind, version's step and incarnation, offset, bytes
_ANSWER = struct.Struct("<BQ")  # status, bytes
_MANIFEST, _RANGE, _BYE = 1, 2, 3
_HERE, _NOT_HELD, _NOT_YET = 0, 1, 2
_MANIFEST_MAX = 64 * 2**20
"""bytes; bounds what a peer can make us allocate"""
_SEND_BY = 30.0
"""s for one answer: who does not take it by then is cut off, so that it cannot hold an evicted version in memory"""
NOT_YET_EVERY = 0.05
"""s between two "not yet": several within the shortest patience of who asks (pull.LEAST)"""
UNHEARD_BY = 1.0
"""s that a request for the manifest of a version waits which the holder has not heard of yet: the manager tells one
after the other. Chunks are asked of those who have given the manifest"""
_STRANGERS = 128
"""connections that have not proved themselves yet, at most; at a further one the oldest is dropped"""

T = TypeVar("T")

_log = logging.getLogger("rrl.weights")


class Reception:
    """Where connections come in: a task for each, few strangers at once; who proves itself is handed to ``serve``,
    whose return (or PipeError) ends the connection."""

    def __init__(self, secret: bytes, serve: Callable[[Line], Awaitable[None]]) -> None:
        self._secret = secret
        self._serve = serve
        self._strangers: dict[Line, None] = {}
        """oldest first"""
        self._tasks: set[asyncio.Task[None]] = set()

    def meet(self, line: Line) -> asyncio.Task[None]:
        """A connection came in: serve it until either end leaves, in the task that is returned. The oldest stranger
        makes room for it, if need be: a member has proved itself within milliseconds, who has not by now is none."""
        if len(self._strangers) >= _STRANGERS:
            next(iter(self._strangers)).abort()
            del self._strangers[next(iter(self._strangers))]
        self._strangers[line] = None
        task = asyncio.get_running_loop().create_task(self._receive(line))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for line in self._strangers:  # of a task that was cancelled before its first step
            line.abort()
        self._strangers.clear()

    async def _receive(self, line: Line) -> None:
        try:
            try:
                await shake_hands(line, self._secret, dialled=False)
            finally:
                self._strangers.pop(line, None)
            await self._serve(line)
        except PipeError as error:
            _log.debug("a weights connection ended: %s", error)
        finally:
            line.abort()


class Desk:
    """The answering end: all connections of one store."""

    def __init__(self, store: WeightStore, secret: bytes) -> None:
        self._store = store
        reception = Reception(secret, self._serve)
        self.meet = reception.meet
        self.close = reception.close

    async def _serve(self, line: Line) -> None:
        try:
            while await self._answer(line):
                pass
        finally:
            self._store.left(line)

    async def _answer(self, line: Line) -> bool:
        request = bytearray(_REQUEST.size)
        await line.receive(memoryview(request))  # no deadline: a holder's clients may have nothing to ask for hours
        kind, step, incarnation, offset, nbytes = _REQUEST.unpack(request)
        version = Version(step, incarnation)
        body: bytes | memoryview | None = None
        if kind == _MANIFEST:
            described = await self._once_here(line, partial(self._store.manifest, version), UNHEARD_BY)
            body = None if described is None else manifests.encode(described)
        elif kind == _RANGE:
            span = range(offset, offset + nbytes)
            body = await self._once_here(line, partial(self._store.read, version, span, line), 0.0)
        else:
            return False
        with deadline(line, _SEND_BY):
            if body is None:
                await line.send(_ANSWER.pack(_NOT_HELD, 0))
            else:
                await line.send(_ANSWER.pack(_HERE, len(body)))
                await line.send(body)
        self._store.sent(line)
        return True

    async def _once_here(self, line: Line, look: Callable[[], T], unheard_by: float) -> T | None:
        """What is asked for, once it is here; None when it does not come, or is not heard of within so many s."""
        now = asyncio.get_running_loop().time
        since = now()
        while True:
            try:
                return await self._store.within(NOT_YET_EVERY, look)
            except NotYet as error:
                if isinstance(error, Unheard) and now() >= since + unheard_by:
                    return None
            except Gone:
                return None
            with deadline(line, _SEND_BY):
                await line.send(_ANSWER.pack(_NOT_YET, 0))


class _NotHeld:
    """An answer."""


class _Call:
    """The asking end of one connection."""

    def __init__(self, line: Line) -> None:
        self.line = line
        self._sending = asyncio.Lock()
        self._turn: asyncio.Future[None] | None = None

    async def ask(
        self, kind: int, version: Version, span: range, into: memoryview | None, by: float, starved_by: float
    ) -> bytearray:
        """Returns the answer's bytes, or an empty one where they went ``into`` a buffer.

        When this raises anything but NotHeld, the line has been aborted, and with it all that were waiting on it.
        """
        request = _REQUEST.pack(kind, version.step, version.incarnation, span.start, len(span))
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        async with self._sending:
            before, self._turn = self._turn, done
            try:
                with deadline(self.line, by):
                    await self.line.send(request)
            except BaseException:
                done.set_result(None)
                raise
        try:
            if before is not None:
                await asyncio.shield(before)
            body = await self._answer(into, by, starved_by)
        except BaseException:
            self.line.abort()  # also when cancelled while waiting: the answer to come would be taken for the next one
            raise
        finally:
            done.set_result(None)
        if isinstance(body, _NotHeld):
            raise NotHeld(f"{version} is not held there")
        return body

    async def _answer(self, into: memoryview | None, by: float, starved_by: float) -> bytearray | _NotHeld:
        now = asyncio.get_running_loop().time
        since: float | None = None
        while True:
            with deadline(self.line, by):
                if (body := await self._body(into)) is not None:
                    return body
            since = now() if since is None else since
            if now() > since + starved_by:
                raise PipeError(f"for {starved_by:.3g} s it only said that it is waiting itself")

    async def _body(self, into: memoryview | None) -> bytearray | _NotHeld | None:
        """One answer; None: not yet."""
        head = bytearray(_ANSWER.size)
        await self.line.receive(memoryview(head))
        status, nbytes = _ANSWER.unpack(head)
        if status in (_NOT_HELD, _NOT_YET):
            return _NotHeld() if status == _NOT_HELD else None
        if status != _HERE or (nbytes > _MANIFEST_MAX if into is None else nbytes != into.nbytes):
            raise PipeError(f"an answer that was not asked for: status {status}, {nbytes} bytes")
        body = bytearray(0 if into is not None else nbytes)
        await self.line.receive(memoryview(body) if into is None else into)
        return body


class Calls:
    """The asking end: one kept connection per address, made when needed, dropped on error."""

    def __init__(self, dial: Callable[[str], Awaitable[Line]], secret: bytes) -> None:
        self._dial = dial
        self._secret = secret
        self._kept: dict[str, _Call] = {}
        self._dialling: dict[str, asyncio.Task[_Call | str]] = {}
        """why it came to nothing is a text: whoever waits raises an exception of its own"""

    async def manifest(self, at: str, version: Version, by: float, starved_by: float = STARVED_BY) -> Manifest:
        data = await (await self._call(at, by)).ask(_MANIFEST, version, range(0), None, by, starved_by)
        try:
            return manifests.decode(data, version, self._secret)
        except ValueError as error:
            self.hang_up(at)
            raise PipeError(str(error)) from error

    async def fetch(
        self, at: str, version: Version, span: range, into: memoryview, by: float, starved_by: float = STARVED_BY
    ) -> None:
        await (await self._call(at, by)).ask(_RANGE, version, span, into, by, starved_by)

    def hang_up(self, at: str) -> None:
        if (call := self._kept.pop(at, None)) is not None:
            call.line.abort()

    async def close(self) -> None:
        """Say bye to those who still listen, then drop every connection."""
        dialling = list(self._dialling.values())
        for attempt in dialling:
            attempt.cancel()
        await asyncio.gather(*dialling, return_exceptions=True)
        for call in list(self._kept.values()):  # a pull that is still running may dial meanwhile
            try:
                if not call.line.broken:
                    with deadline(call.line, CONNECT_BY):
                        await call.line.send(_REQUEST.pack(_BYE, 0, 0, 0, 0))
            except PipeError:
                pass
            call.line.abort()
        self._kept.clear()

    async def _call(self, at: str, by: float) -> _Call:
        """All who ask for one meanwhile wait for the same attempt: a source that hangs costs its patience once. Who
        has waited for ``by`` s goes elsewhere; the attempt has its own deadlines, and may serve the next one."""
        call = self._kept.get(at)
        if call is not None and not call.line.broken:
            return call
        loop = asyncio.get_running_loop()
        dialling = self._dialling.get(at)
        if dialling is None:
            dialling = self._dialling[at] = loop.create_task(self._connect(at))
            dialling.add_done_callback(lambda _: self._dialling.pop(at))
        for _ in range(1 + AGAIN):
            due = loop.time() + by
            await asyncio.wait([dialling], timeout=by)
            if dialling.done() or loop.time() <= due + LATE:
                break
        if dialling.cancelled():
            raise PipeError("the pipe is closed")
        found = dialling.result() if dialling.done() else f"{at} is not connected within {by:.3g} s"
        if isinstance(found, str):
            raise PipeError(found)
        return found

    async def _connect(self, at: str) -> _Call | str:
        for gone in [key for key, kept in self._kept.items() if kept.line.broken]:
            del self._kept[gone]
        try:
            line = await self._dial(at)
            await shake_hands(line, self._secret, dialled=True)
        except PipeError as error:
            return str(error)
        call = self._kept[at] = _Call(line)
        return call
