"""The trajectory store's log: framed, checksummed records from one writer, durable when :meth:`Log.flush` returns.

A folder contains ``log.<k>``, where k counts how often the log was opened. A new writer claims k by creating the file,
exclusively and empty. *Then* it reads the newest earlier log. It writes the records that are still needed to a
temporary file, and renames this file to its own log. An earlier writer may still run, for example on a node that lost
its network. It looks for a later claim after each flush. If there is one, the earlier writer stops before it
acknowledges the flushed records. So either the earlier writer sees the claim, or the new writer has read the flushed
records. On NFS a cached directory entry can hide the claim for as long as the site's ``acdirmax``; the manager's
fencing covers that time. The log does not rely on O_APPEND between NFS clients, on flock or on mtime (docs/sources.md,
sites).

:class:`DurableState` keeps the store's state consistent with its log: a record changes the state at once, and is
durable at the next flush.
"""

from __future__ import annotations

import os
import struct
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import BinaryIO, TypeVar

import msgspec

from ....core.run_dir import sync
from .audit import Audit, audit
from .records import (
    MANY_GROUPS,
    NO_SIGNAL,
    DropCause,
    GroupDropped,
    LogFormatError,
    Part,
    PartRetired,
    Record,
    StepCommitted,
    decode,
    encode,
)
from .state import State

T = TypeVar("T")
_HEADER = struct.Struct("<4sIII")
"""Header of a frame: magic bytes, mark, length of the payload, and CRC-32 of the mark, the length and the payload. The
mark is twice the number of the flush that wrote the frame, plus one for the last frame of the flush."""
_MAGIC = b"rrlT"
READ_ATTEMPTS = 5
"""Number of attempts to read a log before it counts as damaged. A reader can find a flush that is half written, or a
log that its store is replacing. Both states last only a moment."""
RETRY_DELAY_S = 0.2
"""Seconds between two attempts."""
_TAG = b"step_committed"
_TAG_WITHIN_BYTES = 24
"""Number of first bytes of a payload that contain the tag of its record. Only payloads with the tag of a commit are
decoded, because a log has far more bytes of tokens."""


class LogDamaged(RuntimeError):
    """Bytes of the log that were durable cannot be read, so the store's state is unknown."""


class Superseded(RuntimeError):
    """Another process has opened the log's folder. The current process must not acknowledge any further record."""


def read_frames(path: Path) -> Iterator[bytes]:
    """Yield the payloads in order, except those of an incomplete last flush.

    A crash may leave an incomplete flush behind. None of its records was acknowledged.

    Raises:
        LogDamaged: The first frame cannot be read, or a later flush follows bytes that cannot be read. Neither can be
            the result of a crash.
    """
    torn = 0
    with path.open("rb") as file:
        while True:
            at = file.tell()
            frame = _read_frame(file)
            if frame is None:
                break
            mark, payload = frame
            # Number of the next frame's flush: this frame's flush or, if this frame ends its flush, the next flush.
            torn = (mark + 1) // 2
            yield payload
        file.seek(at)
        rest = file.read()
    if torn == 0:
        raise LogDamaged(f"{path}: unreadable from byte {at} on, though complete when written; restore it from a copy")
    if (later := _later_flush(rest, torn)) is not None:
        raise LogDamaged(
            f"{path}: unreadable at byte {at}, but a later write (flush {later}) follows; restore the file from a copy"
        )


def _read_frame(file: BinaryIO) -> tuple[int, bytes] | None:
    """Return (mark, payload) of the next frame, or None if no complete frame follows."""
    header = file.read(_HEADER.size)
    if len(header) < _HEADER.size:
        return None
    magic, mark, length, crc = _HEADER.unpack(header)
    if magic != _MAGIC:
        return None
    if length > os.fstat(file.fileno()).st_size - file.tell():
        return None
    payload = file.read(length)
    if zlib.crc32(payload, zlib.crc32(header[4:12])) != crc:
        return None
    return mark, payload


def _frames(flush: int, payloads: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the frames of one flush, of which the last frame is marked as the last."""
    last: bytes | None = None
    for payload in payloads:
        if last is not None:
            yield _frame(2 * flush, last)
        last = payload
    if last is not None:
        yield _frame(2 * flush + 1, last)


def _frame(mark: int, payload: bytes) -> bytes:
    header = struct.pack("<II", mark, len(payload))
    return _MAGIC + header + struct.pack("<I", zlib.crc32(payload, zlib.crc32(header))) + payload


def _later_flush(rest: bytes, torn: int) -> int | None:
    """Return the number of a flush that is later than flush ``torn`` and that has a complete frame in ``rest``.

    Returns None if there is no such flush. ``rest`` is the end of a log, from the first unreadable byte on.
    """
    at = rest.find(_MAGIC)
    while at >= 0:
        view = memoryview(rest)[at:]
        if len(view) >= _HEADER.size:
            _, mark, length, crc = _HEADER.unpack(view[: _HEADER.size])
            payload = view[_HEADER.size : _HEADER.size + length]
            if mark // 2 > torn and zlib.crc32(payload, zlib.crc32(view[4:12])) == crc:
                return int(mark // 2)
        at = rest.find(_MAGIC, at + 1)
    return None


class Log:
    """The log of ``folder``.

    Call :meth:`rewrite` first, with payloads derived from :meth:`inherited`; then :meth:`append` and :meth:`flush`.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._number = _claim(folder)
        self._path = folder / f"log.{self._number}"
        self._fd: int | None = None
        self._pending: list[bytes] = []
        self._flush = 0
        self.size = 0
        """Size of the file in bytes."""

    def inherited(self) -> Iterator[bytes]:
        """Yield the durable payloads of the newest earlier log in the folder; if there is none, yield nothing."""
        paths = [path for path in log_files(self._folder) if _number(path.name) < self._number]
        older = [path for path in paths if path.stat().st_size]
        return read_frames(older[-1]) if older else iter(())

    def scan(self) -> Iterator[bytes]:
        """Yield the durable payloads of this log."""
        return read_frames(self._path)

    def rewrite(self, payloads: Iterable[bytes]) -> None:
        """Replace the whole log by ``payloads`` (at least one) atomically; durable on return.

        Payloads that were appended before are flushed first.
        """
        self.flush()
        replacement = self._path.with_suffix(f".{self._number}.new")
        with open(os.open(replacement, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.writelines(_frames(0, payloads))
            file.flush()
            os.fsync(file.fileno())
        self._check_ours()
        os.replace(replacement, self._path)
        sync(self._folder)
        self.close()
        self._fd = os.open(self._path, os.O_WRONLY | os.O_APPEND)
        self._flush = 0
        self.size = os.fstat(self._fd).st_size
        for old_log in self._folder.glob("log.*"):
            if old_log != self._path and _number(old_log.name) < self._number:
                old_log.unlink(missing_ok=True)

    def append(self, payload: bytes) -> None:
        """Queue a payload for the next :meth:`flush`."""
        self._pending.append(payload)

    def flush(self) -> None:
        """Make all appended payloads durable with one write and one sync.

        After any exception this object is unusable: the contents of the file are unknown until it is read again.

        Raises:
            Superseded: Another process has opened the folder.
        """
        if self._pending:
            assert self._fd is not None
            self._flush += 1
            left = memoryview(b"".join(_frames(self._flush, self._pending)))
            self._pending = []
            self.size += len(left)
            while left:
                left = left[os.write(self._fd, left) :]
            os.fdatasync(self._fd)
        self._check_ours()

    def _check_ours(self) -> None:
        if (self._folder / f"log.{self._number + 1}").exists() or not self._path.exists():
            raise Superseded(
                f"{self._folder}: a newer process has opened this store; this process must not write {self._path.name}"
                " any more"
            )

    def close(self) -> None:
        """Close the file, without flushing."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def log_files(folder: Path) -> list[Path]:
    """Return the log files of a folder, from the oldest to the newest one, which may still be empty. Raises OSError."""
    return [folder / f"log.{number}" for number in sorted(_numbers(folder))]


def _claim(folder: Path) -> int:
    """Create the next log file of the folder and return its number."""
    while True:
        number = max(_numbers(folder), default=0) + 1
        try:
            os.close(os.open(folder / f"log.{number}", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
        except FileExistsError:
            continue
        sync(folder)
        return number


def _numbers(folder: Path) -> list[int]:
    return [int(name[4:]) for name in os.listdir(folder) if name.startswith("log.") and name[4:].isdecimal()]


def _number(name: str) -> int:
    return int(name.split(".")[1])


_RETAINED_STEPS = 2
"""Number of committed steps whose token data is kept (docs/architecture/trajectories.md, rule 9)."""
_COMPACT_GROWTH = 4
"""Factor by which the log must grow before it is compacted again, so that rewriting is a fixed share of all writing."""


class DurableState:
    """The store's state and its log.

    Args:
        folder: Folder of the log; an earlier writer in this folder is superseded.
        compact_from: Size of the log in bytes below which it is not compacted.
        max_new_tokens: Number of tokens at which answers are cut.
        retained_commits: Number of commits that are kept (:class:`.state.State`).

    Raises:
        LogDamaged: The log cannot be read completely.
        LogFormatError: The log was written by a version of rrl whose records this version cannot read.
    """

    def __init__(self, folder: Path, compact_from: int, max_new_tokens: int, retained_commits: int = 0) -> None:
        self.state = State(_RETAINED_STEPS, max_new_tokens, retained_commits)
        self._compact_from = compact_from
        self._log = Log(folder)
        for payload in self._log.inherited():
            try:
                self.state.apply(decode(payload))
            except LogFormatError as error:
                raise LogFormatError(f"the trajectory log in {folder} {error}") from error
        self.state.lengths.limit = max_new_tokens  # the log may contain another limit, from an earlier job spec
        self._rewrite(self._log.inherited())

    def write(self, record: Record) -> None:
        """Apply a record to the state and queue it for the next :meth:`flush`."""
        self._log.append(encode(record))
        self.state.apply(record)

    def flush(self) -> None:
        """Make all records durable.

        After OSError or Superseded this object is unusable: the contents of the disk are unknown.
        """
        self._log.flush()
        if self._log.size >= max(self._compact_from, _COMPACT_GROWTH * self._rewritten):
            self._rewrite(self._log.scan())

    def _rewrite(self, past: Iterable[bytes]) -> None:
        """Rewrite the log with the records that the state needs, and those of ``past`` that only the audit needs."""

        def records() -> Iterator[Record]:
            yield self.state.head()
            yield from self._history(map(decode, past))
            yield from self.state.records()

        self._log.rewrite(map(encode, records()))
        self._rewritten = self._log.size

    def _history(self, past: Iterable[Record]) -> Iterator[Record]:
        without_signal = 0
        for record in past:
            match record:
                case GroupDropped(_, trajectories, cause=DropCause.NO_SIGNAL):
                    without_signal += trajectories
                case PartRetired() | GroupDropped():
                    yield record
                case Part(number, index, groups, trajectories) if number <= self.state.committed - _RETAINED_STEPS:
                    yield PartRetired(number, index, groups, trajectories, record.ages)
        if without_signal:  # one record, since a run may drop more such groups than it trains
            yield GroupDropped(MANY_GROUPS, without_signal, NO_SIGNAL, DropCause.NO_SIGNAL)

    def audit(self) -> Audit:
        """Compute the audit from the durable records, with the state's counts of episodes."""
        self.flush()
        audited = audit(map(decode, self._log.scan()))
        return msgspec.structs.replace(audited, episodes=self.state.episode_records.figures())

    def close(self) -> None:
        """Close the log."""
        self._log.close()


def read_newest(folder: Path, read: Callable[[Path], T]) -> T | None:
    """Return what ``read`` finds in the newest log of ``folder``, which its store may be writing; None without a log.

    Raises:
        LogDamaged: The log cannot be read.
        OSError: The folder or the log cannot be read.
    """
    for left in reversed(range(READ_ATTEMPTS)):
        try:
            written = [
                path for path in log_files(folder) if path.stat().st_size
            ]  # a new store begins with an empty log
            return read(written[-1]) if written else None
        except (LogDamaged, OSError):
            if not left:
                raise
            time.sleep(RETRY_DELAY_S)
    raise AssertionError("the last attempt returns or raises")


def read_commits(folder: Path) -> dict[int, StepCommitted]:
    """Return the commits in the newest log of ``folder``, by step; empty if there is no log or no commit yet.

    A store keeps the commits whose checkpoints are kept. Its log may also contain older commits.

    Raises:
        LogDamaged: The log cannot be read.
        LogFormatError: A commit was written by a version of rrl that this version cannot read.
        OSError: The folder or the log cannot be read.
    """
    return read_newest(folder, _commits) or {}


def _commits(path: Path) -> dict[int, StepCommitted]:
    commits: dict[int, StepCommitted] = {}
    for payload in read_frames(path):
        if _TAG in payload[:_TAG_WITHIN_BYTES] and isinstance(record := decode(payload), StepCommitted):
            commits[record.number] = record
    return commits
