"""``rrl drain`` and ``rrl undrain``: the command for the manager, and the report of its result."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rrl.cli import main
from rrl.cluster.base import NodeState, NodeStatus
from rrl.core.run_dir import RunDir
from rrl.core.types import NodeName, Outcome
from rrl.manager.model import events as ev
from rrl.manager.model.actions import Drain, Exclude, Readmit, Undrain, Why
from rrl.tests.support.cli.story import Story, completed, job_view
from rrl.tests.support.cli.waiting import CommandInThread, eventually

RUN = "small-7"
N3, N5 = NodeName("n3"), NodeName("n5")
REASON = f"rrl:{RUN}:drain requested by anna: fan"
EXCLUDED = ev.Decided(Exclude(N5, Why(("drain requested by anna: fan",)), by="anna: fan"))
DRAIN = ev.Intended(Drain(N5, REASON, Why(("drain requested by anna: fan",))))


def works() -> Story:
    return Story(RUN, job_view(cluster="slurm")).works()


def pending_commands(run: RunDir) -> list[Path]:
    return list(run.mailbox.glob("[!.]*.json"))


def sent_command(command: str) -> ev.CommandReceived:
    return ev.CommandReceived(command, "anna", "c1", N5, reason="fan" if command == "drain" else "")


def answered(story: Story, root: Path, arguments: list[str], *events: ev.Event) -> int:
    """Run the command, record the events of a manager that takes it, and return the exit code of the command."""
    run = story.written(root)
    waiting = CommandInThread(*arguments)
    eventually(lambda: bool(pending_commands(run)))
    story.goes_on(run, *events)
    pending_commands(run)[0].unlink()
    return waiting.ends()


@pytest.mark.parametrize("command", ["drain", "undrain"])
def test_drain_and_undrain_leave_one_command_for_the_manager(
    root: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    run = works().written(root)
    flags = ["--reason", "fan is loud"] if command == "drain" else []
    assert main.run([command, RUN, "n3", *flags, "--no-wait"]) == 0
    assert capsys.readouterr().out == f"{RUN}: its manager is asked to {command} n3\n"
    (command_file,) = pending_commands(run)
    reported = json.loads(command_file.read_text())
    assert (reported["command"], reported["target"]) == (command, "n3")
    assert reported.get("reason", "") == ("fan is loud" if flags else "")
    assert reported["by"]


@pytest.mark.parametrize("command", ["drain", "undrain"])
def test_node_outside_of_the_run_is_reported_in_one_line(
    root: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    run = works().written(root)
    assert main.run([command, RUN, "n99"]) == 2
    assert capsys.readouterr().err == 'rrl: no node "n99" in this run; it has n1, n2, n3, n4, n5\n'
    assert not pending_commands(run)


def test_ended_or_not_yet_begun_run_has_no_nodes_to_drain(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    completed(RUN).written(root)
    assert main.run(["drain", RUN, "n3"]) == 2
    assert capsys.readouterr().err == f"rrl: {RUN} is completed: it no longer uses a node\n"
    fresh = RunDir(root / "fresh-1")
    fresh.create()
    assert main.run(["drain", "fresh-1", "n3"]) == 2
    assert "fresh-1 has not begun yet" in capsys.readouterr().err


def test_drain_reports_that_the_node_is_drained_and_its_reason(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    done = (sent_command("drain"), EXCLUDED, DRAIN, ev.IntentSettled("n5!drain", True))
    assert answered(works(), root, ["drain", RUN, "n5", "--reason", "fan"], *done) == 0
    assert capsys.readouterr().out == f"n5 is drained: {REASON}\n"


def test_drain_without_permission_is_requested_in_the_summary(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    refused = ev.IntentSettled("n5!drain", False, "we may not drain nodes here: slurm_update error: Invalid user id")
    assert answered(works(), root, ["drain", RUN, "n5"], sent_command("drain"), EXCLUDED, DRAIN, refused) == 0
    assert capsys.readouterr().out == (
        "this run no longer uses n5; its drain is requested in summary.json: we may not drain nodes here:"
        " slurm_update error: Invalid user id\n"
    )


def test_drain_set_by_another_user_is_shown(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = ev.NodeChanged(N5, NodeStatus(NodeState.DRAINING, "IDLE+DRAIN: bad fan"))
    assert answered(works(), root, ["drain", RUN, "n5"], sent_command("drain"), other, EXCLUDED) == 0
    assert capsys.readouterr().out == "this run no longer uses n5; IDLE+DRAIN: bad fan\n"


def test_undrain_reports_that_the_node_may_be_used_again(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    story = works().record(sent_command("drain"), EXCLUDED, DRAIN, ev.IntentSettled("n5!drain", True))
    story.record(ev.NodeChanged(N5, NodeStatus(NodeState.DRAINING, f"IDLE+DRAIN: {REASON}", REASON)))
    back = (
        sent_command("undrain"),
        ev.Decided(Readmit(N5, Why(("undrain requested by anna",)))),
        ev.Intended(Undrain(N5, REASON, Why(("undrain requested by anna",)))),
        ev.IntentSettled("n5!undrain", True),
        ev.NodeChanged(N5, NodeStatus(NodeState.UP, "IDLE")),
    )
    assert answered(story, root, ["undrain", RUN, "n5"], *back) == 0
    assert capsys.readouterr().out == "n5 may be used again; Slurm says IDLE\n"


def test_drain_names_the_replicas_that_move_first(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    story = works()
    run = story.written(root)
    waiting = CommandInThread("drain", RUN, "n3")
    eventually(lambda: bool(pending_commands(run)))
    story.goes_on(run, ev.CommandReceived("drain", "anna", "c1", N3))
    pending_commands(run)[0].unlink()
    printed: list[str] = []

    def moving() -> bool:
        printed.append(capsys.readouterr().err)
        return "n3: rollout/0 moves first ..." in "".join(printed)

    eventually(moving)
    story.ends(Outcome.CANCELLED, "cancel by somebody").goes_on(run, epoch=3)
    assert waiting.ends() == 1
    assert f"{RUN} ended before n3 was drained" in capsys.readouterr().err
