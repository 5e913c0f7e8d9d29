"""A connection between two processes of a run: its interface, its errors, deadlines on it, and the handshake.

The Unix sockets of this package and the weight transports (:mod:`rrl.transport.weights`) implement :class:`Connection`.
"""

from __future__ import annotations

import asyncio
import hmac
import os
from collections.abc import Generator
from contextlib import contextmanager
from typing import Protocol

CONNECT_TIMEOUT_S = 1.0
"""Timeout (s) of one connection attempt. An attempt to reach a dead port sometimes hangs (docs/sources.md, UCX)."""
HANDSHAKE_TIMEOUT_S = 1.0
"""Timeout (s) of the handshake, after which a peer that sends nothing is dropped. Measured (p99): 13.6 ms to connect,
then 3.3 ms for the handshake."""
TIMER_SLACK_S = 0.05
"""Seconds by which a timer may be late on a busy machine. If it is later, the event loop was blocked, for example by a
computation of the role."""
MAX_DEADLINE_EXTENSIONS = 5
"""Maximum number of times that a deadline is restarted because the event loop was late."""
_NONCE_BYTES = 32
_MAC_BYTES = 32
_DIALLED, _LISTENED = b"rrl-connection-1 dialled", b"rrl-connection-1 listened"
"""Labels of the two directions in the MACs of the handshake. They contain the version of the handshake, which is the
same for weights and snapshots. Control messages do not use this handshake; they have a version of their own,
``PROTOCOL_VERSION`` (``transport/messages.py``)."""


class TransportError(Exception):
    """The peer is unreachable, gone or hung, or does not belong to this run. The connection to it has been aborted."""


class Connection(Protocol):
    """One connection. Each ``receive`` takes exactly the bytes of one ``send``; failures raise :class:`TransportError`.

    After :meth:`abort` every pending and later operation fails, and no buffer is accessed.
    """

    async def send(self, data: bytes | memoryview) -> None:
        """Send all of ``data``."""

    async def receive(self, into: memoryview) -> None:
        """Receive bytes until ``into`` is full."""

    def abort(self) -> None:
        """Close the connection at once."""

    @property
    def broken(self) -> bool:
        """Return whether the connection was aborted or has failed."""


@contextmanager
def deadline(connection: Connection, timeout: float) -> Generator[None]:
    """Return a context manager within which operations on ``connection`` fail after ``timeout`` s.

    On any exception the connection is aborted before the exception leaves the context, so that the caller may free its
    buffers (docs/sources.md, UCX). If the event loop itself was late, it has not processed data that arrived meanwhile,
    so the deadline is restarted, at most :data:`MAX_DEADLINE_EXTENSIONS` times.
    """
    loop = asyncio.get_running_loop()
    expired = False
    timer: asyncio.TimerHandle

    def expire(due: float, extensions: int) -> None:
        nonlocal expired, timer
        if extensions and loop.time() > due + TIMER_SLACK_S:
            timer = loop.call_later(timeout, expire, loop.time() + timeout, extensions - 1)
            return
        expired = True
        connection.abort()

    timer = loop.call_later(timeout, expire, loop.time() + timeout, MAX_DEADLINE_EXTENSIONS)
    try:
        yield
    except BaseException as error:
        connection.abort()
        if expired and isinstance(error, TransportError):
            raise TransportError(f"no reply within {timeout:.3g} s") from error
        raise
    finally:
        timer.cancel()


async def authenticate(connection: Connection, secret: bytes, *, dialled: bool) -> None:
    """Prove to the other end that this end knows ``secret``, and require the same proof.

    Both ends send a nonce. The MACs contain the direction, so that an end cannot authenticate by returning the peer's
    MAC.

    Args:
        connection: A connection on which nothing was sent yet.
        secret: The shared secret.
        dialled: True at the end that dialled, False at the end that listened.

    Raises:
        TransportError: The peer did not prove within :data:`HANDSHAKE_TIMEOUT_S` that it knows the secret; the
            connection is aborted.
    """
    with deadline(connection, HANDSHAKE_TIMEOUT_S):
        own_nonce = os.urandom(_NONCE_BYTES)
        if dialled:
            await connection.send(own_nonce)
            answer = await receive_bytes(connection, _NONCE_BYTES + _MAC_BYTES)
            nonces = own_nonce + answer[:_NONCE_BYTES]
            if not hmac.compare_digest(answer[_NONCE_BYTES:], hmac.digest(secret, _LISTENED + nonces, "sha256")):
                raise TransportError("the peer does not know this run's secret")
            await connection.send(hmac.digest(secret, _DIALLED + nonces, "sha256"))
        else:
            nonces = await receive_bytes(connection, _NONCE_BYTES) + own_nonce
            await connection.send(own_nonce + hmac.digest(secret, _LISTENED + nonces, "sha256"))
            proof = await receive_bytes(connection, _MAC_BYTES)
            if not hmac.compare_digest(proof, hmac.digest(secret, _DIALLED + nonces, "sha256")):
                raise TransportError("the peer does not know this run's secret")


async def receive_bytes(connection: Connection, nbytes: int) -> bytes:
    """Receive exactly ``nbytes`` bytes."""
    buffer = bytearray(nbytes)
    await connection.receive(memoryview(buffer))
    return bytes(buffer)
