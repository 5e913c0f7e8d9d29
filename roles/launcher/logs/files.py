"""The log file of one step: rotation by size, a rate limit, and a timestamp for each line of the role's output.

The functions never raise an exception: if the disk is full or fails, lines are lost and the run continues.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

from ....core.log_lines import STAMP_BYTES, missing_notice, second_text

FILE_BYTES = 64 * 2**20
"""Size in bytes at which a file is rotated."""
FILES = 3
"""Number of files kept: ``<tag>.log``, ``<tag>.log.1`` (older), ``<tag>.log.2`` (oldest)."""
RATE_BYTES_PER_S = 1 * 2**20
"""Maximum average number of bytes written per second. At this rate, the files contain the output of the last three
minutes, and 100 roles write 100 MiB/s to the storage."""
BURST_BYTES = 16 * 2**20
"""Number of bytes that may be written in one burst, for example tracebacks of all threads or a table at the start."""
MAX_LINE_BYTES = 16 * 2**10
"""Size in bytes above which a line is split, as Docker's json-file driver does."""
PARTIAL_LINE_TIMEOUT_S = 1.0
"""Seconds after which an unfinished line is written without its end."""
LAST_BYTES = 64 * 2**10
"""Number of the last bytes of the output that are written even during a flood: the end says why a process ended."""
_RESUME_SHARE = 1 / 16
"""Share of the burst that must be available again before a role that exceeded the limit may write. Without this share,
single scattered lines of a flood would be written."""


class RotatingLog:
    """Appends to the file ``path`` and rotates it.

    It must be the only writer of the file, because O_APPEND is not atomic between NFS clients.
    """

    def __init__(self, path: Path, *, file_bytes: int = FILE_BYTES, files: int = FILES) -> None:
        self._path, self._file_bytes, self._files = path, file_bytes, files
        self._fd: int | None = None
        self._size = 0

    def append(self, data: bytes) -> int:
        """Write whole lines; return the number of written bytes, which is lower if the disk is full or unreachable."""
        done = 0
        try:
            if self._size and self._size + len(data) > self._file_bytes:
                self._rotate()
            if self._fd is None:
                self._fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
                self._size = os.fstat(self._fd).st_size
            view = memoryview(data)
            while done < len(data):
                written = os.write(self._fd, view[done:])
                self._size += written
                done += written
        except OSError:  # ENOSPC, ESTALE, quota: the next append opens the file again
            self._close_file()
        return done

    def sync(self) -> None:
        """Write the appended lines to the disk, if that is possible."""
        if self._fd is not None:
            with contextlib.suppress(OSError):
                os.fdatasync(self._fd)

    def close(self) -> None:
        """Write the appended lines to the disk, if that is possible, and close the file."""
        self.sync()
        self._close_file()

    def _rotate(self) -> None:
        self.close()
        names = [self._path, *(self._path.with_name(f"{self._path.name}.{n}") for n in range(1, self._files))]
        for newer, older in reversed(list(pairwise(names))):
            if newer.exists():
                os.replace(newer, older)
        if len(names) == 1:
            self._path.unlink()

    def _close_file(self) -> None:
        fd, self._fd, self._size = self._fd, None, 0
        if fd is not None:
            with contextlib.suppress(OSError):  # NFS may report a failed write only at close(), too late to repeat it
                os.close(fd)


class RateLimiter:
    """Limits a byte stream to an average rate and a burst, by whole lines. ``dropped`` counts the discarded bytes.

    ``refused`` has the newest of these bytes since the last ones that were admitted, at most :data:`LAST_BYTES`.
    """

    def __init__(
        self, rate: float = RATE_BYTES_PER_S, burst: int = BURST_BYTES, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.dropped, self.refused = 0, b""
        self._rate, self._burst, self._clock = rate, burst, clock
        self._tokens, self._filled = float(burst), clock()
        self._dropping = False
        self._within_dropped_line = False

    def admit(self, data: bytes) -> bytes:
        """Return the first lines of ``data`` that may be written now; their timestamps count as bytes, too."""
        now = self._clock()
        self._tokens = min(self._burst, self._tokens + (now - self._filled) * self._rate)
        self._filled = now
        if self._dropping and self._tokens < self._burst * _RESUME_SHARE:
            return self._refuse(b"", data)
        self._dropping = False
        if self._within_dropped_line:
            data = self._skip_rest_of_line(data)
        cost = len(data) + (STAMP_BYTES + 1) * data.count(b"\n")
        self.refused = b""
        if cost <= max(0.0, self._tokens):
            self._tokens -= cost
            return data
        cut = data.rfind(b"\n", 0, int(len(data) * self._tokens / cost)) + 1  # assumes lines of similar length
        self._tokens -= cost * cut / len(data)
        return self._refuse(data[:cut], data[cut:])

    def _refuse(self, allowed: bytes, refused: bytes) -> bytes:
        self.dropped += len(refused)
        self.refused = (self.refused + refused[-LAST_BYTES:])[-LAST_BYTES:]
        self._dropping = True
        self._within_dropped_line = not refused.endswith(b"\n")
        return allowed

    def _skip_rest_of_line(self, data: bytes) -> bytes:
        rest = data.find(b"\n") + 1
        if not rest:
            self.dropped += len(data)
            return b""
        self._within_dropped_line = False
        self.dropped += rest
        return data[rest:]


class LineTimestamper:
    """Splits a byte stream into lines and puts a timestamp before each line.

    If carriage returns overwrite a line (a progress bar), only the line's newest state is written, at the end of the
    line or every ``PARTIAL_LINE_TIMEOUT_S`` seconds. The clock returns ns since the epoch. Timestamps never decrease;
    if the clock is set back, they advance by 1 us per line.
    """

    def __init__(self, clock: Callable[[], int] = time.time_ns) -> None:
        self._clock = clock
        self._last = 0
        self._second, self._text = -1, b""
        self._partial = b""
        self._partial_since = 0.0
        self._line_split = False
        """Whether the beginning of the current line has already been written."""

    def feed(self, data: bytes, now: float = 0.0) -> bytes:
        """Return the lines that ``data`` completes; ``now`` is a time (s) on the clock of :meth:`flush_due_in`."""
        if not self._partial:
            self._partial_since = now
        first, *lines = (self._partial + data).split(b"\n")
        if not lines:
            self._partial = _visible_text(first)
        else:
            self._partial, self._partial_since = _visible_text(lines.pop()), now
            if first.rstrip(b"\r") or not self._line_split:
                lines.insert(0, first)
            self._line_split = False
        if len(self._partial) > MAX_LINE_BYTES:
            lines.append(self._partial)
            self._partial, self._line_split = b"", True
        return self._stamped(lines)

    def flush_due_in(self, now: float) -> float | None:
        """Return the seconds until the unfinished line must be flushed (:meth:`flush`); None if there is none."""
        return max(0.0, self._partial_since + PARTIAL_LINE_TIMEOUT_S - now) if self._partial else None

    def flush(self) -> bytes:
        """Return the unfinished line as it is."""
        lines, self._line_split = [self._partial] if self._partial else [], bool(self._partial) or self._line_split
        self._partial = b""
        return self._stamped(lines)

    def gap(self, count: int) -> bytes:
        """Return the unfinished line and a notice that ``count`` bytes are missing after it."""
        flushed = self.flush()
        self._line_split = False
        return flushed + self._stamped([missing_notice(count)])

    def _stamped(self, lines: list[bytes]) -> bytes:
        at = max(self._clock() // 1000, self._last + 1)
        out: list[bytes] = []
        for line in lines:
            if b"\r" in line:
                line = _visible_text(line).rstrip(b"\r")
            for start in range(0, len(line) or 1, MAX_LINE_BYTES):
                second, micros = divmod(at, 1_000_000)
                if second != self._second:
                    self._second, self._text = second, second_text(second)
                out.append(b"%s%06dZ %s\n" % (self._text, micros, line[start : start + MAX_LINE_BYTES]))
                at += 1
        self._last = at - 1
        return b"".join(out)


def _visible_text(line: bytes) -> bytes:
    """Return the text of a line that a terminal would show.

    Carriage returns at the end of the line are kept, because its newline may still arrive.
    """
    body = line.rstrip(b"\r")
    return line[body.rfind(b"\r") + 1 :] if b"\r" in body else line
