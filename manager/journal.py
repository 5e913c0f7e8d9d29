"""The journal: framed, checksummed, segmented; events in, events out.

One segment per manager epoch and per ``SEGMENT_RECORDS`` records, each created O_EXCL by its one writer and headed by
a snapshot of the state, so that ``rrl status`` never folds weeks. A successor seals what it read: its head names the
length that it accepted of the segment before, so that what a frozen predecessor still writes is never read.

Frame: u32 length, u32 crc32, payload (msgpack). A torn last frame is a write that nobody was told of: it is ignored.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path

import msgspec
from msgspec import Struct

from rrl.manager.events import Stamped
from rrl.manager.state import State, fold
from rrl.spec.rundir import RunDir

SCHEMA = 1
"""Version of the records; a newer one is reported and nothing is decided from it."""
SEGMENT_RECORDS = 4000
"""Records in a segment before the next one: folding so many takes about 50 ms."""
MAGIC = b"RRLJ\n"
_FRAME = struct.Struct("<II")


class JournalError(Exception):
    """The journal cannot be read; the text says which segment and why."""


class Head(Struct, frozen=True):
    """First frame of a segment."""

    schema: int
    epoch: int
    state: State | None
    """as of the segment's start; None only at the very beginning"""
    before: str = ""
    """name of the segment before"""
    accepted: int = 0
    """bytes of it that count"""


_encode = msgspec.msgpack.Encoder().encode
_decode_head = msgspec.msgpack.Decoder(Head).decode
_decode_event = msgspec.msgpack.Decoder(Stamped).decode


class Journal:
    """The writer of one manager epoch. :meth:`append` is cheap; nothing counts before :meth:`flush` returned."""

    def __init__(self, run: RunDir, epoch: int) -> None:
        self._run = run
        self._epoch = epoch
        self._part = 0
        self._fd = -1
        self._buffer: list[bytes] = []
        self._records = 0
        follower = Follower(run)
        self.state = follower.state()
        """what the journal said when this epoch took it over; None for a new run"""
        self._open(self.state, *follower.where)

    def append(self, stamped: Stamped) -> None:
        self._buffer.append(_framed(_encode(stamped)))
        self._records += 1

    def flush(self) -> None:
        """Write and fsync what was appended (blocking: called off the loop). Raises OSError when the disk is full."""
        if not self._buffer:
            return
        frames, self._buffer = self._buffer, []
        data = b"".join(frames)
        start = os.lseek(self._fd, 0, os.SEEK_CUR)
        try:
            _write_all(self._fd, data)
            os.fsync(self._fd)
        except OSError:
            os.lseek(self._fd, start, os.SEEK_SET)  # a torn frame may follow: the next flush writes over it
            os.ftruncate(self._fd, start)
            self._buffer = frames + self._buffer
            raise

    @property
    def full(self) -> bool:
        return self._records >= SEGMENT_RECORDS

    def rotate(self, state: State) -> None:
        """Go on in a fresh segment headed by ``state``. Everything appended must have been flushed."""
        length = os.lseek(self._fd, 0, os.SEEK_CUR)
        os.close(self._fd)
        self._open(state, self._name(), length)

    def close(self) -> None:
        self.flush()
        os.close(self._fd)

    def _name(self) -> str:
        return f"{self._epoch:06}-{self._part:06}.seg"

    def _open(self, state: State | None, before: str, accepted: int) -> None:
        self._part += 1
        path = self._run.journal / self._name()
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        head = Head(SCHEMA, self._epoch, state, before, accepted)
        _write_all(self._fd, MAGIC + _framed(_encode(head)))
        os.fsync(self._fd)
        folder = os.open(self._run.journal, os.O_RDONLY)
        os.fsync(folder)
        os.close(folder)
        self._records = 0


def replay(run: RunDir) -> Iterator[Stamped]:
    """Every event of the run in order. Raises JournalError."""
    for path, end in _chain(run):
        head, offset = _head(path)
        if head is not None:
            for stamped, _ in _framed_events(path, offset, end):
                yield stamped


def read_state(run: RunDir) -> State | None:
    """The state as of the newest record; None when there is no journal yet. Raises JournalError."""
    return Follower(run).state()


class Follower:
    """Reads the state again and again at the price of what is new (for ``rrl status --live`` and logs)."""

    def __init__(self, run: RunDir) -> None:
        self._run = run
        self._segment: Path | None = None
        self._offset = 0
        self._state: State | None = None

    @property
    def where(self) -> tuple[str, int]:
        """Name of the segment that was read last, and how much of it."""
        return (self._segment.name, self._offset) if self._segment else ("", 0)

    def state(self) -> State | None:
        segments = _segments(self._run)
        if not segments:
            return None
        if segments[-1] != self._segment:
            head, offset = _head(segments[-1])
            if head is None:  # just created: its head is not written yet
                if self._segment is None and len(segments) > 1:
                    segments = segments[:-1]
                    head, offset = _head(segments[-1])
                if head is None:
                    return self._state
            self._segment, self._offset, self._state = segments[-1], offset, head.state
        assert self._segment is not None
        for stamped, end in _framed_events(self._segment, self._offset, None):
            self._state, self._offset = fold(self._state, stamped), end
        return self._state


def _segments(run: RunDir) -> list[Path]:
    return sorted(run.journal.glob("*.seg"))


def _chain(run: RunDir) -> list[tuple[Path, int | None]]:
    """The segments that count, oldest first, and where each ends: followed back from the newest one's head.

    A segment that no successor names was written by a manager that had already been succeeded."""
    chain: list[tuple[Path, int | None]] = []
    name, end = next((path.name for path in reversed(_segments(run)) if _head(path)[0] is not None), ""), None
    while name:
        chain.append((run.journal / name, end))
        head = _head(run.journal / name)[0]
        name, end = (head.before, head.accepted) if head is not None else ("", None)
    return chain[::-1]


def _framed(payload: bytes) -> bytes:
    return _FRAME.pack(len(payload), zlib.crc32(payload)) + payload


def _frame_at(data: bytes, offset: int) -> tuple[bytes, int] | None:
    """The payload at ``offset`` and the end of its frame, or None where no whole frame lies."""
    if offset + _FRAME.size > len(data):
        return None
    length, crc = _FRAME.unpack_from(data, offset)
    payload = data[offset + _FRAME.size : offset + _FRAME.size + length]
    if len(payload) < length or zlib.crc32(payload) != crc:
        return None
    return payload, offset + _FRAME.size + length


def _head(path: Path) -> tuple[Head | None, int]:
    with path.open("rb") as file:
        start = file.read(len(MAGIC) + _FRAME.size)
        if len(start) < len(MAGIC) + _FRAME.size:
            return None, 0
        if not start.startswith(MAGIC):
            raise JournalError(f"{path}: not a journal of rrl (it starts with {start[:5]!r})")
        length = _FRAME.unpack_from(start, len(MAGIC))[0]
        frame = _frame_at(start[len(MAGIC) :] + file.read(length), 0)
    if frame is None:
        return None, 0
    try:
        head = _decode_head(frame[0])
    except (msgspec.ValidationError, msgspec.DecodeError) as error:
        raise JournalError(f"{path}: its head cannot be read: {error}") from error
    if head.schema > SCHEMA:
        raise JournalError(f"{path}: written by a newer rrl (schema {head.schema}, this one reads up to {SCHEMA})")
    return head, len(MAGIC) + frame[1]


def _framed_events(path: Path, offset: int, end: int | None) -> Iterator[tuple[Stamped, int]]:
    with path.open("rb") as file:
        file.seek(offset)
        data = file.read() if end is None else file.read(max(0, end - offset))
    at = 0
    while (frame := _frame_at(data, at)) is not None:
        payload, at = frame
        try:
            yield _decode_event(payload), offset + at
        except (msgspec.ValidationError, msgspec.DecodeError) as error:
            raise JournalError(f"{path}: record at byte {offset + at} cannot be read: {error}") from error


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
