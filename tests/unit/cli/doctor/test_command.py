"""``rrl doctor`` and ``rrl init`` on a machine without Slurm."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rrl.cli import main
from rrl.cli.doctor import collect
from rrl.cli.doctor import command as doctor
from rrl.cli.doctor.facts import DoctorOptions, Facts
from rrl.cli.doctor.node_probe.host import Unavailable
from rrl.config.job.load import load_job
from rrl.core.run_dir import RUNS_ENV
from rrl.tests.support.cli import findings
from rrl.tests.support.cli.json_keys import assert_fits_its_schema


@pytest.fixture
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Set up a machine without Slurm on PATH, and with a folder of runs that does not exist yet."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv(RUNS_ENV, str(tmp_path / "home/runs"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "home").mkdir()
    return tmp_path


def test_doctor_without_slurm_reports_what_works_and_changes_nothing(
    alone: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.run(["doctor"]) == 0
    shown = capsys.readouterr().out
    assert 'kind = "local" works' in shown
    assert "0 FAIL" in shown
    assert list(alone.rglob("*")) == [alone / "home"]


def test_slurm_commands_without_a_cluster_count_as_no_slurm(alone: Path, capsys: pytest.CaptureFixture[str]) -> None:
    error = "slurm_load_ctl_conf error: Could not establish a configuration source"
    for name in ("sbatch", "scontrol", "sacctmgr"):
        (alone / name).write_text(f"#!/bin/sh\necho '{error}' >&2; exit 1\n")
        (alone / name).chmod(0o755)
    assert main.run(["doctor", "--yes"]) == 0
    shown = capsys.readouterr().out
    assert "no cluster is configured" in shown
    assert "compute node" not in shown


def test_json_output_is_one_document_with_checks_and_facts(alone: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["doctor", "--json"]) == 0
    reported = json.loads(capsys.readouterr().out)
    assert set(reported) == {"schema", "checks", "facts"}
    assert_fits_its_schema("doctor", reported)
    assert [set(check) for check in reported["checks"]] == [{"name", "verdict", "found", "fix"}] * len(
        reported["checks"]
    )
    assert reported["facts"]["slurm"] is None
    assert {check["name"]: check["verdict"] for check in reported["checks"]}["runs.writable"] == "OK"


def test_unwritable_folder_of_runs_is_a_failure(
    alone: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(RUNS_ENV, "/proc/runs")
    assert main.run(["doctor"]) == 1
    assert "FAIL    writable   /proc: No such file or directory" in capsys.readouterr().out


def test_reader_that_never_answers_does_not_affect_other_readers(
    alone: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(root: Path) -> object:
        raise TimeoutError("no answer within 5 s")

    monkeypatch.setattr(collect, "read_storage", broken)
    assert main.run(["doctor"]) == 0
    shown = capsys.readouterr().out
    assert "UNKNOWN 4 checks   no answer within 5 s (writable, kind, space, durable)" in shown
    assert "OK      machine" in shown


def test_without_consent_no_question_is_printed_and_no_job_submitted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "read_facts", lambda wanted: findings.facts(node=None))
    for consent in (None, False):
        assert doctor.gather_facts(DoctorOptions(), consent=consent, interactive=True).node == Unavailable(
            doctor.NOT_ALLOWED
        )


def test_with_consent_a_node_is_visited_by_a_job(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def visit(facts: Facts) -> Unavailable:
        return Unavailable("no node is free")

    monkeypatch.setattr(doctor, "read_facts", lambda wanted: findings.facts(node=None))
    monkeypatch.setattr("rrl.cli.doctor.node_visit.visit_node", visit)
    assert doctor.gather_facts(DoctorOptions(), consent=True, interactive=False).node == Unavailable("no node is free")
    assert "checking a compute node" in capsys.readouterr().err


@pytest.mark.parametrize(("answer", "looked"), [("y", True), ("Yes ", True), ("\n", False), ("n", False), ("", False)])
def test_user_at_a_terminal_is_asked(monkeypatch: pytest.MonkeyPatch, answer: str, looked: bool) -> None:
    class Terminal:
        def isatty(self) -> bool:
            return True

        def write(self, text: str) -> int:
            return len(text)

        def flush(self) -> None: ...

    def printed(question: str) -> str:
        assert "a job of 10 s" in question
        if not answer:
            raise EOFError
        return answer

    monkeypatch.setattr(doctor, "read_facts", lambda wanted: findings.facts(node=None))
    monkeypatch.setattr("rrl.cli.doctor.node_visit.visit_node", lambda facts: Unavailable("looked"))
    monkeypatch.setattr("builtins.input", printed)
    monkeypatch.setattr(sys, "stdin", Terminal())
    monkeypatch.setattr(sys, "stdout", Terminal())
    assert (
        doctor.gather_facts(DoctorOptions(), consent=None, interactive=True).node == Unavailable("looked")
    ) is looked
    assert doctor.gather_facts(DoctorOptions(), consent=None, interactive=False).node == Unavailable(
        doctor.NOT_ALLOWED
    )  # --json asks nobody


# ── init ───────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_init_writes_a_job_that_check_accepts(alone: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["init"]) == 0
    assert capsys.readouterr().out == "wrote job.toml; see what it would start: rrl check job.toml\n"
    assert load_job(alone / "job.toml").cluster.kind == "local"
    assert main.run(["check", "job.toml"]) == 0


def test_init_replaces_a_file_only_on_request(alone: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (alone / "mine.toml").write_text("mine")
    assert main.run(["init", "--out", "mine.toml"]) == 2
    reported = capsys.readouterr().err
    assert reported == "rrl: mine.toml already exists; name another file with --out, or replace it with --force\n"
    assert (alone / "mine.toml").read_text() == "mine"
    assert main.run(["init", "--out", "mine.toml", "--force"]) == 0
    assert load_job(alone / "mine.toml").run.name == "quickstart"
    (alone / "dangling.toml").symlink_to(alone / "nowhere")
    assert main.run(["init", "--out", "dangling.toml"]) == 2
    assert sorted(path.name for path in alone.iterdir()) == ["dangling.toml", "home", "mine.toml"]


def test_init_into_a_missing_folder_is_one_line(alone: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for flags in ([], ["--force"]):
        assert main.run(["init", "--out", "absent/job.toml", *flags]) == 2
        reported = "rrl: absent/job.toml: there is no folder absent; create it first, or name another file with --out\n"
        assert capsys.readouterr().err == reported


def test_doctor_imports_no_heavy_package() -> None:
    code = (
        "import sys; from rrl.cli import main as app; app.run(['doctor', '--no']);"
        " print('\\n', *{'torch', 'ucxx', 'vllm', 'submitit', 'transformers', 'pynvml'} & set(sys.modules))"
    )
    env = os.environ | {"PATH": "/nonexistent"}
    done = subprocess.run([sys.executable, "-P", "-c", code], env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0
    assert done.stdout.splitlines()[-1].strip() == ""
