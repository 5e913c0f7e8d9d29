"""The control plane: ZeroMQ with CURVE, generic over any msgspec union. One process listens, the others dial it.

CURVE is always on, and only the run's client key is accepted. A frame that cannot be decoded is dropped and counted,
never answered. Nothing blocks the event loop, because every socket operation is non-blocking. Messages that a slow or
absent peer does not take are dropped, oldest first, and counted. A message that must arrive is sent as a request
(:meth:`Dialer.request`), which is repeated to each new listener until a reply arrives.

Every object belongs to the asyncio loop in which it was opened. Several objects may share a loop, and the loop may run
in any thread.
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
"""Type of :meth:`Listener.send`: takes a peer, a message, and the id of the request that the message answers. The id is
None if the message is not a reply."""

ADDRESS_POLL_S = 1.0
"""Seconds between two calls of a dialer's ``find_address`` while the dialer has no connection."""
CONNECTED_ADDRESS_POLL_S = 5.0
"""Seconds between two calls of ``find_address`` while a dialer is connected. The calls go on, because a manager that
has lost its lease may still reply on the connection."""
MAX_QUEUED_MESSAGES = 1000
"""Maximum number of messages that are queued for a peer; beyond it, the oldest are dropped."""
_CONNECT_MS = 2000
_RECONNECT_MS = 100
_RECONNECT_MAX_MS = 1000
_FLUSH_MS = 200
"""Milliseconds for which a closing endpoint tries to deliver sent messages (a Goodbye, a Stop) before it drops them."""
_MAX_FRAMES_PER_TURN = 100
"""Maximum number of frames read in one iteration of the event loop, so that a flood does not starve other tasks."""


class Address(Struct, frozen=True):
    """The address of a listener: ``tcp://host:port``. Of two addresses, the one with the higher epoch is valid."""

    epoch: int
    endpoint: str

    @classmethod
    def read(cls, path: Path) -> Address | None:
        """Return the address in ``path``; None if the file is absent or incomplete.

        The file can be incomplete on a full disk, and on storage that shows a file before its content.
        """
        try:
            return msgspec.json.decode(path.read_bytes(), type=cls)
        except (OSError, ValueError):
            return None


class Incoming(Struct, frozen=True):
    """A message that a listener received.

    A reply must be sent to ``peer`` with the same ``request_id``. If ``request_id`` is None, no reply is expected.
    """

    peer: bytes
    request_id: int | None
    message: Any


class Listener:
    """The listening end: a ROUTER socket to which only processes of the run can connect.

    ``dropped`` counts frames that could not be decoded and messages that a slow peer did not take; ``refused`` counts
    connections that failed to authenticate.
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
        socket.set(zmq.ROUTER_MANDATORY, 1)  # otherwise zmq loses messages for a full queue without an error
        socket.set(zmq.BACKLOG, 1024)  # all processes of the run dial a new manager at the same time
        socket.set(zmq.CURVE_SERVER, 1)
        socket.set(zmq.CURVE_SECRETKEY, keys.server_secret.encode())
        socket.set(zmq.ZAP_DOMAIN, ZAP_DOMAIN)
        socket.set(zmq.ZAP_ENFORCE_DOMAIN, 1)  # without an authenticator every connection is refused
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
        """Listen on a free port of ``host``: a name or IPv4 address of this machine.

        Args:
            keys: The keys of the run.
            incoming: Union of the messages that may arrive.
            epoch: Manager epoch that is sent with each message.
            host: Name or IPv4 address.
            bounds: Limits for each peer.

        Raises:
            OSError: The host cannot be resolved.
            zmq.ZMQError: ``host`` is not an address of this machine.
        """
        resolved = await asyncio.get_running_loop().getaddrinfo(host, None, family=net.AF_INET, type=net.SOCK_STREAM)
        return cls(keys, incoming, epoch, str(resolved[0][4][0]), bounds)

    @property
    def refused(self) -> int:
        """Return how many connections failed to authenticate."""
        return self._handshake_limit.refused

    @property
    def address(self) -> Address:
        """Return the address of this listener."""
        return Address(self.epoch, self.endpoint)

    async def receive(self) -> Incoming:
        """Return the next message of a process of the run.

        Raises:
            ConnectionError: The listener was closed.
        """
        while not self._closed:
            frames = self._socket.receive()
            if frames is None:
                self._readable.clear()
                await self._readable.wait()
                continue
            decoded = self._codec.decode(frames[1]) if len(frames) == 2 else None
            if decoded is None:
                self.dropped += 1
                continue
            _, request_id, message = decoded
            self._frames_read += 1
            if self._frames_read % _MAX_FRAMES_PER_TURN == 0:
                await asyncio.sleep(0)
            return Incoming(frames[0], request_id, message)
        raise ConnectionError("the listener was closed")

    async def send(self, peer: bytes, message: Any, request_id: int | None = None) -> None:
        """Push ``message`` to ``peer``, or send it as the reply to the request ``request_id``. Never waits.

        The message is dropped and counted if the peer's queue is full, and dropped without being counted if the peer is
        gone.
        """
        self._send(peer, encode_frame(self.epoch, request_id, message))

    async def send_all(self, peers: Iterable[bytes], message: Any) -> None:
        """Push one message to several peers, as :meth:`send` does to one peer; the message is encoded once."""
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
        """Stop listening, after up to ``_FLUSH_MS`` for the delivery of sent messages; may be called again."""
        if self._closed:
            return
        self._closed = True
        self._readable.set()
        self._handshake_limit.close()
        self._socket.close(_FLUSH_MS)
        self._authenticator.close()
        await asyncio.to_thread(self._context.term)


class _PendingRequest:
    """A request that has no reply yet."""

    def __init__(self, message: Any, reply: asyncio.Future[Any]) -> None:
        self.message = message
        self.reply = reply
        self.sent = False


def _no_messages() -> Sequence[Any]:
    return ()


class Dialer:
    """The dialling end. If the connection is lost, it connects again to the listener or its successor.

    ``find_address`` returns the newest address, or None; an OSError counts as None. It is called in a thread, since it
    may read shared storage. After the loss of a connection it is called at once, and then every :data:`ADDRESS_POLL_S`
    seconds. ``hello`` returns the messages that are sent first on every connection. ``dropped`` counts messages beyond
    the bound of a queue, frames that could not be decoded, and frames from a listener that is older than the newest
    known address.
    """

    def __init__(
        self,
        keys: RunKeys,
        incoming: Any,
        find_address: Callable[[], Address | None],
        hello: Callable[[], Sequence[Any]] = _no_messages,
    ) -> None:
        self.dropped = 0
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
        """Return whether the listener has accepted the connection and ``hello`` was sent on it."""
        return self._hello_sent

    def refresh_address(self) -> None:
        """Call ``find_address`` now rather than at the next poll, because it may return a new address."""
        self._changed.set()

    async def run(self) -> None:
        """Connect, monitor and reconnect until closed or cancelled. Raises what ``hello`` raises."""
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
        """Send a message once, without waiting.

        While the listener is absent or slow, the message waits in a bounded queue.
        """
        self._enqueue(None, message)

    async def request(self, message: Any, timeout: float, resend_after: float | None = None) -> Any:
        """Send a message until it has a reply, and return the reply.

        The message is sent again after each reconnect, so that the listener may receive it twice. With
        ``resend_after``, for a listener that may drop its reply, the message is also sent again on the same connection:
        after ``resend_after`` s, then after twice as long, and so on.

        Raises:
            TimeoutError: There was no reply within ``timeout`` s.
            ConnectionError: The dialer was closed.
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
        """Return the next message from the listener that is not a reply."""
        return await self._pushes.get()

    async def close(self) -> None:
        """Disconnect, after up to ``_FLUSH_MS`` for the delivery of sent messages; may be called again.

        Open requests raise ConnectionError.
        """
        if self._closed:
            return
        self._closed = True
        self._changed.set()
        self._disconnect(_FLUSH_MS if self._hello_sent else 0)
        for request in self._pending.values():
            if not request.reply.done():
                request.reply.set_exception(ConnectionError("the dialer was closed"))
        await asyncio.to_thread(self._context.term)

    # ── finding the listener ───────────────────────────────────────────────────────────────────────────────────────
    async def _find_listener(self) -> None:
        try:
            address = await asyncio.to_thread(self._find_address)
        except OSError:
            return
        if address is None or address == self._address or self._closed:
            return
        if self._address is not None and address.epoch < self._address.epoch:
            return  # an older manager has written this address
        if self._address is not None and address.endpoint == self._address.endpoint:
            self._address = address  # the connected listener has a new epoch
            return
        self._disconnect()
        self._address = address
        self._dial(address.endpoint)

    def _dial(self, endpoint: str) -> None:
        socket = self._context.socket(zmq.DEALER)
        apply_socket_limits(socket, CONTROL_BOUNDS)
        socket.set(zmq.IMMEDIATE, 1)  # queue nothing before the connection exists: hello must be sent first
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

    def _disconnect(self, flush_ms: int = 0) -> None:
        self._connection_up = self._hello_sent = False
        if self._raw_socket is not None and self._monitor is not None and self._socket is not None:
            self._raw_socket.disable_monitor()
            self._monitor.close()
            self._socket.close(flush_ms)
        self._raw_socket = self._monitor = self._socket = None

    def _on_monitor_event(self) -> None:
        while self._monitor is not None and (frames := self._monitor.receive()) is not None:
            self._connection_up = parse_monitor_message(frames)["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED
            self._hello_sent = False
            self._changed.set()

    # ── sending ────────────────────────────────────────────────────────────────────────────────────────────────────
    def _send_hello(self) -> None:
        """Send the hello messages, then every request that an earlier listener did not answer, then the queue."""
        unanswered: list[tuple[int | None, Any]] = [
            (request_id, request.message) for request_id, request in self._pending.items() if request.sent
        ]
        self._hello_queue = deque([*((None, message) for message in self._hello()), *unanswered])
        self._hello_sent = True
        if self._socket is not None:
            self._socket.process_events()  # makes zmq attach the new connection before the first send
        self._flush()

    def _enqueue(self, request_id: int | None, message: Any) -> None:
        self._send_queue.append((request_id, message))
        if len(self._send_queue) > MAX_QUEUED_MESSAGES:
            oldest = next((i for i, (request_id, _) in enumerate(self._send_queue) if request_id is None), None)
            if oldest is not None:  # requests are never dropped: each has a deadline of its own
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
            if request_id is None or entry is not None:  # otherwise the request was answered or has timed out
                if not self._socket.send([encode_frame(self._address.epoch, request_id, message)]):
                    return  # process_events() calls this again when the socket is writable
                if entry is not None:
                    entry.sent = True
            queue.popleft()

    # ── receiving ──────────────────────────────────────────────────────────────────────────────────────────────────
    def _on_readable(self) -> None:
        for _ in range(_MAX_FRAMES_PER_TURN):
            frames = self._socket.receive() if self._socket is not None else None
            if frames is None:
                return
            decoded = self._codec.decode(frames[0]) if len(frames) == 1 else None
            if decoded is None or (self._address is not None and decoded[0] < self._address.epoch):
                self.dropped += 1
                continue
            _, request_id, message = decoded
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
