"""The lines of a log that its file does not have yet."""

from __future__ import annotations

import threading
from collections import deque

from ....core.log_lines import STAMP_BYTES, last_stamp, missing_notice


class Backlog:
    """The newest lines of a log that have not been written yet, at most ``bound`` bytes. Thread-safe and non-blocking.

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

    def _drop(self, lines: bytes) -> None:
        self.size -= len(lines)
        self._missing += len(lines)
        self._missing_at = last_stamp(lines) or self._missing_at or b"0" * STAMP_BYTES
