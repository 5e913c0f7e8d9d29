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

from ..tcp_inspection import received, shut
from .sockets import HANDSHAKE_MS, Wire

STRANGERS = 64
"""connections at once that have not proved themselves; measured 14 KiB each in libzmq, so 1 MiB. Not fewer: of 900
members that dial at once the last was in after 0.4 s without a limit, 0.6 s with one of 128, 1.0 s with 64, 2.7 s with
16"""
HANDSHAKE_BYTES = 500
"""a member says 567 to be let in (CURVE, ZMTP 3.1; measured): who said less than this certainly was not"""
_EVENT = struct.Struct("=Hi")
"""a monitor's first frame: event, value (zmq_socket_monitor(3))"""
_REFUSED = zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL


class Gate:
    """Made before ``socket`` is bound; belongs to the running asyncio loop.

    ``refused`` counts connections that failed to prove that they belong to the run, ``cut`` those that were one too
    many.
    """

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self.refused = 0
        self.cut = 0
        self._port = 0
        self._watched = socket
        self._young: dict[int, float] = {}
        """descriptor of each connection that may still be in its handshake → when it was first seen"""
        self._proved: list[float] = []
        """when connections proved themselves; which ones zmq does not say"""
        events = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED | _REFUSED
        self._wire = Wire(_monitor(socket, events), self._look)

    def opened(self, port: int) -> None:
        """``socket`` listens at this port."""
        self._port = port

    def close(self) -> None:
        """To be called before the watched socket is closed."""
        self._watched.disable_monitor()
        self._wire.close()

    def _look(self) -> None:
        """Everything that has happened first, then a verdict: a descriptor may have changed hands in between."""
        now = time.monotonic()
        while (frames := self._wire.receive()) is not None:
            event, value = _EVENT.unpack_from(frames[0])
            if event == zmq.EVENT_ACCEPTED:
                self._young[value] = now
            elif event == zmq.EVENT_DISCONNECTED:
                self._young.pop(value, None)
            elif event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._proved.append(now)
            else:
                self.refused += 1
        if len(self._young) > STRANGERS:
            self._cut_off(now)

    def _cut_off(self, now: float) -> None:
        oldest = now - HANDSHAKE_MS / 1000  # whoever is older and still here has proved itself
        self._young = {fd: seen for fd, seen in self._young.items() if seen > oldest}
        self._proved = [seen for seen in self._proved if seen > oldest]
        if (surplus := len(self._young) - len(self._proved) - STRANGERS) <= 0:
            return
        suspects = sorted(self._young, key=lambda fd: ((received(fd) or 0) >= HANDSHAKE_BYTES, self._young[fd]))
        for fd in suspects[:surplus]:
            del self._young[fd]
            self.cut += shut(fd, self._port)


def _monitor(socket: zmq.Socket[bytes], events: int) -> zmq.Socket[bytes]:
    """Where what happens to ``socket`` is told, without a bound: at one, zmq's own thread would wait for our loop, and
    hold a lock meanwhile that closing the socket needs."""
    address = "inproc://gate"
    socket.monitor(address, events)
    told: zmq.Socket[bytes] = socket.context.socket(zmq.PAIR)
    told.set(zmq.RCVHWM, 0)
    told.connect(address)
    return told
