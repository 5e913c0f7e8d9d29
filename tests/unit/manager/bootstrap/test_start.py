"""The start of a manager from a job spec: the files after a failed start, and the restart of a manager that raised."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from rrl.config.job.load import load_job
from rrl.config.job.resolve import resolve
from rrl.config.job.schema import Job
from rrl.core.run_dir import RUNS_ENV, RunDir
from rrl.core.types import Outcome
from rrl.manager.bootstrap import start
from rrl.manager.storage.lease import LeaseHeld
from rrl.tests.support.job_toml import JOB


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(RUNS_ENV, str(tmp_path / "runs"))
    (tmp_path / "job.toml").write_text(JOB)
    return tmp_path / "job.toml"


@pytest.fixture
def job(source: Path) -> Job:
    return load_job(source)


def test_runs_created_in_the_same_second_have_different_ids(job: Job, source: Path) -> None:
    runs = [start.create(job, resolve(job, "python"), source) for _ in range(5)]
    assert len({run.id for run in runs}) == 5
    assert all(run.path.stat().st_mode & 0o777 == 0o700 for run in runs)


def test_disk_full_during_creation_removes_the_run_directory(
    job: Job, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, data: bytes, mode: int = 0o600) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    monkeypatch.setattr(start, "write_atomically", full)
    with pytest.raises(OSError, match="No space left on device"):
        start.create(job, resolve(job, "python"), source)
    assert list((tmp_path / "runs").iterdir()) == []


def test_failed_local_submission_reports_its_last_line(job: Job, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = start.create(job, resolve(job, "python"), source)
    monkeypatch.setattr(start, "LOCAL_TIMEOUT_MIN", None)  # makes submitit raise a TypeError
    with pytest.raises(OSError, match=r"^TypeError: "):
        start.start_manager(run, resolve(job, "python"))


def test_manager_that_raised_is_started_again(
    job: Job, source: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ends: list[Exception | Outcome] = [ZeroDivisionError("a bug"), OSError("storage"), Outcome.COMPLETED]

    async def run_once(run: RunDir, foreground: bool) -> Outcome:
        end = ends.pop(0)
        if isinstance(end, Exception):
            raise end
        return end

    monkeypatch.setattr(start, "_run", run_once)
    monkeypatch.setattr(start, "RETRY_DELAY_S", 0.0)
    assert start.run_manager(start.create(job, resolve(job, "python"), source)) == "completed"
    assert "ZeroDivisionError: a bug" in caplog.text


def test_manager_that_nobody_waits_for_waits_for_space_however_long(
    job: Job, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends = [OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))] * 20

    async def run_once(run: RunDir, foreground: bool) -> Outcome:
        if ends:
            raise ends.pop()
        return Outcome.COMPLETED

    monkeypatch.setattr(start, "_run", run_once)
    monkeypatch.setattr(start, "RETRY_DELAY_S", 0.0)
    run = start.create(job, resolve(job, "python"), source)
    assert start.run_manager(run) == "completed"
    ends.append(OSError(errno.EROFS, os.strerror(errno.EROFS)))
    with pytest.raises(OSError, match="Read-only"):
        start.run_manager(run, by_hand=True)


@pytest.mark.parametrize(("error", "starts"), [(LeaseHeld("another is running"), 1), (ZeroDivisionError(), 4)])
def test_manager_retries_are_limited_and_end_if_another_holds_the_lease(
    job: Job, source: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, starts: int
) -> None:
    started = 0

    async def run_once(run: RunDir, foreground: bool) -> None:
        nonlocal started
        started += 1
        raise error

    monkeypatch.setattr(start, "_run", run_once)
    monkeypatch.setattr(start, "RETRY_DELAY_S", 0.0)
    with pytest.raises(type(error)):
        start.run_manager(start.create(job, resolve(job, "python"), source))
    assert started == starts
