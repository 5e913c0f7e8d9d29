"""The messages that carry log lines to the manager on a separate socket, so that a flood never delays a heartbeat.

The launcher of a step sends :class:`LogLines` as a request, and waits for :class:`LogLinesAck` before it sends more. So
at most one message of an incarnation is in flight, and lines queue up only in the :class:`Backlog` of their sender.
"""

from __future__ import annotations

import threading
from collections import deque

from msgspec import Struct

from ...core.log_lines import STAMP_BYTES, last_stamp, missing_notice
from ...core.types import Incarnation
from .sockets import Bounds

MAX_TEXT_BYTES = 64 * 2**10
"""Maximum number of bytes of new log text in one message."""
TAIL_BYTES = 64 * 2**10
"""Maximum number of bytes of an incarnation's newest lines that its launcher and the manager each keep. This is some
700 lines; the lines of 2,000 incarnations take 128 MiB."""
LOG_BOUNDS = Bounds(256 * 2**10, 16)
"""Limits of the socket for log lines. A message contains at most :data:`TAIL_BYTES` of lines that were sent before and
:data:`MAX_TEXT_BYTES` of new lines; 16 messages of the largest size are 4 MiB per peer."""


class LogLines(Struct, frozen=True, tag=True):
    """Whole lines of an incarnation's log, each with its time, oldest first; some may have been sent before."""

    incarnation: Incarnation
    text: bytes
    unsaved: bool = False
    """True if the launcher currently cannot write the lines to the run directory, so that the receiver must do so."""
    is_last: bool = False
    """True if these are the last lines of the log."""


class LogLinesAck(Struct, frozen=True, tag=True):
    """The reply to :class:`LogLines`."""


class Backlog:
    """The newest lines of a log that have not been sent yet, at most ``bound`` bytes. Thread-safe and non-blocking.

    Lines that exceed the bound are dropped, oldest first; one line with the number of dropped bytes replaces them.
    """

    def __init__(self, bound: int) -> None:
        self._bound = bound
        self._chunks: deque[bytes] = deque()
        self._lock = threading.Lock()
        self._missing = 0
        self._missing_at = b""
        self.size = 0
        """Bytes that are stored."""
        self.lost = 0
        """Total number of bytes that were dropped."""

    def put(self, lines: bytes) -> None:
        """Add whole lines."""
        with self._lock:
            if lines:
                self._chunks.append(lines)
                self.size += len(lines)
            while self.size > self._bound:
                oldest, excess = self._chunks.popleft(), self.size - self._bound
                cut = oldest.find(b"\n", excess - 1) + 1 or len(oldest)
                self._drop(oldest[:cut])
                if rest := oldest[cut:]:
                    self._chunks.appendleft(rest)

    def pop_oldest(self, max_bytes: int) -> bytes:
        """Remove and return the oldest lines, about ``max_bytes`` but at least one line; b"" if there are none."""
        with self._lock:
            chunks: list[bytes] = []
            if self._missing:
                chunks.append(b"%s %s\n" % (self._missing_at, missing_notice(self._missing)))
                self._missing = 0
            remaining = max_bytes
            while self._chunks and remaining > 0:
                chunk = self._chunks.popleft()
                if len(chunk) > remaining:
                    cut = (chunk.rfind(b"\n", 0, remaining) + 1) or (0 if chunks else chunk.find(b"\n") + 1)
                    if chunk[cut:]:
                        self._chunks.appendleft(chunk[cut:])
                    chunk, remaining = chunk[:cut], 0
                chunks.append(chunk)
                self.size -= len(chunk)
                remaining -= len(chunk)
            return b"".join(chunks)

    def all(self) -> bytes:
        """Return everything that is stored, without removing it."""
        with self._lock:
            return b"".join(self._chunks)

    @property
    def empty(self) -> bool:
        """Return whether there is nothing to send, not even a notice of dropped lines."""
        return not self.size and not self._missing

    def _drop(self, lines: bytes) -> None:
        self.size -= len(lines)
        self.lost += len(lines)
        self._missing += len(lines)
        self._missing_at = last_stamp(lines) or self._missing_at or b"0" * STAMP_BYTES
