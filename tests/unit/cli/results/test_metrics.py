"""``rrl metrics``: its output from the journal of a run, and its message if there is none."""

from __future__ import annotations

import csv
import io
import json
import threading
from pathlib import Path
from typing import Any

import pytest

from rrl.cli import main
from rrl.core.run_dir import RUNS_ENV
from rrl.core.types import Outcome
from rrl.manager.model import events as ev
from rrl.tests.support.cli.story import Story, completed, job_view

RUN = "small-1120-064114"


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(RUNS_ENV, str(tmp_path))
    return tmp_path


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main.run(["metrics", *arguments]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return out


def lines(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def test_each_step_is_one_json_line_with_the_failures_before_it(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    story = Story(RUN, job_view(13)).works().recovers("rollout/0").commits(13).ends(Outcome.COMPLETED, "done")
    story.written(root)
    rows = lines(printed(capsys))
    assert [row["step"] for row in rows] == list(range(1, 14))
    assert [row["seconds"] for row in rows[1:12]] == [3.0] * 11
    assert rows[4]["metrics"] == {"reward": 0.1 + 0.07 * 5, "loss": 0.1, "entropy": 1.25}
    assert [(mark["kind"], mark["about"]) for mark in rows[-1]["marks"]] == [
        ("failure", "rollout/0#1"),
        ("restart", "rollout/0#2"),
    ]
    assert rows[0].keys() == {
        "schema",
        "step",
        "at",
        "incarnation",
        "seconds",
        "tokens",
        "tokens_per_second",
        "tokens_per_second_gpu",
        "phase_seconds",
        "token_age_p50",
        "token_age_max",
        "metrics",
        "logged",
        "marks",
        "evaluation",
    }


def test_csv_has_a_column_for_each_number_of_any_step(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    story = Story(RUN, job_view(14)).works().clocks("trainer/0", train=24.0)
    story.record(ev.ValuesLogged(story.incarnation("reward/0"), {"accuracy": 0.5}))
    story.recovers("rollout/0").commits(13).ends(Outcome.COMPLETED, "done").written(root)
    rows = list(csv.DictReader(io.StringIO(printed(capsys, RUN, "--csv"))))
    assert [row["step"] for row in rows] == [str(step) for step in range(1, 14)]
    assert (rows[0]["seconds_train"], rows[12]["seconds_train"]) == ("2.0", "")
    assert (rows[0]["reward/0/accuracy"], rows[12]["reward/0/accuracy"]) == ("", "0.5")
    assert rows[12]["marks"].startswith("failure rollout/0#1: killed by signal 9; restart rollout/0#2")


def test_numbers_that_json_does_not_have_become_null(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    story = Story(RUN, job_view(40)).works()
    story.record(ev.StepCommitted(story.incarnation("trainer/0"), 13, {"loss": float("nan"), "reward": float("inf")}))
    story.written(root)
    assert lines(printed(capsys))[-1]["metrics"] == {"loss": None, "reward": None}


def test_control_characters_in_names_and_texts_are_escaped(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    story = Story(RUN, job_view(40)).works()
    story.loses("rollout/0")
    story.fences("rollout/0", "\x1b[2J").wait(1)
    story.record(ev.StepCommitted(story.incarnation("trainer/0"), 13, {"\x1b]0;x": 1.0}))
    story.written(root)
    for arguments in ((), ("--csv",)):
        assert "\x1b" not in printed(capsys, *arguments)


def test_new_steps_are_followed_until_the_run_ends(
    root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    story = Story(RUN, job_view(13)).works().clocks("trainer/0", train=30.0)
    run = story.written(root)
    waiting = threading.Event()

    def write_the_rest(_: float) -> None:
        if not waiting.is_set():
            waiting.set()
            story.commits(13).ends(Outcome.COMPLETED, "done").goes_on(run)

    monkeypatch.setattr("rrl.api.step_rows.time.sleep", write_the_rest)
    assert [row["step"] for row in lines(printed(capsys, "--follow"))] == list(range(1, 14))
    assert waiting.is_set()


def test_a_damaged_journal_is_one_line_and_exit_code_2(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = completed(RUN).written(root)
    first = min(run.journal.glob("*.seg"))
    content = bytearray(first.read_bytes())
    content[len(content) // 2] ^= 0xFF
    first.write_bytes(content)
    assert main.run(["metrics", RUN]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"rrl: {first}: cannot be read beyond byte")
    assert err.count("\n") == 1


def test_a_run_that_does_not_exist_is_one_line_and_exit_code_2(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    completed(RUN).written(root)
    assert main.run(["metrics", "nonsense"]) == 2
    assert capsys.readouterr().err == f'rrl: no run "nonsense" in {root}; newest: {RUN}\n'
