"""Messages and bulk data on an authenticated connection between processes of a run.

A message is sent as its length, followed by its msgpack encoding. Bulk data is sent unencoded after a message that
announces it; the receiver verifies the data by its digest. Every chunk has its own deadline, which a hung peer misses
and a slow peer meets.
"""

from __future__ import annotations

import hmac
import struct
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import msgspec

from .connection import Connection, TransportError, deadline

CHUNK_BYTES = 4 * 2**20
"""Number of bytes that are sent or received under one deadline."""
CHUNK_TIMEOUT_S = 10.0
"""Timeout (s) of one chunk. A peer that is slower than 0.4 MB/s therefore counts as hung."""
ANSWER_TIMEOUT_S = 10.0
"""Timeout (s) of a reply without bulk data."""
_MAX_MESSAGE_BYTES = 256 * 2**10
"""Largest message in bytes, which bounds what a peer can make this process allocate. A list of 1,000 snapshots is 150
KiB."""
_LENGTH = struct.Struct("<I")


def derive_key(secret: bytes, purpose: str) -> bytes:
    """Return a handshake key for one purpose, so that a MAC from one port cannot be used at another port."""
    return hmac.digest(secret, b"rrl " + purpose.encode(), "sha256")


async def send_message(connection: Connection, message: Any) -> None:
    """Send a message.

    Raises:
        TransportError: The peer does not accept it within :data:`ANSWER_TIMEOUT_S`.
    """
    body = msgspec.msgpack.encode(message)
    with deadline(connection, ANSWER_TIMEOUT_S):
        await connection.send(_LENGTH.pack(len(body)) + body)


async def receive_message(connection: Connection, kind: Any, timeout: float | None = ANSWER_TIMEOUT_S) -> Any:
    """Return the next message, which must be of type ``kind`` (usually a union).

    Args:
        connection: The connection.
        kind: Type of the message.
        timeout: Seconds until the message must begin to arrive; None if there is no limit.

    Raises:
        TransportError: Nothing arrived in time, the connection failed, or the message is invalid, which aborts the
            connection.
    """
    head = bytearray(_LENGTH.size)
    with deadline(connection, timeout) if timeout is not None else nullcontext():
        await connection.receive(memoryview(head))
    (length,) = _LENGTH.unpack(head)
    if length > _MAX_MESSAGE_BYTES:
        connection.abort()
        raise TransportError(f"received a message of {length} bytes; the limit is {_MAX_MESSAGE_BYTES}")
    body = bytearray(length)
    with deadline(connection, ANSWER_TIMEOUT_S):
        await connection.receive(memoryview(body))
    try:
        return msgspec.msgpack.decode(body, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        connection.abort()
        raise TransportError(f"received an invalid message: {error}") from error


async def send_bulk(connection: Connection, data: memoryview) -> None:
    """Send bulk data, chunk by chunk.

    Raises:
        TransportError: The peer does not accept a chunk within :data:`CHUNK_TIMEOUT_S`.
    """
    for start in range(0, data.nbytes, CHUNK_BYTES):
        with deadline(connection, CHUNK_TIMEOUT_S):
            await connection.send(data[start : start + CHUNK_BYTES])


async def receive_bulk(connection: Connection, into: memoryview, on_chunk: Callable[[memoryview], None]) -> None:
    """Receive chunks until ``into`` is full, and call ``on_chunk`` with each chunk after it has arrived.

    Raises:
        TransportError: A chunk does not arrive within :data:`CHUNK_TIMEOUT_S`.
    """
    for start in range(0, into.nbytes, CHUNK_BYTES):
        chunk = into[start : start + CHUNK_BYTES]
        with deadline(connection, CHUNK_TIMEOUT_S):
            await connection.receive(chunk)
        on_chunk(chunk)
