"""``rrl top`` as a command: what it needs, and that it can always be left."""

from __future__ import annotations

import importlib.util
import os
import pty
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rrl.cli import main
from rrl.core.run_dir import RUNS_ENV
from rrl.tests.support.cli.story import Story
from rrl.tests.support.cli.waiting import DEADLINE_S


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(RUNS_ENV, str(tmp_path))
    return tmp_path


def test_without_textual_one_line_names_the_extra(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        "rrl.cli.run.top.command.find_spec", lambda name: None if name == "textual" else find_spec(name)
    )
    assert main.run(["top"]) == 2
    assert capsys.readouterr().err == (
        "rrl: rrl top needs the package textual, which is not installed here; pip install 'rrl-slurm[tui]'\n"
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


class Terminal:
    """``rrl top`` in a terminal of its own."""

    def __init__(self, *arguments: str) -> None:
        leader, follower = pty.openpty()
        environment = os.environ | {"TERM": "xterm-256color", "COLUMNS": "80", "LINES": "24"}
        self.process = subprocess.Popen(
            [sys.executable, "-c", "from rrl.cli.main import main; main()", *arguments],
            stdin=follower, stdout=follower, stderr=follower, env=environment, start_new_session=True,
        )  # fmt: skip
        os.close(follower)
        self._leader, self.output = leader, b""

    def read_until(self, text: bytes) -> None:
        end = time.monotonic() + DEADLINE_S
        while text not in self.output:
            assert time.monotonic() < end, self.output[-3000:]
            if select.select([self._leader], [], [], 0.1)[0]:
                self.output += os.read(self._leader, 65536)

    def write(self, keys: bytes) -> None:
        os.write(self._leader, keys)

    def exit_code(self) -> int:
        """Return the exit code, and read what is written until then: the process must not wait for a reader."""
        end = time.monotonic() + DEADLINE_S
        while self.process.poll() is None:
            assert time.monotonic() < end, "it does not end"
            if select.select([self._leader], [], [], 0.1)[0]:
                try:
                    self.output += os.read(self._leader, 65536)
                except OSError:  # the other side is closed
                    continue
        return self.process.returncode

    def close(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        os.close(self._leader)


def test_key_ends_it_and_the_terminal_is_left_as_it_was(root: Path) -> None:
    Story("quick-1").works().written(root)
    terminal = Terminal("top")
    try:
        terminal.read_until(b"quick-1")
        terminal.write(b"q")
        assert terminal.exit_code() == 0
        assert b"\x1b[?1049h" in terminal.output
        assert b"\x1b[?1049l" in terminal.output, "the screen of the shell is shown again"
        assert b"Traceback" not in terminal.output
    finally:
        terminal.close()


def test_it_can_be_left_while_the_storage_hangs(root: Path) -> None:
    run = Story("quick-1").works().written(root)
    os.mkfifo(run.journal / "000009-000001.seg")  # whoever opens it waits for ever
    terminal = Terminal("top")
    try:
        terminal.read_until(b"Quit")
        terminal.write(b"q")
        assert terminal.exit_code() == 0
    finally:
        terminal.close()
