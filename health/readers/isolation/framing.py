"""What agent, keeper and readers say to each other: an order at the start, then frames: a length, a kind, the bytes."""

from __future__ import annotations

from collections.abc import Iterator
from struct import Struct as Layout

import msgspec

from ..base import ReaderOptions
from ..samples import Reading

HUNG_ENDS = 120.0
"""s that a hung read may go on before its process is ended and a new one started: who waits for a driver that was
loaded anew meanwhile waits forever, a new process does not"""
READ = b"r"
"""a :class:`Reading` as msgpack, with data"""
FAILED = b"f"
"""a :class:`Reading` of any other state: the next look may wait"""
HELLO = b"h"
"""a reader's two times as msgpack: every, within"""
_HEAD = Layout("<Ic")
"""bytes that follow, kind"""
_MOST = 1 << 26
"""bytes of one frame; more is not ours"""

encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder(Reading).decode


def frame(kind: bytes, body: bytes) -> bytes:
    return _HEAD.pack(len(body), kind) + body


def reading(value: Reading) -> bytes:
    """As a frame."""
    return frame(READ if value.state == "read" else FAILED, encode(value))


class Order(msgspec.Struct, frozen=True):
    """What the keeper's process is told in its only argument, as JSON."""

    readers: dict[str, str]
    """name → ``module:Class``"""
    options: ReaderOptions
    parent: int
    once: bool = False
    """one reading of each, then the end"""
    within: float | None = None
    """s that each read may take, instead of the reader's own"""
    hung_ends: float = HUNG_ENDS


class Inbox:
    """Bytes as they come, frames when they are whole."""

    def __init__(self) -> None:
        self._held = bytearray()

    def feed(self, data: bytes) -> None:
        self._held += data

    def frames(self) -> Iterator[tuple[bytes, bytes]]:
        """Kind and body. Raises ValueError for what is no frame."""
        while len(self._held) >= _HEAD.size:
            length, kind = _HEAD.unpack_from(self._held)
            if length > _MOST:
                raise ValueError(f"a frame of {length} bytes")
            end = _HEAD.size + length
            if len(self._held) < end:
                return
            body = bytes(self._held[_HEAD.size : end])
            del self._held[:end]
            yield kind, body
