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
from ...core.log_lines import STAMP, first_stamp, last_stamp
from ...core.run_dir import RunDir
from ...core.types import Life
from ...transport.control.log_messages import LOGS, TAIL_BYTES, Backlog, Lines

ALL_BYTES = 256 * 2**20
"""bytes of all copies, some 4,000 lives; beyond it the copy of who has been silent longest goes"""
FILE_BYTES = 4 * 2**20
"""size at which a file of copies becomes ``.1``, and the one before it goes"""
LAST_WORD = 2.0
"""s after its end in which a life may still say that its file is complete"""


class _Copy:
    def __init__(self) -> None:
        self.lines = Backlog(TAIL_BYTES)
        self.hand = b""
        """taken from ``lines`` and not written yet: the file refused"""
        self.last = b""
        """time of the newest line that was told"""
        self.due: float | None = None
        """s, when it is to be written"""
        self.over = False
        """nothing more comes: it goes once it is written"""

    @property
    def size(self) -> int:
        return self.lines.size + len(self.hand)


class Copies:
    """``believed`` says of a life whether it is, or None where the run never had it. Times are s of any clock.

    ``refused`` counts messages that cannot be of this run's logs, ``evicted`` the bytes that ``ALL_BYTES`` cost."""

    def __init__(
        self, run: RunDir, epoch: int, believed: Callable[[Life], bool | None], *, all_bytes: int = ALL_BYTES,
        file_bytes: int = FILE_BYTES,
    ) -> None:  # fmt: skip
        self.refused = self.evicted = 0
        self._run, self._epoch, self._believed = run, epoch, believed
        self._all_bytes, self._file_bytes = all_bytes, file_bytes
        self._copies: OrderedDict[Life, _Copy] = OrderedDict()
        """by when it was last heard of"""
        self._due: set[Life] = set()
        self.size = 0
        """bytes held"""

    def take(self, told: Lines, now: float) -> None:
        life, text = told.life, told.text
        believed = self._believed(life)
        if believed is None or not _plausible(text):
            self.refused += 1
            return
        copy = self._copy(life)
        before = copy.size
        if fresh := _after(copy.last, text):
            copy.lines.put(fresh)
            copy.last = last_stamp(fresh)
        copy.over = told.over
        self.size += copy.size - before
        if told.unsaved:
            self._set_due(life, copy, now)
            self.write_due(now)
        elif told.over:  # its file has everything
            self._forget(life)
        elif not believed:
            self._set_due(life, copy, now + LAST_WORD)
        while self.size > self._all_bytes:
            self._evict()

    def keep(self, life: Life, now: float) -> None:
        """It has ended or is no longer believed: its copy is written, unless it says in time that there is no need."""
        self._set_due(life, self._copy(life), now + LAST_WORD)

    def write_due(self, now: float) -> None:
        """Write what is due; what the disk refuses stays due."""
        for life in list(self._due):
            copy = self._copies[life]
            if copy.due is not None and copy.due <= now and self._write(life, copy):
                if copy.over or not self._believed(life):
                    self._forget(life)
                else:
                    self._due.discard(life)
                    copy.due = None

    @property
    def due(self) -> bool:
        """Something is to be written."""
        return bool(self._due)

    def write_all_due(self) -> None:
        """The same without waiting for last words."""
        self.write_due(float("inf"))

    def _copy(self, life: Life) -> _Copy:
        copy = self._copies.setdefault(life, _Copy())
        self._copies.move_to_end(life)
        return copy

    def _set_due(self, life: Life, copy: _Copy, at: float) -> None:
        copy.due = at if copy.due is None else min(at, copy.due)
        self._due.add(life)

    def _forget(self, life: Life) -> None:
        self.size -= self._copies.pop(life).size
        self._due.discard(life)

    def _evict(self) -> None:
        life, copy = next(iter(self._copies.items()))
        if copy.due is None or not self._write(life, copy):
            self.evicted += copy.size
        self._forget(life)

    def _write(self, life: Life, copy: _Copy) -> bool:
        """False when something of it is still unwritten."""
        before = copy.size
        copy.hand = copy.hand or copy.lines.take(TAIL_BYTES)
        while copy.hand:
            done = _append(self._path(life), copy.hand, self._file_bytes)
            copy.hand = copy.hand[done:] or (copy.lines.take(TAIL_BYTES) if done else b"")
            if not done:
                break
        self.size += copy.size - before
        return not copy.size

    def _path(self, life: Life) -> Path:
        return self._run.logs / f"{tag_of(self._run.id, life)}.shipped-{self._epoch}.log"


def _plausible(text: bytes) -> bool:
    if len(text) > LOGS.frame:
        return False
    return not text or (text.endswith(b"\n") and bool(first_stamp(text)) and bool(last_stamp(text)))


def _after(last: bytes, text: bytes) -> bytes:
    """The lines that are later than ``last``: a life tells its newest lines again to every new manager."""
    if first_stamp(text) > last:
        return text
    return b"".join(line for line in text.splitlines(keepends=True) if line[:STAMP] > last)


def _append(path: Path, data: bytes, file_bytes: int) -> int:
    """How many bytes were written."""
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            if (size := os.fstat(fd).st_size) and size + len(data) > file_bytes:
                os.replace(path, path.with_name(f"{path.name}.1"))
                os.close(fd)
                fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
            return os.write(fd, data)
        finally:
            os.close(fd)
    except (OSError, ValueError):  # full, away; a name that cannot be one
        return 0
