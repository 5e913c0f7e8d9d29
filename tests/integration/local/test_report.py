"""``rrl report`` has the ETTR of a real run that a comparison with a run without faults has."""

from __future__ import annotations

import json
from pathlib import Path
from subprocess import PIPE
from typing import Any

import pytest

from rrl.core.types import Outcome
from rrl.tests.support.runs import TestRun, light_job, submit_here

STEPS = 10
FAULTS = """
[[faults.planned]]
kind = "kill"
target = "trainer/0"
at = "step=3"
[[faults.planned]]
kind = "kill"
target = "rollout/1"
at = "step=6"
"""


def completed(folder: Path, extra: str = "") -> TestRun:
    """Run a job with steps of two seconds to its end."""
    folder.mkdir()
    job = light_job("local", STEPS, spares=0, warm=False, one_node=True, extra=extra)
    run = submit_here(folder, job.replace("light_trainer.py", "paced_trainer.py"))
    assert run.wait_end().outcome is Outcome.COMPLETED
    run.wait_gone()
    return run


def shown(run: TestRun, command: str, *words: str) -> Any:
    with run.call(command, *words, "--json", stdout=PIPE) as process:
        assert process.stdout is not None
        document = json.loads(process.stdout.read())
    assert process.returncode == 0
    return document


@pytest.mark.long
def test_ettr_of_a_real_run_is_within_3_percent_of_a_comparison_with_a_clean_run(tmp_path: Path) -> None:
    clean, run = completed(tmp_path / "clean"), completed(tmp_path / "run", FAULTS)
    report, compared = shown(run, "report", run.run.id, str(clean.run.path))["runs"]
    assert [(one["replica"], one["injected"]) for one in report["interruptions"]] == [
        ("trainer/0", True),
        ("rollout/1", True),
    ]
    assert report["ettr"] == pytest.approx(compared["wall_s"] / report["wall_s"], abs=0.03)
    assert report["ettr"] == run.summary()["ettr"] == shown(run, "status", run.run.id)["pace"]["ettr"]
    lost = sum(one["seconds"] for one in report["lost"])
    assert lost == pytest.approx((1 - report["ettr"]) * report["wall_s"], abs=0.05)
