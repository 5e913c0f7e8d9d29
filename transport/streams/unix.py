"""Connections between two processes of one node and one user: abstract Unix sockets, which can pass descriptors.

An abstract name leaves no file, and disappears with the process that bound it. The name is not secret
(``/proc/net/unix`` lists all names), and any process may bind it first. So each end checks the user of the other end,
and both authenticate.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import os
import socket
import struct
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from .connection import CONNECT_TIMEOUT_S, Connection, TransportError

_CREDENTIALS = struct.Struct("=iII")
"""``struct ucred``: pid, uid, gid (unix(7))."""
_BACKLOG = 1024
"""Maximum number of connections that the kernel holds until they are accepted, including connections of strangers."""
_BACKLOG_RETRY_S = 0.01
"""Seconds until the next attempt if the listener's backlog is full."""
_MAX_ACCEPTS_PER_TURN = 16
_ACCEPT_RETRY_S = 1.0
"""Seconds until the next attempt if no descriptor is free for an accepted connection."""
_MAX_NAME_BYTES = 107
"""Maximum length of an abstract name in bytes (unix(7), ``sun_path`` without the leading zero)."""
MAX_RUN_NAME_CHARS = 40
"""Maximum number of characters of the run's name in the names of sockets and memfds, which the kernel limits."""
T = TypeVar("T")


def secret_name(run: str, purpose: str, secret: bytes) -> str:
    """Return an abstract name that only processes of the run can compute, so that no other process binds it first."""
    return f"rrl/{run[:MAX_RUN_NAME_CHARS]}/{hmac.digest(secret, purpose.encode(), 'sha256').hex()[:16]}"


class UnixConnection:
    """A :class:`rrl.transport.streams.connection.Connection` over a Unix socket.

    It may be used in one event loop after another, but never in two at the same time.
    """

    def __init__(self, connected: socket.socket) -> None:
        connected.setblocking(False)
        self._socket = connected
        self._operations = 0
        self._broken = False
        self.pid = peer_credentials(connected)[0]
        """Pid of the process at the other end; 0 if it is outside of this process's pid namespace."""

    async def send(self, data: bytes | memoryview) -> None:
        """Send all of ``data``."""
        await self._run(asyncio.get_running_loop().sock_sendall(self._socket, data))

    async def receive(self, into: memoryview) -> None:
        """Receive bytes until ``into`` is full."""
        await self._run(self._fill(into))

    async def send_descriptors(self, descriptors: Sequence[int]) -> None:
        """Send copies of open file descriptors."""
        await self._run(self._send_fds(descriptors))

    async def receive_descriptors(self, count: int) -> list[int]:
        """Receive the ``count`` descriptors of one ``send_descriptors``; the caller closes them."""
        return await self._run(self._receive_fds(count))

    def abort(self) -> None:
        """Close the connection at once; a socket in use by an operation is closed after the operation."""
        if not self._broken:
            self._broken = True
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)  # wakes the operations that wait for the socket
        if not self._operations:
            self._socket.close()

    @property
    def broken(self) -> bool:
        """Return whether the connection was aborted here or closed by the peer."""
        if not self._broken:
            try:
                return not self._socket.recv(1, socket.MSG_PEEK)
            except BlockingIOError:
                return False
            except OSError:
                return True
        return True

    async def _run(self, operation: Awaitable[T]) -> T:
        self._operations += 1
        try:
            return await operation
        except OSError as error:
            raise TransportError(f"the connection was lost: {error}") from error
        finally:
            self._operations -= 1
            if self._broken and not self._operations:
                self._socket.close()

    async def _fill(self, into: memoryview) -> None:
        loop = asyncio.get_running_loop()
        while into:
            count = await loop.sock_recv_into(self._socket, into)
            if not count:
                raise TransportError("the connection was closed by the peer")
            into = into[count:]

    async def _send_fds(self, descriptors: Sequence[int]) -> None:
        await self._wait_ready(asyncio.get_running_loop().add_writer, asyncio.get_running_loop().remove_writer)
        socket.send_fds(self._socket, [b"\0"], descriptors)

    async def _receive_fds(self, count: int) -> list[int]:
        await self._wait_ready(asyncio.get_running_loop().add_reader, asyncio.get_running_loop().remove_reader)
        byte, fds, _, _ = socket.recv_fds(self._socket, 1, count, socket.MSG_CMSG_CLOEXEC)
        if not byte or len(fds) != count:
            for fd in fds:
                os.close(fd)
            raise TransportError(f"received {len(fds)} file descriptors instead of {count}")
        return list(fds)

    async def _wait_ready(self, add: Callable[..., None], remove: Callable[[int], bool]) -> None:
        woken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        fd = self._socket.fileno()
        if fd < 0:
            raise TransportError("the connection was aborted")
        add(fd, _waker(woken))
        try:
            await woken
        finally:
            remove(fd)


def _waker(woken: asyncio.Future[None]) -> Callable[[], None]:
    def wake() -> None:
        if not woken.done():
            woken.set_result(None)

    return wake


def abstract_address(name: str) -> str:
    """Return the socket address of an abstract name.

    Raises:
        ValueError: The name is too long.
    """
    if len(name.encode()) > _MAX_NAME_BYTES:
        raise ValueError(f"the socket name {name!r} is longer than {_MAX_NAME_BYTES} bytes")
    return "\0" + name


def peer_credentials(connected: socket.socket) -> tuple[int, int]:
    """Return the pid and user id of the process at the other end of a connected socket."""
    credentials = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, user, _ = _CREDENTIALS.unpack(credentials)
    return pid, user


async def dial_unix(name: str) -> UnixConnection:
    """Connect to an abstract name.

    Raises:
        TransportError: The connection fails, or a process of another user listens at the name.
    """
    connected = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            await _connect(connected, abstract_address(name))
        if (user := peer_credentials(connected)[1]) != os.geteuid():
            raise TransportError(f"the Unix socket @{name} belongs to another user (uid {user})")
    except TimeoutError:
        connected.close()
        raise TransportError(f"the Unix socket @{name} did not accept within {CONNECT_TIMEOUT_S:g} s") from None
    except OSError as error:
        connected.close()
        raise TransportError(f"cannot connect to the Unix socket @{name}: {error.strerror or error}") from error
    except TransportError:
        connected.close()
        raise
    return UnixConnection(connected)


async def _connect(connecting: socket.socket, address: str) -> None:
    while True:
        try:
            connecting.connect(address)
            return
        except BlockingIOError:  # the listener's backlog is full; the kernel does not signal when there is space again
            await asyncio.sleep(_BACKLOG_RETRY_S)


class UnixListener:
    """Listens at an abstract name in the running event loop; connections of other users are closed unread.

    Raises:
        OSError: The name is in use (EADDRINUSE).
    """

    def __init__(self, name: str, on_connection: Callable[[Connection], object]) -> None:
        self._on_connection = on_connection
        self._loop = asyncio.get_running_loop()
        self._retry_timer: asyncio.TimerHandle | None = None
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            self._socket.bind(abstract_address(name))
            self._socket.listen(_BACKLOG)
        except OSError:
            self._socket.close()
            raise
        self._listen()

    def close(self) -> None:
        """Stop listening."""
        if self._retry_timer is not None:
            self._retry_timer.cancel()
        self._loop.remove_reader(self._socket)
        self._socket.close()

    def close_socket(self) -> None:
        """Close the socket in a forked child, to which the event loop does not belong."""
        self._socket.close()

    def _listen(self) -> None:
        self._loop.add_reader(self._socket, self._accept)

    def _accept(self) -> None:
        for _ in range(_MAX_ACCEPTS_PER_TURN):
            try:
                connected, _ = self._socket.accept()
            except BlockingIOError:
                return
            except ConnectionError:
                continue
            except OSError:  # out of descriptors: the socket stays readable, so the loop would call this again at once
                self._loop.remove_reader(self._socket)
                self._retry_timer = self._loop.call_later(_ACCEPT_RETRY_S, self._listen)
                return
            try:
                same_user = peer_credentials(connected)[1] == os.geteuid()
            except OSError:
                same_user = False
            if same_user:
                self._on_connection(UnixConnection(connected))
            else:
                connected.close()
