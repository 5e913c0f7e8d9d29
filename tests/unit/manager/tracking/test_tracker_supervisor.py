"""The manager keeps the processes of trackers running. The tests have a substitute for the real process."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import msgspec
import pytest

from rrl.core.run_dir import RunDir
from rrl.core.run_spec import RunSpec, TrackSpec
from rrl.manager.tracking import tracker_supervisor
from rrl.manager.tracking.main import FOLLOW, ONCE
from rrl.manager.tracking.tracker_files import Progress, write_progress
from rrl.manager.tracking.tracker_supervisor import TrackerSupervisor
from rrl.tests.support.listening_manager import eventually
from rrl.tests.support.manager.jobs import job

TIMEOUT_S = 60.0


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    monkeypatch.setattr(tracker_supervisor, "MODULE", "rrl.tests.support.trackers.fake_process")
    monkeypatch.setattr(tracker_supervisor, "RESTART_DELAY_S", 0.01)
    monkeypatch.setattr(tracker_supervisor, "END_TIMEOUT_S", 1.0)
    monkeypatch.setattr(tracker_supervisor, "LEAVE_TIMEOUT_S", 1.0)
    run = RunDir(tmp_path / "small-1")
    run.create()
    return run


def spec() -> RunSpec:
    return msgspec.structs.replace(job(), track=TrackSpec(to=("tensorboard",)))


def passes(run: RunDir, **variables: str) -> None:
    run.passed_env.write_bytes(msgspec.json.encode(variables))


def starts(run: RunDir) -> list[str]:
    path = run.path / "starts"
    return path.read_text().splitlines() if path.exists() else []


def logged(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "rrl.manager"]


def test_process_that_fails_repeatedly_is_logged_once(run: RunDir, caplog: pytest.LogCaptureFixture) -> None:
    passes(run, FAKE_TRACKER="fail")

    async def fail_often() -> None:
        supervisor = TrackerSupervisor(run, spec())
        supervisor.start()
        await eventually(lambda: len(starts(run)) >= 4)
        await supervisor.close(ended=False)

    with caplog.at_level(logging.WARNING, "rrl.manager"):
        asyncio.run(fail_often())
    assert logged(caplog) == [
        "tracker tensorboard: its process exited with 1; the run goes on, and its steps after 0 are sent later"
    ]


def test_process_that_hangs_is_logged_once_and_the_pause_before_its_restart_doubles(
    run: RunDir, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    passes(run, FAKE_TRACKER="hang")
    supervisor, pauses, sleep = TrackerSupervisor(run, spec()), [], asyncio.sleep

    async def recorded_sleep(seconds: float) -> None:
        if asyncio.current_task() in supervisor._tasks.values():
            pauses.append(seconds)
        await sleep(seconds)

    async def hang_often() -> None:
        supervisor.start()
        await eventually(lambda: len(pauses) >= 3)
        await supervisor.close(ended=False)

    monkeypatch.setattr(asyncio, "sleep", recorded_sleep)
    with caplog.at_level(logging.WARNING, "rrl.manager"):
        asyncio.run(hang_often())
    assert pauses[:3] == [0.01, 0.02, 0.04]
    assert logged(caplog) == [
        "tracker tensorboard: it does not answer; the run goes on, and its steps after 0 are sent later"
    ]


def test_process_that_fails_after_sending_more_steps_is_logged_again(
    run: RunDir, caplog: pytest.LogCaptureFixture
) -> None:
    passes(run, FAKE_TRACKER="fail")

    async def fail_after_progress() -> None:
        supervisor = TrackerSupervisor(run, spec())
        supervisor.start()
        await eventually(lambda: len(starts(run)) >= 2)
        write_progress(run, "tensorboard", Progress(step=7, error="ConnectionError: no route"))
        await eventually(lambda: len(logged(caplog)) >= 2)
        await supervisor.close(ended=False)

    with caplog.at_level(logging.WARNING, "rrl.manager"):
        asyncio.run(fail_after_progress())
    assert logged(caplog)[1] == (
        "tracker tensorboard: ConnectionError: no route; the run goes on, and its steps after 7 are sent later"
    )


def test_process_that_does_not_end_is_killed_and_the_unsent_steps_are_named(
    run: RunDir, caplog: pytest.LogCaptureFixture
) -> None:
    passes(run, FAKE_TRACKER="ignore SIGTERM")

    async def end() -> None:
        supervisor = TrackerSupervisor(run, spec())
        supervisor.start()
        await eventually((run.path / "ready").exists)
        process = supervisor._processes["tensorboard"]
        await supervisor.close(ended=True)
        assert process.returncode == -9

    with caplog.at_level(logging.WARNING, "rrl.manager"):
        asyncio.run(end())
    assert logged(caplog) == [
        "tracker tensorboard has the steps up to 0 only; to send the others: rrl track small-1 --to tensorboard"
    ]


async def test_a_process_that_is_not_running_at_the_end_of_the_run_is_started_once_more(run: RunDir) -> None:
    passes(run, FAKE_TRACKER="fail")

    supervisor = TrackerSupervisor(run, spec())
    supervisor.start()
    await eventually(lambda: starts(run))
    await supervisor._processes["tensorboard"].wait()
    await supervisor.close(ended=True)

    modes = [line.split()[1] for line in starts(run)]
    assert (modes[0], modes[-1], modes.count(ONCE)) == (FOLLOW, ONCE, 1)


async def test_a_process_gets_only_the_variables_that_the_job_passes(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "x")
    passes(run, FAKE_TRACKER="fail", WANDB_API_KEY="y")

    supervisor = TrackerSupervisor(run, spec())
    supervisor.start()
    await eventually(lambda: starts(run))
    await supervisor.close(ended=False)

    assert "WANDB_API_KEY" in starts(run)[0]
    assert "AWS_SECRET_ACCESS_KEY" not in starts(run)[0]


async def test_job_without_trackers_starts_no_process(run: RunDir) -> None:
    supervisor = TrackerSupervisor(run, job())
    supervisor.start()
    await supervisor.close(ended=True)

    assert not run.trackers.exists()
