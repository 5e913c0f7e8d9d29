"""TCP connections of this process that a library opened and keeps to itself: looked at, and ended, from outside."""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import struct
from collections.abc import Iterator

_BYTES_RECEIVED = struct.Struct("=128xQ")
"""``tcpi_bytes_received`` in ``struct tcp_info`` (linux/tcp.h, since 4.1)"""

_SO_ATTACH_FILTER, _SO_DETACH_FILTER = 26, 27
"""socket(7), asm-generic/socket.h"""
_RETURN_0 = struct.pack("=HBBI", 0x06, 0, 0, 0)
"""classic BPF, one instruction: of each packet keep 0 bytes (linux/filter.h, ``struct sock_filter``)"""


def listening_addresses() -> frozenset[tuple[str, int]]:
    """(address, port) of every TCP socket that this process listens at."""
    return frozenset(one.getsockname()[:2] for _, one in _borrow_all() if _is_listening(one))


def try_packet_filter() -> str:
    """Why this user may not have the kernel drop what comes to a socket of its own; empty where it may."""
    with socket.socket() as own:
        try:
            _drop_everything(own)
        except OSError as error:
            return error.strerror or str(error)
    return ""


def set_port_blocked(port: int, blocked: bool) -> None:
    """Have the kernel drop whatever comes to our listening ``port``, or no longer. Connections that are there already
    are not touched. Raises OSError."""
    for _, one in _borrow_all():  # looked at and told in one: its descriptor may be somebody else's a moment later
        if one.getsockname()[1] == port and _is_listening(one):
            if blocked:
                _drop_everything(one)
            else:
                one.setsockopt(socket.SOL_SOCKET, _SO_DETACH_FILTER, 0)


def _drop_everything(sock: socket.socket) -> None:
    drop = ctypes.create_string_buffer(_RETURN_0)
    program = struct.pack("@HP", 1, ctypes.addressof(drop))
    sock.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)


def accepted_connections(ports: frozenset[int]) -> dict[int, int]:
    """Descriptors of the connections at these of our ports, and the port of each."""
    return {fd: port for fd, port, listens in _tcp_sockets() if not listens and port in ports}


def bytes_received(fd: int) -> int | None:
    """Bytes that have come over the connection; None where the kernel does not tell, or it is none any more."""
    try:
        with _borrow(fd) as connection:
            info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _BYTES_RECEIVED.size)
            return int(_BYTES_RECEIVED.unpack(info)[0])
    except (OSError, struct.error):
        return None


def shut_down(fd: int, port: int) -> bool:
    """End the connection: whoever owns it sees its end and lets go of it. Only ever one to our own ``port``, for the
    descriptor may be somebody else's by now. False when it is."""
    with contextlib.suppress(OSError):
        with _borrow(fd) as connection:
            if connection.getsockname()[1] == port:
                connection.shutdown(socket.SHUT_RDWR)
                return True
    return False


def _tcp_sockets() -> list[tuple[int, int, bool]]:
    """(descriptor, local port, does it listen) of every TCP socket of this process."""
    return [(fd, int(one.getsockname()[1]), _is_listening(one)) for fd, one in _borrow_all()]


def _is_listening(sock: socket.socket) -> bool:
    return bool(sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def _borrow_all() -> Iterator[tuple[int, socket.socket]]:
    """Every TCP socket of this process and its descriptor; borrowed until the next one is asked for."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # no socket, or closed meanwhile
            with _borrow(int(name)) as one:
                if one.family in (socket.AF_INET, socket.AF_INET6) and one.type == socket.SOCK_STREAM:
                    yield int(name), one


def _borrow(fd: int) -> socket.socket:
    """The socket behind ``fd``, to be looked at; closing it leaves ``fd`` alone. Raises OSError if it is no socket."""
    copy = os.dup(fd)
    try:
        return socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        raise
