"""The log of one task: rotated by size, limited in rate, with a count of what was dropped.

Never raises and never blocks its role for long: a full or failing disk costs lines, not the run.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

FILE_BYTES = 64 * 2**20
"""size at which a file is rotated"""
FILES = 3
"""files kept: ``<tag>.log``, ``<tag>.log.1`` (older), ``<tag>.log.2`` (oldest)"""
RATE = 1 * 2**20
"""bytes/s written on average: a flood of three minutes fits the files, 100 floods load the storage by 100 MiB/s"""
BURST = 16 * 2**20
"""bytes that may come at once: a long traceback from every thread, a table at start"""
_READ = 64 * 2**10


class RotatingLog:
    """Append to ``path``. ``dropped`` counts the bytes that were not written."""

    def __init__(
        self, path: Path, *, file_bytes: int = FILE_BYTES, files: int = FILES, rate: float = RATE, burst: int = BURST,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self.dropped = 0
        self._path, self._file_bytes, self._files = path, file_bytes, files
        self._rate, self._burst, self._clock = rate, burst, clock
        self._tokens, self._filled = float(burst), clock()
        self._told = 0
        self._within_dropped_line = False
        self._fd: int | None = None
        self._size = 0

    def write(self, data: bytes) -> None:
        if self._within_dropped_line:
            data = self._skip_rest_of_line(data)
        now = self._clock()
        self._tokens = min(self._burst, self._tokens + (now - self._filled) * self._rate)
        self._filled = now
        if len(data) <= self._tokens:
            allowed, refused = data, b""
        else:
            cut = data.rfind(b"\n", 0, int(self._tokens)) + 1
            allowed, refused = data[:cut], data[cut:]
        self._tokens -= len(allowed)
        if allowed:
            self._tell_dropped()
            if not self._append(allowed):
                self.dropped += len(allowed)
        if refused:
            self.dropped += len(refused)
            self._within_dropped_line = not refused.endswith(b"\n")

    def close(self) -> None:
        self._tell_dropped()
        self._shut()

    def _skip_rest_of_line(self, data: bytes) -> bytes:
        rest = data.find(b"\n") + 1
        if not rest:
            self.dropped += len(data)
            return b""
        self._within_dropped_line = False
        self.dropped += rest
        return data[rest:]

    def _tell_dropped(self) -> None:
        count = self.dropped - self._told
        if count and self._append(b"[rrl: %d bytes of this log were dropped here]\n" % count):
            self._told = self.dropped

    def _append(self, data: bytes) -> bool:
        try:
            if self._size and self._size + len(data) > self._file_bytes:
                self._rotate()
            if self._fd is None:
                self._fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
                self._size = os.fstat(self._fd).st_size
            view = memoryview(data)
            while view:
                written = os.write(self._fd, view)
                self._size += written
                view = view[written:]
            return True
        except OSError:  # ENOSPC, ESTALE, quota: the role goes on, the count says so once there is room again
            self._shut()
            return False

    def _rotate(self) -> None:
        self._shut()
        names = [self._path, *(self._path.with_name(f"{self._path.name}.{n}") for n in range(1, self._files))]
        for newer, older in reversed(list(pairwise(names))):
            if newer.exists():
                os.replace(newer, older)
        if len(names) == 1:
            self._path.unlink()

    def _shut(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
        self._size = 0


def pump(fd: int, log: RotatingLog) -> None:
    """Write what comes out of the pipe ``fd`` until its end; closes both. Runs in a thread of its own: storage that
    hangs must not keep the step from obeying."""
    try:
        while data := os.read(fd, _READ):
            log.write(data)
    finally:
        os.close(fd)
        log.close()
