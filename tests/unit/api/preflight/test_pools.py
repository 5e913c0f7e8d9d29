"""``rrl check`` compares the largest number of jobs of each rollout pool with the limits of the pool's own options."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from rrl.api.preflight import job_preflight
from rrl.cli import main
from rrl.cluster.slurm.site import JobLimits, Limit
from rrl.config.job.schema import Job
from rrl.core.run_spec import RunSpec
from rrl.manager.bootstrap.preflight import SlurmAnswer
from rrl.tests.support.job_toml import JOB

POOLS = """\
[rollouts.h20]
replicas = 2
slurm = { qos = "normal" }
[rollouts.burst]
replicas = { max = 12 }
node_hours = 3
slurm = { qos = "scavenger" }
"""


def test_pool_beyond_the_limits_of_its_qos_is_a_doubt_with_the_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def check_with_slurm(job: Job, spec: RunSpec, foreground: bool) -> SlurmAnswer:
        return SlurmAnswer([])

    async def read_limits(options: Mapping[str, str]) -> JobLimits:
        qos = options.get("qos", "")
        return JobLimits((Limit(8, False, True, f"MaxSubmitJobsPerUser of QOS {qos}"),) if qos else ())

    monkeypatch.setattr(job_preflight, "check_with_slurm", check_with_slurm)
    monkeypatch.setattr(job_preflight, "read_limits", read_limits)
    monkeypatch.setattr("shutil.which", lambda _: "/usr/bin/sbatch")
    path = tmp_path / "job.toml"
    path.write_text(JOB.replace('"local"', '"slurm"') + POOLS)
    assert main.run(["check", "--no-task", str(path)]) == 0
    shown = capsys.readouterr().out
    line = (JOB + POOLS).splitlines().index("replicas = { max = 12 }") + 1
    assert (
        f"job.toml:{line}: rollouts.burst.replicas: the pool can have 12 jobs at the same time, and MaxSubmitJobs"
        in shown
    )
    assert "is 8: it then stays smaller" in " ".join(shown.split())
    assert "rollouts.h20" not in shown
