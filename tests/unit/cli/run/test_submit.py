"""``rrl submit`` validates and resolves a job once: preview, preflight and manager get the same run spec."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from rrl.cli import main
from rrl.cli.job import check
from rrl.config.job import resolve as resolving
from rrl.config.job.schema import Job
from rrl.core.run_dir import HISTORY_ENV, RUNS_ENV, RunDir
from rrl.core.run_spec import RunSpec
from rrl.manager.bootstrap import start as starting
from rrl.manager.bootstrap.preflight import Problem
from rrl.manager.bootstrap.preview import preview
from rrl.manager.cluster.slurm.limits import JobLimits
from rrl.tests.support.job_toml import JOB

SLURM = JOB.replace('kind = "local"', 'kind = "slurm"\nform = "hetjob"\none_node_components = true')


@pytest.mark.parametrize("text", [JOB, SLURM], ids=["local", "slurm"])
def test_submit_resolves_once_and_passes_one_run_spec_on(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(RUNS_ENV, str(tmp_path / "runs"))
    monkeypatch.setenv(HISTORY_ENV, "/site/history")
    specs: list[RunSpec] = []
    validated: list[Job] = []
    passed: dict[str, RunSpec] = {}
    resolve, validate = resolving.resolve, Job.model_validate

    def counted(job: Job, python: str) -> RunSpec:
        specs.append(resolve(job, python))
        return specs[-1]

    def counted_validation(data: Any) -> Job:
        validated.append(validate(data))
        return validated[-1]

    def shown(spec: RunSpec) -> list[tuple[str, str]]:
        passed["preview"] = spec
        return preview(spec)

    async def check_with_slurm(job: Job, spec: RunSpec, foreground: bool) -> list[Problem]:
        passed["preflight"] = spec
        return []

    async def read_limits(options: dict[str, str]) -> JobLimits:
        return JobLimits()

    def start_manager(run: RunDir, spec: RunSpec) -> str:
        passed["start"] = spec
        passed["create"] = msgspec.json.decode(run.run_spec.read_bytes(), type=RunSpec)
        return ""

    monkeypatch.setattr(resolving, "resolve", counted)
    monkeypatch.setattr(Job, "model_validate", counted_validation)
    monkeypatch.setattr(check, "preview", shown)
    monkeypatch.setattr(check, "check_with_slurm", check_with_slurm)
    monkeypatch.setattr(check, "read_limits", read_limits)
    monkeypatch.setattr("shutil.which", lambda _: "/usr/bin/sbatch")
    monkeypatch.setattr(starting, "start_manager", start_manager)
    (tmp_path / "job.toml").write_text(text)
    assert main.run(["submit", str(tmp_path / "job.toml")]) == 0
    assert (len(specs), len(validated)) == (1, 1)
    expected = {"preview", "create", "start"} | ({"preflight"} if text == SLURM else set())
    assert passed.keys() == expected
    assert all(spec == passed["start"] for spec in passed.values())
    assert passed["start"].health.history == "/site/history"
