from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rrl.core.run_dir import RunDir
from rrl.manager.cluster.base import Refused
from rrl.manager.execute import fault_injection
from rrl.tests.support.mounts import own_mounts


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    made = RunDir(tmp_path / "run-1")
    made.create()
    return made


def test_where_others_have_much_room_none_is_taken(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fault_injection, "MAX_FILL_BYTES", 0)
    with pytest.raises(Refused, match=r"GiB are free on the file system of .*run-1, and no more than 0 GiB"):
        fault_injection.fill_disk(run)
    assert not run.disk_filler.exists()


def test_a_run_directory_that_is_away_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="No such file"):
        fault_injection.fill_disk(RunDir(tmp_path / "nothing"))


def test_the_file_is_written_to_the_last_byte_and_given_back(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    room = 3 * 2**20 + 5000
    write = os.write

    def bounded(fd: int, data: bytes) -> int:
        if os.fstat(fd).st_size + len(data) > room:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(fd, data)

    monkeypatch.setattr(fault_injection, "MAX_FILL_BYTES", 2**60)
    monkeypatch.setattr(os, "write", bounded)
    assert fault_injection.fill_disk(run) == f"{run.disk_filler} takes 3.0 MiB: nothing is left"
    assert run.disk_filler.stat().st_size == room
    assert fault_injection.remove_disk_filler(run)
    assert not run.disk_filler.exists()
    assert not fault_injection.remove_disk_filler(run)


FILLS_A_REAL_ONE = """
import subprocess, sys
from pathlib import Path
from rrl.manager.execute import fault_injection
from rrl.core.run_dir import RunDir
run = RunDir(Path(sys.argv[1]))
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "none", run.path], check=True)
try:
    (run.path / "held").write_bytes(b"1" * 1000)
    fault_injection.fill_disk(run)
    try:
        (run.path / "more").write_bytes(b"1" * 100_000)
        raise SystemExit("there is room left")
    except OSError as error:
        print(error.strerror)
    fault_injection.remove_disk_filler(run)
    (run.path / "more").write_bytes(b"1" * 100_000)
    assert (run.path / "held").read_bytes() == b"1" * 1000
finally:
    subprocess.run(["umount", run.path], check=True)
"""


if own_mounts():  # collected only where it can run: nothing is skipped

    def test_a_real_file_system_is_full_and_has_room_again(run: RunDir) -> None:
        argv = [*own_mounts(), sys.executable, "-c", FILLS_A_REAL_ONE, str(run.path)]
        done = subprocess.run(argv, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout) == (0, "No space left on device\n"), done.stderr
