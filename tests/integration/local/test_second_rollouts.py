"""A run with two roles of the kind of rollouts: both get weights and work, and one is replaced like the other.

No key of job.toml makes such a run, so the test adds the second role to the run spec.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from rrl.config.job.document import JobDocument
from rrl.config.job.load import job_from
from rrl.config.job.resolve import resolve_for_submission
from rrl.core.run_dir import RUNS_ENV
from rrl.core.types import ReplicaId
from rrl.manager.bootstrap import start
from rrl.manager.model.state import State
from rrl.tests.support.manager.jobs import with_fast_rollouts
from rrl.tests.support.runs import RRL, TestRun, all_work, cancel, light_job, write_job
from rrl.tests.support.supervisor import end_runs_with_caller

FAST, ROLLOUT = ReplicaId("fast/0"), ReplicaId("rollout/0")


def test_both_roles_of_rollouts_get_weights_and_leases_and_a_killed_one_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write_job(tmp_path, light_job("local", 4000, rollouts=1, spares=0, warm=False, one_node=True))
    end_runs_with_caller(tmp_path / "runs")
    monkeypatch.setenv(RUNS_ENV, str(tmp_path / "runs"))
    job = job_from(JobDocument([file]), tmp_path)
    spec = with_fast_rollouts(resolve_for_submission(job), 1)
    started = start.create(job, spec, file)
    start.start_manager(started, spec)

    def call(*argv: str, **popen: Any) -> subprocess.Popen[str]:
        return subprocess.Popen([RRL, *argv], text=True, **popen)

    run = TestRun(started, call)
    pid = run.wait(lambda state: _generates(state, FAST, 1) and _generates(state, ROLLOUT, 1)).replica(FAST).pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    step = run.wait(lambda state: _generates(state, FAST, 2) and all_work(state)).step
    state = run.wait_steps(step + 1)
    assert state.replica(ROLLOUT).incarnation_number == 1
    version = state.replica(FAST).weight_version
    assert version is not None
    assert version.step > 0
    with run.call("status", run.run.id, stdout=subprocess.PIPE) as process:
        shown, _ = process.communicate(timeout=60)
    assert re.search(r"(?m)^ +fast \d+ % (idle|at work)", shown), shown
    assert re.search(r"(?m)^fast/0 +#2 .* v\d+\b", shown), shown
    cancel(run)
    summary = run.summary()
    (recovery,) = summary["recoveries"]
    assert recovery["replica"] == FAST
    assert recovery["weights_s"] is not None
    assert recovery["first_work_s"] is not None
    assert {"fast", "rollout", "trainer"} <= summary["stream"]["idle"].keys()


def _generates(state: State, replica: ReplicaId, number: int) -> bool:
    """Return whether this incarnation has reported tokens, which it generated for leased trajectories."""
    newest = state.idle_times.newest.get(replica)
    return newest is not None and newest.number == number and newest.clock.done > 0
