"""Below the control plane: non-blocking zmq sockets on an asyncio loop, the frame format, and who is let in.

A frame is msgpack of ``(protocol version, epoch, ask id or nil, body)``.
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
"""a peer whose zmq thread was not heard for so long is cut off; it does not hang on the peer's Python being busy"""
HANDSHAKE_TIMEOUT_MS = 10_000
"""who connects and has not proved itself by then is cut off"""
_ZAP_ENDPOINT = "inproc://zeromq.zap.01"
ZAP_DOMAIN = b"rrl"
"""ZAP domain: without a doorman for it nobody gets in"""


class Bounds(Struct, frozen=True):
    """What one peer may make the other end hold."""

    max_frame_bytes: int
    """bytes of the largest message; who sends a larger one is cut off"""
    max_queued: int
    """messages in zmq's own queue, a peer and direction"""


CONTROL_BOUNDS = Bounds(256 * 2**20, 1000)
"""a batch of trajectories is the largest thing said here"""
MANAGER_BOUNDS = Bounds(2**20, 1000)
"""a step's metrics or a finding's evidence are the largest; a stranger can make us hold a frame as large as this before
it must prove anything"""
STORE_BOUNDS = Bounds(64 * 2**20, 1000)
"""whole trajectories of a rollout at once: 64 of 32,768 tokens, with versions and log-probabilities, are some 30 MiB"""


class Codec:
    """Frames of one direction. ``body`` is the msgspec union that may arrive."""

    def __init__(self, body: Any) -> None:
        self._decoder: msgspec.msgpack.Decoder[tuple[int, int, int | None, Any]] = msgspec.msgpack.Decoder(
            tuple[int, int, int | None, body]
        )

    def decode(self, frame: bytes) -> tuple[int, int | None, Any] | None:
        """``(epoch, ask, message)``, or None when it cannot be read or is of another protocol version."""
        try:
            version, epoch, request_id, message = self._decoder.decode(frame)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return None
        return (epoch, request_id, message) if version == PROTOCOL_VERSION else None


def encode_frame(epoch: int, request_id: int | None, message: Any) -> bytes:
    return msgspec.msgpack.encode((PROTOCOL_VERSION, epoch, request_id, message))


def _int_option(socket: zmq.Socket[bytes], option: int) -> int:
    value = socket.get(option)
    assert isinstance(value, int)
    return value


class AsyncSocket:
    """A non-blocking zmq socket on the running loop.

    zmq's descriptor only tells that *something* changed, and any operation may swallow that: so EVENTS is read after
    every wake-up and after every send. (zmq.asyncio does the same with a future and a timer for each operation.)
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
        if not self._open:
            return
        events = _int_option(self._socket, zmq.EVENTS)
        if events & zmq.POLLIN:
            self._readable()
        if events & zmq.POLLOUT and self._writable is not None and self._open:
            self._writable()

    def process_events_soon(self) -> None:
        self._loop.call_soon(self.process_events)

    def receive(self) -> list[bytes] | None:
        """The next message's frames, or None when there is none now."""
        try:
            return self._socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return None

    def send(self, frames: Sequence[bytes]) -> bool:
        """False when the peer's queue is full. Raises zmq.ZMQError(EHOSTUNREACH) for a peer unknown to a ROUTER."""
        try:
            self._socket.send_multipart(frames, zmq.NOBLOCK)
        except zmq.Again:
            return False
        if _int_option(self._socket, zmq.EVENTS) & zmq.POLLIN:
            self.process_events_soon()
        return True

    def close(self, linger: int = 0) -> None:
        if self._open:
            self._open = False
            self._loop.remove_reader(self._fd)
            self._socket.close(linger)


def apply_socket_limits(socket: zmq.Socket[bytes], bounds: Bounds = CONTROL_BOUNDS) -> None:
    """What both ends set alike, before bind or connect."""
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
    """ZAP (ZeroMQ RFC 27) for one context: lets in the run's client key and nobody else."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], client_public: str) -> None:
        self._client_key = z85.decode(client_public)
        socket = context.socket(zmq.ROUTER)
        socket.set(zmq.LINGER, 0)
        socket.bind(_ZAP_ENDPOINT)
        self._socket = AsyncSocket(socket, self._answer)
        self.close = self._socket.close

    def _answer(self) -> None:
        while (frames := self._socket.receive()) is not None:
            cut = frames.index(b"") + 1  # the envelope of zmq's own ZAP client
            request = frames[cut:]  # version, id, domain, address, identity, mechanism, credentials
            good = (
                len(request) == 7
                and request[2] == ZAP_DOMAIN
                and request[5] == b"CURVE"
                and hmac.compare_digest(request[6], self._client_key)
            )
            verdict = [b"200", b"OK"] if good else [b"400", b"not of this run"]
            self._socket.send([*frames[:cut], b"1.0", request[1] if len(request) > 1 else b"", *verdict, b"", b""])
