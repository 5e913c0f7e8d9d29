"""``rrl submit`` that a signal ends, or whose output nobody reads, names its run or leaves nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from rrl.core.run_dir import RUNS_ENV, RunDir
from rrl.tests.support.runs import RRL, TIMEOUT_S, light_job, processes_of, write_job
from rrl.tests.support.supervisor import end_runs_with_caller

MOMENTS: dict[str, Callable[[Path], bool]] = {
    "at once": lambda runs: runs.is_dir(),
    "directory": lambda runs: any(runs.glob("*/")),
    "visible": lambda runs: any(runs.glob("[!.]*/job.toml")),
    "manager": lambda runs: any(runs.glob("[!.]*/submit/controller.log")),
    "submitted": lambda runs: any(runs.glob("[!.]*/submit/*_submitted*")),
}


def submission(folder: Path) -> subprocess.Popen[str]:
    job = write_job(folder, light_job("local", 100_000, rollouts=1, spares=0, warm=False, one_node=True))
    end_runs_with_caller(folder / "runs")
    return subprocess.Popen(
        ["env", "--default-signal", RRL, "submit", str(job)],  # a test in the background inherits ignored signals
        env={**os.environ, RUNS_ENV: str(folder / "runs")},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )


def wait(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.001)


def end(run: RunDir) -> None:
    subprocess.run([RRL, "cancel", str(run.path)], check=True, capture_output=True)
    wait(lambda: not dict(processes_of(run)))


@pytest.mark.parametrize(
    "number", [signal.SIGINT, *(pytest.param(one, marks=pytest.mark.long) for one in (signal.SIGHUP, signal.SIGTERM))]
)
def test_signal_at_any_moment_leaves_nothing_or_a_run_that_was_named(tmp_path: Path, number: signal.Signals) -> None:
    for moment, reached in MOMENTS.items():
        folder = tmp_path / moment
        folder.mkdir()
        process = submission(folder)
        wait(lambda: reached(folder / "runs") or process.poll() is not None)  # noqa: B023
        os.killpg(process.pid, number)  # as a terminal does: also what rrl submit has started gets it
        out, err = process.communicate(timeout=TIMEOUT_S)
        for path in (folder / "runs").iterdir():
            assert path.name in out + err, (moment, out, err)
            assert process.returncode in (130, -number), (moment, out, err)
            end(RunDir(path))
        assert "Traceback" not in err, (moment, err)


@pytest.mark.parametrize("reads_errors", [True, False])
def test_output_that_nobody_reads_is_named_on_stderr_or_ends_the_run(tmp_path: Path, reads_errors: bool) -> None:
    process = submission(tmp_path)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    if not reads_errors:
        process.stderr.close()
    errors = process.stderr.read() if reads_errors else ""
    assert process.wait(TIMEOUT_S) == 1
    (path,) = (tmp_path / "runs").iterdir()
    if reads_errors:
        assert f"{path.name} was started; to end it: " in errors
        end(RunDir(path))
    wait(lambda: not dict(processes_of(RunDir(path))))
