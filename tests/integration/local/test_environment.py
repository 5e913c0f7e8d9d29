"""[env], [container] and [transport] network determine the environment of plain commands in whole runs."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from rrl.tests.support.runs import TestRun, submit_here, submit_on
from rrl.tests.support.slurm.lab import SlurmLab

FAKE_APPTAINER = Path(__file__).parents[2] / "support" / "fake_apptainer"
SHELL = {"LOOK_SECRET": "s3", "SLURM_NTASKS": "64", "PMI_RANK": "5", "PMIX_RANK": "5", "OMPI_COMM_WORLD_RANK": "5"}
"""Variables of the submitting shell. The last four belong to a launcher of another program."""
BOXED = """
[container]
image = "box.sif"
[commands.boxed]
launcher = "apptainer"
command = ["sh", "-c", "env > boxed.new; mv boxed.new boxed.env"]
watch = "activity"
"""


def job(cluster: str, extra: str = "") -> str:
    return f"""
[run]
name = "look"
[cluster]
kind = "{cluster}"
spares = 0
node = {{ cpus = 2, mem = "1GiB" }}
[env]
setup = ["PATH=$PWD/bin:$PATH", "export SET_UP=yes FAKE_APPTAINER_CALL=$PWD/call"]
passed = ["LOOK_*", "SLURM_*"]
probe = ["json"]
python = "{sys.executable}"
[transport]
network = "lo"
[commands.look]
command = ["sh", "-c", "env > look.new; mv look.new look.env"]
mem = "256MiB"
watch = "activity"
[limits]
heartbeat = "500ms"
silence = "10s"
poll = "1s"
{extra}
"""


def observed(folder: Path, role: str) -> dict[str, str]:
    return dict(line.split("=", 1) for line in (folder / f"{role}.env").read_text().splitlines() if "=" in line)


def ends_well(run: TestRun) -> None:
    state = run.wait_end()
    assert state.outcome == "completed", state.why
    run.wait_gone()


def matches_request(given: dict[str, str]) -> None:
    assert (given["LOOK_SECRET"], given["SET_UP"]) == ("s3", "yes")
    assert (given["GLOO_SOCKET_IFNAME"], given["RRL_ADDRESS"]) == ("lo", "127.0.0.1")
    assert not [name for name in given if name.startswith(("SLURM", "PMI", "OMPI"))]


def test_roles_get_the_configured_environment_also_in_a_container(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in SHELL.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/apptainer").symlink_to(FAKE_APPTAINER)
    run = submit_here(tmp_path, job("local", BOXED))
    ends_well(run)
    matches_request(observed(tmp_path, "look"))
    matches_request(observed(tmp_path, "boxed"))
    assert f"--bind={run.run.path}:{run.run.path}" in (tmp_path / "call").read_text().splitlines()
    reported = [path for path in run.run.path.rglob("*") if path.is_file() and b"s3" in path.read_bytes()]
    assert {path.parent.name for path in reported} <= {run.run.id, "steps"}, "a secret is in the journal or in a log"
    assert {path.stat().st_mode & 0o777 for path in reported} == {0o600}


def test_interpreter_without_rrl_on_the_nodes_rejects_the_job_with_its_own_message(tmp_path: Path) -> None:
    path = tmp_path / "python"
    path.write_text("#!/bin/sh\necho \"$0: No module named 'rrl'\" >&2; exit 1\n")
    path.chmod(0o755)
    toml = job("local", 'quiet = "500ms"\n[recovery]\nbackoff = "100ms"').replace('probe = ["json"]\n', "")
    run = submit_here(tmp_path, toml.replace(sys.executable, str(path)))
    state = run.wait_end()
    assert (state.outcome, state.why) == ("rejected", f"look: not started: {path}: No module named 'rrl' on local1")
    run.wait_gone()


@pytest.mark.slurm
def test_roles_on_slurm_get_the_configured_environment_and_no_slurm_variables(slurm_lab: SlurmLab) -> None:
    run = submit_on(slurm_lab, "look", job("slurm"), SHELL)
    ends_well(run)
    matches_request(observed(slurm_lab.user_home / "look", "look"))
    slurm_lab.clear()
