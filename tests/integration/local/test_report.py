"""``rrl report`` estimates the strict ETTR of a real run as a comparison with a run without faults does."""

from __future__ import annotations

import json
from pathlib import Path
from subprocess import PIPE

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


@pytest.mark.long
def test_estimate_of_a_real_run_is_within_3_percent_of_its_strict_ettr(tmp_path: Path) -> None:
    clean, run = completed(tmp_path / "clean"), completed(tmp_path / "run", FAULTS)
    with run.call("report", run.run.id, "--clean", str(clean.run.path), "--json", stdout=PIPE) as process:
        assert process.stdout is not None
        (report,) = json.loads(process.stdout.read())["runs"]
    assert process.returncode == 0
    assert [(one["replica"], one["injected"]) for one in report["interruptions"]] == [
        ("trainer/0", True),
        ("rollout/1", True),
    ]
    assert report["strict"]["steps"] == STEPS
    assert report["ettr_estimate"] == pytest.approx(report["strict"]["ettr"], abs=0.03)
    assert report["ettr_estimate"] == run.summary()["ettr_estimate"]
    lost = sum(one["seconds"] for one in report["lost"])
    assert lost == pytest.approx((1 - report["ettr_estimate"]) * report["wall_s"], abs=0.05)
