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

from ..weights.base import Line, PipeError, deadline

CHUNK = 4 * 2**20
"""bytes sent, and taken in, under one deadline"""
CHUNK_BY = 10.0
"""s for one chunk: below 0.4 MB/s a peer counts as hung"""
ANSWER_BY = 10.0
"""s for an answer that needs no bulk"""
_MESSAGE_MAX = 256 * 2**10
"""bytes; bounds what a peer can make us allocate. A list of 1,000 snapshots is 150 KiB"""
_LENGTH = struct.Struct("<I")


def key_for(secret: bytes, purpose: str) -> bytes:
    """What shakes hands for one purpose only: a proof made on one port is worth nothing on another."""
    return hmac.digest(secret, b"rrl " + purpose.encode(), "sha256")


async def say(line: Line, message: Any) -> None:
    """Raises PipeError when the peer does not take it within ``ANSWER_BY``."""
    body = msgspec.msgpack.encode(message)
    with deadline(line, ANSWER_BY):
        await line.send(_LENGTH.pack(len(body)) + body)


async def hear(line: Line, kind: Any, by: float | None = ANSWER_BY) -> Any:
    """The next message, which must be of type ``kind`` (a union, mostly). ``by`` None: whenever it comes.

    Raises PipeError; what cannot be read ends the line.
    """
    head = bytearray(_LENGTH.size)
    with deadline(line, by) if by is not None else nullcontext():
        await line.receive(memoryview(head))
    (length,) = _LENGTH.unpack(head)
    if length > _MESSAGE_MAX:
        line.abort()
        raise PipeError(f"a message of {length} bytes; {_MESSAGE_MAX} is the most")
    body = bytearray(length)
    with deadline(line, ANSWER_BY):
        await line.receive(memoryview(body))
    try:
        return msgspec.msgpack.decode(body, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        line.abort()
        raise PipeError(f"a message that cannot be read: {error}") from error


async def send_bulk(line: Line, data: memoryview) -> None:
    """Raises PipeError."""
    for start in range(0, data.nbytes, CHUNK):
        with deadline(line, CHUNK_BY):
            await line.send(data[start : start + CHUNK])


async def receive_bulk(line: Line, into: memoryview, each: Callable[[memoryview], None]) -> None:
    """Fill ``into``; ``each`` is given every chunk as it has come. Raises PipeError."""
    for start in range(0, into.nbytes, CHUNK):
        chunk = into[start : start + CHUNK]
        with deadline(line, CHUNK_BY):
            await line.receive(chunk)
        each(chunk)
