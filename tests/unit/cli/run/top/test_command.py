"""``rrl top`` as a command: its requirements, and that a key quits it in any state."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rrl.cli import main
from rrl.tests.support.cli.story import Story
from rrl.tests.support.cli.terminal import Terminal
from rrl.tests.support.cli.waiting import DEADLINE_S, eventually

PROGRAM = (sys.executable, "-c", "from rrl.cli.main import main; main()", "top")


def test_without_textual_one_line_names_the_extra(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        "rrl.cli.run.top.command.find_spec", lambda name: None if name == "textual" else find_spec(name)
    )
    assert main.run(["top"]) == 2
    assert capsys.readouterr().err == (
        "rrl: rrl top needs the package textual, which is not installed here; pip install '.[tui]' in rrl's clone\n"
    )


def test_without_a_terminal_one_line_names_what_needs_none(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["top"]) == 2
    assert capsys.readouterr().err == (
        "rrl: rrl top needs a terminal; without one, write: rrl list, or rrl status RUN\n"
    )


def test_run_that_is_not_there_is_one_line(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["top", "nope"]) == 2
    assert capsys.readouterr().err == f"rrl: there are no runs in {root}; start one with: rrl submit job.toml\n"


def test_textual_is_imported_by_this_command_alone() -> None:
    program = (
        "import sys, pkgutil, importlib, rrl.cli\n"
        "from rrl.cli.commands import app\n"
        "from rrl.cli.run import status, follow, control\n"
        "from rrl.cli.run.top import command\n"
        "print('textual' in sys.modules)\n"
    )
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout == "False\n"


def test_key_quits_top_and_restores_the_terminal(root: Path) -> None:
    Story("quick-1").works().written(root)
    with Terminal(PROGRAM, {}, 80, 24) as terminal:
        eventually(lambda: "quick-1" in "\n".join(terminal.lines))
        terminal.press("q")
        assert terminal.process.wait(DEADLINE_S) == 0
        eventually(lambda: "\x1b[?1049l" in terminal.drawn)  # the screen of the shell is shown again
        assert "Traceback" not in terminal.drawn


def test_top_can_be_quit_while_the_storage_hangs(root: Path) -> None:
    run = Story("quick-1").works().written(root)
    os.mkfifo(run.journal / "000009-000001.seg")  # an open() of this pipe never returns
    with Terminal(PROGRAM, {}, 80, 24) as terminal:
        eventually(lambda: "Quit" in "\n".join(terminal.lines))
        terminal.press("q")
        assert terminal.process.wait(DEADLINE_S) == 0
