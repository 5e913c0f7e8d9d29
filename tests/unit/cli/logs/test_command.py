from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rrl.api.logs.files import all_logs
from rrl.api.logs.merge import LineFilter, LogTail
from rrl.cli import main
from rrl.cli.common.output import JSON_SCHEMA
from rrl.core.log_lines import stamp
from rrl.core.run_dir import RUNS_ENV, RunDir
from rrl.core.types import Incarnation, Outcome, ReplicaId
from rrl.manager.intake.standby_promotion import link_log
from rrl.tests.support.cli.json_keys import assert_fits_its_schema
from rrl.tests.support.cli.story import Story, completed
from rrl.tests.support.cli.waiting import Output, eventually

RUN = "small-7"
NOON = 1_605_873_600_000_000
"""2020-11-20T12:00:00Z in µs."""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    monkeypatch.setenv(RUNS_ENV, str(tmp_path))
    return Story(RUN).works().written(tmp_path)


def write(run: RunDir, tag: str, *lines: str) -> Path:
    path = run.log_file(f"{RUN}.{tag}")
    with path.open("a") as file:
        file.writelines(f"{line}\n" for line in lines)
    return path


def at(second: float, text: str) -> str:
    """Return a log line as the launcher of a step writes it."""
    return f"{stamp(NOON + int(second * 1e6)).decode()} {text}"


def shown(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    """Return the lines of ``rrl logs`` without the date."""
    assert main.run(["logs", RUN, *arguments]) == 0
    return [line[6:] if line.startswith("11-20 ") else line for line in capsys.readouterr().out.splitlines()]


@pytest.fixture
def utc(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


def test_single_log_is_shown_without_a_prefix_and_several_with_their_incarnations(
    run: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    write(run, "rollout-0.1", "one", "two")
    assert main.run(["logs", RUN, "rollout/0"]) == 0
    assert capsys.readouterr().out == "one\ntwo\n"
    write(run, "rollout-0.2", "three")
    write(run, "trainer-0.1", "four")
    assert main.run(["logs", RUN, "rollout/0"]) == 0
    assert capsys.readouterr().out == "rollout/0#1 | one\nrollout/0#1 | two\nrollout/0#2 | three\n"
    assert main.run(["logs", RUN, "rollout"]) == 0
    assert "trainer" not in capsys.readouterr().out
    assert main.run(["logs", RUN]) == 0
    assert capsys.readouterr().out.endswith("trainer/0#1 | four\n")


def test_every_kind_of_log_file_is_distinguished(run: RunDir) -> None:
    for tag in ("rollout-10.1", "rollout-9.1", "trainer-0.3", "agent-gpu-node.site.org.2", "rollout-9.1.step"):
        write(run, tag, "x")
    for name in ("rollout-9.1.step.log.0", "rollout-9.1.step.log.srun", "rollout-9.1.log.1", "rollout-9.1.log.2"):
        (run.logs / f"{RUN}.{name}").write_text("x\n")
    (run.logs / "manager.3.log").write_text("x\n")
    (run.submit / "123_0_log.out").write_text("x\n")
    (run.submit / "123_0_log.err").write_text("x\n")
    run.controller_log.write_text("")
    (run.logs / "notes.txt").write_text("x\n")
    assert {(log.role, log.replica, log.label) for log in all_logs(run)} == {
        ("rollout", "rollout/10", "rollout/10#1"),
        ("rollout", "rollout/9", "rollout/9#1"),
        ("rollout", "rollout/9", "rollout/9#1 step"),
        ("rollout", "rollout/9", "rollout/9#1 srun"),
        ("trainer", "trainer/0", "trainer/0#3"),
        ("agent", "agent/gpu-node.site.org", "agent/gpu-node.site.org#2"),
        ("manager", "manager", "manager epoch 3"),
        ("manager", "manager", "manager"),
        ("manager", "manager", "manager (errors)"),
    }


def test_log_of_a_promoted_standby_is_shown_once_under_its_incarnation(
    run: RunDir, capsys: pytest.CaptureFixture[str], utc: None
) -> None:
    own = write(run, "standby-n2.3", at(2, "imports"), at(3, "becomes"), at(4, "last words"))
    write(run, "standby-n2.3.step", at(1, "launcher"))
    (run.logs / f"{own.name}.1").write_text(f"{at(1, 'older')}\n")
    write(run, "standby-n2.4", at(9, "another"))
    write(run, "trainer-0.1", at(1, "first life"))
    assert [log.owner for log in all_logs(run) if log.kind == "role"] == ["standby/n2#3", "standby/n2#4", "trainer/0#1"]
    link_log(run, Incarnation(ReplicaId("trainer/0"), 2), Incarnation(ReplicaId("standby/n2"), 3))
    lines = ["older", "imports", "becomes", "last words"]
    for whose in ("trainer/0#2", "standby/n2#3"):
        reported = shown(capsys, whose)
        assert [line.rpartition(" | ")[2] for line in reported if " step " not in line] == lines, whose
        assert all("trainer/0#2" in line for line in reported)
    assert [line.rpartition("| ")[2] for line in shown(capsys, "trainer")] == [
        "first life",
        "older",
        "launcher",
        *lines[1:],
    ]
    assert len(shown(capsys)) == len(lines) + 3
    assert shown(capsys, "standby/n2#4") == ["12:00:09.000 another"]


def test_gang_is_selected_by_the_name_of_its_first_member(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    write(run, "trainer-0.1", "zero")
    write(run, "trainer-0.1.1", "one")
    assert shown(capsys, "trainer/0") == ["trainer/0#1 | zero", "trainer/0.1#1 | one"]
    assert shown(capsys, "trainer/0.1") == ["one"]


def test_logs_are_merged_by_time(run: RunDir, capsys: pytest.CaptureFixture[str], utc: None) -> None:
    write(run, "rollout-0.1", at(1, "one"), at(4, "four"))
    write(run, "rollout-0.2", at(5, "five"))
    write(run, "trainer-0.1", at(2, "two"), at(3, "three"), at(6, "six"))
    assert shown(capsys) == [
        "12:00:01.000 rollout/0#1 | one",
        "12:00:02.000 trainer/0#1 | two",
        "12:00:03.000 trainer/0#1 | three",
        "12:00:04.000 rollout/0#1 | four",
        "12:00:05.000 rollout/0#2 | five",
        "12:00:06.000 trainer/0#1 | six",
    ]
    assert shown(capsys, "rollout/0#1") == ["12:00:01.000 one", "12:00:04.000 four"]
    assert shown(capsys, "-n", "1") == [
        "12:00:04.000 rollout/0#1 | four",
        "12:00:05.000 rollout/0#2 | five",
        "12:00:06.000 trainer/0#1 | six",
    ]


def test_rotated_files_are_read_as_part_of_their_log(
    run: RunDir, capsys: pytest.CaptureFixture[str], utc: None
) -> None:
    path = write(run, "rollout-0.1", at(1, "a"), at(2, "b"))
    os.replace(path, f"{path}.2")
    os.replace(write(run, "rollout-0.1", at(3, "c")), f"{path}.1")
    write(run, "rollout-0.1", at(4, "d"))
    assert [line[-1] for line in shown(capsys, "rollout/0")] == ["a", "b", "c", "d"]
    assert [line[-1] for line in shown(capsys, "rollout/0", "-n", "3")] == ["b", "c", "d"]
    assert [line[-1] for line in shown(capsys, "rollout/0", "-n", "1")] == ["d"]
    assert [line[-1] for line in shown(capsys, "rollout/0", "--grep", "[ac]")] == ["a", "c"]
    assert [line[-1] for line in shown(capsys, "rollout/0", "--grep", "[ac]", "-n", "1")] == ["c"]


def test_since_accepts_times_and_durations(run: RunDir, capsys: pytest.CaptureFixture[str], utc: None) -> None:
    now = time.time() - NOON / 1e6
    write(run, "rollout-0.1", *(at(n, f"old {n}") for n in range(100)), at(now - 300, "lately"))
    assert [line.split()[-1] for line in shown(capsys, "--since", "10m")] == ["lately"]
    assert shown(capsys, "--since", "60s") == []
    since = shown(capsys, "rollout/0", "--since", "2020-11-20T12:01:38Z")
    assert [line.split(" ", 1)[1][-6:] for line in since] == ["old 98", "old 99", "lately"]
    assert len(shown(capsys, "--since", "2020-11-20 12:00")) == 101, "not all lines since the given time are shown"
    assert len(shown(capsys, "--since", "2020-11-20 12:00", "-n", "7")) == 7
    assert len(shown(capsys, "--since", "2020-11-20T14:00+02:00")) == 101


@pytest.mark.parametrize("since", ["yesterday", "10", "10 parsecs", "2026-13-01", "", "0001-01-01"])
def test_invalid_time_is_one_line(run: RunDir, capsys: pytest.CaptureFixture[str], since: str) -> None:
    assert main.run(["logs", RUN, "--since", since]) == 2
    reported = capsys.readouterr().err
    assert reported.startswith(f'rrl: --since "{since}" is not a time; write for example ')
    assert reported.count("\n") == 1


def test_grep_shows_matching_lines_only(run: RunDir, capsys: pytest.CaptureFixture[str], utc: None) -> None:
    write(run, "rollout-0.1", *(at(n, f"step {n} loss {n / 7:.3f}") for n in range(50)), at(60, "CUDA out of memory"))
    assert shown(capsys, "--grep", "(?i)out of MEMORY|^step 1 ") == [
        "12:00:01.000 step 1 loss 0.143",
        "12:01:00.000 CUDA out of memory",
    ]
    assert main.run(["logs", RUN, "--grep", "(unclosed"]) == 2
    reported = capsys.readouterr().err
    assert reported.startswith('rrl: --grep "(unclosed" is not a valid regular expression: ')
    assert reported.count("\n") == 1


def test_json_output_is_one_object_per_line(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    write(run, "rollout-0.1", at(1, 'say "hi"'))
    write(run, "rollout-0.1.step", "no time")
    (run.submit / "1_0_log.out").write_text("managing\n")
    assert main.run(["logs", RUN, "--json"]) == 0
    reported = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    for document in reported:
        assert_fits_its_schema("logs", document)
    assert [one.pop("schema") for one in reported] == [JSON_SCHEMA] * 3
    assert sorted(reported, key=lambda one: str(one["log"])) == [
        {"time": None, "incarnation": "rollout/0#1", "log": "launcher", "text": "no time"},
        {"time": None, "incarnation": "manager", "log": "manager", "text": "managing"},
        {"time": "2020-11-20T12:00:01.000000Z", "incarnation": "rollout/0#1", "log": "role", "text": 'say "hi"'},
    ]


def test_log_of_any_size_is_read_from_the_required_position(run: RunDir) -> None:
    path = run.log_file(f"{RUN}.rollout-0.1")
    with path.open("wb") as file:
        file.truncate(40 * 2**30)  # zeros without a line end, which take no block on the disk
        file.seek(0, os.SEEK_END)
        file.write(b"\n" + b"".join(at(n, "x" * 100).encode() + b"\n" for n in range(3000)))
    [log] = all_logs(run)
    tail = LogTail(log, LineFilter(2500))
    assert sum(1 for _ in tail.new_lines()) == 2500
    since = LogTail(log, LineFilter(None, stamp(NOON + 1_000_000)))
    assert sum(1 for _ in since.new_lines()) == 2999
    for one in (tail, since):
        assert list(one.close()) == []


def test_only_the_newest_lines_are_shown(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    write(run, "rollout-0.1", *(f"line {i} {'x' * 500}" for i in range(2000)), "the last")
    assert main.run(["logs", RUN, "rollout/0", "-n", "2"]) == 0
    assert [line[:9] for line in capsys.readouterr().out.splitlines()] == ["line 1999", "the last"]
    assert main.run(["logs", RUN, "rollout/0", "-n", "5000"]) == 0
    assert capsys.readouterr().out.count("\n") == 2001
    assert main.run(["logs", RUN, "rollout/0", "-n", "0"]) == 0
    assert capsys.readouterr().out == ""


def test_unfinished_line_and_invalid_utf8_are_shown(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    run.log_file(f"{RUN}.rollout-0.1").write_bytes(b"whole\n\xff half")
    assert main.run(["logs", RUN, "rollout/0"]) == 0
    assert capsys.readouterr().out == "whole\n� half\n"


def test_unknown_role_is_one_line_with_the_existing_ones(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["logs", RUN]) == 2
    assert capsys.readouterr().err == f"rrl: {RUN} has no logs yet\n"
    write(run, "rollout-0.1", "x")
    write(run, "trainer-0.1", "x")
    for arguments in (["judge"], ["rollout/7"], ["judge", "-f"]):
        assert main.run(["logs", RUN, *arguments]) == 2
        assert capsys.readouterr().err == (
            f'rrl: {RUN} has no logs of "{arguments[0]}"; there are logs of: rollout/0, trainer/0\n'
        )


def test_following_continues_over_rotation_and_new_incarnations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(RUNS_ENV, str(tmp_path))
    story = Story(RUN).works()
    run = story.written(tmp_path)
    path = write(run, "rollout-0.1", "old", "newest")
    output = Output(monkeypatch)
    following = threading.Thread(target=main.run, args=(["logs", RUN, "rollout/0", "-f", "-n", "1"],), daemon=True)
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
    story.ends(Outcome.COMPLETED, "all steps are done").goes_on(run)
    following.join(timeout=30)
    assert not following.is_alive()
    assert output.lines[5:] == ["rollout/0#2 | its last word"]


def test_following_an_ended_run_shows_its_logs_and_exits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(RUNS_ENV, str(tmp_path))
    write(completed(RUN).written(tmp_path), "rollout-0.1", "x")
    assert main.run(["logs", RUN, "rollout", "-f"]) == 0
    assert capsys.readouterr().out == "rollout/0#1 | x\n"


def test_logs_without_a_run_are_those_of_the_newest(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    older = Story("aaa-1").works().written(run.path.parent)
    os.utime(older.resolved, (1, 1))
    write(run, "rollout-0.1", "of the newest")
    (older.logs / "aaa-1.rollout-0.1.log").write_text("of the older one\n")
    assert main.run(["logs"]) == 0
    shown = capsys.readouterr().out
    assert "of the newest" in shown
    assert "older" not in shown


def test_selector_in_place_of_a_run_is_answered_with_the_newest_run(
    run: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    write(run, "rollout-0.1", "text")
    for selector in ("rollout", "rollout/0", "trainer/0"):
        assert main.run(["logs", selector]) == 2
        assert capsys.readouterr().err == f'rrl: "{selector}" is not a run; write: rrl logs {RUN} {selector}\n'
    assert main.run(["logs", "nonsense"]) == 2
    assert 'no run "nonsense"' in capsys.readouterr().err
