"""No command prints a control sequence that a role wrote."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from rrl.cli import main
from rrl.core.log_lines import stamp
from rrl.core.run_dir import RUNS_ENV, RunDir
from rrl.core.text import escaped
from rrl.core.types import Cause, Evidence, Finding, Outcome, Remedy, Verdict
from rrl.manager.model import events as ev
from rrl.manager.reporting.summary import write_summary
from rrl.tests.support.cli.story import Story
from rrl.tests.support.cli.terminal import Terminal
from rrl.tests.support.cli.waiting import eventually

RUN = "small-7"
HOSTILE = "\x1b]0;owned\x9c\x1b[2J \x9b31m \u202etxt.exe [red]markup[/red]"
SHOWN = r"\x1b]0;owned\x9c\x1b[2J \x9b31m \u202etxt.exe [red]markup[/red]"


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    """Return a run in which a rollout wrote control sequences into its log and into the finding about its failure."""
    monkeypatch.setenv(RUNS_ENV, str(tmp_path))
    monkeypatch.setenv("COLUMNS", "400")
    story = Story(RUN).works()
    incarnation = story.incarnation("rollout/0")
    evidence = (Evidence("stderr", HOSTILE, story.now),)
    failed = Finding(
        "exit_record", Verdict.FAIL, Cause.PROCESS, Remedy.RESTART, story.now, evidence, incarnation=incarnation
    )
    story.record(ev.FindingChanged(failed))
    made = story.written(tmp_path)
    line = stamp(int(story.now * 1e6)).decode()
    made.log_file(f"{RUN}.rollout-0.1").write_text(f"{line} {HOSTILE}\n")
    return made


@pytest.mark.parametrize(
    "command",
    [
        ("status",),
        ("status", "--json"),
        ("logs",),
        ("logs", "--json"),
        ("logs", "--failed"),
        ("logs", "--failed", "--json"),
    ],
)
def test_text_of_a_role_is_escaped_by_every_command_that_shows_it(
    run: RunDir, capsys: pytest.CaptureFixture[str], command: tuple[str, ...]
) -> None:
    assert main.run([command[0], RUN, *command[1:]]) == 0
    out, err = capsys.readouterr()
    assert [line for line in (out + err).splitlines() if escaped(line) != line] == []
    if "--json" in command:
        assert json.dumps(HOSTILE)[1:-1] in out
    else:
        assert SHOWN in out


def test_text_of_a_role_is_escaped_in_a_live_view_and_moves_no_line(run: RunDir) -> None:
    program = "from rrl.cli.main import main; main(['status', '--live'])"
    with Terminal([sys.executable, "-c", program], {"RRL_RUNS_DIR": str(run.path.parent)}) as terminal:
        eventually(lambda: terminal.drawn.count("q stops watching") >= 3)
        assert [line[:7] for line in terminal.lines if RUN in line] == [RUN]
        assert r"\x1b]0;owned" in terminal.drawn
        assert "\x1b]0;owned" not in terminal.drawn


@pytest.mark.parametrize("options", [(), ("--failed",)])
def test_raw_logs_are_shown_unescaped(
    run: RunDir, capsys: pytest.CaptureFixture[str], options: tuple[str, ...]
) -> None:
    assert main.run(["logs", RUN, "--raw", *options]) == 0
    assert HOSTILE in capsys.readouterr().out


def test_raw_json_is_refused_in_one_line(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["logs", RUN, "--raw", "--json"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_summary_file_has_no_control_characters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    story = Story(RUN).works()
    story.record(ev.RunEnded(Outcome.FAILED, HOSTILE))
    run = story.written(tmp_path)
    write_summary(run)
    text = run.summary.read_text()
    assert [line for line in text.splitlines() if escaped(line) != line] == []
    assert SHOWN in json.dumps(json.loads(text), ensure_ascii=False).replace("\\\\", "\\")
