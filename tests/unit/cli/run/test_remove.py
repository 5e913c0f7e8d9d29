"""``rrl rm`` removes ended runs completely, and keeps a run that is running, another user's run, and a link."""

from __future__ import annotations

import os
import pwd
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from rrl.cli import main
from rrl.cli.run import remove
from rrl.core.run_dir import RunDir
from rrl.core.types import Outcome
from rrl.manager.bootstrap import start_failure
from rrl.manager.storage.lease import LeaseHolder
from rrl.manager.storage.resume_request import ResumeRequest, write_request
from rrl.tests.support.cli.story import BEGAN, Story, completed, job_view


def test_ended_run_is_removed_and_the_freed_space_reported(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = completed("over-1").written(root)
    other = completed("over-2").written(root)
    (run.checkpoints / "model").write_bytes(os.urandom(3 * 2**20))
    os.link(run.checkpoints / "model", run.checkpoints / "newest")  # a hard link: the bytes count once
    assert main.run(["rm", "over-1", "--yes"]) == 0
    removed, freed = capsys.readouterr().out.splitlines()
    assert removed.startswith("removed over-1  3.")
    assert freed.startswith("freed 3.")
    assert freed.endswith(" MiB")
    assert os.listdir(root) == [other.id]


def _pending(run: RunDir, story: Story) -> None:
    write_request(run, ResumeRequest("me", "1", job_view(), "job.toml", story.now), lambda making: None)


def _managed(run: RunDir, story: Story) -> None:
    (run.epochs / "000001").write_bytes(msgspec.json.encode(LeaseHolder("elsewhere", 1, 17)))


@pytest.mark.parametrize(
    ("story", "prepare", "why"),
    [
        (Story("mine-1").works(), None, r"has not ended \(rrl cancel mine-1 ends it\)"),
        (completed("mine-1"), _pending, "is to be resumed"),
        (completed("mine-1"), _managed, "has a manager that has not ended yet"),
    ],
    ids=["running", "resumed", "managed"],
)
def test_run_that_may_not_be_removed_is_refused_in_one_line_and_nothing_goes(
    root: Path,
    capsys: pytest.CaptureFixture[str],
    story: Story,
    prepare: Callable[[RunDir, Story], None] | None,
    why: str,
) -> None:
    run, over = story.written(root), completed("over-1").written(root)
    if prepare is not None:
        prepare(run, story)
    assert main.run(["rm", "over-1", "mine-1", "--yes"]) == 2
    reported = capsys.readouterr().err
    assert re.fullmatch(rf"rrl: mine-1 {why}; it is not removed\n", reported)
    assert run.journal.is_dir()
    assert over.journal.is_dir()


def test_run_of_another_user_is_refused_and_left_by_older_than(
    root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = completed("over-1").written(root)
    owner = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    assert main.run(["rm", "over-1", "--yes"]) == 1
    me = pwd.getpwuid(owner).pw_name
    assert capsys.readouterr().err == f"rrl: over-1 is a run of {me}, and only {me} can look at it or change it\n"
    assert main.run(["rm", "--older-than", "0s", "--yes"]) == 0
    assert capsys.readouterr().out == f"no run to remove in {root}\n"
    assert run.journal.is_dir()


def test_links_in_a_run_directory_are_removed_and_not_followed(root: Path, tmp_path: Path) -> None:
    run = completed("over-1").written(root)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "corpus").write_bytes(b"1" * 100)
    (run.checkpoints / "data").symlink_to(tmp_path / "data")
    (run.checkpoints / "corpus").symlink_to(tmp_path / "data" / "corpus")
    assert main.run(["rm", "over-1", "--yes"]) == 0
    assert not run.path.exists()
    assert (tmp_path / "data" / "corpus").stat().st_size == 100


def test_path_through_a_link_names_the_run_in_the_folder_of_runs_only(root: Path, tmp_path: Path) -> None:
    """In ``link/..`` the kernel would follow the link before it goes to the parent folder."""
    outside = completed("over-1").written(tmp_path / "other")
    inside = completed("over-1").written(root)
    (tmp_path / "other" / "folder").mkdir()
    (root / "link").symlink_to(tmp_path / "other" / "folder")
    assert main.run(["rm", f"{root}/link/../over-1", "--yes"]) == 0
    assert outside.journal.is_dir()
    assert not inside.path.exists()


def test_older_than_takes_ended_runs_of_that_age_only(
    root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    completed("old-1").written(root)
    completed("old-2").written(root)
    Story("running-1").works().written(root)
    recent = Story("recent-1").wait(5 * 86400.0).works().ends(Outcome.FAILED, "a bug")
    recent.written(root)
    broken = Story("broken-1").written(root)
    next(broken.journal.iterdir()).write_bytes(b"#!/bin/sh")
    monkeypatch.setattr("rrl.cli.run.remove.time.time", lambda: BEGAN + 8 * 86400.0)
    assert main.run(["rm", "--older-than", "7d", "--yes"]) == 0
    out, err = capsys.readouterr()
    assert {line.split()[1] for line in out.splitlines() if line.startswith("removed")} == {"old-1", "old-2"}
    assert err.startswith("rrl: broken-1 is not removed: ")
    assert sorted(os.listdir(root)) == ["broken-1", "recent-1", "running-1"]


@pytest.mark.parametrize(("answer", "code"), [("y", 0), ("n", 1), ("", 1)])
def test_without_yes_the_user_is_asked(
    root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, answer: str, code: int
) -> None:
    run = completed("over-1").written(root)
    questions: list[str] = []

    def ask(question: str) -> str:
        questions.append(question)
        return answer

    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    monkeypatch.setattr("builtins.input", ask)
    assert main.run(["rm", "over-1"]) == code
    assert re.fullmatch(r"Remove 1 run \(.* KiB\) with logs and checkpoints\? \[y/N\] ", questions[0])
    assert capsys.readouterr().err.startswith("over-1  ")
    assert run.path.exists() == bool(code)


def test_without_a_terminal_option_yes_is_required(
    root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = completed("over-1").written(root)
    monkeypatch.setattr("sys.stdin.isatty", lambda: False)
    assert main.run(["rm", "over-1"]) == 2
    assert "you cannot be asked; to remove without a question: --yes" in capsys.readouterr().err
    assert run.journal.is_dir()


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ((), "name the runs to remove, or give --older-than"),
        (("over-1", "--older-than", "7d"), "name the runs to remove, or give --older-than"),
        (("--older-than", "soon"), "--older-than: 'soon' is not a duration"),
        (("/etc/over-1",), "/etc/over-1 is not in"),
        (("fresh-1",), r"fresh-1 has not begun yet (rrl cancel fresh-1 ends it)"),
    ],
)
def test_wrong_request_is_one_line_and_exit_code_2(
    root: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], why: str
) -> None:
    completed("over-1").written(root)
    RunDir(root / "fresh-1").create()
    assert main.run(["rm", *arguments, "--yes"]) == 2
    reported = capsys.readouterr().err
    assert reported.startswith(f"rrl: {why}")
    assert reported.count("\n") == 1
    assert sorted(os.listdir(root)) == ["fresh-1", "over-1"]


def test_interrupted_removal_is_hidden_and_completed_by_the_next(
    root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    completed("over-1").written(root)
    completed("over-2").written(root)

    def interrupt(folder: Path) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(shutil, "rmtree", interrupt)
        assert main.run(["rm", "over-1", "--yes"]) == 130
    assert os.listdir(root).count(f".over-1{remove.REMOVED}") == 1
    capsys.readouterr()
    assert main.run(["list"]) == 0
    assert "over-1" not in capsys.readouterr().out
    assert main.run(["rm", "over-2", "--yes"]) == 0
    assert os.listdir(root) == []


def test_run_that_never_began_is_ended_by_cancel_and_then_removed(
    root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A killed rrl submit has left a run without a manager: rrl rm names rrl cancel, which names rrl rm."""
    run = RunDir(root / "mine-1")
    run.create()
    run.run_spec.write_bytes(msgspec.json.encode(job_view()))
    assert main.run(["rm", "mine-1", "--yes"]) == 2
    assert "has not begun yet (rrl cancel mine-1 ends it)" in capsys.readouterr().err
    monkeypatch.setattr(start_failure, "SUBMISSION_S", 0.5)
    assert main.run(["cancel", "mine-1"]) == 0
    assert capsys.readouterr().out == (
        "mine-1 never began: the command that was to start its manager was interrupted; to remove it: rrl rm mine-1\n"
    )
    assert not list(run.mailbox.iterdir())
    assert main.run(["rm", "mine-1", "--yes"]) == 0
    assert not run.path.exists()


def test_what_a_killed_submission_has_left_is_removed_but_not_one_in_progress(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    killed, fresh, other = (root / name for name in (".q-1120-064114-1f2a", ".q-1120-064115-1f2b", ".snapshot"))
    for folder in (killed, fresh, other):
        folder.mkdir()
    for folder in (killed, other):
        os.utime(folder, (1, 1))
    assert main.run(["rm", "--older-than", "1d", "--yes"]) == 0
    assert sorted(root.iterdir()) == [fresh, other]
