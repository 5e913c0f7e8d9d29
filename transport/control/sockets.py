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

from ..messages import PROTOCOL

_HEARTBEAT_MS = 1000
_SILENCE_MS = 5000
"""a peer whose zmq thread was not heard for so long is cut off; it does not hang on the peer's Python being busy"""
HANDSHAKE_MS = 10_000
"""who connects and has not proved itself by then is cut off"""
_ZAP_ENDPOINT = "inproc://zeromq.zap.01"
DOMAIN = b"rrl"
"""ZAP domain: without a doorman for it nobody gets in"""


class Bounds(Struct, frozen=True):
    """What one peer may make the other end hold."""

    frame: int
    """bytes of the largest message; who sends a larger one is cut off"""
    queue: int
    """messages in zmq's own queue, a peer and direction"""


CONTROL = Bounds(256 * 2**20, 1000)
"""a batch of trajectories is the largest thing said here"""
TO_MANAGER = Bounds(2**20, 1000)
"""a step's metrics or a finding's evidence are the largest; a stranger can make us hold a frame as large as this before
it must prove anything"""
TO_STORE = Bounds(64 * 2**20, 1000)
"""whole trajectories of a rollout at once: 64 of 32,768 tokens, with versions and log-probabilities, are some 30 MiB"""


class Codec:
    """Frames of one direction. ``body`` is the msgspec union that may arrive."""

    def __init__(self, body: Any) -> None:
        self._decoder: msgspec.msgpack.Decoder[tuple[int, int, int | None, Any]] = msgspec.msgpack.Decoder(
            tuple[int, int, int | None, body]
        )

    def read(self, frame: bytes) -> tuple[int, int | None, Any] | None:
        """``(epoch, ask, message)``, or None when it cannot be read or is of another protocol version."""
        try:
            version, epoch, ask, message = self._decoder.decode(frame)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return None
        return (epoch, ask, message) if version == PROTOCOL else None


def frame(epoch: int, ask: int | None, message: Any) -> bytes:
    return msgspec.msgpack.encode((PROTOCOL, epoch, ask, message))


def _number(socket: zmq.Socket[bytes], option: int) -> int:
    value = socket.get(option)
    assert isinstance(value, int)
    return value


class Wire:
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
        self._fd = _number(socket, zmq.FD)
        self._open = True
        self._loop.add_reader(self._fd, self.look)
        self._loop.call_soon(self.look)

    def look(self) -> None:
        if not self._open:
            return
        events = _number(self._socket, zmq.EVENTS)
        if events & zmq.POLLIN:
            self._readable()
        if events & zmq.POLLOUT and self._writable is not None and self._open:
            self._writable()

    def look_soon(self) -> None:
        self._loop.call_soon(self.look)

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
        if _number(self._socket, zmq.EVENTS) & zmq.POLLIN:
            self.look_soon()
        return True

    def close(self, linger: int = 0) -> None:
        if self._open:
            self._open = False
            self._loop.remove_reader(self._fd)
            self._socket.close(linger)


def harden(socket: zmq.Socket[bytes], bounds: Bounds = CONTROL) -> None:
    """What both ends set alike, before bind or connect."""
    for option, value in (
        (zmq.LINGER, 0),
        (zmq.SNDHWM, bounds.queue),
        (zmq.RCVHWM, bounds.queue),
        (zmq.MAXMSGSIZE, bounds.frame),
        (zmq.HEARTBEAT_IVL, _HEARTBEAT_MS),
        (zmq.HEARTBEAT_TIMEOUT, _SILENCE_MS),
        (zmq.HEARTBEAT_TTL, _SILENCE_MS),
        (zmq.HANDSHAKE_IVL, HANDSHAKE_MS),
    ):
        socket.set(option, value)


class Doorman:
    """ZAP (ZeroMQ RFC 27) for one context: lets in the run's client key and nobody else."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], client_public: str) -> None:
        self._key = z85.decode(client_public)
        socket = context.socket(zmq.ROUTER)
        socket.set(zmq.LINGER, 0)
        socket.bind(_ZAP_ENDPOINT)
        self._wire = Wire(socket, self._answer)
        self.close = self._wire.close

    def _answer(self) -> None:
        while (frames := self._wire.receive()) is not None:
            cut = frames.index(b"") + 1  # the envelope of zmq's own ZAP client
            request = frames[cut:]  # version, id, domain, address, identity, mechanism, credentials
            good = (
                len(request) == 7
                and request[2] == DOMAIN
                and request[5] == b"CURVE"
                and hmac.compare_digest(request[6], self._key)
            )
            verdict = [b"200", b"OK"] if good else [b"400", b"not of this run"]
            self._wire.send([*frames[:cut], b"1.0", request[1] if len(request) > 1 else b"", *verdict, b"", b""])
