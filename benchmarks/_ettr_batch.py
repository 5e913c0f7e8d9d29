"""The two arms of benchmarks/ettr.py in which Slurm restarts the job: a plain batch job, and submitit's own pattern.

The roles of the other arms run inside of one batch job, on its node. The run ends at its first failure, the job is
requeued, and its next execution resumes the run from the last commit. No process outlives the job.

``requeue``: the batch script calls ``scontrol requeue`` when the run has failed. ``submitit``: a ``Checkpointable``
that submitit submits. submitit requeues only on a signal, which Slurm sends at preemption and before a timeout. So the
function does what users of submitit write: it watches the run, and sends this signal to itself when the run has failed.

Run by ``python -m`` as the program of the batch job: it submits or resumes the run, and waits for its end.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import submitit

from rrl.benchmarks._ettr_arms import Arm, job
from rrl.benchmarks._ettr_faults import Kill
from rrl.benchmarks._ettr_figures import trained_again
from rrl.core.run_dir import RUNS_ENV, RunDir
from rrl.core.types import TRAINER
from rrl.manager.model.state import State, Status
from rrl.manager.storage.journal import Follower, replay
from rrl.tests.support.runs import RRL, wait_for_run
from rrl.tests.support.slurm.lab import SlurmLab

KILL_STEP = 3
"""Committed step after which the trainer is killed."""
STEPS = 1000
"""Number of steps of the job, which the run never reaches."""
TIMEOUT_S = 600.0
WATCH_TIMEOUT_S = 120.0
"""A job that has requested to be requeued waits at most this time (s) until Slurm ends it."""
IN_JOB = Arm("in one job", faults=True, protected=False, spares=0, full_restarts=0)
KINDS = ("requeue", "submitit")


def run_once(folder: Path) -> int:
    """Submit the run of a folder, or resume it if it exists, and wait for its end; return the exit code."""
    runs = [path.parent.parent.name for path in (folder / "runs").glob("*/journal/*.seg")]
    command = ["resume", runs[0]] if runs else ["submit", str(folder / "job.toml")]
    return subprocess.run([RRL, *command, "--wait"], env={**os.environ, RUNS_ENV: str(folder / "runs")}).returncode


class WatchedRun(submitit.helpers.Checkpointable):  # type: ignore[misc]
    """The code of a user of submitit: it starts the run, watches it, and requeues the job when the run has failed."""

    def __call__(self, folder: str) -> int:
        """Run to the end, or until Slurm requeues the job."""
        code = run_once(Path(folder))
        if code:
            os.kill(os.getpid(), signal.SIGUSR2)  # submitit saves this object, and requeues the job
            time.sleep(WATCH_TIMEOUT_S)
        return code


_SCRIPT = """#!/bin/bash
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output={folder}/job.log
#SBATCH --cpus-per-task={cpus}
{python} -m rrl.benchmarks._ettr_batch run {folder} && exit 0
scontrol requeue $SLURM_JOB_ID
sleep {timeout}
"""


def outage(lab: SlurmLab, kind: str, name: str, step_s: float) -> float:
    """Run a job of this kind, kill its trainer, and return the seconds until the trainer trains again."""
    folder = lab.user_home / name
    cpus = lab.settings.cpus

    def write() -> None:
        for path in (folder, folder / "pace"):
            path.mkdir()
        recovery = job(IN_JOB, "local", STEPS, step_s, 0, folder / "pace")
        limit = "full_restarts = 0\n"
        assert limit in recovery
        (folder / "job.toml").write_text(recovery.replace(limit, f"{limit}per_replica = 0\n"))
        (folder / "job.sh").write_text(
            _SCRIPT.format(folder=folder, cpus=cpus, python=sys.executable, timeout=int(WATCH_TIMEOUT_S))
        )

    lab.call_as_user(write)
    if kind == "requeue":
        lab.run_as_user(["sbatch", str(folder / "job.sh")])
    else:
        lab.run_as_user([sys.executable, "-m", "rrl.benchmarks._ettr_batch", "submit", str(folder), str(cpus)])
    run = wait_for_run(folder / "runs")
    state = _wait(run, lambda state: state.step >= KILL_STEP and state.replica(TRAINER).status is Status.JOINED)
    trainer = state.replica(TRAINER)
    assert trainer.pid is not None
    os.kill(trainer.pid, signal.SIGKILL)
    kill = Kill(time.time(), state.step, trainer.incarnation)
    until = time.monotonic() + TIMEOUT_S
    while (again := trained_again(replay(run), kill)) is None:
        assert time.monotonic() < until, f"{run.path}: the trainer did not train again"
        time.sleep(1.0)
    lab.clear()  # the job is cancelled first, because it would requeue itself when its run ends
    lab.run_as_user([RRL, "cancel", run.id], env={RUNS_ENV: str(folder / "runs")})
    return again[0] - kill.at


def _wait(run: RunDir, condition: Callable[[State], bool]) -> State:
    follower, until = Follower(run), time.monotonic() + TIMEOUT_S
    while (state := follower.state()) is None or not condition(state):
        assert time.monotonic() < until, f"{run.path}: never"
        time.sleep(0.05)
    return state


def submit_with_submitit(folder: Path, cpus: int) -> None:
    """Submit the run of a folder as a user of submitit does."""
    executor = submitit.AutoExecutor(folder / "submitit", cluster="slurm")
    executor.update_parameters(nodes=1, cpus_per_task=cpus, timeout_min=60, slurm_job_name="watched")
    executor.submit(WatchedRun(), str(folder))


def main() -> int:
    """Run or submit the run of a folder."""
    action, folder, *rest = sys.argv[1:]
    if action == "run":
        return run_once(Path(folder))
    submit_with_submitit(Path(folder), int(rest[0]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
