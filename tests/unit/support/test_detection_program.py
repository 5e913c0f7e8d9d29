"""benchmarks/detection.py: its output does not depend on the number of processes."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from rrl.benchmarks._detection_runs import available_cores
from rrl.benchmarks.detection import main

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


def test_output_is_the_same_with_one_process_and_with_several(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "crash.toml").write_text(CRASH)
    (tmp_path / "calm.toml").write_text('about = "Nothing happens"\nlasts = "2min"\n')
    printed = []
    for jobs in (1, 3):
        main(tmp_path, seeds=2, curve=False, jobs=jobs)
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1]
    result = json.loads(printed[0].splitlines()[-1])
    assert (result["scenarios"], result["runs"], result["recall"], result["precision"]) == (2, 4, 1.0, 1.0)


def test_default_is_the_number_of_cores_that_the_process_may_use() -> None:
    allowed = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(allowed)})
        assert available_cores() == 1
    finally:
        os.sched_setaffinity(0, allowed)
    assert available_cores() == len(allowed)
