"""If the journal's writers are killed, lose power or get an error at any disk call, no flushed record is lost.

All flushed records are read again in order, and the next manager continues after them.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from rrl.core.run_dir import RunDir
from rrl.manager.model import events as ev
from rrl.manager.model.reducer import fold
from rrl.manager.model.state import State
from rrl.manager.storage.journal import read_state, replay
from rrl.tests.support.fake_disk import Died, FakeDisk, Image
from rrl.tests.support.manager.jobs import RUN
from rrl.tests.support.manager.journal_writer import BEGUN, Writer

FIRST = "000001-000001.seg"
MAX_FRAME_BYTES = 1000
"""Upper bound for the bytes of one write. Only a write of a segment's head may be larger."""


class RecordedRun:
    """Two managers on a fake disk.

    The first manager rotates into a second segment, and then freezes in the middle of a flush. The second manager takes
    over. Then the first one thaws and continues to write records, which must never be read. ``flushed[i]`` are the
    records that were flushed when ``disk.note`` was i. The second manager may have read more records than these.
    """

    def __init__(self, run: RunDir, disk: FakeDisk) -> None:
        self.run, self.disk = run, disk
        self.flushed: list[list[ev.Stamped]] = [[]]
        self.timelines: list[list[ev.Stamped]] = []
        """For each manager: all records that could be read while it wrote."""

    def _note_flushed(self, records: list[ev.Stamped]) -> None:
        self.flushed.append(list(records))
        self.disk.note = len(self.flushed) - 1

    def record(self) -> None:
        first = Writer(self.run).begin()
        self.timelines.append(first.written)
        self._note_flushed(first.written)
        for step in (1, 2):
            self._note_flushed(first.steps(2 * step - 1, 2 * step).flush().written)
        self._note_flushed(first.steps(5).rotate().written)
        self._note_flushed(first.flush().written)
        self.disk.die_before = f"fsync {FIRST.replace('1.seg', '2.seg')}"
        with pytest.raises(Died):
            first.steps(6, 7).flush()
        readable = list(replay(self.run))
        second = Writer(self.run, 2)
        second.written = readable
        self.timelines.append(readable)
        self._note_flushed(readable)
        self._note_flushed(second.steps(8).flush().written)
        first.flush()  # thawed
        first.steps(9).rotate().steps(10).flush()
        self._note_flushed(second.rotate().steps(11).flush().written)
        second.journal.close()


@pytest.fixture(scope="module")
def recorded_run(tmp_path_factory: pytest.TempPathFactory) -> RecordedRun:
    run = _run(tmp_path_factory.mktemp("recorded_run"))
    with pytest.MonkeyPatch.context() as patch:
        recorded = RecordedRun(run, FakeDisk(run.journal, patch))
        recorded.record()
    return recorded


@pytest.fixture(autouse=True)
def _quick_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip real syncs, because the tests compute what a power loss would leave."""
    for name in ("fsync", "fdatasync"):
        monkeypatch.setattr(os, name, lambda fd: None)


def _run(folder: Path) -> RunDir:
    run = RunDir(folder / RUN)
    run.create()
    return run


def _restored(folder: Path, image: Image) -> RunDir:
    folder.mkdir()
    run = _run(folder)
    for name, data in image.items():
        (run.journal / name).write_bytes(data)
    return run


def _folded(records: list[ev.Stamped]) -> State | None:
    state: State | None = None
    for stamped in records:
        state = fold(state, stamped)
    return state


def _check(run: RunDir, flushed: list[ev.Stamped], timelines: list[list[ev.Stamped]]) -> None:
    """Check that all of ``flushed`` is read, perhaps with later unflushed records, and that a manager can continue."""
    read = list(replay(run))
    assert read[: len(flushed)] == flushed
    assert any(read == timeline[: len(read)] for timeline in timelines), "the records are not those of a single manager"
    assert read_state(run) == _folded(read)
    if not read:
        return
    following = Writer(run, epoch=9)
    assert following.state == _folded(read)
    following.steps(100).flush().rotate().steps(101).flush()
    following.journal.close()
    assert list(replay(run)) == [*read, *following.written]
    assert read_state(run) == following.state


def test_recorded_run_covers_every_kind_of_disk_call(recorded_run: RecordedRun) -> None:
    assert {call.split()[0] for call in recorded_run.disk.calls} == {"open", "write", "fsync"}
    assert [stamped.epoch for stamped in recorded_run.timelines[1]].count(2) == 2
    assert len(recorded_run.timelines[1]) == len(recorded_run.flushed[5]) + 4, (
        "records written and not flushed were found"
    )


def _die_everywhere(recorded_run: RecordedRun, tmp_path: Path, cuts: Callable[[int, int], Iterable[int]]) -> int:
    """Check every folder that a crash could leave, and return the number of different folders.

    ``cuts(start, end)`` returns the offsets at which a crash may cut off bytes that were not synced.
    """
    checked: set[bytes] = set()
    for moment in recorded_run.disk.moments:
        for image in moment.images(cuts):
            mark = hashlib.sha256(repr((sorted(image.items()), moment.note)).encode()).digest()
            if mark in checked:
                continue
            checked.add(mark)
            try:
                _check(
                    _restored(tmp_path / str(len(checked)), image),
                    recorded_run.flushed[moment.note],
                    recorded_run.timelines,
                )
            except BaseException as error:
                error.add_note(
                    f"{moment.number}: {moment.call}; { ({name: len(data) for name, data in image.items()}) }"
                )
                raise
    return len(checked)


def test_crash_at_any_disk_call_keeps_all_flushed_records(recorded_run: RecordedRun, tmp_path: Path) -> None:
    assert _die_everywhere(recorded_run, tmp_path, lambda start, end: (start + 1, (start + end) // 2, end - 1)) > 80


@pytest.mark.long
def test_write_torn_at_any_byte_keeps_all_flushed_records(recorded_run: RecordedRun, tmp_path: Path) -> None:
    def cuts(start: int, end: int) -> range:
        return range(start, end, 1 if end - start < MAX_FRAME_BYTES else 17)

    assert _die_everywhere(recorded_run, tmp_path, cuts) > 800


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO], ids=["full", "broken"])
def test_failed_disk_call_keeps_buffered_records_for_a_later_flush(tmp_path: Path, error: int) -> None:
    number, failed = 0, True
    while failed:
        folder = tmp_path / str(number)
        folder.mkdir()
        run = _run(folder)
        with pytest.MonkeyPatch.context() as patch:
            disk = FakeDisk(run.journal, patch)
            disk.recording, disk.fail_at, disk.error = False, number, error
            written = _written_whatever_fails(run)
        try:
            _check(run, written, [written])
        except BaseException as wrong:
            wrong.add_note(f"{number}: {disk.calls[number]}")
            raise
        failed, number = number < len(disk.calls), number + 1
    assert number > 20


def _written_whatever_fails(run: RunDir) -> list[ev.Stamped]:
    """Write as the real manager does: it repeats a failed call in the next flush, or in the next epoch."""
    epoch = 1
    while True:
        try:
            writer = Writer(run, epoch)
            break
        except OSError:
            epoch += 1
    writer.write(*BEGUN)
    for attempt in range(8):
        writer.steps(attempt)
        with contextlib.suppress(OSError):
            writer.flush()
            if attempt % 3 == 2:
                writer.rotate()
    with contextlib.suppress(OSError):
        writer.flush()
    writer.journal.close()
    return writer.written
