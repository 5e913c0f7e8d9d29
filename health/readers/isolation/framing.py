"""The protocol between client, supervisor and readers: a configuration at the start, then frames.

A frame is a length, a kind and the body.
"""

from __future__ import annotations

from collections.abc import Iterator
from struct import Struct as Layout

import msgspec

from ..base import ReaderOptions
from ..samples import Reading

HUNG_TIMEOUT_S = 120.0
"""Seconds after which the process of a hung read is ended and a new process started. A call never returns if its driver
was reloaded during the call; calls of a new process return."""
READ_FRAME = b"r"
"""Kind of a frame with a :class:`Reading` in state ``read``, as msgpack."""
FAILED_FRAME = b"f"
"""Kind of a frame with a :class:`Reading` in another state than ``read``. After such a frame, the supervisor may wait
longer than the reader's interval before it requests the next read."""
HELLO_FRAME = b"h"
"""Kind of a frame with a reader's interval and timeout (s), as msgpack."""
_HEAD = Layout("<Ic")
"""Length of the body, kind."""
_MAX_FRAME_BYTES = 1 << 26
"""Maximum size of a body in bytes. A greater length means that the bytes are not a frame."""

encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder(Reading).decode


def frame(kind: bytes, body: bytes) -> bytes:
    """Return a frame of this kind."""
    return _HEAD.pack(len(body), kind) + body


def reading_frame(value: Reading) -> bytes:
    """Return the result of a reader as a frame."""
    return frame(READ_FRAME if value.state == "read" else FAILED_FRAME, encode(value))


class ReaderConfig(msgspec.Struct, frozen=True):
    """Configuration of the supervisor, passed as JSON in its only argument."""

    readers: dict[str, str]
    """Reader name → ``module:Class``."""
    options: ReaderOptions
    parent: int
    once: bool = False
    """Whether to read each source once and then end."""
    read_timeout_s: float | None = None
    """Seconds that each read may take, instead of the reader's own timeout."""
    hung_timeout_s: float = HUNG_TIMEOUT_S


class Inbox:
    """Buffer that turns received bytes into whole frames."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> None:
        """Add received bytes."""
        self._buffer += data

    def frames(self) -> Iterator[tuple[bytes, bytes]]:
        """Yield kind and body of each whole frame. Raises ValueError for bytes that are not a frame."""
        while len(self._buffer) >= _HEAD.size:
            length, kind = _HEAD.unpack_from(self._buffer)
            if length > _MAX_FRAME_BYTES:
                raise ValueError(f"invalid frame of {length} bytes; at most {_MAX_FRAME_BYTES} are allowed")
            end = _HEAD.size + length
            if len(self._buffer) < end:
                return
            body = bytes(self._buffer[_HEAD.size : end])
            del self._buffer[:end]
            yield kind, body
