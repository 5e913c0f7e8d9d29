"""Blobs between processes of a run: short messages, and bulk bytes in chunks, on a line that has shaken hands.

A message is its length and msgpack. Bulk bytes go as they are, announced by the message before them; whoever takes
them knows by their digest that they have arrived. Every chunk has a deadline of its own: a peer that hangs is noticed,
one that is only slow is not mistaken for it.
"""

from __future__ import annotations

import hmac
import struct
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import msgspec

from ..weights.base import Connection, TransportError, deadline

CHUNK_BYTES = 4 * 2**20
"""bytes sent, and taken in, under one deadline"""
CHUNK_TIMEOUT_S = 10.0
"""s for one chunk: below 0.4 MB/s a peer counts as hung"""
ANSWER_TIMEOUT_S = 10.0
"""s for an answer that needs no bulk"""
_MAX_MESSAGE_BYTES = 256 * 2**10
"""bytes; bounds what a peer can make us allocate. A list of 1,000 snapshots is 150 KiB"""
_LENGTH = struct.Struct("<I")


def derive_key(secret: bytes, purpose: str) -> bytes:
    """What shakes hands for one purpose only: a proof made on one port is worth nothing on another."""
    return hmac.digest(secret, b"rrl " + purpose.encode(), "sha256")


async def send_message(connection: Connection, message: Any) -> None:
    """Raises PipeError when the peer does not take it within ``ANSWER_BY``."""
    body = msgspec.msgpack.encode(message)
    with deadline(connection, ANSWER_TIMEOUT_S):
        await connection.send(_LENGTH.pack(len(body)) + body)


async def receive_message(connection: Connection, kind: Any, timeout: float | None = ANSWER_TIMEOUT_S) -> Any:
    """The next message, which must be of type ``kind`` (a union, mostly). ``by`` None: whenever it comes.

    Raises PipeError; what cannot be read ends the line.
    """
    head = bytearray(_LENGTH.size)
    with deadline(connection, timeout) if timeout is not None else nullcontext():
        await connection.receive(memoryview(head))
    (length,) = _LENGTH.unpack(head)
    if length > _MAX_MESSAGE_BYTES:
        connection.abort()
        raise TransportError(f"a message of {length} bytes; {_MAX_MESSAGE_BYTES} is the most")
    body = bytearray(length)
    with deadline(connection, ANSWER_TIMEOUT_S):
        await connection.receive(memoryview(body))
    try:
        return msgspec.msgpack.decode(body, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        connection.abort()
        raise TransportError(f"a message that cannot be read: {error}") from error


async def send_bulk(connection: Connection, data: memoryview) -> None:
    """Raises PipeError."""
    for start in range(0, data.nbytes, CHUNK_BYTES):
        with deadline(connection, CHUNK_TIMEOUT_S):
            await connection.send(data[start : start + CHUNK_BYTES])


async def receive_bulk(connection: Connection, into: memoryview, on_chunk: Callable[[memoryview], None]) -> None:
    """Fill ``into``; ``each`` is given every chunk as it has come. Raises PipeError."""
    for start in range(0, into.nbytes, CHUNK_BYTES):
        chunk = into[start : start + CHUNK_BYTES]
        with deadline(connection, CHUNK_TIMEOUT_S):
            await connection.receive(chunk)
        on_chunk(chunk)
