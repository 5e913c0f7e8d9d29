"""The store dies at any call of its disk while agents work, and no episode is trained twice.

Every acknowledged turn and attempt is still there, and the same requests get the same answers.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from rrl.roles.trajectories.durable.log import read_frames
from rrl.roles.trajectories.durable.records import Record, decode
from rrl.tests.support.fake_disk import FakeDisk
from rrl.tests.support.roles.trajectories.agents_script import EPISODE_RECORDS, AgentsScript, check

COMPACTS = 1500
"""Size (bytes) from which the log is compacted. The log reaches this size several times in the script."""
STEPS = 6
"""Number of steps of a run that continues after a crash. The script ends two steps earlier."""
STALENESS = 2
SPARSE = 5
"""``make test`` opens every ``SPARSE``-th folder that a crash could leave, and ``make test-long`` opens each one."""
Recorded = tuple[AgentsScript, FakeDisk]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    """Run the whole script on a disk that does not fail; return the script and the disk.

    The disk has recorded the folder before and after each call.
    """
    folder = tmp_path_factory.mktemp("store")
    with pytest.MonkeyPatch.context() as patch:
        disk = FakeDisk(folder, patch)
        script = AgentsScript(
            folder, lambda number: setattr(disk, "note", number), compact_from=COMPACTS, staleness=STALENESS
        )
        script.run(STEPS - 2)
        disk.recording = False
        script.store.close()
    return script, disk


@pytest.fixture(autouse=True)
def _quick_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip syncs: the tests compute what a power loss would leave, so that nothing has to reach the real disk."""
    for name in ("fsync", "fdatasync"):
        monkeypatch.setattr(os, name, lambda fd: None)


def test_script_writes_every_kind_of_record_of_episodes_and_compacts_them(recorded: Recorded, tmp_path: Path) -> None:
    script, disk = recorded
    kinds: set[type[Record]] = set()
    for number, data in enumerate({image for moment in disk.moments for image in moment.now.values() if image}):
        path = tmp_path / str(number)
        path.write_bytes(data)
        kinds |= {type(decode(payload)) for payload in read_frames(path)}
    assert kinds >= EPISODE_RECORDS
    assert script.views[-1].audit.dropped
    assert sum(call.startswith("replace") for call in disk.calls) >= 3, (
        "the log was not replaced at its opening and at two compactions"
    )


def _crash_everywhere(
    recorded: Recorded, tmp_path: Path, cuts: Callable[[int, int], Iterable[int]], distance: int = 1
) -> int:
    """Open and continue every folder that a crash could leave. Return the number of folders.

    ``cuts(start, end)`` returns the offsets at which a crash may cut off bytes that were not synced. With ``distance``,
    open only the first and each ``distance``-th later folder of each kind of call.
    """
    script, disk = recorded
    counts: Counter[str] = Counter()
    for moment, _, folder in disk.crash_folders(tmp_path, cuts):
        kind = moment.call.split()[0]
        counts[kind] += 1
        if (counts[kind] - 1) % distance:
            continue
        note = moment.note
        again = script.calls[max(0, note - 1) : note + 1]
        try:
            check(folder, script.views[note : note + 2], script.members[note], STEPS, again, staleness=STALENESS)
        except BaseException as error:
            error.add_note(f"{moment.number}: {moment.call}; note {note}: {again}")
            raise
    return counts.total()


def test_crash_at_any_call_keeps_episodes_and_requests_can_be_repeated(recorded: Recorded, tmp_path: Path) -> None:
    assert _crash_everywhere(recorded, tmp_path, lambda start, end: (start + 1, end - 1), SPARSE) > 200


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_crash_at_every_byte_of_every_write_keeps_episodes(recorded: Recorded, tmp_path: Path) -> None:
    assert _crash_everywhere(recorded, tmp_path, range) > 2000
