"""Keep the newest log lines of every incarnation in the manager.

The log file of an incarnation may be lost with the incarnation's node. The buffers are in the manager's memory. A
buffer is written to ``logs/<tag>.shipped-<epoch>.log`` in two cases: its incarnation is no longer current and has not
reported that its own file is complete, or a step reports lines that it cannot write itself. Readers drop duplicates,
since a line is identified by its timestamp. Each file name contains the epoch, so that the file has only one writer,
because O_APPEND is not atomic on NFS.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

from ....core.launch import tag_of
from ....core.log_lines import STAMP_BYTES, first_stamp, last_stamp
from ....core.run_dir import RunDir
from ....core.types import Incarnation
from ....transport.control.log_messages import LOG_BOUNDS, TAIL_BYTES, Backlog, LogLines

MAX_TOTAL_BYTES = 256 * 2**20
"""Maximum size in bytes of all buffers, enough for about 4,000 incarnations. Beyond this size, the buffer whose last
message is the oldest is evicted."""
MAX_FILE_BYTES = 4 * 2**20
"""Size in bytes at which a file is renamed to ``.1``, which replaces an earlier ``.1``."""
COMPLETION_GRACE_S = 2.0
"""Seconds after an incarnation's end during which it may still report that its log file is complete."""


class _LogBuffer:
    """The newest lines of one incarnation."""

    def __init__(self) -> None:
        self.lines = Backlog(TAIL_BYTES)
        self.unwritten = b""
        """Bytes taken from ``lines`` that could not be written yet."""
        self.newest_stamp = b""
        """Timestamp of the newest line received."""
        self.due_at: float | None = None
        """Time (s) at which the buffer must be written; None if it need not be written."""
        self.complete = False
        """True once the last line was received, so that the buffer is removed after it is written."""

    @property
    def size(self) -> int:
        return self.lines.size + len(self.unwritten)


class LogBuffers:
    """The log buffers of all incarnations.

    ``is_current`` returns whether an incarnation is current, or None if the run never had it. All times are seconds of
    the same clock. ``refused`` counts messages that cannot belong to this run's logs; ``evicted`` counts the bytes
    evicted because of ``MAX_TOTAL_BYTES``.
    """

    def __init__(
        self, run: RunDir, epoch: int, is_current: Callable[[Incarnation], bool | None], *,
        max_total_bytes: int = MAX_TOTAL_BYTES, max_file_bytes: int = MAX_FILE_BYTES,
    ) -> None:  # fmt: skip
        self.refused = self.evicted = 0
        self._run, self._epoch, self._is_current = run, epoch, is_current
        self._max_total_bytes, self._max_file_bytes = max_total_bytes, max_file_bytes
        self._buffers: OrderedDict[Incarnation, _LogBuffer] = OrderedDict()
        """Buffers in the order of their last message, oldest first."""
        self._due: set[Incarnation] = set()
        self.size = 0
        """Bytes in all buffers."""

    def add(self, message: LogLines, now: float) -> None:
        """Buffer the lines of a message, except lines that were received before.

        If the launcher cannot write the lines itself, the buffer is written now. Else, if these are the last lines of
        the log, the incarnation's own file is complete, and the buffer is removed. Else, if the incarnation is not
        current, the buffer is written after COMPLETION_GRACE_S.
        """
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
        elif message.is_last:  # its own file is complete
            self._remove(incarnation)
        elif not is_current:
            self._set_due(incarnation, buffer, now + COMPLETION_GRACE_S)
        while self.size > self._max_total_bytes:
            self._evict()

    def write_later(self, incarnation: Incarnation, now: float) -> None:
        """Write the buffer of an incarnation that ended or was fenced, after COMPLETION_GRACE_S.

        The buffer is dropped instead if the incarnation reports in time that its log file is complete.
        """
        self._set_due(incarnation, self._buffer(incarnation), now + COMPLETION_GRACE_S)

    def write_due(self, now: float) -> None:
        """Write the buffers that are due. A buffer that cannot be written stays due."""
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
        """Return whether any buffer has a ``due_at``. Such a buffer must be written now or later."""
        return bool(self._due)

    def write_all_due(self) -> None:
        """Write every buffer that has a ``due_at``, even if this time has not come yet."""
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
        """Write a buffer to its file. Return False if a part of it is still unwritten."""
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
    """Return the lines with timestamps after ``last``.

    The other lines are duplicates, because an incarnation sends its newest lines again on each new connection.
    """
    if first_stamp(text) > last:
        return text
    return b"".join(line for line in text.splitlines(keepends=True) if line[:STAMP_BYTES] > last)


def _private(path: str, flags: int) -> int:
    """Open a file that only its owner may read."""
    return os.open(path, flags, 0o600)


def _append(path: Path, data: bytes, max_file_bytes: int) -> int:
    """Append to the file, rotating it if it is full. Return the number of bytes written, 0 on an error."""
    try:
        with open(path, "ab", buffering=0, opener=_private) as file:
            size = os.fstat(file.fileno()).st_size
            if not size or size + len(data) <= max_file_bytes:
                return file.write(data)
        os.replace(path, path.with_name(f"{path.name}.1"))
        with open(path, "ab", buffering=0, opener=_private) as file:
            return file.write(data)
    except (OSError, ValueError):  # the storage is full or unavailable, or the file name is invalid
        return 0
