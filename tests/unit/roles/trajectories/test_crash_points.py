"""The store is killed or loses power at any of its disk calls, or one of these calls fails.

After a kill or power loss, all acknowledged data is there, repeated requests get the same answers, and nothing is
trained twice. If a call fails, nothing that depends on it was acknowledged.
"""

from __future__ import annotations

import errno
import os
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, get_args

import pytest

from rrl.roles.trajectories.durable.evaluation_state import EvaluationRecord
from rrl.roles.trajectories.durable.log import read_frames
from rrl.roles.trajectories.durable.records import ItemsOrdered, Record, TimesObserved, decode
from rrl.tests.support.fake_disk import FakeDisk
from rrl.tests.support.roles.trajectories.agents_script import EPISODE_RECORDS
from rrl.tests.support.roles.trajectories.crew import MARKS, open_store
from rrl.tests.support.roles.trajectories.script import Script, check

COMPACTS = 900
"""Size (bytes) from which the log is compacted. The log reaches this size several times in the script."""
STALENESS = 1
"""Staleness with which the script drops a group for its age, in one flush with a binding."""
SPARSE = 3
"""``make test`` tries every ``SPARSE``-th crash and failure, and ``make test-long`` tries each one."""
STEPS = 10
"""Number of steps of a run that continues after a crash. The script ends two steps earlier."""


Recorded = tuple[Script, FakeDisk]


def _scripted(folder: Path, disk: FakeDisk, **changed: Any) -> Script:
    """Run the script to its end, and raise OSError if the disk fails before that."""

    def noted(promise: int) -> None:
        disk.note = promise

    script = Script(folder, noted, compact_from=COMPACTS, staleness=STALENESS, wait_for_late=False, **changed)
    try:
        script.run(STEPS - 2)
        disk.recording = False
    finally:
        script.store.close()
    return script


def _recorded(folder: Path, **changed: Any) -> Recorded:
    """Run the whole script on a disk that does not fail; return the script and the disk.

    The disk has recorded the folder before and after each call.
    """
    with pytest.MonkeyPatch.context() as patch:
        disk = FakeDisk(folder, patch)
        script = _scripted(folder, disk, **changed)
    return script, disk


@pytest.fixture(scope="module")
def lived(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    return _recorded(tmp_path_factory.mktemp("store"))


@pytest.fixture(autouse=True)
def _quick_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip syncs: the tests compute what a power loss would leave, so that nothing has to reach the real disk."""
    for name in ("fsync", "fdatasync"):
        monkeypatch.setattr(os, name, lambda fd: None)


def test_script_covers_every_kind_of_record_and_of_system_call(lived: Recorded) -> None:
    kinds: set[type[Record]] = set()
    for data in {image for moment in lived[1].moments for image in moment.now.values() if image}:
        path = lived[0].folder / "some"
        path.write_bytes(data)
        kinds |= {type(decode(payload)) for payload in read_frames(path)}
        path.unlink()
    elsewhere = {ItemsOrdered, TimesObserved, *EPISODE_RECORDS, *get_args(EvaluationRecord)}
    others = "test_dispatching.py, episodes/test_episode_crash_points.py, steps/test_evaluations.py"
    assert kinds == set(get_args(Record)) - elsewhere, others
    assert any(reason.startswith("stale") for reason in lived[0].promised[-1].dropped)
    assert {call.split()[0] for call in lived[1].calls} == {"open", "write", "fdatasync", "fsync", "replace"}
    assert sum(call.startswith("replace") for call in lived[1].calls) >= 3, (
        "the log was not replaced at its opening and at two compactions"
    )


def _crash_everywhere(
    recorded: Recorded, tmp_path: Path, cuts: Callable[[int, int], Iterable[int]], distance: int = 1, **changed: Any
) -> int:
    """Open and continue every folder that a crash could leave. Return the number of folders.

    ``cuts(start, end)`` returns the offsets at which a crash may cut off bytes that were not synced. With ``distance``,
    open only the first and each ``distance``-th later folder of each kind of call.
    """
    script, disk = recorded
    counts: Counter[str] = Counter()
    for moment, image, folder in disk.crash_folders(tmp_path, cuts):
        kind = moment.call.split()[0]
        counts[kind] += 1
        if (counts[kind] - 1) % distance:
            continue
        again = script.calls[max(0, moment.note - 1) : moment.note + 1]
        try:
            check(
                folder, script.promised[moment.note], STEPS, again, staleness=STALENESS, wait_for_late=False, **changed
            )
        except BaseException as error:
            error.add_note(f"{moment.number}: {moment.call}; { ({name: len(data) for name, data in image.items()}) }")
            raise
    return counts.total()


def test_crash_at_any_call_keeps_answers_and_requests_can_be_repeated(lived: Recorded, tmp_path: Path) -> None:
    assert _crash_everywhere(lived, tmp_path, _around, SPARSE) > 200


def _around(start: int, end: int) -> Iterable[int]:
    return (start + 1, (start + end) // 2, end - 1)


@pytest.mark.parametrize("checkpoint_every", [3, 5])
@pytest.mark.parametrize("of_calls", [9, pytest.param(1, marks=[pytest.mark.long, pytest.mark.timeout(3600)])])
def test_crash_at_a_sample_of_calls_keeps_the_batches_of_uncommitted_steps(
    tmp_path: Path, of_calls: int, checkpoint_every: int
) -> None:
    (tmp_path / "store").mkdir()
    recorded = _recorded(tmp_path / "store", checkpoint_every=checkpoint_every)
    assert _crash_everywhere(recorded, tmp_path, _around, of_calls, checkpoint_every=checkpoint_every) > 200


def test_crash_at_a_sample_of_calls_keeps_extras_with_their_tokens(tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    recorded = _recorded(tmp_path / "store", extras=MARKS)
    assert _crash_everywhere(recorded, tmp_path, _around, 9, extras=MARKS) > 200


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_write_torn_at_any_byte_loses_no_acknowledged_data(lived: Recorded, tmp_path: Path) -> None:
    assert _crash_everywhere(lived, tmp_path, range) > 2000


@pytest.mark.parametrize("distance", [SPARSE, pytest.param(1, marks=pytest.mark.long)])
@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO], ids=["full", "broken"])
def test_failed_system_call_leaves_no_answer_that_is_not_durable(
    lived: Recorded, tmp_path: Path, error: int, distance: int
) -> None:
    whole, disk = lived
    kinds: dict[str, list[int]] = {}
    for number, call in enumerate(disk.calls):
        kinds.setdefault(call.split()[0], []).append(number)
    for number in sorted(number for numbers in kinds.values() for number in numbers[::distance]):
        folder = tmp_path / str(number)
        folder.mkdir()
        promised = 0
        with pytest.MonkeyPatch.context() as patch:
            failing = FakeDisk(folder, patch)
            failing.recording, failing.fail_at, failing.error = False, number, error
            with pytest.raises(OSError, match=f"Errno {error}"):
                _scripted(folder, failing)
            promised = failing.note
            while_full = failing
            while_full.full = True
            with pytest.raises(OSError, match=f"Errno {error}"):
                open_store(folder)  # a restart while the disk is still full
        again = whole.calls[max(0, promised - 1) : promised + 1]
        try:
            check(folder, whole.promised[promised], STEPS, again, staleness=STALENESS, wait_for_late=False)
        except BaseException as wrong:
            wrong.add_note(f"{number}: {disk.calls[number]}")
            raise
