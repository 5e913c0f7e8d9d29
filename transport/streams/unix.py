"""Lines between two processes of one node and one user: abstract Unix sockets, over which descriptors can be passed.

An abstract name leaves no file and ends with its owner. It is no secret (``/proc/net/unix`` shows all of them), and
whoever is first may take it: both ends look at the other's user, and shake hands.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import struct
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from ..weights.base import CONNECT_BY, Line, PipeError

_CREDENTIALS = struct.Struct("=iII")
"""``struct ucred``: pid, uid, gid (unix(7))"""
_BACKLOG = 1024
"""connections that the kernel holds until they are accepted: strangers' too"""
_FULL = 0.01
"""s until the next try where it is full"""
_AT_ONCE = 16
_AGAIN = 1.0
"""s until the next try, when there is no descriptor to accept with"""
_NAME_MAX = 107
"""bytes of an abstract name (unix(7), ``sun_path`` less the leading zero)"""
T = TypeVar("T")


class UnixLine:
    """See :class:`rrl.transport.weights.base.Line`. It may be used in one loop after another, never in two at once."""

    def __init__(self, connected: socket.socket) -> None:
        connected.setblocking(False)
        self._socket = connected
        self._busy = 0
        self._broken = False
        self.pid = peer(connected)[0]
        """of the process that connected or listens; 0 where it cannot be seen from our pid namespace"""

    async def open(self) -> None:
        """Nothing to agree on."""

    async def send(self, data: bytes | memoryview) -> None:
        await self._doing(asyncio.get_running_loop().sock_sendall(self._socket, data))

    async def receive(self, into: memoryview) -> None:
        await self._doing(self._fill(into))

    async def send_descriptors(self, descriptors: Sequence[int]) -> None:
        """They stay open here."""
        await self._doing(self._pass(descriptors))

    async def receive_descriptors(self, count: int) -> list[int]:
        """Exactly as many as one ``send_descriptors``; the caller closes them."""
        return await self._doing(self._take(count))

    def abort(self) -> None:
        if not self._broken:
            self._broken = True
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)  # wakes whoever waits on it
        if not self._busy:
            self._socket.close()

    @property
    def broken(self) -> bool:
        """Aborted here, or ended by the other end."""
        if not self._broken:
            try:
                return not self._socket.recv(1, socket.MSG_PEEK)
            except BlockingIOError:
                return False
            except OSError:
                return True
        return True

    async def _doing(self, what: Awaitable[T]) -> T:
        self._busy += 1
        try:
            return await what
        except OSError as error:
            raise PipeError(f"the connection was lost: {error}") from error
        finally:
            self._busy -= 1
            if self._broken and not self._busy:
                self._socket.close()

    async def _fill(self, into: memoryview) -> None:
        loop = asyncio.get_running_loop()
        while into:
            count = await loop.sock_recv_into(self._socket, into)
            if not count:
                raise PipeError("the connection was closed by the other end")
            into = into[count:]

    async def _pass(self, descriptors: Sequence[int]) -> None:
        await self._ready(asyncio.get_running_loop().add_writer, asyncio.get_running_loop().remove_writer)
        socket.send_fds(self._socket, [b"\0"], descriptors)

    async def _take(self, count: int) -> list[int]:
        await self._ready(asyncio.get_running_loop().add_reader, asyncio.get_running_loop().remove_reader)
        byte, taken, _, _ = socket.recv_fds(self._socket, 1, count, socket.MSG_CMSG_CLOEXEC)
        if not byte or len(taken) != count:
            for fd in taken:
                os.close(fd)
            raise PipeError(f"{len(taken)} descriptors came, not {count}")
        return list(taken)

    async def _ready(self, add: Callable[..., None], remove: Callable[[int], bool]) -> None:
        woken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        fd = self._socket.fileno()
        if fd < 0:
            raise PipeError("the connection was aborted")
        add(fd, _once(woken))
        try:
            await woken
        finally:
            remove(fd)


def _once(woken: asyncio.Future[None]) -> Callable[[], None]:
    def wake() -> None:
        if not woken.done():
            woken.set_result(None)

    return wake


def abstract(name: str) -> str:
    """The address of ``name``. Raises ValueError when it is too long."""
    if len(name.encode()) > _NAME_MAX:
        raise ValueError(f"{name!r} is longer than {_NAME_MAX} bytes")
    return "\0" + name


def peer(connected: socket.socket) -> tuple[int, int]:
    """Pid and user of who connected, or listened when we connected."""
    told = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, user, _ = _CREDENTIALS.unpack(told)
    return pid, user


async def dial_local(name: str) -> UnixLine:
    """Raises PipeError, also when another user took the name."""
    connected = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        async with asyncio.timeout(CONNECT_BY):
            await _connect(connected, abstract(name))
        if (user := peer(connected)[1]) != os.geteuid():
            raise PipeError(f"{name} is held by user {user}")
    except TimeoutError:
        connected.close()
        raise PipeError(f"the Unix socket @{name} is not answered within {CONNECT_BY:g} s") from None
    except OSError as error:
        connected.close()
        raise PipeError(f"nobody listens at the Unix socket @{name}: {error.strerror or error}") from error
    except PipeError:
        connected.close()
        raise
    return UnixLine(connected)


async def _connect(connecting: socket.socket, address: str) -> None:
    while True:
        try:
            connecting.connect(address)
            return
        except BlockingIOError:  # its backlog is full; the kernel tells nobody when it no longer is
            await asyncio.sleep(_FULL)


class LocalListener:
    """Listens at an abstract name in the running loop; whoever is of another user is let go unheard.

    Raises OSError (EADDRINUSE) when the name is taken.
    """

    def __init__(self, name: str, meet: Callable[[Line], object]) -> None:
        self._meet = meet
        self._loop = asyncio.get_running_loop()
        self._again: asyncio.TimerHandle | None = None
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            self._socket.bind(abstract(name))
            self._socket.listen(_BACKLOG)
        except OSError:
            self._socket.close()
            raise
        self._listen()

    def close(self) -> None:
        if self._again is not None:
            self._again.cancel()
        self._loop.remove_reader(self._socket)
        self._socket.close()

    def _listen(self) -> None:
        self._loop.add_reader(self._socket, self._accept)

    def _accept(self) -> None:
        for _ in range(_AT_ONCE):
            try:
                connected, _ = self._socket.accept()
            except BlockingIOError:
                return
            except ConnectionError:
                continue
            except OSError:  # out of descriptors: it would be told again at once, for ever
                self._loop.remove_reader(self._socket)
                self._again = self._loop.call_later(_AGAIN, self._listen)
                return
            try:
                ours = peer(connected)[1] == os.geteuid()
            except OSError:
                ours = False
            if ours:
                self._meet(UnixLine(connected))
            else:
                connected.close()
