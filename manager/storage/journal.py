"""The journal: all events of a run, durable and in order, as checksummed frames in segment files.

Each manager epoch begins a segment, and begins another one after ``SEGMENT_RECORDS`` records. A segment is created
O_EXCL by its only writer and begins with the whole state, so that ``rrl status`` never has to fold weeks of events. The
first frame of a segment, its head, also records how many bytes of the previous segment the new writer has read. Bytes
that a frozen predecessor appends to the previous segment after that are ignored.

Frame: u32 length, u32 crc32, payload (msgpack). A torn last frame is an unfinished write. It is ignored, because no
decision was based on it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import struct
import threading
import zlib
from collections.abc import Iterator
from pathlib import Path

import msgspec
from msgspec import Struct

from ...core.run_dir import RunDir, sync
from ...core.text import escaped
from ...core.types import UsageError
from ..model.events import Stamped
from ..model.reducer import fold
from ..model.state import State
from ..model.table import as_dict

_log = logging.getLogger("rrl.manager")

SCHEMA = 7
"""Version of the records. A journal of another version is refused with a one-line error.

2: ends of steps and rejected intents carry a reason as an enum, findings carry flags.
3: events, actions and fields of the state have the names of docs/glossary.md.
4: the run spec contains what the roles read; network, weight transport and staleness moved into its tables.
5: there are no preloaded processes; the manager records the ETTR.
6: later weight versions of rollouts are recorded together."""
SEGMENT_RECORDS = 4000
"""Maximum number of records in a segment. Folding so many records takes about 50 ms."""
MAGIC = b"RRLJ\n"
_FRAME = struct.Struct("<II")


class JournalError(UsageError):
    """The journal cannot be read. The text says in one line which segment, where in it, and why."""


RECOVERY_ADVICE = "restore the file from a backup, or submit the job again"
"""Advice for a journal with a damaged record. The events after that record cannot be trusted."""


class Head(Struct, frozen=True):
    """The first frame of a segment."""

    schema: int
    epoch: int
    state: State | None
    """State at the start of the segment; None only in a run's first segment."""
    previous: str = ""
    """Name of the previous segment; empty in a run's first segment."""
    previous_bytes: int = 0
    """Number of bytes of the previous segment that are valid; the rest is ignored."""


class _Schema(Struct, frozen=True):
    """The schema number at the head of a journal segment: the only part that every version of rrl can read.

    The rest of the head is decoded only if the number matches.
    """

    schema: int


_encode = msgspec.msgpack.Encoder(enc_hook=as_dict).encode
_decode_schema = msgspec.msgpack.Decoder(_Schema).decode
_decode_head = msgspec.msgpack.Decoder(Head).decode
_decode_event = msgspec.msgpack.Decoder(Stamped).decode
_UNDECODABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""Exceptions that msgspec raises for damaged bytes. Text that is not UTF-8 raises another exception than a
DecodeError."""


class Journal:
    """The journal as one manager writes it during its epoch.

    :meth:`append` only buffers; a record is durable once :meth:`flush` has returned. :meth:`flush` and :meth:`rotate`
    may run in threads while the event loop appends.
    """

    def __init__(self, run: RunDir, epoch: int) -> None:
        self._run = run
        self._epoch = epoch
        self._segment_number = 0
        self._writing = threading.Lock()
        self._buffer: list[tuple[int, bytes]] = []
        """Pairs of (seq, frame). Records are only appended at the end and removed at the front, so that a concurrent
        flush loses none."""
        self._records = 0
        follower = Follower(run)
        self.state = follower.state()
        """State of the journal when this epoch took it over; None for a new run."""
        if torn := follower.torn_bytes:
            position = follower.position[0]
            _log.warning("%s: ignored %d bytes of an unfinished record, which nothing has acted on yet", position, torn)
        before, accepted = follower.position
        if before:
            sync(run.journal / before)  # its writer may have died before it synced what was read
        self._path, self._fd = self._open(self.state, before, accepted)

    def append(self, stamped: Stamped) -> None:
        """Add an event to the buffer; :meth:`flush` makes it durable."""
        frame = _framed(_encode(stamped))
        self._buffer.append((stamped.seq, frame))
        self._records += 1

    def flush(self) -> None:
        """Write and fsync all buffered records. Blocks. Raises OSError if the disk is full."""
        with self._writing:
            self._write(len(self._buffer))

    @property
    def unwritten(self) -> int:
        """Return the number of records that are not durable yet."""
        return len(self._buffer)

    @property
    def full(self) -> bool:
        """Return whether the segment has ``SEGMENT_RECORDS`` records, so that the next segment should begin."""
        return self._records >= SEGMENT_RECORDS

    def rotate(self, state: State) -> None:
        """Begin a new segment with ``state`` in its head; all records of later events are written to it.

        Raises:
            OSError: there is no space for a segment. In this case the old segment stays in use.
        """
        with self._writing:
            self._write(sum(seq <= state.seq for seq, _ in self._buffer))
            length = os.lseek(self._fd, 0, os.SEEK_CUR)
            path, fd = self._open(state, self._path.name, length)
            os.close(self._fd)
            self._path, self._fd, self._records = path, fd, len(self._buffer)

    def close(self) -> None:
        """Flush the buffer and close the segment."""
        try:
            self.flush()
        finally:
            os.close(self._fd)

    def _write(self, count: int) -> None:
        """Write and fsync the first ``count`` frames of the buffer; if this fails, keep the frames in the buffer."""
        if not count:
            return
        start = os.lseek(self._fd, 0, os.SEEK_CUR)
        try:
            _write_all(self._fd, b"".join(frame for _, frame in self._buffer[:count]))
            os.fsync(self._fd)
        except OSError:
            os.lseek(self._fd, start, os.SEEK_SET)  # a torn frame may follow: the next flush writes over it
            os.ftruncate(self._fd, start)
            raise
        del self._buffer[:count]

    def _open(self, state: State | None, before: str, accepted: int) -> tuple[Path, int]:
        head = MAGIC + _framed(_encode(Head(SCHEMA, self._epoch, state, before, accepted)))
        self._segment_number += 1
        path = self._run.journal / f"{self._epoch:06}-{self._segment_number:06}.seg"
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            _write_all(fd, head)
            os.fsync(fd)
            sync(self._run.journal)
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(fd, 0)  # a segment without a head is ignored if it cannot be removed
            os.close(fd)
            path.unlink(missing_ok=True)
            raise
        return path, fd


def replay(run: RunDir) -> Iterator[Stamped]:
    """Yield every event of the run in order. Raises JournalError."""
    return EventFollower(run).events()


class EventFollower:
    """Yields every event of a run once, in order. A later call yields the events recorded since the previous call.

    A manager that lost its lease may have written events that its successor does not know of. If this class reads such
    events before the successor has written its first segment, it yields them, and it does not yield the successor's
    events with the same numbers. So callers may rely only on events that are durable elsewhere too, such as a committed
    step.
    """

    def __init__(self, run: RunDir) -> None:
        self._run = run
        self._segment: Path | None = None
        self._offset = 0
        self._seq = 0

    def events(self) -> Iterator[Stamped]:
        """Yield the events since the last call.

        Raises:
            JournalError: a segment is damaged or of another schema.
            OSError: the journal's folder cannot be listed, or a segment cannot be read.
        """
        for path, end in self._unread():
            if path != self._segment:
                self._segment, self._offset = path, _head(path)[1]
            for stamped, offset in _framed_events(path, self._offset, end):
                self._offset = offset
                if stamped.seq > self._seq:
                    self._seq = stamped.seq
                    yield stamped
            if end is not None and self._offset < end:
                raise JournalError(
                    f"{path}: cannot be read beyond byte {self._offset}, although its records end at byte {end}, where"
                    " the next segment continues"
                )

    def _unread(self) -> list[tuple[Path, int | None]]:
        """Return (path, end offset) of the valid segments that may have unread events, oldest first.

        The newest segment has no end offset (None).
        """
        segments = _segments(self._run)
        if self._segment is not None and segments and segments[-1] == self._segment:
            return [(self._segment, None)]
        chain = _chain(self._run)
        read = [index for index, (path, _) in enumerate(chain) if path == self._segment]
        return chain[read[0] :] if read else chain


def read_state(run: RunDir) -> State | None:
    """Return the state after the newest record; None if there is no journal yet. Raises JournalError."""
    return Follower(run).state()


class Follower:
    """Reads the state repeatedly; each read processes only new records (for ``rrl status --live`` and logs)."""

    def __init__(self, run: RunDir) -> None:
        self._run = run
        self._segment: Path | None = None
        self._offset = 0
        self._state: State | None = None

    @property
    def position(self) -> tuple[str, int]:
        """Return the name of the segment that was read last, and the number of bytes read from it."""
        return (self._segment.name, self._offset) if self._segment else ("", 0)

    @property
    def torn_bytes(self) -> int:
        """Return the number of bytes after the last complete record.

        They belong to a record that is being written, or whose writer died during the write.
        """
        if self._segment is None:
            return 0
        try:
            return max(0, self._segment.stat().st_size - self._offset)
        except OSError:
            return 0

    def state(self) -> State | None:
        """Return the state after the newest record; None if there is no journal yet.

        Raises:
            JournalError: a segment is damaged, of another schema, or of another run.
            OSError: the journal's folder cannot be listed, or a segment cannot be read.
        """
        segments = _segments(self._run)
        if not segments or segments[-1] != self._segment:
            newest = _newest(self._run)
            if newest is None:
                return self._state
            if newest[0] != self._segment:
                self._segment, self._offset, self._state = newest[0], newest[2], newest[1].state
        assert self._segment is not None
        for stamped, end in _framed_events(self._segment, self._offset, None):
            try:
                self._state = fold(self._state, stamped)
            except Exception as error:  # only a damaged event can make the fold fail
                raise _damaged(self._segment, f"the record that ends at byte {end}", error) from error
            self._offset = end
        if self._state is not None and self._state.run != self._run.id:
            raise JournalError(f"{self._segment}: this is the journal of {self._state.run}, not of {self._run.id}")
        return self._state


def _segments(run: RunDir) -> list[Path]:
    """Return the run's segments, sorted by name.

    Raises:
        OSError: the folder cannot be listed, which does not mean that it is empty.
    """
    try:
        names = os.listdir(run.journal)
    except FileNotFoundError:
        return []
    return sorted(run.journal / name for name in names if name.endswith(".seg"))


def _newest(run: RunDir) -> tuple[Path, Head, int] | None:
    """Return (path, head, offset of the records) of the newest segment with a complete head; None if there is none.

    A segment without a complete head is being created at this moment, or its manager died while creating it. No
    decision was based on it.
    """
    for path in reversed(_segments(run)):
        head, offset = _head(path)
        if head is not None:
            return path, head, offset
    return None


def _chain(run: RunDir) -> list[tuple[Path, int | None]]:
    """Return (path, end offset) of the valid segments, oldest first; the newest segment has no end offset (None).

    Starts at the newest segment and follows the name of the previous segment in each head. A segment that is not
    reached was written by a manager that had already been succeeded, and is ignored.
    """
    chain: list[tuple[Path, int | None]] = []
    newest = _newest(run)
    name, end = newest[0].name if newest is not None else "", None
    while name:
        chain.append((run.journal / name, end))
        head = _head(run.journal / name)[0]
        if head is None:
            raise JournalError(f"{run.journal / name}: its header is incomplete, but a later segment refers to it")
        name, end = head.previous, head.previous_bytes
    return chain[::-1]


def _framed(payload: bytes) -> bytes:
    return _FRAME.pack(len(payload), zlib.crc32(payload)) + payload


def _frame_at(data: bytes, offset: int) -> tuple[bytes, int] | None:
    """Return the payload at ``offset`` and the end of its frame, or None if there is no complete frame."""
    if offset + _FRAME.size > len(data):
        return None
    length, crc = _FRAME.unpack_from(data, offset)
    payload = data[offset + _FRAME.size : offset + _FRAME.size + length]
    # zeros: the file grew before a power cut, but its data was not written
    if not payload or len(payload) < length or zlib.crc32(payload) != crc:
        return None
    return payload, offset + _FRAME.size + length


def _head(path: Path) -> tuple[Head | None, int]:
    """Return the head and the offset of the records; the head is None if it is not (yet) complete."""
    try:
        with path.open("rb") as file:
            start = file.read(len(MAGIC) + _FRAME.size)
            if start and not start.strip(b"\0"):  # the file grew before a power cut, but its data was not written
                return None, 0
            if not start.startswith(MAGIC[: len(start)]):
                raise JournalError(f"{path}: not a journal of rrl (it starts with {start[:5]!r})")
            if len(start) < len(MAGIC) + _FRAME.size:
                return None, 0
            length = _FRAME.unpack_from(start, len(MAGIC))[0]
            frame = _frame_at(start[len(MAGIC) :] + file.read(length), 0)
    except FileNotFoundError:
        raise JournalError(f"{path}: the segment is missing, but a later segment refers to it") from None
    if frame is None:
        return None, 0
    try:
        schema = _decode_schema(frame[0]).schema
        if schema > SCHEMA:
            raise JournalError(
                f"{path}: written by a newer rrl (schema {schema}, this one reads schema {SCHEMA}); "
                "use the version of rrl that wrote it"
            )
        if schema < SCHEMA:
            raise JournalError(
                f"{path}: written by an older rrl (schema {schema}, this one reads schema {SCHEMA}); "
                f"use the version of rrl that wrote it, or submit the job again"
            )
        return _decode_head(frame[0]), len(MAGIC) + frame[1]
    except _UNDECODABLE as error:
        raise _damaged(path, "its head", error) from error


def _framed_events(path: Path, offset: int, end: int | None) -> Iterator[tuple[Stamped, int]]:
    with path.open("rb") as file:
        file.seek(offset)
        data = file.read() if end is None else file.read(max(0, end - offset))
    at = 0
    while (frame := _frame_at(data, at)) is not None:
        payload, after = frame
        try:
            stamped = _decode_event(payload)
        except _UNDECODABLE as error:
            raise _damaged(path, f"the record at byte {offset + at}", error) from error
        at = after
        yield stamped, offset + at


def _damaged(path: Path, record: str, error: Exception) -> JournalError:
    """Return the error for a damaged record, on one line even if damaged bytes put line breaks into ``error``."""
    why = " ".join(str(error).split()) or type(error).__name__
    return JournalError(f"{path}: {record} cannot be read: {escaped(why)}; {RECOVERY_ADVICE}")


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
