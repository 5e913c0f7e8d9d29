"""What an agent does for snapshots: it owns their memory, lends it to the members on its node, takes in the copies that
other nodes' members send, and gives out what is asked for.

All of it in a thread and a loop of its own, so that no copy delays a beat. Two doors: an abstract Unix socket for
members on this node (descriptors), a TCP port for the others (bytes). Nobody is heard at either before it has proved
that it belongs to the run.
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

from ...core.types import Life, NodeName
from ...transport.keys import RunKeys
from ...transport.streams.framing import CHUNK, hear, receive_bulk, say, send_bulk
from ...transport.streams.unix import LocalListener, UnixLine
from ...transport.weights.base import Line, PipeError
from ...transport.weights.protocol import Reception
from ...transport.weights.tcp import listen
from . import messages as msg
from .buffers import Pair, Shelf
from .connection import RUN_SHOWN, local_key, remote_key, socket_name
from .format import HEAD, HEAD_ROOM, META_ROOM, PAYLOAD, Digest, Fenced, Head, Kept, SnapshotError

_log = logging.getLogger("rrl.agent")

WRITER_ENDS_WITHIN = 2.0
"""s that a member waits here for its killed predecessor to be gone; then it is given other memory"""
_LOOK = 0.02
"""s between two looks whether it is"""
_NAME_AGAIN = 1.0
"""s between two tries to take the socket's name: a frozen agent before this one may hold it until it is ended"""
_STARTS_WITHIN = 10.0
_ENDS_WITHIN = 2.0
"""s; what is on its way then is dropped"""


class Keeper:
    """Made and closed in any thread. ``host``: where to listen for other nodes; empty: not at all."""

    def __init__(self, run: str, node: NodeName, keys: RunKeys, host: str) -> None:
        self._secret, self._node, self._host = keys.secret, node, host
        self._name = socket_name(run, node, keys.secret)
        self._shelf = Shelf(f"rrl/{run[:RUN_SHOWN]}/snapshot")
        self.address = ""
        """``tcp://host:port``, once started"""
        self._loop = asyncio.new_event_loop()
        self._over = asyncio.Event()
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._main, name="rrl-snapshots", daemon=True)

    def start(self) -> None:
        """What keeps one of its doors shut is said in the log; the other one opens."""
        self._thread.start()
        self._started.wait(_STARTS_WITHIN)

    def fence(self, life: Life) -> None:
        """This life and those before it no longer count."""
        with contextlib.suppress(RuntimeError):  # it has ended
            self._loop.call_soon_threadsafe(self._shelf.fence, life.gang.replica, life.incarnation + 1)

    def close(self) -> None:
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._over.set)
        if self._thread.is_alive():
            self._thread.join(_ENDS_WITHIN)

    # ── its thread ─────────────────────────────────────────────────────────────────────────────────────────────────
    def _main(self) -> None:
        try:
            with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
                runner.run(self._serve())
        except Exception as error:  # the agent goes on without
            _log.error("this node keeps no snapshots: %r", error)
        finally:
            self.address = ""
            self._started.set()

    async def _serve(self) -> None:
        desk = _Desk(self._shelf)
        local = Reception(local_key(self._node, self._secret), desk.local)
        remote = Reception(remote_key(self._secret), desk.remote)
        server = None
        try:
            if self._host:
                try:
                    server, port = await listen(remote.meet, self._host)
                    self.address = f"tcp://{self._host}:{port}"
                except OSError as error:
                    told = "this node keeps no snapshots of other nodes: cannot listen at %s: %s"
                    _log.warning(told, self._host, error)
            opening = asyncio.create_task(self._open(local.meet))
            await asyncio.sleep(0)
            self._started.set()
            await self._over.wait()
            opening.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                (await opening).close()
        finally:
            if server is not None:
                server.close()
            await asyncio.gather(local.close(), remote.close())
            self._shelf.close()

    async def _open(self, meet: Callable[[Line], object]) -> LocalListener:
        told = False
        while True:
            try:
                return LocalListener(self._name, meet)
            except OSError as error:
                if not told:
                    _log.warning("cannot listen on the socket @%s: %s; trying again", self._name, error.strerror)
                told = True
                await asyncio.sleep(_NAME_AGAIN)


class _Desk:
    """The answering end of all connections."""

    def __init__(self, shelf: Shelf) -> None:
        self._shelf = shelf

    async def local(self, line: Line) -> None:
        assert isinstance(line, UnixLine)
        try:
            while True:
                request = await hear(line, msg.Attach | msg.Grow | msg.Lend | msg.Ask | msg.Forget, None)
                await _answered(line, self._answer_local(line, request))
        finally:
            line.abort()

    async def remote(self, line: Line) -> None:
        while True:
            request = await hear(line, msg.Ask | msg.Forget | msg.Put | msg.Get, None)
            await _answered(line, self._answer_remote(line, request))

    async def _answer_local(self, line: UnixLine, request: msg.Request) -> msg.Answer | None:
        self._shelf.admit(request.who)
        match request:
            case msg.Attach():
                pair = await self._attach(line, request)
                held = [(slot, buffer) for slot, buffer in enumerate(pair.buffers) if buffer is not None]
                await _grant(line, [(slot, buffer.room) for slot, buffer in held], [b.fd for _, b in held])
            case msg.Grow():
                buffer = self._shelf.grow(request.who, request.slot, request.nbytes)
                await _grant(line, [(request.slot, buffer.room)], [buffer.fd])
            case msg.Lend():
                lent = self._shelf.find(request.kept)
                fd = lent.read_only()
                try:
                    await _grant(line, [(0, lent.room)], [fd])
                finally:
                    os.close(fd)
            case _:
                return self._answer(request)
        return None

    async def _answer_remote(self, line: Line, request: msg.Request) -> msg.Answer | None:
        self._shelf.admit(request.who)
        match request:
            case msg.Put():
                return await self._take(line, request)
            case msg.Get():
                await self._give(line, request.kept)
                return None
            case _:
                return self._answer(request)

    def _answer(self, request: msg.Request) -> msg.Answer:
        if isinstance(request, msg.Forget):
            self._shelf.forget(request.who)
        return msg.Listed(tuple(self._shelf.kept(request.who.gang)))

    # ── members on this node ───────────────────────────────────────────────────────────────────────────────────────
    async def _attach(self, line: UnixLine, request: msg.Attach) -> Pair:
        """Waits for the end of the member before it, whose memory may then be used again."""
        before = self._shelf.attached(request.who)
        ended = before is None or before.who == request.who
        loop = asyncio.get_running_loop()
        deadline = loop.time() + WRITER_ENDS_WITHIN
        while before is not None and not ended and before.writer is not None:
            ended = _has_ended(before.writer)
            if loop.time() > deadline:
                break
            if not ended:
                await asyncio.sleep(_LOOK)
        self._shelf.admit(request.who)  # another one may have come meanwhile
        ended = ended and self._shelf.attached(request.who) is before
        return self._shelf.attach(request.who, _pidfd(line.pid), ended=ended)

    # ── other nodes ────────────────────────────────────────────────────────────────────────────────────────────────
    async def _take(self, line: Line, put: msg.Put) -> msg.Answer | None:
        """Two at most of a rank, and only complete ones count."""
        kept = msgspec.structs.replace(put.kept, own=False)
        if kept in self._shelf.kept(kept.gang):
            return msg.Listed((kept,))
        if (kept.gang, kept.rank, kept.incarnation) != (put.who.gang, put.who.rank, put.who.incarnation):
            raise SnapshotError(f"{kept} is not its sender's")
        if put.meta > META_ROOM:
            raise SnapshotError(f"{put.meta} bytes of meta; {META_ROOM} are the most")
        buffer, sequence = self._shelf.place(put.who, kept)
        with buffer.used(writing=True) as fd:
            await say(line, msg.Ready())
            try:
                digest = await _write(line, fd, put.meta, kept.nbytes)
            except OSError as error:  # the rest of the bytes would be taken for a request
                raise PipeError(f"a snapshot could not be taken in: {error}") from error
            if digest != kept.digest:
                raise SnapshotError(f"{kept} arrived with other bytes than were sent")
            self._shelf.admit(put.who)  # it may have been fenced meanwhile
            head = Head(sequence, kept.step, kept.incarnation, kept.nbytes, put.meta, kept.digest)
            os.pwrite(fd, head.encode(), 0)
        return msg.Listed((kept,))

    async def _give(self, line: Line, kept: Kept) -> None:
        buffer = self._shelf.find(kept)
        with buffer.used() as fd:
            head = Head.decode(os.pread(fd, HEAD, 0))
            assert head is not None
            await say(line, msg.Here(head.meta))
            space = memoryview(bytearray(max(head.meta, min(CHUNK, kept.nbytes))))
            for start, stop in _spans(head.meta, kept.nbytes):
                part = space[: stop - start]
                os.preadv(fd, [part], start)
                await send_bulk(line, part)


async def _write(line: Line, fd: int, meta: int, nbytes: int) -> bytes:
    """Take a snapshot in; its digest. Through a small buffer: mapped, the memory would count as the agent's own."""
    space = memoryview(bytearray(max(meta, min(CHUNK, nbytes))))
    digest = None
    for start, stop in _spans(meta, nbytes):
        part = space[: stop - start]
        await receive_bulk(line, part, lambda chunk: None)
        if os.pwrite(fd, part, start) < len(part):
            raise PipeError("the memory of this node is full")
        if digest is None:
            digest = Digest(part)
        else:
            digest.add(part)
    assert digest is not None
    return digest.value()


def _spans(meta: int, nbytes: int) -> list[tuple[int, int]]:
    """Where ``meta`` lies in a buffer, and then each chunk of the bytes."""
    chunks = [(PAYLOAD + at, PAYLOAD + min(at + CHUNK, nbytes)) for at in range(0, nbytes, CHUNK)]
    return [(HEAD_ROOM, HEAD_ROOM + meta), *chunks]


async def _answered(line: Line, answering: Awaitable[msg.Answer | None]) -> None:
    """Say the answer, or why there is none."""
    try:
        answer = await answering
    except Fenced as error:
        answer = msg.Refused(str(error), fenced=True)
    except SnapshotError as error:
        answer = msg.Refused(str(error))
    except OSError as error:  # no memory, no descriptor
        answer = msg.Refused(f"the agent cannot: {error.strerror or error}")
    if answer is not None:
        await say(line, answer)


async def _grant(line: UnixLine, slots: list[tuple[int, int]], fds: list[int]) -> None:
    await say(line, msg.Granted(tuple(slots)))
    if fds:
        await line.send_descriptors(fds)


def _has_ended(pidfd: int) -> bool:
    watched = select.poll()
    watched.register(pidfd, select.POLLIN)
    return bool(watched.poll(0))


def _pidfd(pid: int) -> int | None:
    try:
        return os.pidfd_open(pid) if pid > 0 else None
    except OSError:
        return None
