"""Connections from outside are inspected and closed correctly, even while descriptors are reused."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from rrl.transport import tcp_inspection
from rrl.transport.tcp_inspection import accepted_connections, bytes_received, set_port_blocked
from rrl.transport.weights import ucx

SOON = 30.0


@contextmanager
def connected() -> Iterator[tuple[socket.socket, socket.socket]]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        with socket.create_connection(listener.getsockname(), SOON) as dialled:
            here, _ = listener.accept()
            with here:
                here.settimeout(SOON)
                yield here, dialled


def test_listener_closed_during_inspection_does_not_affect_another_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    """The listener's descriptor belongs to another socket as soon as it was inspected."""
    borrowed = tcp_inspection._borrow
    with socket.create_server(("127.0.0.1", 0)) as listener, connected() as (here, dialled):
        port = listener.getsockname()[1]

        def lent(fd: int) -> socket.socket:
            one = borrowed(fd)
            if fd == listener.fileno():
                os.dup2(here.fileno(), fd)
            return one

        monkeypatch.setattr(tcp_inspection, "_borrow", lent)
        set_port_blocked(port, True)
        monkeypatch.undo()
        dialled.sendall(b"heard")
        assert here.recv(5) == b"heard"


def test_received_bytes_are_unknown_if_the_kernel_does_not_report_them(monkeypatch: pytest.MonkeyPatch) -> None:
    with connected() as (here, dialled):
        dialled.sendall(b"heard")
        here.recv(5, socket.MSG_WAITALL)
        assert bytes_received(here.fileno()) == 5
        monkeypatch.setattr(socket, "TCP_INFO", 0x7FFF)  # no kernel has this option
        assert bytes_received(here.fileno()) is None
    assert bytes_received(here.fileno()) is None


@pytest.mark.parametrize("tells", [True, False])
def test_only_connections_known_to_be_silent_are_closed(monkeypatch: pytest.MonkeyPatch, tells: bool) -> None:
    monkeypatch.setattr(ucx, "SILENT_TIMEOUT_S", 0.0)
    monkeypatch.setattr(ucx, "_SILENT_POLL_S", 0.01)
    shut: list[int] = []
    looks: list[int] = []

    def look(fd: int) -> int | None:
        looks.append(fd)
        return bytes_received(fd) if tells else None

    monkeypatch.setattr(ucx, "bytes_received", look)
    monkeypatch.setattr(ucx, "shut_down", lambda fd, port: shut.append(fd))

    async def test(port: int) -> None:
        cutting = asyncio.create_task(ucx.close_silent_connections(lambda: frozenset([port])))
        async with asyncio.timeout(SOON):
            while len(looks) < 3:
                await asyncio.sleep(0.01)
        cutting.cancel()

    with connected() as (here, _):
        port = here.getsockname()[1]
        assert here.fileno() in accepted_connections(frozenset([port]))
        asyncio.run(test(port))
        assert set(shut) == ({here.fileno()} if tells else set())
