"""``rrl submit`` validates and resolves a job once: preview, preflight and manager get the same run spec."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rrl.api.preflight import job_preflight
from rrl.cli import main
from rrl.cli.run.status import metrics_failure
from rrl.cluster.slurm.site import JobLimits
from rrl.config.job import resolve as resolving
from rrl.config.job.load import load_job, resolved
from rrl.config.job.schema import Job
from rrl.core.run_dir import HISTORY_ENV, RUNS_ENV, RunDir
from rrl.core.run_spec import HealthSpec, RunSpec
from rrl.core.types import Outcome
from rrl.manager.bootstrap import start as starting
from rrl.manager.bootstrap.preflight import SlurmAnswer
from rrl.manager.bootstrap.preview import preview
from rrl.tests.support.cli.story import Story, job_view
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

    async def check_with_slurm(job: Job, spec: RunSpec, foreground: bool) -> SlurmAnswer:
        passed["preflight"] = spec
        return SlurmAnswer([])

    async def read_limits(options: dict[str, str]) -> JobLimits:
        return JobLimits()

    def start_manager(run: RunDir, spec: RunSpec) -> str:
        passed["start"] = spec
        passed["create"] = msgspec.json.decode(run.run_spec.read_bytes(), type=RunSpec)
        return ""

    monkeypatch.setattr(resolving, "resolve", counted)
    monkeypatch.setattr(Job, "model_validate", counted_validation)
    monkeypatch.setattr(job_preflight, "preview", shown)
    monkeypatch.setattr(job_preflight, "check_with_slurm", check_with_slurm)
    monkeypatch.setattr(job_preflight, "read_limits", read_limits)
    monkeypatch.setattr("shutil.which", lambda _: "/usr/bin/sbatch")
    monkeypatch.setattr(starting, "start_manager", start_manager)
    (tmp_path / "job.toml").write_text(text)
    assert main.run(["submit", str(tmp_path / "job.toml")]) == 0
    assert (len(specs), len(validated)) == (1, 1)
    expected = {"preview", "create", "start"} | ({"preflight"} if text == SLURM else set())
    assert passed.keys() == expected
    assert all(spec == passed["start"] for spec in passed.values())
    assert passed["start"].health.history == "/site/history"


def test_submit_keeps_files_and_settings_as_one_file_that_gives_the_same_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = [*submission(tmp_path, monkeypatch, ""), str(tmp_path / "more.toml")]
    (tmp_path / "more.toml").write_text(
        '[roles.rollout]\nreplicas = 3\nenv.BAR = "x = 1"\n[[faults.random]]\nkinds = ["kill"]\nevery = "1h"\n'
    )
    settings = ["--set", "roles.trainer.learning_rate=1e-6", "--set", "cluster.walltime=8h"]
    assert main.run([*command, *settings, "--set", "faults.planned=[]"]) == 0
    run = RunDir(tmp_path / "runs" / capsys.readouterr().out.strip())
    job = load_job(run.job_toml)
    assert (job.roles.rollout.replicas, job.roles.trainer.learning_rate, job.cluster.walltime) == (3, 1e-6, 28800.0)
    assert job.roles.rollout.env == {"FOO": "bar", "BAR": "x = 1"}
    assert (len(job.faults.planned), len(job.faults.random)) == (0, 1)
    recorded = msgspec.json.decode(run.resolved.read_bytes())
    assert (recorded["job"], recorded["source"]) == (resolved(job), str(tmp_path / "job.toml"))
    first = run.job_toml.read_text().splitlines()[0]
    assert first.startswith(f"# Merged by rrl from {tmp_path}/job.toml + {tmp_path}/more.toml + --set roles.trainer.")


def test_submit_keeps_a_single_file_with_its_comments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.run(submission(tmp_path, monkeypatch, "# why")) == 0
    run = RunDir(tmp_path / "runs" / capsys.readouterr().out.strip())
    assert run.job_toml.read_text() == (tmp_path / "job.toml").read_text()


def submission(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, extra: str) -> list[str]:
    """Return the command that submits a local job with ``extra`` tables. No manager will be started."""
    monkeypatch.setenv(RUNS_ENV, str(tmp_path / "runs"))
    monkeypatch.setattr(starting, "start_manager", lambda run, spec: "")
    (tmp_path / "job.toml").write_text(f"{JOB}\n{extra}")
    return ["submit", str(tmp_path / "job.toml")]


@pytest.mark.parametrize("how", [(), ("--foreground",)], ids=["background", "foreground"])
def test_submit_on_a_network_that_is_not_there_is_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], how: tuple[str, ...]
) -> None:
    command = submission(tmp_path, monkeypatch, '[transport]\nnetwork = "ib77"')
    assert main.run([*command, *how]) == 2
    reported = capsys.readouterr().err
    assert reported.startswith(
        f"rrl: {tmp_path}/job.toml:26: transport.network: no interface ib77 with an IPv4 address"
    )
    assert reported.count("\n") == 1
    assert not (tmp_path / "runs").exists()


def test_submit_warns_of_a_taken_metrics_port(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"127.0.0.1:{other.getsockname()[1]}"
        command = submission(tmp_path, monkeypatch, f'[health]\nmetrics = "{address}"')
        assert main.run(command) == 0
    warning = f"metrics will not be served at {address}: the port is taken; the run goes on without them"
    assert f"rrl: warning: {warning}\n" in capsys.readouterr().err
    assert main.run(command) == 0
    assert "metrics" not in capsys.readouterr().err


def test_status_says_why_metrics_are_not_served_until_the_run_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(RUNS_ENV, str(tmp_path))
    job = msgspec.structs.replace(job_view(), health=HealthSpec(metrics="127.0.0.1:9464"))
    story = Story("small-7", job).works()
    run = story.written(tmp_path)
    run.metrics_failure.write_text("not served at 127.0.0.1:9464: Address already in use\n")
    assert main.run(["status"]) == 0
    assert "metrics of the manager: not served at 127.0.0.1:9464: Address already in use" in capsys.readouterr().out
    assert main.run(["status", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["metrics_failure"] == "not served at 127.0.0.1:9464: Address already in use"
    assert metrics_failure(run, story.ends(Outcome.COMPLETED, "all steps are done").recorded()) == ""
