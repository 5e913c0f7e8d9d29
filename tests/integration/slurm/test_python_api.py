"""A plain user runs the example of the Python API on a real Slurm."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from rrl.core.run_dir import RUNS_ENV, RunDir
from rrl.examples import sweep as example
from rrl.tests.support.light_roles.light_rollout import BEST_RATE_ENV
from rrl.tests.support.runs import TIMEOUT_S, check_sound, light_job, write_job
from rrl.tests.support.slurm.lab import SlurmLab

pytestmark = pytest.mark.slurm


@pytest.mark.long  # tests/integration/local/test_python_api.py runs the programs of the page
def test_the_best_of_three_learning_rates_is_found_side_by_side(slurm_lab: SlurmLab) -> None:
    folder = slurm_lab.user_home / "sweep"
    slurm_lab.call_as_user(folder.mkdir)
    best_rate = example.LEARNING_RATES[1]
    light = light_job("slurm", 2, rollouts=1, spares=0, warm=False)
    job = write_job(folder, light.replace("[roles.rollout]", f'[roles.rollout]\nenv.{BEST_RATE_ENV} = "{best_rate}"'))
    program = (sys.executable, example.__file__, job.name)
    process = slurm_lab.popen_as_user(
        program, env={RUNS_ENV: str(folder / "runs")}, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    out, err = process.communicate(timeout=2 * TIMEOUT_S)
    assert process.returncode == 0, err
    *lines, best = out.splitlines()
    assert [line.split()[4] for line in lines] == ["0.00", "1.00", "0.00"], out
    assert lines[1].endswith(f"({best.removeprefix('the best: ')})")
    runs = [RunDir(path) for path in Path(folder / "runs").iterdir()]
    assert len(runs) == 3
    for run in runs:
        check_sound(run)
    slurm_lab.wait_no_jobs()
