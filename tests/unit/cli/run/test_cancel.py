from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from rrl.cli import main
from rrl.core.run_dir import RunDir
from rrl.core.types import Outcome
from rrl.manager.storage.lease import LeaseHolder
from rrl.tests.support.cli.story import Story, completed, job_view
from rrl.tests.support.cli.waiting import CommandInThread, eventually

RUN = "small-7"


def pending_commands(run: RunDir) -> list[Path]:
    return list(run.mailbox.glob("[!.]*.json"))  # as the manager looks


def test_cancel_leaves_one_command_for_the_manager(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = Story(RUN).works().written(root)
    assert main.run(["cancel", RUN, "--no-wait"]) == 0
    assert capsys.readouterr().out == f"{RUN}: its manager is asked to end it\n"
    (command_file,) = pending_commands(run)
    reported = json.loads(command_file.read_text())
    assert reported["command"] == "cancel"
    assert reported["by"]
    assert main.run(["cancel", RUN, "--no-wait"]) == 0
    assert len(pending_commands(run)) == 2  # the second command does not replace the first one


def test_cancel_waits_until_the_manager_has_ended_the_run(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    story = Story(RUN).works()
    run = story.written(root)
    waiting = CommandInThread("cancel", RUN)
    eventually(lambda: bool(pending_commands(run)))
    pending_commands(run)[0].unlink()
    story.ends(Outcome.CANCELLED, "cancel by somebody").goes_on(run)
    assert waiting.ends() == 0
    assert capsys.readouterr().out == f"{RUN}: cancelled after 12 steps; everything is given back\n"


def test_cancel_of_an_ended_run_changes_nothing(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = completed(RUN).written(root)
    assert main.run(["cancel", RUN]) == 0
    assert capsys.readouterr().out == f"{RUN} has ended already: completed\n"
    assert not pending_commands(run)


@pytest.mark.parametrize(("cluster", "hint"), [("local", ""), ("slurm", "scancel --name=small-7.manager")])
def test_cancel_without_a_live_manager_names_the_command_to_start_one(
    root: Path, capsys: pytest.CaptureFixture[str], cluster: str, hint: str
) -> None:
    job = job_view(cluster=cluster)
    job = msgspec.structs.replace(job, limits=msgspec.structs.replace(job.limits, lease=0.3))
    run = Story(RUN, job).works().written(root)
    (run.epochs / "000001").write_bytes(
        msgspec.json.encode(LeaseHolder("elsewhere", 1, 17))
    )  # no manager renews this lease
    assert main.run(["cancel", RUN]) == 1
    reported = capsys.readouterr().err
    assert f"no manager of {RUN} is running to end it; to start one: rrl manage {RUN}" in reported
    assert hint in reported
    assert len(pending_commands(run)) == 1
