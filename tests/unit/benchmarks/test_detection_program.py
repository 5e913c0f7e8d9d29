"""benchmarks/detection.py: its output does not depend on the number of processes, and a signal ends all of them."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from rrl.benchmarks import _provenance, detection
from rrl.benchmarks._detection_runs import available_cores
from rrl.benchmarks._provenance import provenance
from rrl.benchmarks.detection import main
from rrl.benchmarks.scenarios.methods import METHODS, OURS, ROBUSTRL, WARNS_OF_ALL
from rrl.tests.support.cli.waiting import DEADLINE_S, eventually

CRASH = """
about = "A rollout crashes"
lasts = "4min"
[[event]]
at = "2min"
do = "crash"
who = "rollout/0"
[[truth]]
who = "rollout/0"
cause = "process"
within = "30s"
"""


@pytest.fixture(autouse=True)
def _keeps_raw_samples_out_of_the_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_provenance, "RESULTS", tmp_path / "results")


def test_output_is_the_same_with_one_process_and_with_several(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "crash.toml").write_text(CRASH)
    (tmp_path / "calm.toml").write_text('about = "Nothing happens"\nlasts = "2min"\n')
    printed = []
    for jobs in (1, 3):
        main(tmp_path, seeds=2, jobs=jobs)
        *lines, last = capsys.readouterr().out.splitlines()
        result = json.loads(last)
        samples = json.loads(Path(result["raw"]).read_text())["samples"]
        own = {key: value for key, value in result.items() if key not in {*provenance(), "raw"}}
        printed.append((lines, own, samples))
    assert printed[0] == printed[1]
    assert (result["scenarios"], result["runs"], result["recall"], result["precision"]) == (2, 4, 1.0, 1.0)


HANG_AND_WARN = """
about = "A rollout deadlocks, and NVML hangs on the node of another one"
lasts = "8min"
[[event]]
at = "3min"
do = "hang"
who = "rollout/0"
phase = "generate"
[[event]]
at = "3min"
do = "reader"
reader = "nvml"
who = "@rollout/1"
[[truth]]
of = "hang"
who = "rollout/0"
cause = "hang"
"""


def test_hangs_that_both_find_are_compared_by_role_and_warnings_are_listed_on_request(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "hang.toml").write_text(HANG_AND_WARN)
    main(tmp_path, seeds=1, jobs=1)
    printed = capsys.readouterr().out
    assert "warnings of ours" not in printed
    result = json.loads(printed.splitlines()[-1])
    assert set(result["hangs"]) == {"rollout"}
    for method, answer_timeout in ROBUSTRL.items():
        found = result["hangs"]["rollout"][method]
        assert (found["both"], found["ours_alone"], found["robustrl_alone"]) == (1, 0, 0)
        assert found["p95"]["robustrl"] == 60.0 + answer_timeout
        assert found["median"]["ratio"] == result["hang_delay_over_robustrl"]["rollout"][method]["median"] < 1.0
    main(tmp_path, seeds=1, jobs=1, warnings=True)
    listed = re.findall(
        r"^  hang seed 0: WARN at .* about (\S+?)(?:, until .*)?: (\w+): ", capsys.readouterr().out, re.M
    )
    assert ("n4", "readers") in listed
    hours = 8 / 60
    assert len(listed) == pytest.approx(result["suites"]["all"][OURS]["warnings_per_hour"] * hours, rel=0.01)


def test_counts_are_given_for_each_suite(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for suite, text in {"faults": CRASH, "no_fault": 'about = "Nothing happens"\nlasts = "6min"\n'}.items():
        (tmp_path / suite).mkdir()
        (tmp_path / suite / "one.toml").write_text(text)
    main(tmp_path, seeds=1, jobs=1, json_only=True)
    suites = json.loads(capsys.readouterr().out)["suites"]
    assert {name: (each[OURS]["runs"], each[OURS]["found"], each[OURS]["false"]) for name, each in suites.items()} == {
        "faults": (1, 1, 0),
        "no_fault": (1, 0, 0),
        "all": (2, 1, 0),
    }
    assert suites["no_fault"][WARNS_OF_ALL]["unexplained_per_hour"] > suites["no_fault"][OURS]["unexplained_per_hour"]


def test_baselines_are_left_out_on_request(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "crash.toml").write_text(CRASH)
    main(tmp_path, seeds=1, jobs=1, baselines=False)
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert list(result["suites"]["all"]) == [OURS]
    assert (result["recall"], result["hangs"]) == (1.0, {})
    with pytest.raises(typer.Exit):
        main(tmp_path, seeds=1, jobs=1, baselines=False, curve=True)
    assert capsys.readouterr().err == "--curve scales the limits of the baselines too; remove --no-baselines\n"


def test_default_is_the_number_of_cores_that_the_process_may_use() -> None:
    allowed = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(allowed)})
        assert available_cores() == 1
    finally:
        os.sched_setaffinity(0, allowed)
    assert available_cores() == len(allowed)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
@pytest.mark.parametrize("whole_group", [True, False], ids=["group", "process"])
def test_signal_ends_the_program_and_its_workers_with_one_line(
    tmp_path: Path, number: signal.Signals, code: int, whole_group: bool
) -> None:
    """Ctrl-C and `timeout` signal the whole process group, and `kill` signals only the program."""
    (tmp_path / "calm.toml").write_text('about = "Nothing happens"\nlasts = "12h"\n')
    command = [sys.executable, detection.__file__, "--scenarios", str(tmp_path), "--seeds", "500", "--jobs", "2"]
    heeds = ["env", "--default-signal=INT"]  # if a shell runs the tests in its background, they ignore SIGINT
    program = subprocess.Popen(
        [*heeds, *command], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        children = Path(f"/proc/{program.pid}/task/{program.pid}/children")
        eventually(lambda: len(children.read_text().split()) == 2)
        workers = children.read_text().split()
        os.kill(-program.pid if whole_group else program.pid, number)
        error = program.communicate(timeout=DEADLINE_S)[1]
        assert program.returncode == code
        assert re.fullmatch(rf"stopped after \d+ of {500 * len(METHODS)} plays\n", error)
        assert not any(Path(f"/proc/{worker}").exists() for worker in workers)
    finally:
        program.kill()
        program.wait()
