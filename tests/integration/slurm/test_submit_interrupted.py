"""``rrl submit`` that a signal ends on a real Slurm names its run, or leaves neither a folder nor a job."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from rrl.core.run_dir import RUNS_ENV
from rrl.tests.support.runs import RRL, TIMEOUT_S, light_job, write_job
from rrl.tests.support.slurm.lab import SlurmLab

pytestmark = pytest.mark.slurm

MOMENTS: dict[str, Callable[[Path], bool]] = {
    "directory": lambda runs: any(runs.glob("*/")),
    "visible": lambda runs: any(runs.glob("[!.]*/job.toml")),
    "submitting": lambda runs: any(runs.glob("[!.]*/submit/submission_file_*")),
    "submitted": lambda runs: any(runs.glob("[!.]*/submit/*_submitted*")),
}


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGHUP, marks=pytest.mark.long)])
def test_signal_during_a_submission_leaves_no_job_of_a_run_that_was_not_named(
    slurm_lab: SlurmLab, number: signal.Signals
) -> None:
    for moment, reached in MOMENTS.items():
        folder = slurm_lab.user_home / f"interrupted-{number.name}-{moment}"
        slurm_lab.call_as_user(folder.mkdir)
        job, runs = write_job(folder, light_job("slurm", 100_000, spares=0, warm=False)), folder / "runs"
        process = slurm_lab.popen_as_user(
            [RRL, "submit", str(job)],
            env={RUNS_ENV: str(runs)},
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        until = time.monotonic() + TIMEOUT_S
        while not reached(runs) and process.poll() is None:
            assert time.monotonic() < until
            time.sleep(0.001)
        with contextlib.suppress(ProcessLookupError):  # it has ended by itself
            os.killpg(process.pid, number)  # as a terminal does: sbatch gets it too
        out, err = process.communicate(timeout=TIMEOUT_S)
        for path in runs.iterdir():
            assert path.name in out + err, (moment, out, err)
            slurm_lab.run_as_user([RRL, "cancel", str(path)], cwd=folder, timeout=TIMEOUT_S)
        assert "Traceback" not in err, (moment, err)
        slurm_lab.wait_no_jobs()
