"""``rrl submit --wait`` ends if the managers die on a real Slurm before they begin the run."""

from __future__ import annotations

import json
import subprocess

import pytest

from rrl.core.run_dir import RUNS_ENV, RunDir
from rrl.tests.support.runs import RRL, TIMEOUT_S, check_records, light_job, write_job
from rrl.tests.support.slurm.lab import SlurmLab

pytestmark = pytest.mark.slurm


@pytest.mark.parametrize(
    ("where", "old", "new", "last_line"),
    [
        ("job", 'weights = "tcp"', 'weights = "tcp"\nnetwork = "hsn9"', "no interface hsn9 with an IPv4 address"),
        ("pool", "[task]", '[env]\npython = "/nowhere/bin/python"\n[task]', "/nowhere/bin/python"),
    ],
)
def test_managers_that_die_at_their_start_reject_the_run(
    slurm_lab: SlurmLab, where: str, old: str, new: str, last_line: str
) -> None:
    folder = slurm_lab.user_home / f"no-manager-{where}"
    slurm_lab.call_as_user(folder.mkdir)
    toml = light_job("slurm", 3, extra=f'[manager]\nwhere = "{where}"\n').replace(old, new, 1)
    job = write_job(folder, toml)

    def rrl(*arguments: str) -> subprocess.CompletedProcess[str]:
        env = {RUNS_ENV: str(folder / "runs")}
        return slurm_lab.run_as_user([RRL, *arguments], env=env, cwd=folder, timeout=TIMEOUT_S, check=False)

    done = rrl("submit", str(job), "--wait", "--json")
    assert done.returncode == 2, done.stderr
    ended = json.loads(done.stdout)
    assert ended["outcome"] == "rejected"
    assert last_line in ended["why"]
    assert last_line in done.stderr.splitlines()[-1]
    status = rrl("status").stdout
    assert status.startswith(f"{ended['run']}: rejected: ")
    assert last_line in status
    slurm_lab.wait_no_jobs()
    check_records(RunDir(folder / "runs" / ended["run"]))
