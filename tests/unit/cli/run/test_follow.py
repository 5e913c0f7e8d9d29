"""Commands that follow a run in a real terminal: a pseudo-terminal, of which the test has the other end."""

from __future__ import annotations

import os
import pty
import signal
import sys
import termios
import threading
from pathlib import Path

import pytest

from rrl.cli.run.follow import _REDRAW_KEY, _key_reader, follow
from rrl.core.types import OperationFailed
from rrl.manager.reporting.summary import write_summary
from rrl.manager.storage.journal import Journal
from rrl.tests.support.cli.story import Story, completed
from rrl.tests.support.cli.terminal import Terminal
from rrl.tests.support.cli.waiting import Output, eventually

RUN = "small-7"
STATUS_LIVE = "from rrl.cli.main import main; sys.argv[1:] = ['status', '--live']; main()"
SUBMIT_WAIT = f"""\
from rrl.api.runs import find_run
from rrl.cli.run.submit import watch_until_end
sys.exit(watch_until_end(find_run({RUN!r}), False))
"""
"""Program that waits as ``rrl submit --wait`` does once the run has started."""

FOREGROUND = f"""\
from rrl.api.runs import find_run
from rrl.cli.run.follow import follow
follow(find_run({RUN!r}), summary_follows=True, manages=True)
"""
"""Program that draws the same view as ``rrl submit --foreground``."""


def terminal_with(root: Path, command: str, columns: int = 100, rows: int = 40) -> Terminal:
    """Return a terminal in which Python runs ``command`` for the runs in ``root``."""
    # If a shell runs the tests in its background, they ignore SIGINT, and so would this process.
    heeds = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
    argv = [sys.executable, "-c", f"{heeds}; import sys\n{command}"]
    return Terminal(argv, {"RRL_RUNS_DIR": str(root)}, columns, rows)


@pytest.mark.parametrize(("leave", "command"), [("q", STATUS_LIVE), ("ctrl-c", SUBMIT_WAIT)], ids=["q", "ctrl-c"])
def test_leaving_the_view_does_not_affect_the_run(tmp_path: Path, leave: str, command: str) -> None:
    run = Story(RUN).works().written(tmp_path)
    before = sorted(path for path in run.path.rglob("*"))
    with terminal_with(tmp_path, command) as terminal:
        eventually(lambda: "step 12/40" in terminal.drawn)
        if leave == "q":
            terminal.press("q")
        else:
            terminal.process.send_signal(signal.SIGINT)
        assert terminal.process.wait(30) == (0 if leave == "q" and command == STATUS_LIVE else 130)
        eventually(lambda: "\x1b[?25h" in terminal.drawn)  # the cursor is back
        assert terminal.echoes, "the terminal does not echo again"
    assert "Traceback" not in terminal.drawn
    assert (f"stopped watching; {RUN} goes on" in terminal.drawn) is (command == SUBMIT_WAIT)
    assert sorted(path for path in run.path.rglob("*")) == before


def test_key_press_does_not_detach_a_manager_in_the_foreground(tmp_path: Path) -> None:
    story = Story(RUN).works()
    run = story.written(tmp_path)
    with terminal_with(tmp_path, FOREGROUND) as terminal:
        eventually(lambda: "Ctrl-C cancels the run" in terminal.drawn)
        eventually(lambda: not terminal.echoes)
        terminal.press("q")
        story.commits(13).goes_on(run)
        eventually(lambda: "step 13/40" in terminal.drawn)
        assert terminal.process.poll() is None
        assert "q stops watching" not in terminal.drawn


def test_lines_beyond_the_screen_are_counted_and_shown_after_the_terminal_grows(tmp_path: Path) -> None:
    Story(RUN).works().written(tmp_path)
    with terminal_with(tmp_path, STATUS_LIVE, columns=80, rows=8) as terminal:
        eventually(lambda: "more lines do not fit" in "".join(terminal.lines))
        small = terminal.lines
        terminal.resize(100, 40)
        eventually(lambda: "rollout/1" in "\n".join(terminal.lines))
        eventually(lambda: terminal.lines[-1] == "q stops watching; the run goes on")
        grown = terminal.lines
        terminal.resize(60, 12)
        eventually(lambda: "more lines do not fit" in "".join(terminal.lines))
        shrunk = terminal.lines
    assert len(small) == 8
    assert [len([line for line in lines if line.startswith("small-7")]) for lines in (small, grown, shrunk)] == [
        1,
        1,
        1,
    ]
    assert len(shrunk) == 12


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
            assert pressed(0.01) == _REDRAW_KEY, "the program has read keys that were typed for the other job"
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
    story.loses("rollout/0")
    story.fences("rollout/0")
    story.goes_on(run)
    eventually(lambda: len(output.lines) == 2)
    journal = Journal(run, 3)
    for stamped in completed(RUN).stamped[-1:]:
        journal.append(stamped)
    journal.close()
    write_summary(run)
    following.join(30)
    assert output.lines == [
        "small-7: running, step 12/40, reward 0.94",
        "small-7: recovering, step 12/40, reward 0.94, rollout/0#1 dead",
        "small-7: completed, step 12/40, reward 0.94",
    ]


def test_waiting_ends_if_no_local_process_can_end_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rrl.api.watching.run_watcher.STALE_LEASES", 0.01)
    run = Story(RUN).works().written(tmp_path)  # the run has no manager and no lease
    Output(monkeypatch)
    with pytest.raises(OperationFailed, match=rf"the manager of {RUN} is gone .* rrl manage {RUN}"):
        follow(run, require_manager=True)
