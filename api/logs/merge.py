"""Read the lines of logs backwards from the end to the first selected line, then forwards, merged by time.

Only one block of each file is held in memory, since a log may have several GiB. A line is ordered by its time. A line
without a time gets the time of the line before it, or for the first line, the time when the file was last written.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

from ...core.log_lines import STAMP_BYTES, stamp, stamp_of
from ...core.run_dir import errors_about
from .files import Log, rotated_files

_BLOCK_BYTES = 64 * 2**10
_MAX_LINE_BYTES = 64 * 2**10
"""Maximum length of a line in bytes; a longer line is shown in pieces."""


class Line(NamedTuple):
    """A line of a log, with the key that orders it among the lines of other logs."""

    order: bytes
    """The time in the format of :mod:`rrl.core.log_lines`; for a line without a time, the time of a nearby line."""
    stamp: bytes
    """The line's own time; ``b""`` if the line has no time."""
    text: bytes


class LineFilter(NamedTuple):
    """Selects the newest lines that match a pattern and are within a time range.

    ``newest`` is the maximum number of lines, or None for all lines. ``match`` searches a line's text for the pattern.
    ``since`` and ``until`` are times in the format of ``Line.order``; ``b""`` sets no limit.
    """

    newest: int | None = None
    since: bytes = b""
    match: Callable[[bytes], object] | None = None
    until: bytes = b""

    def matches(self, line: Line) -> bool:
        """Return whether the line is within the time range and matches the pattern."""
        if line.order < self.since or (self.until and line.order > self.until):
            return False
        return self.match is None or bool(self.match(line.text))


class LogTail:
    """Reads the file of a log and its rotated files, from the first line selected by ``wanted`` on.

    A file that was rotated away is read to its end before the next newer file is read.
    """

    def __init__(self, log: Log, wanted: LineFilter) -> None:
        self.log = log
        self._path, self._wanted = log.path, wanted
        self._files: deque[BinaryIO] = deque(
            file for name in rotated_files(log.path) if (file := _open(name)) is not None
        )
        self._order = _modified_at(self._files[0]) if self._files else b""
        self._partial = b""
        if wanted.newest is not None or wanted.since:
            self._seek_to_start()

    def new_lines(self) -> Iterator[Line]:
        """Yield the lines that were written since the last call."""
        if not self._files and (file := _open(self._path)) is not None:
            self._files.append(file)
            self._order = _modified_at(file)
        while self._files:
            rotated = len(self._files) > 1 or (self._path.exists() and not _is_same_file(self._files[0], self._path))
            while data := self._files[0].readline(_MAX_LINE_BYTES):
                self._partial += data
                if data.endswith(b"\n") or len(self._partial) >= _MAX_LINE_BYTES:
                    yield from self._finish_line()
            if not rotated:
                return
            if len(self._files) == 1:
                successor = _successor(self._files[0], self._path)
                if successor is None:
                    return
                self._files.append(successor)
            self._files.popleft().close()
            if self._partial:  # the line was cut off when the disk was full
                yield from self._finish_line()

    def close(self) -> Iterator[Line]:
        """Yield an unfinished last line."""
        if self._partial:
            yield from self._finish_line()
        while self._files:
            self._files.popleft().close()

    def _finish_line(self) -> Iterator[Line]:
        line = self._parse_line(self._partial.removesuffix(b"\n"))
        self._partial, self._order = b"", line.order
        if self._wanted.matches(line):
            yield line

    def _parse_line(self, data: bytes) -> Line:
        at = stamp_of(data)
        return Line(at or self._order, at, data[STAMP_BYTES + 1 :] if at else data)

    def _seek_to_start(self) -> None:
        """Seek to the first selected line; lines before it are not read again."""
        left = self._wanted.newest
        files = list(self._files)
        for n, file in reversed(list(enumerate(files))):
            size = file.seek(0, os.SEEK_END)
            for start, data in _backwards(file, size):
                line = self._parse_line(data)
                if left == 0 or (line.stamp and line.stamp < self._wanted.since):
                    file.seek(start + len(data) + 1)
                    for older in files[:n]:
                        older.close()
                    self._files = deque(files[n:])
                    return
                if left is not None and self._wanted.matches(line):
                    left -= 1
            file.seek(0)


def _backwards(file: BinaryIO, at: int) -> Iterator[tuple[int, bytes]]:
    """Yield the complete lines before offset ``at``, last line first, each with the offset where it begins."""
    data = b""
    while at:
        block = min(_BLOCK_BYTES, at)
        at = file.seek(at - block)
        data = file.read(block) + data
        if not data.endswith(b"\n"):  # an unfinished line at the very end
            data = data[: data.rfind(b"\n") + 1]
            if not data:
                continue
        first, *lines = data[:-1].split(b"\n")
        end = at + len(data)
        for line in reversed(lines):
            end -= len(line) + 1
            yield end, line
        data = first + b"\n"
    if data:
        yield 0, data[:-1]


def _open(path: Path) -> BinaryIO | None:
    with errors_about(path):
        try:
            return path.open("rb")
        except FileNotFoundError:  # the file was just rotated, or does not exist yet
            return None


def _successor(file: BinaryIO, path: Path) -> BinaryIO | None:
    """Return the next newer file of the log after ``file``, which may have been rotated more than once."""
    names = rotated_files(path)
    after = next((n + 1 for n, name in enumerate(names) if _is_same_file(file, name)), 0)
    return next((found for name in names[after:] if (found := _open(name)) is not None), None)


def _modified_at(file: BinaryIO) -> bytes:
    return stamp(os.fstat(file.fileno()).st_mtime_ns // 1000)


def _is_same_file(file: BinaryIO, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except OSError:
        return False
