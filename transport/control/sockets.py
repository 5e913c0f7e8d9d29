"""The layer below the control plane: non-blocking zmq sockets on an asyncio loop, the frame format and authentication.

A frame is msgpack of ``(protocol version, epoch, request id or nil, body)``.
"""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import zmq
from msgspec import Struct
from zmq.utils import z85

from ..messages import PROTOCOL_VERSION

_HEARTBEAT_MS = 1000
_HEARTBEAT_TIMEOUT_MS = 5000
"""Milliseconds without traffic from a peer's zmq thread after which the peer is disconnected. A peer whose Python code
is busy is not affected."""
HANDSHAKE_TIMEOUT_MS = 10_000
"""Milliseconds after which a connection that has not authenticated is closed."""
_ZAP_ENDPOINT = "inproc://zeromq.zap.01"
ZAP_DOMAIN = b"rrl"
"""ZAP domain; without an authenticator for it every connection is refused."""


class Bounds(Struct, frozen=True):
    """Limits on the memory that one peer can make the other end use."""

    max_frame_bytes: int
    """Maximum size of a message in bytes; a peer that sends a larger message is disconnected."""
    max_queued: int
    """Maximum number of messages in zmq's own queue, per peer and direction."""


CONTROL_BOUNDS = Bounds(256 * 2**20, 1000)
"""Default limits. They suffice for the largest message of the control plane, a batch of trajectories."""
MANAGER_BOUNDS = Bounds(2**20, 1000)
"""Limits of the manager, whose largest messages are a step's metrics and a finding's evidence. They are low, because
even an unauthenticated peer can make the manager allocate one frame of the maximum size."""
STORE_BOUNDS = Bounds(64 * 2**20, 1000)
"""Limits of the store, to which a rollout may send many whole trajectories in a row. 64 trajectories of 32,768 tokens
each, with versions and log-probabilities, take about 30 MiB."""


class Codec:
    """Decodes frames of one direction. ``body`` is the msgspec union that may arrive."""

    def __init__(self, body: Any) -> None:
        self._decoder: msgspec.msgpack.Decoder[tuple[int, int, int | None, Any]] = msgspec.msgpack.Decoder(
            tuple[int, int, int | None, body]
        )

    def decode(self, frame: bytes) -> tuple[int, int | None, Any] | None:
        """Return ``(epoch, request id, message)``, or None if the frame is invalid or of another protocol version."""
        try:
            version, epoch, request_id, message = self._decoder.decode(frame)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return None
        return (epoch, request_id, message) if version == PROTOCOL_VERSION else None


def encode_frame(epoch: int, request_id: int | None, message: Any) -> bytes:
    """Encode a message with this process's protocol version."""
    return msgspec.msgpack.encode((PROTOCOL_VERSION, epoch, request_id, message), enc_hook=_scalar)


def _scalar(value: Any) -> Any:
    """Return a scalar of numpy or torch, such as a program's reward or metric, as a number of Python."""
    if not hasattr(value, "item"):
        raise NotImplementedError  # msgspec then names the type
    return value.item()


def _int_option(socket: zmq.Socket[bytes], option: int) -> int:
    value = socket.get(option)
    assert isinstance(value, int)
    return value


class AsyncSocket:
    """A non-blocking zmq socket on the running loop.

    zmq's descriptor only signals that *something* changed, and any operation may consume that signal. Therefore EVENTS
    is read after every wake-up and after every send. (zmq.asyncio does the same with a future and a timer for each
    operation.)
    """

    def __init__(
        self, socket: zmq.Socket[bytes], readable: Callable[[], None], writable: Callable[[], None] | None = None
    ) -> None:
        self._socket = socket
        self._readable = readable
        self._writable = writable
        self._loop = asyncio.get_running_loop()
        self._fd = _int_option(socket, zmq.FD)
        self._open = True
        self._loop.add_reader(self._fd, self.process_events)
        self._loop.call_soon(self.process_events)

    def process_events(self) -> None:
        """Call ``readable`` if the socket is readable, and ``writable`` if it is writable."""
        if not self._open:
            return
        events = _int_option(self._socket, zmq.EVENTS)
        if events & zmq.POLLIN:
            self._readable()
        if events & zmq.POLLOUT and self._writable is not None and self._open:
            self._writable()

    def process_events_soon(self) -> None:
        """Call :meth:`process_events` in the next iteration of the loop."""
        self._loop.call_soon(self.process_events)

    def receive(self) -> list[bytes] | None:
        """Return the frames of the next message, or None if there is none now."""
        try:
            return self._socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return None

    def send(self, frames: Sequence[bytes]) -> bool:
        """Send a message. Return False if the peer's queue is full.

        Raises:
            zmq.ZMQError: The socket is a ROUTER and is not connected to the peer (EHOSTUNREACH).
        """
        try:
            self._socket.send_multipart(frames, zmq.NOBLOCK)
        except zmq.Again:
            return False
        if _int_option(self._socket, zmq.EVENTS) & zmq.POLLIN:
            self.process_events_soon()
        return True

    def close(self, flush_ms: int = 0) -> None:
        """Close the socket, after up to ``flush_ms`` ms for the delivery of sent messages; may be called again."""
        if self._open:
            self._open = False
            self._loop.remove_reader(self._fd)
            self._socket.close(flush_ms)


def apply_socket_limits(socket: zmq.Socket[bytes], bounds: Bounds = CONTROL_BOUNDS) -> None:
    """Set the options that sockets of both ends have; must be called before bind or connect."""
    for option, value in (
        (zmq.LINGER, 0),
        (zmq.SNDHWM, bounds.max_queued),
        (zmq.RCVHWM, bounds.max_queued),
        (zmq.MAXMSGSIZE, bounds.max_frame_bytes),
        (zmq.HEARTBEAT_IVL, _HEARTBEAT_MS),
        (zmq.HEARTBEAT_TIMEOUT, _HEARTBEAT_TIMEOUT_MS),
        (zmq.HEARTBEAT_TTL, _HEARTBEAT_TIMEOUT_MS),
        (zmq.HANDSHAKE_IVL, HANDSHAKE_TIMEOUT_MS),
    ):
        socket.set(option, value)


class ZapAuthenticator:
    """Answers the ZAP requests (ZeroMQ RFC 27) of one context, and accepts only the run's client key."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], client_public: str) -> None:
        self._client_key = z85.decode(client_public)
        socket = context.socket(zmq.ROUTER)
        socket.set(zmq.LINGER, 0)
        socket.bind(_ZAP_ENDPOINT)
        self._socket = AsyncSocket(socket, self._answer)
        self.close = self._socket.close

    def _answer(self) -> None:
        while (frames := self._socket.receive()) is not None:
            cut = frames.index(b"") + 1  # the end of the envelope that zmq's own ZAP client adds
            request = frames[cut:]  # version, id, domain, address, identity, mechanism, credentials
            good = (
                len(request) == 7
                and request[2] == ZAP_DOMAIN
                and request[5] == b"CURVE"
                and hmac.compare_digest(request[6], self._client_key)
            )
            verdict = [b"200", b"OK"] if good else [b"400", b"not of this run"]
            self._socket.send([*frames[:cut], b"1.0", request[1] if len(request) > 1 else b"", *verdict, b"", b""])
