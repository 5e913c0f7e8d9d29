"""What agent, keeper and readers say to each other: an order at the start, then frames: a length, a kind, the bytes."""

from __future__ import annotations

from collections.abc import Iterator
from struct import Struct as Layout

import msgspec

from ..base import ReaderOptions
from ..samples import Reading

HUNG_TIMEOUT_S = 120.0
"""s that a hung read may go on before its process is ended and a new one started: who waits for a driver that was
loaded anew meanwhile waits forever, a new process does not"""
READ_FRAME = b"r"
"""a :class:`Reading` as msgpack, with data"""
FAILED_FRAME = b"f"
"""a :class:`Reading` of any other state: the next look may wait"""
HELLO_FRAME = b"h"
"""a reader's two times as msgpack: every, within"""
_HEAD = Layout("<Ic")
"""bytes that follow, kind"""
_MAX_FRAME_BYTES = 1 << 26
"""bytes of one frame; more is not ours"""

encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder(Reading).decode


def frame(kind: bytes, body: bytes) -> bytes:
    return _HEAD.pack(len(body), kind) + body


def reading_frame(value: Reading) -> bytes:
    """As a frame."""
    return frame(READ_FRAME if value.state == "read" else FAILED_FRAME, encode(value))


class ReaderConfig(msgspec.Struct, frozen=True):
    """What the keeper's process is told in its only argument, as JSON."""

    readers: dict[str, str]
    """name → ``module:Class``"""
    options: ReaderOptions
    parent: int
    once: bool = False
    """one reading of each, then the end"""
    read_timeout_s: float | None = None
    """s that each read may take, instead of the reader's own"""
    hung_timeout_s: float = HUNG_TIMEOUT_S


class Inbox:
    """Bytes as they come, frames when they are whole."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> None:
        self._buffer += data

    def frames(self) -> Iterator[tuple[bytes, bytes]]:
        """Kind and body. Raises ValueError for what is no frame."""
        while len(self._buffer) >= _HEAD.size:
            length, kind = _HEAD.unpack_from(self._buffer)
            if length > _MAX_FRAME_BYTES:
                raise ValueError(f"a frame of {length} bytes")
            end = _HEAD.size + length
            if len(self._buffer) < end:
                return
            body = bytes(self._buffer[_HEAD.size : end])
            del self._buffer[:end]
            yield kind, body
