from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from rrl.cli import main
from rrl.core.faults import Fault, FaultKind, FaultTrigger
from rrl.core.run_dir import RunDir
from rrl.core.types import NodeName, Outcome
from rrl.manager.intake.user_commands import Command, pending_commands
from rrl.manager.model import events as ev
from rrl.manager.model.actions import InjectFault, Why
from rrl.manager.storage.lease import LeaseHolder
from rrl.tests.support.cli.json_keys import assert_fits_its_schema
from rrl.tests.support.cli.story import Story, completed, job_view
from rrl.tests.support.cli.waiting import CommandInThread, eventually

RUN = "small-7"


def allowing(lease: float = 10.0) -> Story:
    job = job_view()
    limits = msgspec.structs.replace(job.limits, lease=lease)
    return Story(RUN, msgspec.structs.replace(job, faults_allowed=True, limits=limits)).works()


def test_inject_writes_a_command_with_the_whole_fault(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = allowing().written(root)
    words = ["inject", RUN, "freeze", "--target", "rollout/1", "--for", "5s", "--at", "step=20"]
    assert main.run(words) == 0
    (command,) = pending_commands(run)
    assert command.fault is not None
    assert command == Command("inject", command.by, command.id, command.fault)
    assert command.by
    assert command.fault == Fault(command.fault.id, FaultKind.FREEZE, "rollout/1", FaultTrigger(step=20), 5.0)
    assert capsys.readouterr().out == f"{RUN}: freeze rollout/1 at step=20 is requested ({command.fault.id})\n"


def test_commands_never_share_an_id_and_are_printed_as_json_too(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = allowing().written(root)
    for _ in range(2):
        assert main.run(["inject", RUN, "exit", "--target", "reward/0", "--amount", "3", "--json"]) == 0
        reported = json.loads(capsys.readouterr().out)
        assert (reported["run"], reported["kind"], reported["target"], reported["amount"]) == (
            RUN,
            "exit",
            "reward/0",
            3.0,
        )
    assert len({command.fault.id for command in pending_commands(run) if command.fault is not None}) == 2


@pytest.mark.parametrize("target", [["--target", "rollout"], []])
def test_role_or_empty_target_draws_one_replica_reproducibly_by_the_seed(root: Path, target: list[str]) -> None:
    run = allowing().written(root)
    for seed in "1111111123456789":
        assert main.run(["inject", RUN, "kill", *target, "--seed", seed]) == 0
    drawn = [command.fault.target for command in pending_commands(run) if command.fault is not None]
    assert len(set(drawn[:8])) == 1
    assert len(set(drawn)) > 1
    assert all("/" in one for one in drawn)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (["explode"], 'no fault "explode"; the faults are kill, freeze, slow, exit'),
        (["kill", "--target", "judge/0"], 'no role "judge"; there are trajectories, reward, trainer, rollout'),
        (["kill", "--target", "judge"], 'no role "judge"'),
        (["kill", "--target", "rollout/2"], 'no replica "rollout/2"; role rollout has 2'),
        (["crash", "--target", "n77"], 'no node "n77" in this run; it has n1, n2, n3, n4, n5'),
        (["kill", "--target", "agent/n77"], 'no node "n77" in this run'),
        (["cut", "--target", "n1"], "cut needs seconds: its duration; add --for 10s"),
        (["slow", "--target", "rollout/0"], "slow needs amount, the share of the time"),
        (["kill", "--target", "rollout/0", "--for", "5s"], "kill is permanent: it takes no seconds"),
        (["kill", "--target", "rollout/0", "--for", "soon"], "--for: 'soon' is not a duration; write for example"),
        (["kill", "--target", "rollout/0", "--at", "noon"], "--at: 'noon' is not a valid trigger; write \"step=5\""),
        (["crash", "--target", "n1", "--at", "phase=train"], "at phase=train needs a replica as target"),
        (["outage", "--target", "n1", "--for", "5s"], "outage takes no target"),
    ],
)
def test_invalid_fault_is_refused_in_one_line_and_no_command_written(
    root: Path, capsys: pytest.CaptureFixture[str], text: list[str], why: str
) -> None:
    run = allowing().written(root)
    assert main.run(["inject", RUN, *text]) == 2
    reported = capsys.readouterr()
    assert reported.out == ""
    assert reported.err.startswith("rrl: ")
    assert why in reported.err
    assert reported.err.count("\n") == 1
    assert pending_commands(run) == []


def test_run_whose_job_spec_does_not_allow_faults_is_left_alone(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = Story(RUN).works().written(root)
    assert main.run(["inject", RUN, "kill", "--target", "rollout/0"]) == 2
    reported = capsys.readouterr().err
    assert (
        reported
        == f"rrl: {RUN}: the job spec of this run allows no faults on demand; they need allow = true in [faults]\n"
    )
    assert pending_commands(run) == []


def test_ended_run_is_left_alone(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    story = completed(RUN)
    run = story.written(root)
    assert main.run(["inject", RUN, "kill", "--target", "rollout/0"]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert pending_commands(run) == []


@pytest.mark.parametrize("json_wanted", [True, False])
@pytest.mark.parametrize("ok", [True, False])
def test_wait_prints_the_outcome_of_the_fault(
    root: Path, capsys: pytest.CaptureFixture[str], ok: bool, json_wanted: bool
) -> None:
    story = allowing()
    run = story.written(root)
    words = ["inject", RUN, "kill", "--target", "rollout/0", "--wait", *(["--json"] if json_wanted else [])]
    waiting = CommandInThread(*words)
    eventually(lambda: bool(pending_commands(run)))
    (command,) = pending_commands(run)
    fault, incarnation = command.fault, story.incarnation("rollout/0")
    assert fault is not None
    action = InjectFault(fault, "step", NodeName("n3"), Why(("it is due",)), incarnation)
    reported = ev.FaultInjected(
        fault.id, incarnation, ok, "SIGKILL to process group 7" if ok else "it was gone", fault.kind
    )
    story.goes_on(run, ev.FaultRequested(fault, command.by, command.id), ev.Intended(action), reported)
    (run.mailbox / f"{command.id}.json").unlink()
    assert waiting.ends() == (0 if ok else 1)
    out, err = capsys.readouterr()
    if json_wanted:
        assert json.loads(out)["ok"] is ok
        assert_fits_its_schema("injected-fault", json.loads(out))
    elif ok:
        assert out == f"{RUN}: kill rollout/0: SIGKILL to process group 7\n"
    else:
        assert f"rrl: {RUN}: kill rollout/0 was not performed: it was gone\n" in err


def begun(root: Path, target: str, lease: float = 0.3) -> tuple[RunDir, CommandInThread, Story, Fault]:
    """Request a fault with a command that waits for the result, and let a manager begin the fault.

    Return the run, the command, the story of the run, and the fault.
    """
    story = allowing(lease)
    run = story.written(root)
    words = ["inject", RUN, "kill", "--target", target, "--wait"]
    waiting = CommandInThread(*words)
    eventually(lambda: bool(pending_commands(run)))
    (command,) = pending_commands(run)
    assert command.fault is not None
    action = InjectFault(command.fault, "", NodeName(""), Why(("it is due",)), None)
    story.goes_on(run, ev.FaultRequested(command.fault, command.by, command.id), ev.Intended(action))
    (run.mailbox / f"{command.id}.json").unlink()
    return run, waiting, story, command.fault


def test_killed_manager_without_successor_is_reported_and_not_awaited(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, waiting, _, _ = begun(root, "manager")
    assert waiting.ends() == 0
    reported = f"no manager is running now; the roles keep running, and the next manager takes over: rrl manage {RUN}"
    assert capsys.readouterr().out == f"{RUN}: kill manager: {reported}\n"


def test_command_does_not_wait_for_a_manager_that_ends_before_it_reports_the_fault(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, waiting, _, _ = begun(root, "rollout/0")
    assert waiting.ends() == 1
    expected = f"no manager of {RUN} is running to report the result of kill rollout/0; to start one: rrl manage {RUN}"
    assert expected in capsys.readouterr().err


@pytest.mark.parametrize("target", ["manager", "rollout/0"])
def test_next_manager_reports_a_fault_whose_result_is_unknown(
    root: Path, capsys: pytest.CaptureFixture[str], target: str
) -> None:
    run, waiting, story, fault = begun(root, target, lease=60.0)
    reported = ev.FaultInjected(fault.id, None, False, "its manager died over it", fault.kind, target, unknown=True)
    story.goes_on(run, reported, epoch=3)
    code = waiting.ends()
    out, err = capsys.readouterr()
    if target == "manager":
        assert code == 0
        assert out == f"{RUN}: kill manager: its manager died over it\n"
    else:
        assert code == 1
        assert f"rrl: {RUN}: it is unknown whether kill rollout/0 was performed: its manager died over it\n" in err


def test_wait_ends_with_a_message_when_the_run_ends_first(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    story = allowing()
    run = story.written(root)
    words = ["inject", RUN, "kill", "--target", "rollout/0", "--at", "step=99", "--wait"]
    waiting = CommandInThread(*words)
    eventually(lambda: bool(pending_commands(run)))
    (command,) = pending_commands(run)
    assert command.fault is not None
    story.goes_on(
        run, ev.FaultRequested(command.fault, "me", command.id), ev.RunEnded(Outcome.COMPLETED, "all steps are done")
    )
    (run.mailbox / f"{command.id}.json").unlink()
    assert waiting.ends() == 1
    assert f"rrl: {RUN} has ended (completed) before kill rollout/0 was due" in capsys.readouterr().err


def test_wait_without_a_manager_names_the_command_to_start_one(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = allowing(lease=0.3).written(root)
    (run.epochs / "000001").write_bytes(
        msgspec.json.encode(LeaseHolder("elsewhere", 1, 17))
    )  # no manager renews this lease
    assert main.run(["inject", RUN, "kill", "--target", "rollout/0", "--wait"]) == 1
    reported = capsys.readouterr().err
    assert f"no manager of {RUN} is running to accept the request; to start one: rrl manage {RUN}" in reported
