"""The manager's copy of the newest lines of every life, for what the run directory lacks when their node is gone.

It lives in memory. Written to ``logs/<tag>.shipped-<epoch>.log`` is the copy of a life that is no longer believed and
did not say itself that its file is complete, and what a step cannot write for itself. Whoever reads takes each line
once, for a line is known by its time. A file has one writer, for O_APPEND is not atomic on NFS: hence the epoch.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

from ...core.launch import tag_of
from ...core.log_lines import STAMP_BYTES, first_stamp, last_stamp
from ...core.run_dir import RunDir
from ...core.types import Incarnation
from ...transport.control.log_messages import LOG_BOUNDS, TAIL_BYTES, Backlog, LogLines

MAX_TOTAL_BYTES = 256 * 2**20
"""bytes of all copies, some 4,000 lives; beyond it the copy of who has been silent longest goes"""
MAX_FILE_BYTES = 4 * 2**20
"""size at which a file of copies becomes ``.1``, and the one before it goes"""
COMPLETION_GRACE_S = 2.0
"""s after its end in which a life may still say that its file is complete"""


class _LogBuffer:
    def __init__(self) -> None:
        self.lines = Backlog(TAIL_BYTES)
        self.unwritten = b""
        """taken from ``lines`` and not written yet: the file refused"""
        self.newest_stamp = b""
        """time of the newest line that was told"""
        self.due_at: float | None = None
        """s, when it is to be written"""
        self.complete = False
        """nothing more comes: it goes once it is written"""

    @property
    def size(self) -> int:
        return self.lines.size + len(self.unwritten)


class LogBuffers:
    """``is_current`` says of a life whether it is, or None where the run never had it. Times are s of any clock.

    ``refused`` counts messages that cannot be of this run's logs, ``evicted`` the bytes that ``MAX_TOTAL_BYTES`` cost."""

    def __init__(
        self, run: RunDir, epoch: int, is_current: Callable[[Incarnation], bool | None], *, max_total_bytes: int = MAX_TOTAL_BYTES,
        max_file_bytes: int = MAX_FILE_BYTES,
    ) -> None:  # fmt: skip
        self.refused = self.evicted = 0
        self._run, self._epoch, self._is_current = run, epoch, is_current
        self._max_total_bytes, self._max_file_bytes = max_total_bytes, max_file_bytes
        self._buffers: OrderedDict[Incarnation, _LogBuffer] = OrderedDict()
        """by when it was last heard of"""
        self._due: set[Incarnation] = set()
        self.size = 0
        """bytes held"""

    def add(self, message: LogLines, now: float) -> None:
        incarnation, text = message.incarnation, message.text
        is_current = self._is_current(incarnation)
        if is_current is None or not _plausible(text):
            self.refused += 1
            return
        buffer = self._buffer(incarnation)
        before = buffer.size
        if fresh := _after(buffer.newest_stamp, text):
            buffer.lines.put(fresh)
            buffer.newest_stamp = last_stamp(fresh)
        buffer.complete = message.is_last
        self.size += buffer.size - before
        if message.unsaved:
            self._set_due(incarnation, buffer, now)
            self.write_due(now)
        elif message.is_last:  # its file has everything
            self._remove(incarnation)
        elif not is_current:
            self._set_due(incarnation, buffer, now + COMPLETION_GRACE_S)
        while self.size > self._max_total_bytes:
            self._evict()

    def write_later(self, incarnation: Incarnation, now: float) -> None:
        """It has ended or is no longer believed: its copy is written, unless it says in time that there is no need."""
        self._set_due(incarnation, self._buffer(incarnation), now + COMPLETION_GRACE_S)

    def write_due(self, now: float) -> None:
        """Write what is due; what the disk refuses stays due."""
        for incarnation in list(self._due):
            buffer = self._buffers[incarnation]
            if buffer.due_at is not None and buffer.due_at <= now and self._write(incarnation, buffer):
                if buffer.complete or not self._is_current(incarnation):
                    self._remove(incarnation)
                else:
                    self._due.discard(incarnation)
                    buffer.due_at = None

    @property
    def due(self) -> bool:
        """Something is to be written."""
        return bool(self._due)

    def write_all_due(self) -> None:
        """The same without waiting for last words."""
        self.write_due(float("inf"))

    def _buffer(self, incarnation: Incarnation) -> _LogBuffer:
        buffer = self._buffers.setdefault(incarnation, _LogBuffer())
        self._buffers.move_to_end(incarnation)
        return buffer

    def _set_due(self, incarnation: Incarnation, buffer: _LogBuffer, at: float) -> None:
        buffer.due_at = at if buffer.due_at is None else min(at, buffer.due_at)
        self._due.add(incarnation)

    def _remove(self, incarnation: Incarnation) -> None:
        self.size -= self._buffers.pop(incarnation).size
        self._due.discard(incarnation)

    def _evict(self) -> None:
        incarnation, buffer = next(iter(self._buffers.items()))
        if buffer.due_at is None or not self._write(incarnation, buffer):
            self.evicted += buffer.size
        self._remove(incarnation)

    def _write(self, incarnation: Incarnation, buffer: _LogBuffer) -> bool:
        """False when something of it is still unwritten."""
        before = buffer.size
        buffer.unwritten = buffer.unwritten or buffer.lines.pop_oldest(TAIL_BYTES)
        while buffer.unwritten:
            done = _append(self._path(incarnation), buffer.unwritten, self._max_file_bytes)
            buffer.unwritten = buffer.unwritten[done:] or (buffer.lines.pop_oldest(TAIL_BYTES) if done else b"")
            if not done:
                break
        self.size += buffer.size - before
        return not buffer.size

    def _path(self, incarnation: Incarnation) -> Path:
        return self._run.logs / f"{tag_of(self._run.id, incarnation)}.shipped-{self._epoch}.log"


def _plausible(text: bytes) -> bool:
    if len(text) > LOG_BOUNDS.max_frame_bytes:
        return False
    return not text or (text.endswith(b"\n") and bool(first_stamp(text)) and bool(last_stamp(text)))


def _after(last: bytes, text: bytes) -> bytes:
    """The lines that are later than ``last``: a life tells its newest lines again to every new manager."""
    if first_stamp(text) > last:
        return text
    return b"".join(line for line in text.splitlines(keepends=True) if line[:STAMP_BYTES] > last)


def _append(path: Path, data: bytes, max_file_bytes: int) -> int:
    """How many bytes were written."""
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            if (size := os.fstat(fd).st_size) and size + len(data) > max_file_bytes:
                os.replace(path, path.with_name(f"{path.name}.1"))
                os.close(fd)
                fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
            return os.write(fd, data)
        finally:
            os.close(fd)
    except (OSError, ValueError):  # full, away; a name that cannot be one
        return 0
