"""Following in a real terminal: a pseudo-terminal on both ends."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from rrl.cli.common.runs import OperationFailed
from rrl.cli.run.follow import follow
from rrl.core.run_dir import RunDir
from rrl.core.types import Outcome
from rrl.manager.reporting.summary import write_summary
from rrl.manager.storage.journal import Journal
from rrl.tests.support.cli.story import Story, completed
from rrl.tests.support.cli.waiting import Output, eventually

RUN = "small-7"


class Terminal:
    """``rrl status --live`` with a terminal of 100 columns, and all that it drew."""

    def __init__(self, root: Path) -> None:
        self._mine, theirs = pty.openpty()
        # Whoever runs the tests in the background of a shell has SIGINT ignored, and so would this process.
        heeds = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
        code = f"{heeds}; import sys; from rrl.cli.main import main; sys.argv[1:] = ['status', '--live']; main()"
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


@pytest.mark.parametrize("leave", ["q", "ctrl-c"])
def test_to_stop_looking_leaves_the_run_alone(tmp_path: Path, leave: str) -> None:
    run = Story(RUN).works().written(tmp_path)
    before = sorted(path for path in run.path.rglob("*"))
    with Terminal(tmp_path) as terminal:
        eventually(lambda: "step 12/40" in terminal.drawn)
        if leave == "q":
            terminal.press("q")
        else:
            terminal.process.send_signal(signal.SIGINT)
        assert terminal.process.wait(30) == (0 if leave == "q" else 130)
        eventually(lambda: "\x1b[?25h" in terminal.drawn)  # the cursor is back
    assert "Traceback" not in terminal.drawn
    assert sorted(path for path in run.path.rglob("*")) == before


def test_without_a_terminal_each_change_of_a_replica_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    story = Story(RUN).works()
    run = story.written(tmp_path)
    output = Output(monkeypatch)
    following = threading.Thread(target=follow, args=(run,), kwargs={"keys": False}, daemon=True)
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
    monkeypatch.setattr("rrl.cli.run.follow.SILENT_AFTER_LEASES", 0.01)
    run = Story(RUN).works().written(tmp_path)  # it has no manager and no lease
    Output(monkeypatch)
    with pytest.raises(OperationFailed, match=rf"the manager of {RUN} is gone .* rrl manage {RUN}"):
        follow(run, keys=False, require_manager=True)
