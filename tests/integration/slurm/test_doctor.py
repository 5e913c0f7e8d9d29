"""On a real Slurm, the findings of rrl doctor are true, and it leaves no job and no file behind."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import pytest

from rrl.cli.doctor import node_visit as visiting
from rrl.cli.doctor.collect import read_facts
from rrl.cli.doctor.facts import DoctorOptions, Facts, Visit
from rrl.cli.doctor.node_probe.host import Unavailable
from rrl.core.run_dir import RUNS_ENV
from rrl.tests.support.cli.check_output import doubts_in
from rrl.tests.support.runs import RRL
from rrl.tests.support.slurm.lab import SlurmLab

pytestmark = pytest.mark.slurm

TIMEOUT_S = 30.0
TORCH = "__version__ = '9.9'\nclass cuda:\n    is_available = staticmethod(lambda: False)\n"
"""A replacement for torch, because the import of torch takes two seconds on two cores."""


@pytest.fixture
def lab(slurm_lab: SlurmLab) -> Iterator[SlurmLab]:
    yield slurm_lab
    slurm_lab.clear()


@pytest.fixture
def env(lab: SlurmLab) -> dict[str, str]:
    """Return an environment that names a folder of runs that does not exist yet."""
    light = lab.dir / "light"
    light.mkdir(exist_ok=True)
    (light / "torch.py").write_text(TORCH)
    return {RUNS_ENV: str(lab.user_home / f"doctor-{time.monotonic_ns()}/runs"), "PYTHONPATH": str(light)}


MAY_FAIL = {"host.filter", "node.filter"}
"""Checks of NIXL over TCP, which may fail.

No job uses this transport by default, and a kernel may deny its packet filter to plain users.
"""


OPEN_FILES = 999
"""Limit of open files in the shell of the user who runs ``rrl doctor``; the lab's nodes have another limit."""


def doctor(lab: SlurmLab, env: dict[str, str], *arguments: str) -> tuple[int, dict[str, dict[str, Any]]]:
    limited = ["bash", "-c", f'ulimit -Sn {OPEN_FILES}; exec "$@"', "bash", RRL, "doctor", "--json", *arguments]
    done = lab.run_as_user(limited, env=env, check=False)
    assert done.stdout, done.stderr
    return done.returncode, {check["name"]: check for check in json.loads(done.stdout)["checks"]}


def verdicts(checks: dict[str, dict[str, Any]]) -> dict[str, str]:
    return {name: check["verdict"] for name, check in checks.items()}


def test_doctor_with_consent_checks_a_node_and_leaves_nothing(lab: SlurmLab, env: dict[str, str]) -> None:
    code, checks = doctor(lab, env, "--yes")
    verdict_of = verdicts(checks)
    failed = {name for name, verdict in verdict_of.items() if verdict == "FAIL"}
    assert failed <= MAY_FAIL
    assert code == bool(failed)
    assert [name for name, verdict in verdict_of.items() if verdict == "UNKNOWN"] in ([], ["slurm.confined"])
    for name in (
        "slurm.pool",
        "slurm.replica",
        "slurm.manager",
        "slurm.answers",
        "slurm.hold",
        "slurm.select",
        "node.visit",
        "node.folder",
        "node.answer",
        "node.rrl",
        "node.packages",
        "node.torch",
        "node.reach",
        "node.clock",
        "node.sbatch",
    ):
        assert verdict_of[name] == "OK", checks[name]
    assert verdict_of["slurm.hetjob"] == "WARN"
    assert verdict_of["slurm.drain"] == ("OK" if lab.user == "root" else "WARN")
    assert "with 2 GPU" in checks["slurm.gpus"]["found"]
    assert "9.9" in checks["node.torch"]["found"]
    assert checks["host.nofile"]["found"].startswith(f"{OPEN_FILES} ")
    assert not checks["node.nofile"]["found"].startswith(f"{OPEN_FILES} "), (
        "the check of the node shows the limit of the shell, which does not apply to steps"
    )
    assert "Slurm gave the job GPU" in checks["node.gpus"]["found"]  # no driver has the lab's fake GPUs
    lab.wait_no_jobs()
    assert not Path(env[RUNS_ENV]).exists()


def test_doctor_without_consent_submits_nothing(lab: SlurmLab, env: dict[str, str]) -> None:
    code, checks = doctor(lab, env)
    failed = {name for name, verdict in verdicts(checks).items() if verdict == "FAIL"}
    assert failed <= MAY_FAIL
    assert code == bool(failed)
    assert {checks[name]["verdict"] for name in checks if name.startswith("node.")} == {"UNKNOWN"}
    assert "you did not allow a job" in checks["node.visit"]["found"]
    assert lab.jobs() == []


def test_doctor_reports_a_missing_partition_with_sbatchs_message(lab: SlurmLab, env: dict[str, str]) -> None:
    code, checks = doctor(lab, env, "--partition", "nope", "--yes")
    assert code == 1
    assert checks["slurm.pool"]["verdict"] == "FAIL"
    assert "nvalid partition" in checks["slurm.pool"]["found"]
    assert "--partition" in checks["slurm.pool"]["fix"]
    assert checks["slurm.walltime"]["verdict"] == "UNKNOWN"
    assert "nvalid partition" in checks["node.visit"]["found"]
    assert checks["node.visit"]["verdict"] == "UNKNOWN"


def test_doctor_with_an_unanswering_controller_reports_nothing_as_ok(lab: SlurmLab, env: dict[str, str]) -> None:
    with lab.controller_stopped():
        _, checks = doctor(lab, env)
    lab.wait_states(dict.fromkeys(lab.nodes, "idle"))
    cluster = {name: check for name, check in checks.items() if name.startswith(("slurm.", "node."))}
    installed = any(distribution.name == "pyslurm" for distribution in distributions())
    known = {"slurm.here"} if installed else {"slurm.here", "slurm.reader"}  # without pyslurm it needs no query
    assert {name for name, check in cluster.items() if check["verdict"] != "UNKNOWN"} == known
    assert all(check["found"] for check in cluster.values())


def _visit(lab: SlurmLab, env: dict[str, str], expected: str, **changes: object) -> None:
    """Visit a node as the plain user, with changed attributes of the module or of sys, and check the resulting text."""

    def visit_as_user() -> None:
        import os

        os.environ.update(env)
        for name, value in changes.items():
            setattr(sys if name == "executable" else visiting, name, value)
        facts: Facts = read_facts(DoctorOptions())
        visit = visiting.visit_node(facts)
        assert isinstance(visit, Unavailable | Visit)
        why = visit.why if isinstance(visit, Unavailable) else f"visited {visit.report.node}: {visit.report.folder}"
        assert expected in why, why

    lab.call_as_user(visit_as_user)
    assert not Path(env[RUNS_ENV]).exists()


def test_node_visit_names_an_interpreter_missing_on_the_node(lab: SlurmLab, env: dict[str, str]) -> None:
    _visit(lab, env, "/nonexistent/python does not exist on the node", executable="/nonexistent/python")
    lab.wait_no_jobs()


def test_node_visit_that_ends_early_is_reported_with_its_last_line(lab: SlurmLab, env: dict[str, str]) -> None:
    script = "#!/bin/sh\nexec >{folder}/job.log 2>&1; echo no module rrl; exit 1\n"
    _visit(lab, env, "no module rrl", _SCRIPT=script)
    lab.wait_no_jobs()


def test_node_visit_that_does_not_start_is_cancelled(lab: SlurmLab, env: dict[str, str]) -> None:
    _visit(lab, env, "PENDING", _JOB_OPTIONS=(*visiting._JOB_OPTIONS, "--hold"), MAX_QUEUE_S=1.0)
    lab.wait_no_jobs()


def test_doctor_submits_no_job_while_every_node_is_busy(lab: SlurmLab, env: dict[str, str]) -> None:
    lab.run_as_user(
        [
            "sbatch",
            f"--nodes={len(lab.nodes)}",
            "--exclusive",
            "--time=60",
            "--output=/dev/null",
            "--job-name=full",
            "--wrap=sleep 3600",
        ]
    )
    lab.wait_states(dict.fromkeys(lab.nodes, "alloc"))
    _visit(lab, env, "no node is free soon: the job would start at 2")
    assert [job.split()[1] for job in lab.jobs()] == ["full"]


def test_node_visit_finds_a_folder_that_is_not_shared(lab: SlurmLab, env: dict[str, str]) -> None:
    script = visiting._SCRIPT.replace(
        "rrl.cli.doctor.node_probe.main {folder}", "rrl.cli.doctor.node_probe.main {folder}/elsewhere"
    )
    _visit(lab, env, "visited n1: No such file or directory", _SCRIPT=script)
    lab.wait_no_jobs()


def test_rrl_init_writes_a_job_that_rrl_check_accepts(lab: SlurmLab, env: dict[str, str]) -> None:
    job = lab.user_home / f"init-{time.monotonic_ns()}.toml"
    lab.run_as_user([RRL, "init", "--no", "--out", str(job)], env=env)
    text = job.read_text()
    assert 'kind = "slurm"' in text
    assert 'partition = "main"' in text
    assert "spares = 1" in text
    checked = lab.run_as_user([RRL, "check", str(job)], env=env, check=False)
    assert (checked.returncode, checked.stderr, doubts_in(checked.stdout)) == (0, "", [])
    second = lab.run_as_user([RRL, "init", "--no", "--out", str(job)], env=env, check=False)
    assert (second.returncode, second.stdout) == (2, "")
    assert lab.jobs() == []
