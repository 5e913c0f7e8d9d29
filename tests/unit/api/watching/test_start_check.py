"""If the managers of a run die before they begin it, commands that wait for the run end and report the reason."""

from __future__ import annotations

import json
import os
from pathlib import Path

import msgspec
import pytest

from rrl.api.watching import start_check
from rrl.cli import main
from rrl.cli.run.submit import watch_until_end
from rrl.config.job.load import load_job
from rrl.config.job.resolve import resolve
from rrl.core.run_dir import RunDir
from rrl.core.run_spec import TransportSpec
from rrl.manager.bootstrap import start as starting
from rrl.manager.bootstrap import start_failure as failures
from rrl.manager.storage.resume_request import ResumeRequest, write_request
from rrl.tests.support.cli.story import Story, completed, job_view
from rrl.tests.support.job_toml import JOB

NOWHERE = "203.0.113.0/24"
"""TEST-NET-3 (RFC 5737): a network without hosts."""


def squeue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> Path:
    """Install a squeue that runs ``script``, and return the file that gets a line for each of its calls."""
    calls, command = tmp_path / "calls", tmp_path / "bin" / "squeue"
    calls.touch()
    command.parent.mkdir(exist_ok=True)
    command.write_text(f'#!/bin/sh\necho "$*" >> {calls}\n{script}\n')
    command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin:/bin")
    return calls


def submitted_to_slurm(root: Path, where: str = "job", jobs: tuple[str, ...] = ("71", "72")) -> RunDir:
    run = RunDir(root / "fresh-1")
    run.create()
    view = msgspec.structs.replace(job_view(), cluster="slurm")
    view = msgspec.structs.replace(view, manager=msgspec.structs.replace(view.manager, where=where))
    run.run_spec.write_bytes(msgspec.json.encode(view))
    for job in jobs:
        (run.submit / f"{job}_submitted.pkl").touch()
    return run


def test_a_local_manager_that_dies_at_its_start_ends_the_wait_as_rejected(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "job.toml"
    path.write_text(JOB)
    job = load_job(path)
    spec = msgspec.structs.replace(resolve(job, "python"), transport=TransportSpec(network=NOWHERE))
    run = starting.create(job, spec, path)
    starting.start_manager(run, spec)
    with pytest.raises(start_check.NeverBegan, match=rf"{run.id} is rejected: .*NoAddress: no interface with an addr"):
        watch_until_end(run, json=True)
    ended = json.loads(capsys.readouterr().out)
    assert (ended["run"], ended["outcome"]) == (run.id, "rejected")
    assert main.run(["status"]) == 0
    reported = capsys.readouterr().out
    assert reported.startswith(f"{run.id}: rejected: its manager ended before the run began; the last line logged: ")
    assert f"no interface with an address in {NOWHERE}" in reported


def test_a_run_whose_managers_have_left_the_queue_is_rejected_with_their_last_line(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    squeue(tmp_path, monkeypatch, "exit 0")
    run = submitted_to_slurm(root)
    (run.submit / "71_0_log.err").write_text("an older one\n")
    (run.submit / "72_0_log.err").write_text("Traceback\nNoAddress: \x1b]0;none\nsrun: error: n1: task 0: Exited\n")
    assert main.run(["status"]) == 0
    reported = capsys.readouterr().out
    assert reported == (
        "fresh-1: rejected: all 2 managers ended before the run began; the last line logged: NoAddress:"
        rf" \x1b]0;none (logs: {run.submit})"
        "\n"
    )
    assert main.run(["status", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["outcome"] == "rejected"
    assert main.run(["list", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert (row["outcome"], row["standing"]) == ("rejected", "rejected")


@pytest.mark.parametrize(
    ("answer", "jobs"),
    [
        ("echo 72", ("71", "72")),  # the second one waits
        ("echo Socket timed out >&2; exit 1", ("71", "72")),
        ("exit 0", ()),  # nothing was submitted: the run works in the foreground, or its submission is in progress
    ],
)
def test_a_run_that_may_still_be_begun_is_not_rejected(
    root: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    answer: str,
    jobs: tuple[str, ...],
) -> None:
    squeue(tmp_path, monkeypatch, answer)
    submitted_to_slurm(root, jobs=jobs)
    assert main.run(["status"]) == 0
    assert "its manager is starting" in capsys.readouterr().out
    assert main.run(["list", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert (row["outcome"], row["standing"]) == (None, "submitted")


def test_a_local_manager_that_was_started_on_another_machine_is_not_judged(root: Path) -> None:
    run = submitted_to_slurm(root, jobs=("4194304",))
    view = msgspec.structs.replace(job_view(), cluster="local")
    (run.submit / failures.HOST_FILE).write_text("elsewhere")
    assert failures.start_failure(run, view) == ""
    (run.submit / failures.HOST_FILE).write_text(os.uname().nodename)
    assert "its manager ended before the run began; nothing was logged" in failures.start_failure(run, view)


@pytest.mark.parametrize(("line", "state", "may_be"), [(b"", "R", True), (b"", "Z", False), (b"other\0", "S", False)])
def test_process_during_execve_may_be_the_manager_and_a_zombie_may_not(
    root: Path, tmp_path: Path, line: bytes, state: str, may_be: bool
) -> None:
    run = submitted_to_slurm(root)
    (tmp_path / "cmdline").write_bytes(line)
    (tmp_path / "stat").write_text(f"77 (python (x)) {state} 1 77 77")
    assert failures._is_submitit_of(tmp_path, run) is may_be
    (tmp_path / "cmdline").write_bytes(b"\0".join((b"python", b"-m", b"submitit.local._local", bytes(run.submit), b"")))
    assert failures._is_submitit_of(tmp_path, run)


def test_slurm_is_asked_for_the_managers_of_a_waiting_run_at_most_once_in_ten_seconds(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = squeue(tmp_path, monkeypatch, "echo 72")
    times = [100.0, 100.5, 109.5, 110.0]
    monkeypatch.setattr("rrl.api.watching.start_check.time.monotonic", lambda: times[0])
    check = start_check.StartCheck(submitted_to_slurm(root))
    while times:
        assert check.failure(None) == ""
        times.pop(0)
    assert calls.read_text().count("--name=fresh-1.manager") == 2


def test_a_run_that_a_manager_began_and_ended_during_the_check_is_not_rejected(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    completed("fresh-1").written(tmp_path / "told")
    run = submitted_to_slurm(root)
    squeue(tmp_path, monkeypatch, f"cp {tmp_path}/told/fresh-1/journal/* {run.journal}")
    assert start_check.StartCheck(run).failure(None) == ""


def test_resumed_run_whose_new_managers_died_reports_it_until_one_takes_the_request(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    squeue(tmp_path, monkeypatch, "exit 0")
    story = completed("small-7")
    run = story.written(root)
    view = msgspec.structs.replace(job_view(), cluster="slurm")
    run.run_spec.write_bytes(msgspec.json.encode(view))
    (run.submit / "60_submitted.pkl").touch()  # of its earlier life
    os.utime(run.submit / "60_submitted.pkl", (1, 1))
    state = story.recorded()
    assert start_check.StartCheck(run).failure(state) == ""
    write_request(run, ResumeRequest("me", "1", view, "job.toml", state.ended or 0.0), lambda making: None)
    assert start_check.StartCheck(run).failure(state) == "", (
        "a failure is reported before a manager was submitted for the resume request"
    )
    (run.submit / "73_submitted.pkl").touch()
    with pytest.raises(start_check.NeverBegan, match="small-7 does not go on: its manager ended before"):
        watch_until_end(run, json=False)
    assert start_check.StartCheck(run).failure(Story("small-7").works().recorded()) == ""
