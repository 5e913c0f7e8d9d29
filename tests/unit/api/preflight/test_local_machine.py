"""``rrl check`` and ``rrl submit`` compare a local run with the cores and memory of this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rrl.api.preflight import job_preflight
from rrl.api.preflight.local_machine import Machine, size_problem, this_machine
from rrl.cli import main
from rrl.config.job.resolve import resolve
from rrl.config.job.schema import Job
from rrl.core.run_dir import RUNS_ENV
from rrl.manager.bootstrap.preflight import Problem
from rrl.tests.support.job_toml import JOB

SMALL = Machine(cores=2, memory=24 * 2**30)


def problem(machine: Machine = SMALL, **tables: Any) -> Problem | None:
    table = {
        "run": {"name": "test", "steps": 1},
        "model": {"tokenizer": {"pieces": "0123456789"}},
        "task": {"function": "mine:make"},
    }
    job = Job.model_validate(table | tables)
    return size_problem(job, resolve(job, "python"), machine)


def test_job_that_may_fit_is_accepted_with_any_number_of_cores() -> None:
    assert problem() is None
    assert (
        problem(cluster={"node": {"cpus": 64, "mem": "24GiB"}}, roles={"rollout": {"replicas": 8, "cpus": 8}}) is None
    )
    assert problem(model={"path": "/no/such/model"}, roles={"trainer": {"gpus": 0}}) is None


def test_node_with_more_memory_than_the_machine_is_refused() -> None:
    found = problem(cluster={"node": {"mem": "25GiB"}})
    assert found == Problem(("cluster", "node", "mem"), "25GiB is more than this machine has (24.0 GiB); lower it")


def test_more_processes_than_the_memory_holds_are_refused_at_the_largest_role() -> None:
    found = problem(roles={"rollout": {"replicas": 4000}})
    assert found is not None
    assert found.key == ("roles", "rollout", "replicas")
    assert found.text == (
        "4000: the processes of the run need at least 1,094.1 GiB, and this machine has 24.0 GiB and 2 cores; lower it"
    )
    commands = {"sim": {"command": ["sim"], "ranks": 4000}}
    found = problem(commands=commands)
    assert found is not None
    assert found.key == ("commands", "sim", "ranks")
    assert problem(Machine(2, 2**40), commands=commands) is None


def test_elastic_pool_counts_at_its_largest() -> None:
    burst = {"replicas": {"min": 1, "max": 4000}, "node_hours": 1}
    found = problem(rollouts={"burst": burst})
    assert found is not None
    assert found.key == ("rollouts", "burst", "replicas")
    assert found.text.startswith("4000: the processes of the run need at least ")
    assert problem(rollouts={"burst": burst | {"replicas": {"max": 4}}}) is None


def test_model_that_the_memory_cannot_hold_is_refused() -> None:
    tokenizer = {"pieces": "0123456789"}
    found = problem(model={"tokenizer": tokenizer, "layers": 10**9})
    assert found is not None
    assert found.key == ("model",)
    assert "weights needs at least" in found.text
    medium = {"tokenizer": tokenizer, "hidden_size": 4096, "intermediate_size": 12288, "layers": 16}
    assert problem(model=medium) is not None, (
        "no problem found, though the trainer's optimizer needs 30 GiB for 2.5e9 weights"
    )
    on_gpus = {"trainer": {"gpus": 1}, "rollout": {"gpus": 1}}
    assert problem(model=medium, roles=on_gpus, cluster={"node": {"gpus": 1}}) is None
    own = {"trainer": {"command": ["python"]}, "rollout": {"command": ["python"]}}
    assert problem(model=medium, roles=own) is None


def test_this_machine_has_cores_and_memory() -> None:
    here = this_machine()
    assert here.cores > 0
    assert here.memory > 2**28


def changed(before: str, after: str) -> str:
    assert before in JOB
    return JOB.replace(before, after)


@pytest.mark.parametrize("command", ["check", "submit"])
@pytest.mark.parametrize(
    ("job", "line"),
    [
        (changed('"4GiB"', '"900TiB"'), "7: cluster.node.mem: 900TiB is more than this machine has ("),
        (changed("replicas = 2", "replicas = 4000"), "17: roles.rollout.replicas: 4000: the processes of the run need"),
        (
            changed("[model.tokenizer]", "[model]\nhidden_size = 1000000000\n[model.tokenizer]"),
            "9: model: a model of 1.7e+12 weights needs at least",
        ),
        (f'{JOB}[transport]\nnetwork = "ib7"\n', "25: transport.network: no interface ib7 with an IPv4 address; there"),
        (f'{JOB}[env]\nvenv = "/no/venv"\n', "25: env.venv: '/no/venv' does not exist; name a path that exists"),
        (f'{JOB}[env]\npython = "/no/py"\n', "25: env.python: '/no/py' does not exist; name a path that exists"),
        (f'{JOB}[commands.judge]\ncommand = ["juge"]\n', '25: commands.judge.command: there is no command "juge" in'),
    ],
)
def test_local_job_that_cannot_run_on_this_machine_is_refused_in_one_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    command: str,
    job: str,
    line: str,
) -> None:
    monkeypatch.setenv(RUNS_ENV, str(tmp_path / "runs"))
    monkeypatch.setattr(job_preflight, "this_machine", lambda: SMALL)
    path = tmp_path / "job.toml"
    path.write_text(job)
    assert main.run([command, str(path)]) == 2
    reported = capsys.readouterr().err
    assert reported.startswith(f"rrl: {path}:{line}")
    assert reported.count("\n") == 1
    assert not (tmp_path / "runs").exists()
