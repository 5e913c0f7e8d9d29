"""Following in a real terminal: a pseudo-terminal on both ends."""

from __future__ import annotations

import os
import pty
import re
import signal
import subprocess
import sys
import termios
import threading
from pathlib import Path

import pytest

from rrl.cli.run.follow import _key_reader, follow
from rrl.core.run_dir import RunDir
from rrl.core.types import OperationFailed, Outcome
from rrl.manager.reporting.summary import write_summary
from rrl.manager.storage.journal import Journal
from rrl.tests.support.cli.story import Story, completed
from rrl.tests.support.cli.waiting import Output, eventually

RUN = "small-7"


STATUS_LIVE = "from rrl.cli.main import main; sys.argv[1:] = ['status', '--live']; main()"
SUBMIT_WAIT = f"""\
from rrl.api.runs import find_run
from rrl.cli.run.submit import watch_until_end
sys.exit(watch_until_end(find_run({RUN!r}), False))
"""
"""What ``rrl submit --wait`` does once the run is started."""

FOREGROUND = f"""\
from rrl.api.runs import find_run
from rrl.cli.run.follow import follow
follow(find_run({RUN!r}), summary_follows=True, manages=True)
"""
"""What ``rrl submit --foreground`` draws."""


class Terminal:
    """A command in a terminal of 100 columns, and all that it drew."""

    def __init__(self, root: Path, command: str = STATUS_LIVE) -> None:
        self._mine, theirs = pty.openpty()
        # Whoever runs the tests in the background of a shell has SIGINT ignored, and so would this process.
        heeds = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
        code = f"{heeds}; import sys\n{command}"
        environment = os.environ | {"RRL_RUNS_DIR": str(root), "COLUMNS": "100", "LINES": "40", "TERM": "xterm"}
        self.process = subprocess.Popen(
            [sys.executable, "-c", code], stdin=theirs, stdout=theirs, stderr=theirs, env=environment,
            start_new_session=True,
        )  # fmt: skip
        os.close(theirs)
        self._drawn = b""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def drawn(self) -> str:
        return self._drawn.decode(errors="replace")

    @property
    def echoes(self) -> bool:
        """Whether the terminal itself shows the keys that are pressed."""
        return bool(termios.tcgetattr(self._mine)[3] & termios.ECHO)

    @property
    def visible(self) -> list[str]:
        """The lines on the screen: what was drawn, without the lines that were erased."""
        lines, row = [""], 0
        for part in re.split(r"(\x1b\[[?0-9;]*[a-zA-Z]|\r|\n)", self.drawn):
            if part == "\n":
                row += 1
                lines += [""] * (row >= len(lines))
            elif part == "\x1b[1A":
                row -= 1
            elif part == "\x1b[2K":
                lines[row] = ""
            elif not part.startswith(("\x1b", "\r")):
                lines[row] += part
        return [line.rstrip() for line in lines]

    def press(self, key: str) -> None:
        os.write(self._mine, key.encode())

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait(30)
        self._reader.join(30)
        os.close(self._mine)

    def _read(self) -> None:
        try:
            while data := os.read(self._mine, 4096):
                self._drawn += data
        except OSError:  # the other end was closed
            pass


def print_progress(run: RunDir, story: Story, since: int) -> None:
    journal = Journal(run, 2)
    for stamped in story.stamped[since:]:
        journal.append(stamped)
    journal.close()


def test_a_live_picture_follows_the_journal_and_ends_with_the_run(tmp_path: Path) -> None:
    story = Story(RUN).works()
    run = story.written(tmp_path)
    with Terminal(tmp_path) as terminal:
        eventually(lambda: "step 12/40" in terminal.drawn)
        reported = len(story.stamped)
        story.commits(13)
        story.ends(Outcome.COMPLETED, "all steps are done")
        print_progress(run, story, reported)
        write_summary(run)
        assert terminal.process.wait(30) == 0
    assert "step 13/40" in terminal.drawn
    assert "\x1b[" in terminal.drawn  # in colour


@pytest.mark.parametrize("command", [STATUS_LIVE, SUBMIT_WAIT], ids=["status", "submit"])
@pytest.mark.parametrize("leave", ["q", "ctrl-c"])
def test_to_stop_looking_leaves_the_run_alone(tmp_path: Path, leave: str, command: str) -> None:
    run = Story(RUN).works().written(tmp_path)
    before = sorted(path for path in run.path.rglob("*"))
    with Terminal(tmp_path, command) as terminal:
        eventually(lambda: "step 12/40" in terminal.drawn)
        if leave == "q":
            terminal.press("q")
        else:
            terminal.process.send_signal(signal.SIGINT)
        assert terminal.process.wait(30) == (0 if leave == "q" and command == STATUS_LIVE else 130)
        eventually(lambda: "\x1b[?25h" in terminal.drawn)  # the cursor is back
        assert terminal.echoes, "the terminal is as it was"
    assert "Traceback" not in terminal.drawn
    assert (f"stopped watching; {RUN} goes on" in terminal.drawn) is (command == SUBMIT_WAIT)
    assert sorted(path for path in run.path.rglob("*")) == before


@pytest.mark.parametrize("command", [STATUS_LIVE, SUBMIT_WAIT], ids=["status", "submit"])
def test_pressed_keys_leave_nothing_in_the_view(tmp_path: Path, command: str) -> None:
    Story(RUN).works().written(tmp_path)
    with Terminal(tmp_path, command) as terminal:
        eventually(lambda: "step 12/40" in terminal.drawn)
        eventually(lambda: not terminal.echoes)
        terminal.press("zz\r")
        terminal.press("q")
        terminal.process.wait(30)
        eventually(lambda: terminal.echoes)
        assert "zz" not in terminal.drawn
        assert len([line for line in terminal.visible if "step 12/40" in line]) == 1


def test_a_manager_in_the_foreground_is_not_left_by_a_key(tmp_path: Path) -> None:
    story = Story(RUN).works()
    run = story.written(tmp_path)
    with Terminal(tmp_path, FOREGROUND) as terminal:
        eventually(lambda: "Ctrl-C cancels the run" in terminal.drawn)
        eventually(lambda: not terminal.echoes)
        terminal.press("q")
        reported = len(story.stamped)
        print_progress(run, story.commits(13), reported)
        eventually(lambda: "step 13/40" in terminal.drawn)
        assert terminal.process.poll() is None
        assert "q stops watching" not in terminal.drawn


def test_the_end_of_a_watched_run_is_shown_once_with_what_to_do_next(tmp_path: Path) -> None:
    run = completed(RUN).written(tmp_path)
    (run.checkpoints / "step-12.1.0").mkdir()
    with Terminal(tmp_path, SUBMIT_WAIT) as terminal:
        assert terminal.process.wait(30) == 0
        eventually(lambda: "rrl list" in terminal.drawn)
        text = "\n".join(terminal.visible)
    assert [text.count(shown) for shown in ("● completed", "failure           detect", "↻ rollout/0#1")] == [1, 1, 1]
    next_steps = " ".join(text[text.index("next") :].split())
    assert f"folder {run.path}" in " ".join(text.split())
    assert next_steps.startswith(
        f"next checkpoints/ in this folder weights of step 12 rrl logs {RUN} what its roles printed"
        f" rrl resume {RUN} --steps 24 trains on rrl list all runs"
    )


def test_a_job_in_the_background_leaves_the_terminal_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    mine, theirs = pty.openpty()
    with open(theirs, "rb", buffering=0) as terminal:
        monkeypatch.setattr("sys.stdin", terminal)
        monkeypatch.setattr("os.tcgetpgrp", lambda fd: os.getpgrp() + 1)
        before = termios.tcgetattr(theirs)
        with _key_reader() as pressed:
            os.write(mine, b"typed for another job\n")
            assert pressed(0.01) == ""
            assert termios.tcgetattr(theirs) == before
            monkeypatch.setattr("os.tcgetpgrp", lambda fd: os.getpgrp())
            assert pressed(0.01) == "", "keys that were typed before are not for this program"
            os.write(mine, b"q")
            assert pressed(30.0) == "q"
            assert termios.tcgetattr(theirs) != before
        assert termios.tcgetattr(theirs) == before
    os.close(mine)


def test_without_a_terminal_each_change_of_a_replica_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    story = Story(RUN).works()
    run = story.written(tmp_path)
    output = Output(monkeypatch)
    following = threading.Thread(target=follow, args=(run,), daemon=True)
    following.start()
    eventually(lambda: len(output.lines) == 1)
    reported = len(story.stamped)
    story.loses("rollout/0")
    story.fences("rollout/0")
    print_progress(run, story, reported)
    eventually(lambda: len(output.lines) == 2)
    journal = Journal(run, 3)
    for stamped in completed(RUN).stamped[-1:]:
        journal.append(stamped)
    journal.close()
    write_summary(run)
    following.join(30)
    assert output.lines == [
        "small-7: running, step 12/40, reward 0.94",
        "small-7: recovering, step 12/40, reward 0.94, rollout/0#1 wanted",
        "small-7: completed, step 12/40, reward 0.94",
    ]


def test_waiting_gives_up_when_nothing_here_could_ever_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rrl.api.watching.run_watcher.STALE_LEASES", 0.01)
    run = Story(RUN).works().written(tmp_path)  # it has no manager and no lease
    Output(monkeypatch)
    with pytest.raises(OperationFailed, match=rf"the manager of {RUN} is gone .* rrl manage {RUN}"):
        follow(run, require_manager=True)
