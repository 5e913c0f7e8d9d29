"""The control plane: ZeroMQ with CURVE, generic over any msgspec union. One listens, everybody else dials.

CURVE is always on and only the run's client key is let in; a frame that cannot be read is dropped and counted, never
answered. Nothing blocks the loop: every socket operation is non-blocking, and what a slow or absent peer cannot take
is dropped, oldest first, and counted. What must arrive is asked (:meth:`Dialer.ask`): an ask is sent again to the next
listener until it is answered.

All objects here belong to the asyncio loop in which they were opened; several may share one loop, in any thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket as net
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import zmq
from msgspec import Struct
from zmq.utils.monitor import parse_monitor_message

from ..keys import RunKeys
from .handshake_limit import HandshakeLimiter
from .sockets import (
    CONTROL_BOUNDS,
    ZAP_DOMAIN,
    AsyncSocket,
    Bounds,
    Codec,
    ZapAuthenticator,
    apply_socket_limits,
    encode_frame,
)

Send = Callable[[bytes, Any, int | None], Coroutine[Any, Any, None]]
"""Type of :meth:`Listener.send`: takes a peer, a message, and the id of the request that it answers (None: of none)."""

ADDRESS_POLL_S = 1.0
"""s between two calls of ``find`` while nobody answers"""
CONNECTED_ADDRESS_POLL_S = 5.0
"""s between two calls of ``find`` while connected: a manager that lost its lease may still be answering"""
MAX_QUEUED_MESSAGES = 1000
"""messages kept for a peer that does not take them; the oldest go first"""
_CONNECT_MS = 2000
_RECONNECT_MS = 100
_RECONNECT_MAX_MS = 1000
_FLUSH_MS = 200
"""at close, the last words (a Goodbye, a Stop) get so long to leave; then they are dropped"""
_MAX_FRAMES_PER_TURN = 100
"""frames read in one turn of the loop, so that a flood leaves the other tasks their turn"""


class Address(Struct, frozen=True):
    """Where a listener can be dialled: ``tcp://host:port``. Of two addresses the one with the higher epoch counts."""

    epoch: int
    endpoint: str

    @classmethod
    def read(cls, path: Path) -> Address | None:
        """What ``path`` says; None when it is absent or torn (a full disk, storage that shows a file before its bytes):
        whoever looks, looks again in a moment."""
        try:
            return msgspec.json.decode(path.read_bytes(), type=cls)
        except (OSError, ValueError):
            return None


class Incoming(Struct, frozen=True):
    """One message at a listener. ``peer`` is where an answer goes; ``ask`` is the id to answer, None if none is due."""

    peer: bytes
    request_id: int | None
    message: Any


class Listener:
    """The side that is dialled: a ROUTER that only members of the run get through to.

    ``dropped`` counts frames that could not be read and answers that a slow peer did not take;
    ``refused`` counts connections that failed to prove that they belong to the run.
    """

    def __init__(self, keys: RunKeys, incoming: Any, epoch: int, ip: str, bounds: Bounds = CONTROL_BOUNDS) -> None:
        self.epoch = epoch
        self.dropped = 0
        self._codec = Codec(incoming)
        self._readable = asyncio.Event()
        self._closed = False
        self._frames_read = 0
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._authenticator = ZapAuthenticator(self._context, keys.client_public)
        socket = self._context.socket(zmq.ROUTER)
        apply_socket_limits(socket, bounds)
        socket.set(zmq.ROUTER_MANDATORY, 1)  # else a full queue is a silent loss
        socket.set(zmq.BACKLOG, 1024)  # a new manager is dialled by the whole run at once
        socket.set(zmq.CURVE_SERVER, 1)
        socket.set(zmq.CURVE_SECRETKEY, keys.server_secret.encode())
        socket.set(zmq.ZAP_DOMAIN, ZAP_DOMAIN)
        socket.set(zmq.ZAP_ENFORCE_DOMAIN, 1)  # no doorman, no entry
        self._handshake_limit = HandshakeLimiter(socket)
        try:
            socket.bind(f"tcp://{ip}:*")
        except zmq.ZMQError:
            self._authenticator.close()
            self._handshake_limit.close()
            socket.close(0)
            self._context.term()
            raise
        self.endpoint: str = str(socket.getsockopt_string(zmq.LAST_ENDPOINT)).rstrip("\0")
        self._handshake_limit.set_port(int(self.endpoint.rpartition(":")[2]))
        self._socket = AsyncSocket(socket, self._readable.set)

    @classmethod
    async def open(
        cls, keys: RunKeys, incoming: Any, *, epoch: int = 0, host: str = "127.0.0.1", bounds: Bounds = CONTROL_BOUNDS
    ) -> Listener:
        """Listen on a free port of ``host``: a name or IPv4 address of this machine. ``up``: what may arrive.

        Raises OSError when the host cannot be resolved, zmq.ZMQError when it is not an address of this machine.
        """
        found = await asyncio.get_running_loop().getaddrinfo(host, None, family=net.AF_INET, type=net.SOCK_STREAM)
        return cls(keys, incoming, epoch, str(found[0][4][0]), bounds)

    @property
    def refused(self) -> int:
        return self._handshake_limit.refused

    @property
    def address(self) -> Address:
        return Address(self.epoch, self.endpoint)

    async def receive(self) -> Incoming:
        """The next message of a member of the run. Raises ConnectionError once closed."""
        while not self._closed:
            frames = self._socket.receive()
            if frames is None:
                self._readable.clear()
                await self._readable.wait()
                continue
            read = self._codec.decode(frames[1]) if len(frames) == 2 else None
            if read is None:
                self.dropped += 1
                continue
            _, request_id, message = read
            self._frames_read += 1
            if self._frames_read % _MAX_FRAMES_PER_TURN == 0:
                await asyncio.sleep(0)
            return Incoming(frames[0], request_id, message)
        raise ConnectionError("the listener was closed")

    async def send(self, peer: bytes, message: Any, request_id: int | None = None) -> None:
        """Push to ``peer``, or answer its ``ask``. Never waits: dropped (and counted) if the peer's queue is full,
        dropped silently if the peer is gone."""
        self._send(peer, encode_frame(self.epoch, request_id, message))

    async def send_all(self, peers: Iterable[bytes], message: Any) -> None:
        """Push the same to all of them, as :meth:`send` does to one: it is encoded once."""
        data = encode_frame(self.epoch, None, message)
        for peer in peers:
            self._send(peer, data)

    def _send(self, peer: bytes, data: bytes) -> None:
        if self._closed:
            return
        try:
            if not self._socket.send([peer, data]):
                self.dropped += 1
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise

    async def close(self) -> None:
        """Stop listening; what was sent gets a moment to leave. Repeatable."""
        if self._closed:
            return
        self._closed = True
        self._readable.set()
        self._handshake_limit.close()
        self._socket.close(_FLUSH_MS)
        self._authenticator.close()
        await asyncio.to_thread(self._context.term)


class _PendingRequest:
    def __init__(self, message: Any, reply: asyncio.Future[Any]) -> None:
        self.message = message
        self.reply = reply
        self.sent = False


def _no_messages() -> Sequence[Any]:
    return ()


class Dialer:
    """The side that dials one listener, loses it, and finds it or its successor again.

    ``find`` gives the newest address, or None; it is called in a thread of its own (it may read shared storage) at
    once after a loss and then every ``LOOK_EVERY`` s; an OSError in it counts as None. ``hello`` gives the messages
    that are sent first on every connection. ``dropped`` counts messages that the bound of a queue cost, frames that
    could not be read and frames of a listener older than the newest address seen.
    """

    def __init__(
        self,
        keys: RunKeys,
        incoming: Any,
        find_address: Callable[[], Address | None],
        hello: Callable[[], Sequence[Any]] = _no_messages,
        bounds: Bounds = CONTROL_BOUNDS,
    ) -> None:
        self.dropped = 0
        self._bounds = bounds
        self._keys = keys
        self._codec = Codec(incoming)
        self._find_address = find_address
        self._hello = hello
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._raw_socket: zmq.Socket[bytes] | None = None
        self._socket: AsyncSocket | None = None
        self._monitor: AsyncSocket | None = None
        self._address: Address | None = None
        self._connection_up = False
        self._hello_sent = False
        self._closed = False
        self._changed = asyncio.Event()
        self._pushes: asyncio.Queue[Any] = asyncio.Queue()
        self._hello_queue: deque[tuple[int | None, Any]] = deque()
        self._send_queue: deque[tuple[int | None, Any]] = deque()
        self._pending: dict[int, _PendingRequest] = {}
        self._last_request_id = 0

    @property
    def connected(self) -> bool:
        """The listener has let us in and we have greeted it."""
        return self._hello_sent

    def refresh_address(self) -> None:
        """``find`` may have news: ask it now rather than at the next look."""
        self._changed.set()

    async def run(self) -> None:
        """Connect, watch, reconnect: until closed or cancelled. Raises what ``hello`` raises."""
        try:
            while not self._closed:
                self._changed.clear()
                if not self._connection_up or self._hello_sent:
                    await self._find_listener()
                if self._connection_up and not self._hello_sent and not self._closed:
                    self._send_hello()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(CONNECTED_ADDRESS_POLL_S if self._connection_up else ADDRESS_POLL_S):
                        await self._changed.wait()
        finally:
            self._disconnect(_FLUSH_MS if self._hello_sent else 0)

    async def send(self, message: Any) -> None:
        """Say it once. Waits for nobody: queued (bounded) while the listener is away or slow."""
        self._enqueue(None, message)

    async def request(self, message: Any, timeout: float, resend_after: float | None = None) -> Any:
        """Say it until it is answered (sent again after each reconnect: the listener may see it twice; and, for one
        that may drop an answer, on the same connection too, ``again`` s after it was sent, then after twice as long).

        Raises TimeoutError after ``by`` s, ConnectionError when the dialer is closed meanwhile.
        """
        self._last_request_id += 1
        request_id = self._last_request_id
        entry = self._pending[request_id] = _PendingRequest(message, asyncio.get_running_loop().create_future())
        self._enqueue(request_id, message)
        try:
            async with asyncio.timeout(timeout):
                while not (await asyncio.wait((entry.reply,), timeout=resend_after))[0]:
                    if self._hello_sent and all(request_id != other for other, _ in self._send_queue):
                        self._enqueue(request_id, message)
                        resend_after = resend_after and 2 * resend_after
                return entry.reply.result()
        finally:
            del self._pending[request_id]

    async def next_push(self) -> Any:
        """The next message that the listener sent of its own accord."""
        return await self._pushes.get()

    async def close(self) -> None:
        """Hang up; what was sent gets a moment to leave. Open asks raise ConnectionError. Repeatable."""
        if self._closed:
            return
        self._closed = True
        self._changed.set()
        self._disconnect(_FLUSH_MS if self._hello_sent else 0)
        for ask in self._pending.values():
            if not ask.reply.done():
                ask.reply.set_exception(ConnectionError("the dialer was closed"))
        await asyncio.to_thread(self._context.term)

    # ── finding the listener ───────────────────────────────────────────────────────────────────────────────────────
    async def _find_listener(self) -> None:
        try:
            found = await asyncio.to_thread(self._find_address)
        except OSError:
            return
        if found is None or found == self._address or self._closed:
            return
        if self._address is not None and found.epoch < self._address.epoch:
            return  # the file of a stale manager: whoever wrote it has been succeeded
        if self._address is not None and found.endpoint == self._address.endpoint:
            self._address = found  # the same socket serves a new epoch
            return
        self._disconnect()
        self._address = found
        self._dial(found.endpoint)

    def _dial(self, endpoint: str) -> None:
        socket = self._context.socket(zmq.DEALER)
        apply_socket_limits(socket, self._bounds)
        socket.set(zmq.IMMEDIATE, 1)  # nothing is queued for a connection that is not there: hello must come first
        socket.set(zmq.CONNECT_TIMEOUT, _CONNECT_MS)
        socket.set(zmq.RECONNECT_IVL, _RECONNECT_MS)
        socket.set(zmq.RECONNECT_IVL_MAX, _RECONNECT_MAX_MS)
        socket.set(zmq.CURVE_SERVERKEY, self._keys.server_public.encode())
        socket.set(zmq.CURVE_PUBLICKEY, self._keys.client_public.encode())
        socket.set(zmq.CURVE_SECRETKEY, self._keys.client_secret.encode())
        monitor = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        self._raw_socket = socket
        self._monitor = AsyncSocket(monitor, self._on_monitor_event)
        self._socket = AsyncSocket(socket, self._on_readable, self._flush)
        socket.connect(endpoint)

    def _disconnect(self, linger: int = 0) -> None:
        self._connection_up = self._hello_sent = False
        if self._raw_socket is not None and self._monitor is not None and self._socket is not None:
            self._raw_socket.disable_monitor()
            self._monitor.close()
            self._socket.close(linger)
        self._raw_socket = self._monitor = self._socket = None

    def _on_monitor_event(self) -> None:
        while self._monitor is not None and (frames := self._monitor.receive()) is not None:
            self._connection_up = parse_monitor_message(frames)["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED
            self._hello_sent = False
            self._changed.set()

    # ── outwards ───────────────────────────────────────────────────────────────────────────────────────────────────
    def _send_hello(self) -> None:
        """First hello, then every ask that the last listener took and did not answer, then what has waited."""
        unanswered: list[tuple[int | None, Any]] = [
            (ask, entry.message) for ask, entry in self._pending.items() if entry.sent
        ]
        self._hello_queue = deque([*((None, message) for message in self._hello()), *unanswered])
        self._hello_sent = True
        if self._socket is not None:
            self._socket.process_events()  # lets zmq attach the new connection before the first send
        self._flush()

    def _enqueue(self, request_id: int | None, message: Any) -> None:
        self._send_queue.append((request_id, message))
        if len(self._send_queue) > MAX_QUEUED_MESSAGES:
            oldest = next((i for i, (request_id, _) in enumerate(self._send_queue) if request_id is None), None)
            if oldest is not None:  # asks stay: each has a deadline of its own
                del self._send_queue[oldest]
                self.dropped += 1
        self._flush()

    def _flush(self) -> None:
        while self._hello_sent and self._socket is not None and self._address is not None:
            queue = self._hello_queue or self._send_queue
            if not queue:
                return
            request_id, message = queue[0]
            entry = None if request_id is None else self._pending.get(request_id)
            if request_id is None or entry is not None:  # else it has been answered or given up meanwhile
                if not self._socket.send([encode_frame(self._address.epoch, request_id, message)]):
                    return  # look() comes here again when there is room
                if entry is not None:
                    entry.sent = True
            queue.popleft()

    # ── inwards ────────────────────────────────────────────────────────────────────────────────────────────────────
    def _on_readable(self) -> None:
        for _ in range(_MAX_FRAMES_PER_TURN):
            frames = self._socket.receive() if self._socket is not None else None
            if frames is None:
                return
            read = self._codec.decode(frames[0]) if len(frames) == 1 else None
            if read is None or (self._address is not None and read[0] < self._address.epoch):
                self.dropped += 1
                continue
            _, request_id, message = read
            if request_id is None:
                self._push(message)
            elif (entry := self._pending.get(request_id)) is not None and not entry.reply.done():
                entry.reply.set_result(message)
        if self._socket is not None:
            self._socket.process_events_soon()

    def _push(self, message: Any) -> None:
        if self._pushes.qsize() >= MAX_QUEUED_MESSAGES:
            self._pushes.get_nowait()
            self.dropped += 1
        self._pushes.put_nowait(message)
