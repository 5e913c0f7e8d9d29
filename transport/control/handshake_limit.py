"""Who connects to a listening zmq socket and has not proved itself yet: counted, and never more than a few at once.

libzmq cuts off whoever has not finished the handshake within its deadline, but lets in any number meanwhile: one host
that connects and says nothing would take every descriptor of the process. So the ones too many are cut off here, first
those that said too little to have proved anything, then the oldest: a member of the run proves itself within some
milliseconds, and one that is cut off dials again.
"""

from __future__ import annotations

import struct
import time

import zmq

from ..tcp_inspection import bytes_received, shut_down
from .sockets import HANDSHAKE_TIMEOUT_MS, AsyncSocket

MAX_UNAUTHENTICATED = 64
"""connections at once that have not proved themselves; measured 14 KiB each in libzmq, so 1 MiB. Not fewer: of 900
members that dial at once the last was in after 0.4 s without a limit, 0.6 s with one of 128, 1.0 s with 64, 2.7 s with
16"""
MIN_HANDSHAKE_BYTES = 500
"""a member says 567 to be let in (CURVE, ZMTP 3.1; measured): who said less than this certainly was not"""
_EVENT = struct.Struct("=Hi")
"""a monitor's first frame: event, value (zmq_socket_monitor(3))"""
_REFUSED = zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL


class HandshakeLimiter:
    """Made before ``socket`` is bound; belongs to the running asyncio loop.

    ``refused`` counts connections that failed to prove that they belong to the run, ``cut`` those that were one too
    many.
    """

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self.refused = 0
        self.cut_off = 0
        self._port = 0
        self._monitored = socket
        self._unauthenticated: dict[int, float] = {}
        """descriptor of each connection that may still be in its handshake → when it was first seen"""
        self._authenticated_at: list[float] = []
        """when connections proved themselves; which ones zmq does not say"""
        events = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED | _REFUSED
        self._monitor_socket = AsyncSocket(_monitor(socket, events), self._on_events)

    def set_port(self, port: int) -> None:
        """``socket`` listens at this port."""
        self._port = port

    def close(self) -> None:
        """To be called before the watched socket is closed."""
        self._monitored.disable_monitor()
        self._monitor_socket.close()

    def _on_events(self) -> None:
        """Everything that has happened first, then a verdict: a descriptor may have changed hands in between."""
        now = time.monotonic()
        while (frames := self._monitor_socket.receive()) is not None:
            event, value = _EVENT.unpack_from(frames[0])
            if event == zmq.EVENT_ACCEPTED:
                self._unauthenticated[value] = now
            elif event == zmq.EVENT_DISCONNECTED:
                self._unauthenticated.pop(value, None)
            elif event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._authenticated_at.append(now)
            else:
                self.refused += 1
        if len(self._unauthenticated) > MAX_UNAUTHENTICATED:
            self._cut_off_excess(now)

    def _cut_off_excess(self, now: float) -> None:
        oldest = now - HANDSHAKE_TIMEOUT_MS / 1000  # whoever is older and still here has proved itself
        self._unauthenticated = {fd: since for fd, since in self._unauthenticated.items() if since > oldest}
        self._authenticated_at = [since for since in self._authenticated_at if since > oldest]
        if (surplus := len(self._unauthenticated) - len(self._authenticated_at) - MAX_UNAUTHENTICATED) <= 0:
            return
        suspects = sorted(
            self._unauthenticated,
            key=lambda fd: ((bytes_received(fd) or 0) >= MIN_HANDSHAKE_BYTES, self._unauthenticated[fd]),
        )
        for fd in suspects[:surplus]:
            del self._unauthenticated[fd]
            self.cut_off += shut_down(fd, self._port)


def _monitor(socket: zmq.Socket[bytes], events: int) -> zmq.Socket[bytes]:
    """Where what happens to ``socket`` is told, without a bound: at one, zmq's own thread would wait for our loop, and
    hold a lock meanwhile that closing the socket needs."""
    address = "inproc://gate"
    socket.monitor(address, events)
    monitor: zmq.Socket[bytes] = socket.context.socket(zmq.PAIR)
    monitor.set(zmq.RCVHWM, 0)
    monitor.connect(address)
    return monitor
