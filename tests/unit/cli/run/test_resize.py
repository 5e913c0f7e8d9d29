"""``rrl resize``: the command for the manager, and the sizes and pools that are refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

import rrl
from rrl.cli import main
from rrl.core.run_dir import RunDir
from rrl.core.types import Outcome, UsageError
from rrl.manager.intake.user_commands import pending_commands, to_events
from rrl.manager.model import events as ev
from rrl.tests.support.cli.status_scenes import pools
from rrl.tests.support.cli.story import Story, job_view, pools_view
from rrl.tests.support.cli.waiting import CommandInThread, eventually

RUN = "small-7"


def works() -> Story:
    return Story(RUN, pools_view()).works()


@pytest.mark.parametrize(("size", "replicas"), [("6", 6), ("0", 0), ("12", 12), ("auto", None)])
def test_resize_leaves_one_command_for_the_manager(
    root: Path, capsys: pytest.CaptureFixture[str], size: str, replicas: int | None
) -> None:
    story = works()
    run = story.written(root)
    assert main.run(["resize", RUN, "burst", size, "--no-wait"]) == 0
    assert capsys.readouterr().out == f"{RUN}: its manager is asked to resize burst\n"
    (command,) = pending_commands(run)
    (event,) = to_events(command, story.recorded())
    assert isinstance(event, ev.CommandReceived)
    assert (event.command, event.target, event.replicas) == ("resize", "burst", replicas)
    assert event.by


@pytest.mark.parametrize(
    ("size", "text"),
    [
        ("6", f"burst: held at 6 until the run is resumed, or until: rrl resize {RUN} burst auto\n"),
        ("auto", "burst: the run chooses the number of replicas again\n"),
    ],
)
def test_resize_waits_until_the_manager_has_the_command(
    root: Path, capsys: pytest.CaptureFixture[str], size: str, text: str
) -> None:
    run = works().written(root)
    waiting = CommandInThread("resize", RUN, "burst", size)
    eventually(lambda: bool(pending_commands(run)))
    (run.mailbox / f"{pending_commands(run)[0].id}.json").unlink()
    assert waiting.ends() == 0
    assert capsys.readouterr().out == text


REFUSED: dict[str, tuple[Callable[[], Story], list[str], str]] = {
    "near match": (works, ["brust", "6"], 'no elastic pool "brust" in this run; did you mean burst?'),
    "unknown": (works, ["x", "6"], 'no elastic pool "x" in this run; the run has burst'),
    "role": (
        works,
        ["trainer", "2"],
        "trainer has a fixed number of replicas (1); only an elastic pool can be resized: the run has burst",
    ),
    "fixed pool": (
        works,
        ["h20", "auto"],
        "h20 has a fixed number of replicas (1); only an elastic pool can be resized: the run has burst",
    ),
    "above max": (works, ["burst", "13"], "burst has 0 to 12 replicas in this run, not 13; rrl resume changes both"),
    "word": (works, ["burst", "six"], '"six" is not a number of replicas; write a whole number, or auto'),
    "no elastic pool": (
        lambda: Story(RUN, job_view()).works(),
        ["burst", "6"],
        'no elastic pool "burst" in this run; the run has none ([rollouts.NAME] replicas = { max = 8 })',
    ),
    "ended": (
        lambda: works().ends(Outcome.CANCELLED, "cancelled by ada"),
        ["burst", "6"],
        f"{RUN} has ended (cancelled): its pools are not resized any more",
    ),
    "ending": (
        lambda: works().stops(Outcome.COMPLETED, "step 40 of 40 is committed"),
        ["burst", "6"],
        f"{RUN} is ending: its pools are not resized any more",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_resized_is_one_line_and_exit_code_2(
    root: Path, capsys: pytest.CaptureFixture[str], case: str
) -> None:
    story, arguments, text = REFUSED[case]
    run = story().written(root)
    assert main.run(["resize", RUN, *arguments]) == 2
    assert capsys.readouterr().err == f"rrl: {text}\n"
    assert pending_commands(run) == []


def test_below_min_is_refused_with_both_numbers(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = pools_view()
    roles = tuple(msgspec.structs.replace(one, replicas=2) if one.is_elastic else one for one in job.roles)
    Story(RUN, msgspec.structs.replace(job, roles=roles)).works().written(root)
    assert main.run(["resize", RUN, "burst", "1"]) == 2
    assert capsys.readouterr().err == "rrl: burst has 2 to 12 replicas in this run, not 1; rrl resume changes both\n"


def test_run_that_has_not_begun_is_not_resized(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    RunDir(root / RUN).create()
    assert main.run(["resize", RUN, "burst", "1"]) == 2
    assert f"{RUN} has not begun yet" in capsys.readouterr().err


def test_python_resizes_like_the_command(root: Path) -> None:
    run = works().written(root)
    rrl.run(RUN).resize("burst", 3, wait=False)
    rrl.run(RUN).resize("burst", None, wait=False)
    assert [one.replicas for one in pending_commands(run)] == [3, None]
    with pytest.raises(UsageError, match="burst has 0 to 12 replicas in this run, not -1"):
        rrl.run(RUN).resize("burst", -1)


def test_status_of_a_run_with_pools_has_the_figures_of_each(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pools().written(root)
    assert main.run(["status", "--json"]) == 0
    shown: dict[str, Any] = json.loads(capsys.readouterr().out)
    burst = shown["rollout_pools"]["burst"]
    assert (burst["at_work"], burst["wanted"], burst["queued_nodes"], burst["held"]) == (7, 9, 2, None)
    assert burst["budget_node_s"] == 200 * 3600
    assert shown["extras"] == 2
