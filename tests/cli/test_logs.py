from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from rrl.cli import app
from rrl.cli.logs import all_logs
from rrl.manager.journal import Journal
from rrl.spec.rundir import RUNS_ENV, RunDir
from rrl.spec.words import Outcome
from rrl.tests.cli.story import Story, completed
from rrl.tests.cli.waiting import Output, eventually

RUN = "small-7"


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    monkeypatch.setenv(RUNS_ENV, str(tmp_path))
    return Story(RUN).works().written(tmp_path)


def write(run: RunDir, tag: str, *lines: str) -> Path:
    path = run.log_file(f"{RUN}.{tag}")
    with path.open("a") as file:
        file.writelines(f"{line}\n" for line in lines)
    return path


def test_one_log_is_shown_bare_and_several_with_their_lives(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    write(run, "rollout-0.1", "one", "two")
    assert app.run(["logs", RUN, "rollout/0"]) == 0
    assert capsys.readouterr().out == "one\ntwo\n"
    write(run, "rollout-0.2", "three")
    write(run, "trainer-0.1", "four")
    assert app.run(["logs", RUN, "rollout/0"]) == 0
    assert capsys.readouterr().out == "rollout/0#1 | one\nrollout/0#1 | two\nrollout/0#2 | three\n"
    assert app.run(["logs", RUN, "rollout"]) == 0
    assert "trainer" not in capsys.readouterr().out
    assert app.run(["logs", RUN]) == 0
    assert capsys.readouterr().out.endswith("trainer/0#1 | four\n")


def test_every_kind_of_log_file_is_told_apart(run: RunDir) -> None:
    for tag in ("rollout-10.1", "rollout-9.1", "agent-gpu-node.site.org.2", "rollout-9.1.step"):
        write(run, tag, "x")
    (run.logs / "manager.3.log").write_text("x\n")
    (run.submit / "123_0_log.out").write_text("x\n")
    (run.submit / "123_0_log.err").write_text("x\n")
    (run.submit / "controller.log").write_text("")
    (run.logs / "notes.txt").write_text("x\n")
    assert {(log.role, log.replica, log.label) for log in all_logs(run)} == {
        ("rollout", "rollout/10", "rollout/10#1"), ("rollout", "rollout/9", "rollout/9#1"),
        ("rollout", "rollout/9", "rollout/9#1 step"), ("agent", "agent/gpu-node.site.org", "agent/gpu-node.site.org#2"),
        ("manager", "manager", "manager epoch 3"), ("manager", "manager", "manager"),
        ("manager", "manager", "manager (errors)"),
    }  # fmt: skip


def test_only_the_newest_lines_are_shown(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    write(run, "rollout-0.1", *(f"line {i} {'x' * 500}" for i in range(2000)), "the last")
    assert app.run(["logs", RUN, "rollout/0", "-n", "2"]) == 0
    assert [line[:9] for line in capsys.readouterr().out.splitlines()] == ["line 1999", "the last"]
    assert app.run(["logs", RUN, "rollout/0", "-n", "5000"]) == 0
    assert capsys.readouterr().out.count("\n") == 2001
    assert app.run(["logs", RUN, "rollout/0", "-n", "0"]) == 0
    assert capsys.readouterr().out == ""


def test_an_unfinished_line_and_bytes_that_are_no_text_are_shown(
    run: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    run.log_file(f"{RUN}.rollout-0.1").write_bytes(b"whole\n\xff half")
    assert app.run(["logs", RUN, "rollout/0"]) == 0
    assert capsys.readouterr().out == "whole\n� half\n"


def test_a_role_that_is_not_there_is_one_line_with_those_that_are(
    run: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    assert app.run(["logs", RUN]) == 2
    assert capsys.readouterr().err == f"rrl: {RUN} has no logs yet\n"
    write(run, "rollout-0.1", "x")
    write(run, "trainer-0.1", "x")
    for arguments in (["judge"], ["rollout/7"], ["judge", "-f"]):
        assert app.run(["logs", RUN, *arguments]) == 2
        assert capsys.readouterr().err == (
            f'rrl: {RUN} has no logs of "{arguments[0]}"; there are: rollout/0, trainer/0\n'
        )


def test_following_goes_on_over_rotation_and_new_lives_until_the_run_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(RUNS_ENV, str(tmp_path))
    story = Story(RUN).works()
    run = story.written(tmp_path)
    path = write(run, "rollout-0.1", "old", "newest")
    output = Output(monkeypatch)
    following = threading.Thread(target=app.run, args=(["logs", RUN, "rollout/0", "-f", "-n", "1"],), daemon=True)
    following.start()
    eventually(lambda: output.lines == ["rollout/0#1 | newest"])
    write(run, "rollout-0.1", "before the rotation")
    os.replace(path, path.with_name(f"{path.name}.1"))
    write(run, "rollout-0.1", "after it")
    eventually(lambda: output.lines[1:] == ["rollout/0#1 | before the rotation", "rollout/0#1 | after it"])
    with path.open("a") as file:
        file.write("half a ")
        file.flush()
        write(run, "rollout-0.2", "a new life")
        eventually(lambda: output.lines[3:] == ["rollout/0#2 | a new life"])
        file.write("line\n")
    eventually(lambda: output.lines[4:] == ["rollout/0#1 | half a line"])
    write(run, "rollout-0.2", "its last word")
    told = len(story.stamped)
    story.ends(Outcome.COMPLETED, "all steps are done")
    journal = Journal(run, 2)
    for stamped in story.stamped[told:]:
        journal.append(stamped)
    journal.close()
    following.join(timeout=30)
    assert not following.is_alive()
    assert output.lines[5:] == ["rollout/0#2 | its last word"]


def test_following_a_run_that_has_ended_shows_its_logs_and_leaves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(RUNS_ENV, str(tmp_path))
    write(completed(RUN).written(tmp_path), "rollout-0.1", "x")
    assert app.run(["logs", RUN, "rollout", "-f"]) == 0
    assert capsys.readouterr().out == "rollout/0#1 | x\n"
