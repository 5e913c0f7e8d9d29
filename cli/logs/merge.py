"""The lines of logs: from their ends backwards to where to begin, then forwards, merged by time.

Nothing is held but a block of each file: logs may have GiB. A line is ordered by its time; one that has none by that of
the line before it, at a file's beginning by when the file was last written.
"""

from __future__ import annotations

import heapq
import os
from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import BinaryIO, NamedTuple

from ...core.log_lines import STAMP, is_notice, stamp, stamp_of
from ..common.runs import Failed
from .files import Log, chain

_BLOCK = 64 * 2**10
_LONGEST = 64 * 2**10
"""bytes; what has no newline for so long is shown in pieces"""


class Line(NamedTuple):
    order: bytes
    """a time of :mod:`rrl.core.log_lines`, of the line or near it"""
    stamp: bytes
    """its time; b"" when it has none"""
    text: bytes
    copied: bool = False
    """from a copy of the log"""


class Wanted(NamedTuple):
    """Which lines: the newest ``newest`` (None: all) of those from ``since`` to ``until`` (b"": for ever) that
    ``match``."""

    newest: int | None = None
    since: bytes = b""
    match: Callable[[bytes], object] | None = None
    until: bytes = b""

    def has(self, line: Line) -> bool:
        if line.order < self.since or (self.until and line.order > self.until):
            return False
        return self.match is None or bool(self.match(line.text))


class Tail:
    """One file and what it was rotated to, from ``wanted`` on. What is open is read to its end before its successor."""

    def __init__(self, path: Path, wanted: Wanted, copied: bool = False) -> None:
        self._path, self._wanted, self._copied = path, wanted, copied
        self._files: deque[BinaryIO] = deque(file for name in chain(path) if (file := _opened(name)) is not None)
        self._order = _written(self._files[0]) if self._files else b""
        self._rest = b""
        if wanted.newest is not None or wanted.since:
            self._go_back()

    def more(self) -> Iterator[Line]:
        """The lines that have come since the last call."""
        if not self._files and (file := _opened(self._path)) is not None:
            self._files.append(file)
            self._order = _written(file)
        while self._files:
            rotated = len(self._files) > 1 or (self._path.exists() and not _is(self._files[0], self._path))
            while data := self._files[0].readline(_LONGEST):
                self._rest += data
                if data.endswith(b"\n") or len(self._rest) >= _LONGEST:
                    yield from self._take()
            if not rotated:
                return
            if len(self._files) == 1:
                successor = _successor(self._files[0], self._path)
                if successor is None:
                    return
                self._files.append(successor)
            self._files.popleft().close()
            if self._rest:  # torn when the disk was full
                yield from self._take()

    def close(self) -> Iterator[Line]:
        """An unfinished last line."""
        if self._rest:
            yield from self._take()
        while self._files:
            self._files.popleft().close()

    def _take(self) -> Iterator[Line]:
        line = self._line(self._rest.removesuffix(b"\n"))
        self._rest, self._order = b"", line.order
        if self._wanted.has(line):
            yield line

    def _line(self, data: bytes) -> Line:
        at = stamp_of(data)
        return Line(at or self._order, at, data[STAMP + 1 :] if at else data, self._copied)

    def _go_back(self) -> None:
        """Seek to the first line that is wanted; what lies before it is not read again."""
        left = self._wanted.newest
        files = list(self._files)
        for n, file in reversed(list(enumerate(files))):
            size = file.seek(0, os.SEEK_END)
            for start, data in _backwards(file, size):
                line = self._line(data)
                if left == 0 or (line.stamp and line.stamp < self._wanted.since):
                    file.seek(start + len(data) + 1)
                    for older in files[:n]:
                        older.close()
                    self._files = deque(files[n:])
                    return
                if left is not None and self._wanted.has(line):
                    left -= 1
            file.seek(0)


class LifeTail:
    """One log together with its copies: every line once, in order."""

    def __init__(self, log: Log, wanted: Wanted) -> None:
        self.log = log
        self._wanted = wanted
        self._own = Tail(log.path, wanted)
        self._copies = {path: Tail(path, wanted, True) for path in log.copies}
        self._newest = b""
        """time of the newest line of its own that was shown"""
        self._shown: set[bytes] = set()
        """times of the lines that were shown from a copy only; as many as the copies' files hold"""

    def begin(self) -> Iterator[Line]:
        """The lines that are wanted and there."""
        if self._wanted.newest is None or not self._copies:
            yield from self.more()
            return
        counted = LifeTail(self.log, self._wanted)  # each of several files gives as many: the oldest are too many
        count = sum(1 for _ in counted.more()) + sum(1 for _ in counted.close())
        yield from islice(self.more(), max(0, count - self._wanted.newest), None)

    def more(self, copies: tuple[Path, ...] = ()) -> Iterator[Line]:
        """What has come since; ``copies``: those that are there by now."""
        for path in copies:
            if path not in self._copies:
                self._copies[path] = Tail(path, Wanted(None, b"", self._wanted.match), True)
        newest = self._newest
        tails = [self._own.more(), *(tail.more() for tail in self._copies.values())]
        for line in _once(heapq.merge(*tails, key=_order) if self._copies else tails[0]):
            if line.copied:
                if line.stamp and line.stamp <= newest:
                    continue
                self._shown.add(line.stamp)
            elif line.stamp:
                if line.stamp in self._shown:
                    continue
                self._newest = line.stamp
            yield line

    def close(self) -> Iterator[Line]:
        """Unfinished last lines."""
        yield from self._own.close()
        for tail in self._copies.values():
            yield from tail.close()


def _once(lines: Iterator[Line]) -> Iterator[Line]:
    """Of lines of one time the one that says most: a real one before a word of what is missing, a whole one before
    a torn one."""
    held: Line | None = None
    for line in lines:
        if held is not None and held.stamp and held.stamp == line.stamp:
            held = max(held, line, key=_worth)
            continue
        if held is not None:
            yield held
        held = line
    if held is not None:
        yield held


def _worth(line: Line) -> tuple[bool, int, bool]:
    return not is_notice(line.text), len(line.text), not line.copied


def _order(line: Line) -> bytes:
    return line.order


def _backwards(file: BinaryIO, at: int) -> Iterator[tuple[int, bytes]]:
    """Whole lines before ``at`` and where they begin, the last one first."""
    data = b""
    while at:
        block = min(_BLOCK, at)
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


def _opened(path: Path) -> BinaryIO | None:
    try:
        return path.open("rb")
    except FileNotFoundError:  # rotated away at this moment, or not there yet
        return None
    except OSError as error:
        raise Failed(f"{path}: {error.strerror}") from None


def _successor(file: BinaryIO, path: Path) -> BinaryIO | None:
    """The file that was begun after ``file``, which may have been rotated more than once."""
    names = chain(path)
    after = next((n + 1 for n, name in enumerate(names) if _is(file, name)), 0)
    return next((found for name in names[after:] if (found := _opened(name)) is not None), None)


def _written(file: BinaryIO) -> bytes:
    return stamp(os.fstat(file.fileno()).st_mtime_ns // 1000)


def _is(file: BinaryIO, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except OSError:
        return False
