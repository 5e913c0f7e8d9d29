"""Limit the connections to a listening zmq socket that have not authenticated yet.

libzmq closes a connection that does not finish the handshake in time, but accepts any number of connections until then.
One host that connects and sends nothing could take every descriptor of the process. So this module closes surplus
connections. It first closes connections that have sent too few bytes to have authenticated, then the oldest
connections. A process of the run authenticates within some milliseconds, and dials again if its connection was closed.
"""

from __future__ import annotations

import struct
import time

import zmq

from ..tcp_inspection import bytes_received, shut_down
from .sockets import HANDSHAKE_TIMEOUT_MS, AsyncSocket

MAX_UNAUTHENTICATED = 64
"""Maximum number of unauthenticated connections. Each takes 14 KiB in libzmq (measured), so all take 1 MiB. A lower
limit delays processes that dial at the same time. The last of 900 processes was accepted after 0.4 s without a limit,
0.6 s with a limit of 128, 1.0 s with 64, and 2.7 s with 16."""
MIN_HANDSHAKE_BYTES = 500
"""A connection that has sent fewer bytes than this cannot have authenticated. A handshake sends 567 bytes (CURVE, ZMTP
3.1; measured)."""
_EVENT = struct.Struct("=Hi")
"""First frame of a monitor's message: event and value (zmq_socket_monitor(3))."""
_REFUSED = zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL


class HandshakeLimiter:
    """Monitors a socket and closes surplus unauthenticated connections.

    It must be created before ``socket`` is bound, and belongs to the running asyncio loop. ``refused`` counts
    connections that failed to authenticate.
    """

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self.refused = 0
        self._port = 0
        self._monitored = socket
        self._unauthenticated: dict[int, float] = {}
        """Time (s) of acceptance of each connection that may still be in its handshake, by descriptor."""
        self._authenticated_at: list[float] = []
        """Times (s) at which connections authenticated. The connections are not stored with them, because zmq does not
        report which connection has authenticated."""
        events = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED | _REFUSED
        self._monitor_socket = AsyncSocket(_monitor(socket, events), self._on_events)

    def set_port(self, port: int) -> None:
        """Set the port at which ``socket`` listens."""
        self._port = port

    def close(self) -> None:
        """Stop monitoring; must be called before the monitored socket is closed."""
        self._monitored.disable_monitor()
        self._monitor_socket.close()

    def _on_events(self) -> None:
        """Process all waiting events, then close surplus connections.

        The order matters, because a waiting event may report that a descriptor now belongs to another connection.
        """
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
        oldest = now - HANDSHAKE_TIMEOUT_MS / 1000  # libzmq closes an unauthenticated connection at this age
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
            shut_down(fd, self._port)


def _monitor(socket: zmq.Socket[bytes], events: int) -> zmq.Socket[bytes]:
    """Return a socket that receives the events of ``socket``, without a bound on its queue.

    If the queue were bounded and full, zmq's own thread would wait for the event loop while holding a lock that is
    needed to close the socket.
    """
    address = "inproc://gate"
    socket.monitor(address, events)
    monitor: zmq.Socket[bytes] = socket.context.socket(zmq.PAIR)
    monitor.set(zmq.RCVHWM, 0)
    monitor.connect(address)
    return monitor
