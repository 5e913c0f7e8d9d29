"""The reserve of space that a run frees at its end on a full file system."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from rrl.core.run_dir import RunDir
from rrl.manager.storage.space_reserve import RELEASE_BYTES, RESERVE_BYTES, fill_reserve, write_from_reserve


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    made = RunDir(tmp_path / "run-1")
    made.create()
    fill_reserve(made)
    return made


class FullDisk:
    """A disk whose writes fail with error ``number`` until ``released`` bytes of the reserve are free."""

    def __init__(self, run: RunDir, number: int, released: int) -> None:
        self.run, self.number, self.released, self.written = run, number, released, False

    def write(self) -> None:
        if RESERVE_BYTES - self.run.space_reserve.stat().st_size < self.released:
            raise OSError(self.number, "no room")
        self.written = True


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_write_takes_no_more_of_the_reserve_than_it_needs(run: RunDir, number: int) -> None:
    disk = FullDisk(run, number, 2 * RELEASE_BYTES)
    write_from_reserve(run, disk.write)
    assert disk.written
    assert run.space_reserve.stat().st_size == RESERVE_BYTES - 2 * RELEASE_BYTES


def test_write_that_fails_for_another_reason_leaves_the_reserve(run: RunDir) -> None:
    with pytest.raises(OSError, match="no room"):
        write_from_reserve(run, FullDisk(run, errno.EROFS, 1).write)
    assert run.space_reserve.stat().st_size == RESERVE_BYTES


def test_write_fails_once_the_reserve_is_used_up_or_missing(run: RunDir) -> None:
    disk = FullDisk(run, errno.ENOSPC, RESERVE_BYTES + 1)
    with pytest.raises(OSError, match="no room"):
        write_from_reserve(run, disk.write)
    assert run.space_reserve.stat().st_size == 0

    def fail() -> None:
        raise OSError(errno.ENOSPC, "no room")

    run.space_reserve.unlink()
    with pytest.raises(OSError, match="no room"):
        write_from_reserve(run, fail)
    assert not run.space_reserve.exists()


def test_reserve_that_is_a_link_is_not_followed(run: RunDir, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_bytes(b"1" * 100)
    run.space_reserve.unlink()
    run.space_reserve.symlink_to(victim)
    with pytest.raises(OSError, match="no room"):
        write_from_reserve(run, FullDisk(run, errno.ENOSPC, 2 * RESERVE_BYTES).write)
    assert victim.stat().st_size == 100
