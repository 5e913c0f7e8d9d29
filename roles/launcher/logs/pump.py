"""Copy a role's output to its log file without blocking the role.

The role writes into a pipe that one thread always empties. A second thread writes the file.
"""

from __future__ import annotations

import os
import re
import select
import threading
import time
from collections import deque
from collections.abc import Sequence
from math import inf
from pathlib import Path

from ....core.log_lines import STAMP_BYTES, missing_notice, stamp_of
from ....core.text import last_lines
from ..end_report import users_place
from .files import LineTimestamper, RateLimiter, RotatingLog

MAX_QUEUED_BYTES = 4 * 2**20
"""Maximum number of bytes kept while the file cannot be written; above it, the oldest lines are dropped."""
RETRY_INTERVAL_S = 1.0
"""Seconds between two tries to write after an error."""
SYNC_INTERVAL_S = 1.0
"""Seconds after which written lines are on the disk. So a node that fails loses the lines of about this time."""
DRAIN_TIMEOUT_S = 1.0
"""Timeout (s) for writing the rest of the log at the end, because the storage may hang."""
LAST_LINE_TIMEOUT_S = 1.0
"""Timeout (s) for emptying the pipe after the command has ended, because another process may have inherited the
pipe."""
_TAIL_BYTES = 4096
"""Number of bytes that are kept from the end of the output, to find its last line."""
_FRAME = re.compile(r'  File "(.+)", line (\d+)')
"""Pattern of a frame in a Python traceback."""
_READ_BYTES = 64 * 2**10
_WRITE_BYTES = 256 * 2**10


class Backlog:
    """The newest lines of a log that its file does not have yet, at most ``bound`` bytes. Thread-safe and non-blocking.

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
        """Add whole lines, each with a timestamp."""
        with self._lock:
            self._chunks.append(lines)
            self.size += len(lines)
            while self.size > self._bound:
                oldest, excess = self._chunks.popleft(), self.size - self._bound
                cut = oldest.find(b"\n", excess - 1) + 1 or len(oldest)
                self.size -= cut
                self._missing += cut
                last = oldest.rfind(b"\n", 0, cut - 1) + 1
                self._missing_at = oldest[last : last + STAMP_BYTES]
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


class LogPump:
    """Copies the pipe ``fd`` to ``log`` in two threads, and closes the pipe and the log."""

    def __init__(self, fd: int, log: RotatingLog) -> None:
        self._fd, self._log = fd, log
        self._queued = Backlog(MAX_QUEUED_BYTES)
        self._last_bytes = b""
        """The end of the output, at most :data:`_TAIL_BYTES`."""
        self._wakeup = threading.Event()
        self._ended = False
        self._closing = threading.Event()
        self._reader = threading.Thread(target=self._read, name="log reader", daemon=True)
        self._writer = threading.Thread(target=self._write, name="log writer", daemon=True)

    def start(self) -> None:
        """Start both threads."""
        self._reader.start()
        self._writer.start()

    def last_line(self, folder: Path | None = None) -> str:
        """Return the last line that the ended command wrote; block up to :data:`LAST_LINE_TIMEOUT_S`.

        If ``folder``, the job's folder, is given and the line ends a Python traceback, the place in the code is
        appended.
        """
        self._reader.join(LAST_LINE_TIMEOUT_S)
        stamped = self._last_bytes.splitlines()
        texts = (line[STAMP_BYTES + 1 :] if stamp_of(line) else line for line in stamped)
        lines = [line for text in texts if (line := text.decode(errors="replace").rstrip())]
        place = "" if folder is None else place_in_traceback(lines, folder)
        return last_lines(lines[-1] if lines else "") + (f" ({place})" if place else "")

    def finish(self, within: float = DRAIN_TIMEOUT_S) -> None:
        """Wait up to ``within`` seconds until the pipe has ended and the file is written; later output is lost."""
        deadline = time.monotonic() + within
        self._reader.join(within)
        self._closing.set()
        self._wakeup.set()
        self._writer.join(max(0.0, deadline - time.monotonic()))

    # ── threads ────────────────────────────────────────────────────────────────────────────────────────────────────
    def _read(self) -> None:
        limiter, stamper = RateLimiter(), LineTimestamper()
        reported_drops = 0
        poller = select.poll()
        poller.register(self._fd, select.POLLIN)
        try:
            while True:
                due = stamper.flush_due_in(time.monotonic())
                if due == 0.0 or not poller.poll(None if due is None else due * 1000 + 1):
                    self._enqueue(stamper.flush())
                    continue
                if not (data := os.read(self._fd, _READ_BYTES)):
                    break
                dropped = limiter.dropped
                if allowed := limiter.admit(data):
                    if dropped > reported_drops:
                        self._enqueue(stamper.gap(dropped - reported_drops))
                        reported_drops = dropped
                    self._enqueue(stamper.feed(allowed, time.monotonic()))
            missing, last = limiter.dropped - reported_drops, limiter.refused
            if missing > len(last):  # begin with a whole line
                last = last[last.find(b"\n") + 1 :]
                self._enqueue(stamper.gap(missing - len(last)))
            self._enqueue(stamper.feed(last) + stamper.flush())
        finally:
            os.close(self._fd)
            self._ended = True
            self._wakeup.set()

    def _enqueue(self, lines: bytes) -> None:
        if lines:
            self._last_bytes = (self._last_bytes + lines[-_TAIL_BYTES:])[-_TAIL_BYTES:]
            self._queued.put(lines)
            self._wakeup.set()

    def _write(self) -> None:
        unwritten, unsynced_since = b"", inf
        while True:
            self._wakeup.clear()
            over = self._ended or self._closing.is_set()
            unwritten = unwritten or self._queued.pop_oldest(_WRITE_BYTES)
            if unwritten:
                unwritten = unwritten[self._log.append(unwritten) :]
                unsynced_since = min(unsynced_since, time.monotonic())
                if unwritten and self._closing.is_set():
                    return
                if unwritten:
                    self._closing.wait(RETRY_INTERVAL_S)
            elif over:
                self._log.close()
                return
            else:
                due = unsynced_since + SYNC_INTERVAL_S
                self._wakeup.wait(None if due == inf else max(0.0, due - time.monotonic()))
            if time.monotonic() >= unsynced_since + SYNC_INTERVAL_S:
                self._log.sync()
                unsynced_since = inf


def place_in_traceback(lines: Sequence[str], folder: Path) -> str:
    """Return ``file:line`` in the user's code if ``lines`` end with a Python traceback, else an empty text.

    This serves a process that leaves no end report because it ended before it joined the run, for example by a syntax
    error. The result is only shown to people.
    """
    places: list[tuple[str, int]] = []
    for line in reversed(lines[:-1]):
        if not line.startswith(" "):  # the head of the traceback
            break
        if frame := _FRAME.match(line):
            places.insert(0, (frame[1], int(frame[2])))
    return users_place(places, folder) if places else ""
