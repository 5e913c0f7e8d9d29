"""The journal on disk: exactly the flushed records are read again, despite torn writes and frozen managers."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from rrl.core.run_dir import RunDir
from rrl.manager.model import events as ev
from rrl.manager.model.reducer import fold
from rrl.manager.model.state import State
from rrl.manager.storage import journal as journal_module
from rrl.manager.storage.journal import (
    MAGIC,
    SCHEMA,
    EventFollower,
    Follower,
    Head,
    Journal,
    JournalError,
    _framed,
    read_state,
    replay,
)
from rrl.tests.support.manager.jobs import RUN
from rrl.tests.support.manager.journal_writer import Writer


@pytest.fixture
def writer(run: RunDir) -> Writer:
    return Writer(run).begin()


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path / RUN)
    run.create()
    return run


def segments(run: RunDir) -> list[str]:
    return sorted(path.name for path in run.journal.glob("*.seg"))


def folded(run: RunDir) -> State | None:
    state: State | None = None
    for stamped in replay(run):
        state = fold(state, stamped)
    return state


def test_run_without_a_journal_has_no_state_and_no_events(run: RunDir) -> None:
    assert read_state(run) is None
    assert list(replay(run)) == []


def test_flushed_records_are_read_again_and_buffered_ones_are_not(run: RunDir, writer: Writer) -> None:
    durable = writer.state
    writer.steps(1)
    assert read_state(run) == durable
    writer.flush()
    assert read_state(run) == writer.state
    assert list(replay(run)) == writer.written


def test_close_flushes_the_buffer(run: RunDir) -> None:
    writer = Writer(run).begin().steps(1)
    writer.journal.close()
    assert read_state(run) == writer.state


def test_torn_last_frame_is_ignored_at_every_length(run: RunDir, writer: Writer) -> None:
    segment = run.journal / segments(run)[0]
    before, whole = writer.state, segment.read_bytes()
    writer.steps(1).flush()
    torn = segment.read_bytes()
    for length in range(len(whole), len(torn)):
        segment.write_bytes(torn[:length])
        assert read_state(run) == before, length
    for length in range(len(whole), len(torn)):  # the file was extended before its data was written
        segment.write_bytes(torn[:length] + bytes(len(torn) - length))
        assert read_state(run) in (before, writer.state), length
    segment.write_bytes(torn[:-1] + bytes([torn[-1] ^ 1]))
    assert read_state(run) == before


def test_successor_continues_after_a_torn_frame(run: RunDir) -> None:
    Writer(run).begin().steps(1).flush()
    segment = run.journal / segments(run)[0]
    segment.write_bytes(segment.read_bytes()[:-3])
    writer = Writer(run, epoch=2).steps(1, 2).flush()
    assert writer.state is not None
    assert writer.state.rewards.last == {1: 0.5, 2: 0.5}
    assert read_state(run) == writer.state == folded(run)


TORN_HEADS = (b"", MAGIC[:3], MAGIC, MAGIC + b"\x40\0\0\0", MAGIC + bytes(30), MAGIC + b"\x08" * 40)


@pytest.mark.parametrize("torn", TORN_HEADS)
def test_segments_with_an_unfinished_head_are_skipped(run: RunDir, torn: bytes) -> None:
    writer = Writer(run).begin().steps(1).flush()
    for epoch in (2, 3):  # two managers in a row had a full disk
        (run.journal / f"{epoch:06}-000001.seg").write_bytes(torn)
    assert read_state(run) == writer.state
    later = Writer(run, epoch=4).steps(2).flush()
    assert [stamped.seq for stamped in replay(run)] == [1, 2, 3, 4]
    assert read_state(run) == later.state


def test_follower_skips_a_later_segment_with_an_unfinished_head(run: RunDir, writer: Writer) -> None:
    follower = Follower(run)
    follower.state()
    (run.journal / "000002-000001.seg").write_bytes(MAGIC)
    writer.steps(1).flush()
    assert follower.state() == writer.state


@pytest.mark.parametrize("garbage", [b"#!/bin/sh\necho hello\n", b"{}"])
def test_file_that_is_not_a_journal_is_refused(run: RunDir, garbage: bytes) -> None:
    Writer(run).begin()
    (run.journal / "000002-000001.seg").write_bytes(garbage)
    with pytest.raises(JournalError, match=r"000002-000001\.seg: not a journal of rrl"):
        read_state(run)
    with pytest.raises(JournalError, match="not a journal of rrl"):
        Journal(run, 3)


def test_newer_schema_is_refused_even_if_its_state_cannot_be_decoded(run: RunDir) -> None:
    Writer(run).begin()
    head = {"schema": SCHEMA + 1, "epoch": 2, "state": "packed otherwise"}
    (run.journal / "000002-000001.seg").write_bytes(MAGIC + _framed(msgspec.msgpack.encode(head)))
    with pytest.raises(JournalError, match=rf"written by a newer rrl \(schema {SCHEMA + 1}, this one reads schema"):
        read_state(run)
    with pytest.raises(JournalError, match="newer"):
        list(replay(run))


def test_older_schema_is_refused_in_one_line_that_names_both_versions(run: RunDir) -> None:
    Writer(run).begin()
    head = {"schema": SCHEMA - 1, "epoch": 2, "state": "packed otherwise"}
    (run.journal / "000002-000001.seg").write_bytes(MAGIC + _framed(msgspec.msgpack.encode(head)))
    text = rf"000002-000001\.seg: written by an older rrl \(schema {SCHEMA - 1}, this one reads schema {SCHEMA}\); use"
    for read in (read_state, lambda run: list(replay(run)), lambda run: Journal(run, 3)):
        with pytest.raises(JournalError, match=text) as refused:
            read(run)
        assert "\n" not in str(refused.value)


def test_event_of_an_unknown_kind_is_reported_with_its_position(run: RunDir) -> None:
    Writer(run).begin()
    segment = run.journal / segments(run)[0]
    at = segment.stat().st_size
    unknown = {"seq": 3, "at": 3.0, "epoch": 1, "event": {"type": "Teleported"}}
    with segment.open("ab") as file:
        file.write(_framed(msgspec.msgpack.encode(unknown)))
    text = rf"000001-000001\.seg: the record at byte {at} cannot be read: .*Teleported"
    for read in (read_state, lambda run: list(replay(run)), lambda run: Journal(run, 2)):
        with pytest.raises(JournalError, match=text):
            read(run)


def test_unknown_fields_of_an_event_are_ignored(run: RunDir, writer: Writer) -> None:
    newer = {"seq": 3, "at": 3.0, "epoch": 1, "event": {"type": "ManagerStopped", "why": "x", "mood": 7}, "colour": 1}
    with (run.journal / segments(run)[0]).open("ab") as file:
        file.write(_framed(msgspec.msgpack.encode(newer)))
    assert list(replay(run)) == [*writer.written, ev.Stamped(3, 3.0, 1, ev.ManagerStopped("x"))]


def test_newest_head_equals_the_fold_of_all_records(run: RunDir, writer: Writer) -> None:
    for step in range(1, 30):
        writer.steps(step).flush()
        if step % 7 == 0:
            writer.rotate()
    assert len(segments(run)) == 5
    assert read_state(run) == folded(run) == writer.state
    assert list(replay(run)) == writer.written


def test_segment_is_full_after_its_limit_and_a_new_one_is_not(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_module, "SEGMENT_RECORDS", 4)
    writer = Writer(run).begin().steps(1)
    assert not writer.journal.full
    writer.steps(2)
    assert writer.journal.full
    assert not writer.rotate().journal.full


def test_records_appended_during_a_rotation_are_kept_exactly_once(run: RunDir) -> None:
    writer = Writer(run).begin().steps(1, 2)
    assert writer.state is not None
    then = writer.state
    writer.steps(3)  # appended after the snapshot was taken, and before the change of segments
    writer.journal.rotate(then)
    writer.flush()
    assert read_state(run) == writer.state == folded(run)
    assert list(replay(run)) == writer.written


def test_concurrent_flushes_and_appends_write_every_record_once(run: RunDir, writer: Writer) -> None:
    stopped = threading.Event()

    def flush() -> None:
        while not stopped.is_set():
            writer.journal.flush()

    threads = [threading.Thread(target=flush) for _ in range(2)]
    for thread in threads:
        thread.start()
    for step in range(1, 400):
        writer.steps(step)
    stopped.set()
    for thread in threads:
        thread.join()
    writer.flush()
    assert list(replay(run)) == writer.written


def test_records_appended_by_a_thawed_predecessor_are_never_read(run: RunDir) -> None:
    predecessor = Writer(run).begin().steps(1).flush()
    successor = Writer(run, epoch=2)
    assert successor.state == predecessor.state
    predecessor.steps(7).flush()
    successor.steps(2).flush()
    assert read_state(run) == successor.state
    assert [stamped.epoch for stamped in replay(run)] == [1, 1, 1, 2]
    third = Writer(run, epoch=3)
    assert third.state == successor.state


def test_segment_begun_by_a_thawed_predecessor_is_never_read(run: RunDir) -> None:
    predecessor = Writer(run).begin().steps(1).flush()
    successor = Writer(run, epoch=2).steps(2).flush()
    predecessor.steps(7).flush().rotate().steps(8).flush()
    assert len(segments(run)) == 3
    assert read_state(run) == successor.state
    successor.rotate().steps(3).flush()
    assert [stamped.epoch for stamped in replay(run)] == [1, 1, 1, 2, 2]
    assert folded(run) == read_state(run) == successor.state


def test_follower_leaves_a_predecessor_that_keeps_writing(run: RunDir) -> None:
    predecessor = Writer(run).begin()
    follower = Follower(run)
    successor = Writer(run, epoch=2)
    predecessor.steps(7).flush()
    follower.state()
    successor.steps(1).flush()
    assert follower.state() == successor.state


def test_follower_equals_a_full_read_after_every_write(run: RunDir) -> None:
    follower = Follower(run)
    assert follower.state() is None
    writer = Writer(run).begin()
    writes: list[Callable[[], object]] = [
        lambda: writer.steps(1).flush(),
        lambda: writer.steps(2, 3).flush(),
        writer.rotate,
        lambda: writer.steps(4).flush(),
        lambda: writer.rotate().steps(5).rotate(),
        lambda: writer.steps(6).flush(),
    ]
    for write_next in writes:
        write_next()
        assert follower.state() == read_state(run) == writer.state


def test_follower_reads_a_frame_once_it_is_complete(run: RunDir, writer: Writer) -> None:
    follower = Follower(run)
    before = follower.state()
    writer.steps(1).flush()
    segment = run.journal / segments(run)[0]
    whole = segment.read_bytes()
    segment.write_bytes(whole[:-1])
    assert follower.state() == before
    segment.write_bytes(whole)
    assert follower.state() == writer.state


def test_sealed_segment_that_lost_records_is_reported(run: RunDir) -> None:
    writer = Writer(run).begin().steps(1).rotate().steps(2).flush()
    first = run.journal / segments(run)[0]
    whole = first.read_bytes()
    first.write_bytes(whole[:-1])
    with pytest.raises(JournalError, match=rf"cannot be read beyond byte \d+, .* records end at byte {len(whole)},"):
        list(replay(run))
    first.unlink()
    with pytest.raises(JournalError, match=r"000001-000001\.seg: the segment is missing"):
        list(replay(run))
    assert read_state(run) == writer.state  # the state needs only the newest segment


class FullDisk:
    """A disk that is full until ``freed``.

    ``os.write`` writes half of its data and then fails, or ``os.fsync`` fails.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, failing_call: str) -> None:
        self.freed = False
        self.failed = 0
        self._write, self._fsync = os.write, os.fsync
        monkeypatch.setattr(os, failing_call, self.write if failing_call == "write" else self.fsync)

    def write(self, fd: int, data: memoryview) -> int:
        if not self.freed:
            self.failed += 1
            if self.failed % 2:
                return self._write(fd, data[: len(data) // 2])
            raise OSError(errno.ENOSPC, "No space left on device")
        return self._write(fd, data)

    def fsync(self, fd: int) -> None:
        if not self.freed:
            self.failed += 1
            raise OSError(errno.EIO, "Input/output error")
        self._fsync(fd)


@pytest.mark.parametrize("failing_call", ["write", "fsync"])
def test_full_disk_keeps_buffered_records_for_the_next_flush(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, failing_call: str, writer: Writer
) -> None:
    durable = writer.state
    disk = FullDisk(monkeypatch, failing_call)
    for step in (1, 2, 3):
        writer.steps(step)
        with pytest.raises(OSError, match=r"device|error"):
            writer.flush()
        assert read_state(run) == durable
    disk.freed = True
    writer.steps(4).flush()
    assert disk.failed
    assert list(replay(run)) == writer.written
    assert read_state(run) == writer.state


@pytest.mark.parametrize("failing_call", ["write", "fsync"])
def test_full_disk_during_a_rotation_keeps_the_old_segment_in_use(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, failing_call: str
) -> None:
    writer = Writer(run).begin().steps(1).flush()
    disk = FullDisk(monkeypatch, failing_call)
    with pytest.raises(OSError, match=r"device|error"):
        writer.rotate()
    assert read_state(run) == writer.state
    disk.freed = True
    writer.steps(2).flush()
    assert read_state(run) == writer.state
    writer.rotate().steps(3).flush()
    assert list(replay(run)) == writer.written
    assert read_state(run) == folded(run) == writer.state


@pytest.mark.parametrize("failing_call", ["write", "fsync"])
def test_failed_first_segment_raises_and_the_next_epoch_can_begin(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, failing_call: str
) -> None:
    first = Writer(run).begin().steps(1).flush()
    with monkeypatch.context() as patched:
        FullDisk(patched, failing_call)
        for epoch in (2, 3):
            with pytest.raises(OSError, match=r"device|error"):
                Journal(run, epoch)
    writer = Writer(run, epoch=4)
    assert writer.state == first.state


def test_epoch_has_one_writer(run: RunDir) -> None:
    Writer(run)
    with pytest.raises(FileExistsError):
        Journal(run, 1)


def test_head_names_the_accepted_length_of_the_previous_segment(run: RunDir, writer: Writer) -> None:
    length = (run.journal / segments(run)[0]).stat().st_size
    Writer(run, epoch=2)
    payload = (run.journal / segments(run)[1]).read_bytes()[len(MAGIC) + 8 :]
    head = msgspec.msgpack.decode(payload, type=Head)
    assert (head.previous, head.previous_bytes, head.state, head.epoch) == (segments(run)[0], length, writer.state, 2)


def test_each_event_is_followed_once_across_segments_and_managers(run: RunDir) -> None:
    follower = EventFollower(run)
    followed = list(follower.events())
    first = Writer(run).begin().steps(1, 2).flush()
    followed += follower.events()
    first.rotate().steps(3, 4).flush()
    followed += follower.events()
    Writer(run, epoch=2).steps(5).flush()
    followed += follower.events()
    assert list(follower.events()) == []
    assert followed == list(replay(run))
    assert [stamped.seq for stamped in followed] == [1, 2, 3, 4, 5, 6, 7]


def test_follower_continues_with_the_successor_after_the_last_records_of_a_manager(run: RunDir) -> None:
    frozen = Writer(run).begin().steps(1).flush()
    follower = EventFollower(run)
    followed = list(follower.events())
    successor = Writer(run, epoch=2).steps(2).flush()
    frozen.steps(2, 3).flush()
    followed += follower.events()
    successor.steps(3, 4).flush()
    followed += follower.events()
    assert followed == list(replay(run)), "late records of the frozen manager were read"
    steps = [stamped.event.step for stamped in followed if isinstance(stamped.event, ev.StepCommitted)]
    assert steps == [1, 2, 3, 4]
