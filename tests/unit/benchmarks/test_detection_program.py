"""benchmarks/detection.py: its output does not depend on the number of processes, and a signal ends all of them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from rrl.benchmarks import _provenance
from rrl.benchmarks._provenance import provenance
from rrl.benchmarks.detection import main
from rrl.benchmarks.scenarios.methods import OURS, ROBUSTRL

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
