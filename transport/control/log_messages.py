"""How lines of logs reach the manager: on a socket of their own, because a flood must never delay a beat.

The first process of a step asks (:class:`Lines`) and is answered (:class:`Taken`) before it says more: one message of a
life is under way at most, so that nothing queues up anywhere but in the :class:`Backlog` of whoever has the lines.
"""

from __future__ import annotations

import threading
from collections import deque

from msgspec import Struct

from ...core.log_lines import STAMP_BYTES, last_stamp, missing_notice
from ...core.types import Incarnation
from .sockets import Bounds

MAX_TEXT_BYTES = 64 * 2**10
"""of one message"""
TAIL_BYTES = 64 * 2**10
"""newest lines of a life that its step and the manager each keep: some 700 lines, and 128 MiB for 2,000 lives"""
LOG_BOUNDS = Bounds(256 * 2**10, 16)
"""a message carries a tail and a message's worth of new lines at most; 16 of them are 4 MiB a peer"""


class LogLines(Struct, frozen=True, tag=True):
    """Whole lines of a life's log, each with its time, oldest first; some may have been said before."""

    incarnation: Incarnation
    text: bytes
    unsaved: bool = False
    """the step cannot write them to the run directory now: whoever takes them shall"""
    is_last: bool = False
    """the log ends here"""


class LogLinesAck(Struct, frozen=True, tag=True):
    """Answer to every Lines."""


class Backlog:
    """The newest lines of a log that somebody has yet to take, at most ``bound`` bytes. Thread-safe, waits for nobody.

    What there is no room for goes, oldest first; one line with its number of bytes takes its place.
    """

    def __init__(self, bound: int) -> None:
        self._bound = bound
        self._chunks: deque[bytes] = deque()
        self._lock = threading.Lock()
        self._missing = 0
        self._missing_at = b""
        self.size = 0
        """bytes held"""
        self.lost = 0
        """bytes that went, ever"""

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
        """The oldest lines, about ``most`` bytes of them (one line at least); b"" when there are none."""
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
        """Everything that is held; it stays."""
        with self._lock:
            return b"".join(self._chunks)

    @property
    def empty(self) -> bool:
        return not self.size and not self._missing

    def _drop(self, lines: bytes) -> None:
        self.size -= len(lines)
        self.lost += len(lines)
        self._missing += len(lines)
        self._missing_at = last_stamp(lines) or self._missing_at or b"0" * STAMP_BYTES
