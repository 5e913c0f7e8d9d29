"""The trajectory store's file: framed, checksummed records; one writer; durable when :meth:`Log.flush` returns.

A folder holds ``log.<k>``, where k counts the openings. A new writer claims k by creating its file, exclusively and
empty, *then* reads the newest log before it, then writes what still matters into its own, which appears whole, by
rename. A predecessor that still runs (on a node that was cut off) sees the claim when it flushes, and stops before it
acknowledges: either it sees the new writer, or the new writer saw its bytes. On NFS a cached directory entry may hide
the claim for as long as the site's ``acdirmax``; the manager's fencing covers that. O_APPEND between NFS clients, flock
and mtime are not relied upon (docs/sources.md, sites). :class:`Durable` keeps the store's state and its log in step: a
record is folded at once, and durable at the next flush.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

from .records import Audit, Binding, BindingRetired, GroupDropped, Record, audit, decode, encode
from .state import State

_HEADER = struct.Struct("<4sIII")
"""magic, twice the number of the flush that wrote it (plus one on its last frame), length, crc32 of the rest"""
_MAGIC = b"rrlT"


class LogDamaged(RuntimeError):
    """Bytes that had been made durable cannot be read: nothing may be decided from the rest."""


class Superseded(RuntimeError):
    """Another process opened this folder: nothing of ours may be acknowledged any more."""


def read_frames(path: Path) -> Iterator[bytes]:
    """Payloads in order, up to a torn tail: what a crash left of the last flush, which nobody was told of.

    Raises LogDamaged where that cannot be the explanation, because a later flush lies behind the bad bytes.
    """
    torn = 0
    with path.open("rb") as file:
        while True:
            at = file.tell()
            frame = _read_frame(file)
            if frame is None:
                break
            mark, payload = frame
            torn = (mark + 1) // 2  # the flush that the next frame belongs to: this one, or after its last the next
            yield payload
        file.seek(at)
        rest = file.read()
    if torn == 0:
        raise LogDamaged(f"{path}: cannot be read from byte {at} on, although it was complete when it got its name")
    if (later := _later_flush(rest, torn)) is not None:
        raise LogDamaged(f"{path}: cannot be read at byte {at}, yet flush {later} lies behind; restore it from a copy")


def _read_frame(file: BinaryIO) -> tuple[int, bytes] | None:
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
    """The frames of one flush; the last one says that it is."""
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
    """Number of a whole frame in ``rest`` that a flush after ``torn`` wrote, if there is one."""
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
    """The one log of ``folder``. First ``rewrite`` (from what ``inherited`` says), then ``append`` and ``flush``."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._number = _claim(folder)
        self._path = folder / f"log.{self._number}"
        self._fd: int | None = None
        self._pending: list[bytes] = []
        self._flush = 0
        self.size = 0
        """bytes in the file"""

    def inherited(self) -> Iterator[bytes]:
        """What the newest opening before ours left durable; nothing in a fresh folder."""
        older = [n for n in _numbers(self._folder) if n < self._number and (self._folder / f"log.{n}").stat().st_size]
        return read_frames(self._folder / f"log.{max(older)}") if older else iter(())

    def scan(self) -> Iterator[bytes]:
        """What is durable in our own file."""
        return read_frames(self._path)

    def rewrite(self, payloads: Iterable[bytes]) -> None:
        """Replace all by ``payloads`` (at least one), whole or not at all; durable when it returns.

        What waits is flushed before."""
        self.flush()
        fresh = self._path.with_suffix(f".{self._number}.new")
        with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.writelines(_frames(0, payloads))
            file.flush()
            os.fsync(file.fileno())
        self._check_ours()
        os.replace(fresh, self._path)
        _sync_folder(self._folder)
        self.close()
        self._fd = os.open(self._path, os.O_WRONLY | os.O_APPEND)
        self._flush = 0
        self.size = os.fstat(self._fd).st_size
        for stale in self._folder.glob("log.*"):
            if stale != self._path and _number(stale.name) < self._number:
                stale.unlink(missing_ok=True)

    def append(self, payload: bytes) -> None:
        """To be written by the next ``flush``."""
        self._pending.append(payload)

    def flush(self) -> None:
        """Make all that was appended durable: one write, one sync. Raises Superseded when this folder is not ours.

        After any error here the object is useless: what the file holds is known only by reading it again.
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
            raise Superseded(f"{self._folder} was opened again, after our opening number {self._number}")

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def _claim(folder: Path) -> int:
    while True:
        number = max(_numbers(folder), default=0) + 1
        try:
            os.close(os.open(folder / f"log.{number}", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
        except FileExistsError:
            continue
        _sync_folder(folder)
        return number


def _numbers(folder: Path) -> list[int]:
    return [int(name[4:]) for name in os.listdir(folder) if name.startswith("log.") and name[4:].isdecimal()]


def _number(name: str) -> int:
    return int(name.split(".")[1])


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


_RETAINED_STEPS = 2
"""committed steps whose token data stays (rule 9)"""
_COMPACT_GROWTH = 4
"""the log is compacted once it has grown so many times since the last time: rewriting stays a fixed share of writing"""


class DurableState:
    """``compact_from``: bytes of log below which it is not compacted."""

    def __init__(self, folder: Path, compact_from: int) -> None:
        self.state = State(_RETAINED_STEPS)
        self._compact_from = compact_from
        self._log = Log(folder)
        for payload in self._log.inherited():
            self.state.apply(decode(payload))
        self._rewrite(self._log.inherited())

    def write(self, record: Record) -> None:
        self._log.append(encode(record))
        self.state.apply(record)

    def flush(self) -> None:
        """Raises OSError or Superseded: then what the disk holds is not known, and this object is useless."""
        self._log.flush()
        if self._log.size >= max(self._compact_from, _COMPACT_GROWTH * self._rewritten):
            self._rewrite(self._log.scan())

    def _rewrite(self, past: Iterable[bytes]) -> None:
        """Leave only what the state needs, and of the ``past`` what the audit needs."""

        def records() -> Iterator[Record]:
            yield self.state.head()
            yield from self._history(map(decode, past))
            yield from self.state.records()

        self._log.rewrite(map(encode, records()))
        self._rewritten = self._log.size

    def _history(self, past: Iterable[Record]) -> Iterator[Record]:
        for record in past:
            match record:
                case BindingRetired() | GroupDropped():
                    yield record
                case Binding(number, groups, trajectories) if number <= self.state.committed - _RETAINED_STEPS:
                    yield BindingRetired(number, groups, trajectories)

    def audit(self) -> Audit:
        self.flush()
        return audit(map(decode, self._log.scan()))

    def close(self) -> None:
        self._log.close()
