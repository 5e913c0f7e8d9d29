"""Inspect and close TCP connections of this process that a library opened and does not expose."""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import struct
from collections.abc import Iterator

_BYTES_RECEIVED = struct.Struct("=128xQ")
"""Field ``tcpi_bytes_received`` of ``struct tcp_info`` (linux/tcp.h, since 4.1)."""

_SO_ATTACH_FILTER, _SO_DETACH_FILTER = 26, 27
"""Socket options of socket(7), asm-generic/socket.h."""
_RETURN_0 = struct.pack("=HBBI", 0x06, 0, 0, 0)
"""Classic BPF program of one instruction: keep 0 bytes of each packet (linux/filter.h, ``struct sock_filter``)."""


def listening_addresses() -> frozenset[tuple[str, int]]:
    """Return (address, port) of every TCP socket on which this process listens."""
    return frozenset(sock.getsockname()[:2] for _, sock in _borrow_all() if _is_listening(sock))


def try_packet_filter() -> str:
    """Return why this user cannot attach a packet filter to sockets, or an empty text if it can."""
    with socket.socket() as sock:
        try:
            _drop_everything(sock)
        except OSError as error:
            return error.strerror or str(error)
    return ""


def set_port_blocked(port: int, blocked: bool) -> None:
    """Make the kernel drop, or accept again, all packets to this process's listening ``port``.

    Existing connections are not affected.

    Raises:
        OSError: The kernel refuses the filter.
    """
    for _, sock in _borrow_all():  # check and change in one pass, because a descriptor may be reused
        if sock.getsockname()[1] == port and _is_listening(sock):
            if blocked:
                _drop_everything(sock)
            else:
                sock.setsockopt(socket.SOL_SOCKET, _SO_DETACH_FILTER, 0)


def _drop_everything(sock: socket.socket) -> None:
    drop = ctypes.create_string_buffer(_RETURN_0)
    program = struct.pack("@HP", 1, ctypes.addressof(drop))
    sock.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)


def accepted_connections(ports: frozenset[int]) -> dict[int, int]:
    """Return the port of each connection that was accepted at ``ports`` of this process, by descriptor."""
    return {fd: port for fd, port, is_listening in _tcp_sockets() if not is_listening and port in ports}


def bytes_received(fd: int) -> int | None:
    """Return how many bytes a connection has received; None if the kernel does not report it or the socket is gone."""
    try:
        with _borrow(fd) as connection:
            info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _BYTES_RECEIVED.size)
            return int(_BYTES_RECEIVED.unpack(info)[0])
    except (OSError, struct.error):
        return None


def shut_down(fd: int, port: int) -> None:
    """Shut down a connection that may be gone, so that its library notices and closes it.

    Only a connection at this process's ``port`` is shut down, since the descriptor may have been reused.
    """
    with contextlib.suppress(OSError):
        with _borrow(fd) as connection:
            if connection.getsockname()[1] == port:
                connection.shutdown(socket.SHUT_RDWR)


def _tcp_sockets() -> list[tuple[int, int, bool]]:
    """Return (descriptor, local port, whether it listens) of every TCP socket of this process."""
    return [(fd, int(sock.getsockname()[1]), _is_listening(sock)) for fd, sock in _borrow_all()]


def _is_listening(sock: socket.socket) -> bool:
    return bool(sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def _borrow_all() -> Iterator[tuple[int, socket.socket]]:
    """Yield (descriptor, socket) for every TCP socket of this process; the next iteration closes the socket object."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # not a socket, or closed in the meantime
            with _borrow(int(name)) as sock:
                if sock.family in (socket.AF_INET, socket.AF_INET6) and sock.type == socket.SOCK_STREAM:
                    yield int(name), sock


def _borrow(fd: int) -> socket.socket:
    """Return the socket behind ``fd`` for inspection; closing it does not close ``fd``.

    Raises:
        OSError: ``fd`` is not a socket.
    """
    copy = os.dup(fd)
    try:
        return socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        raise
