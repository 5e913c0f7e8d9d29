"""A run of the built-in trainer with two ranks that exports its checkpoints itself."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from rrl.core.types import Outcome
from rrl.tests.support.runs import QUICKSTART, TestRun, check_sound, submit_here

pytestmark = pytest.mark.torch

TIMEOUT_S = 240.0
STEPS = 5


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> TestRun:
    toml = QUICKSTART.read_text().partition("[[faults.planned]]")[0]
    changes = (
        ("steps = 300", f"steps = {STEPS}"), ("spares = 1", "spares = 0"), ("replicas = 2", "replicas = 1"),
        ("[roles.trainer]\n", "[roles.trainer]\nexport = 3\nkeep_checkpoints = 5\nranks = 2\nwarm = false\n"),
        ("warm_start_steps = 30", "warm_start_steps = 1"),
    )  # fmt: skip
    for before, after in changes:
        assert before in toml
        toml = toml.replace(before, after)
    run = submit_here(tmp_path_factory.mktemp("export"), toml)
    assert run.wait_end(TIMEOUT_S).outcome is Outcome.COMPLETED
    check_sound(run.run)
    return run


def test_run_exports_the_requested_checkpoints_before_it_ends(run: TestRun, tmp_path: Path) -> None:
    assert sorted(path.name for path in run.run.exports.iterdir()) == ["step-3", "step-5"]
    assert not run.run.export_failure.exists()
    with run.call("export", run.run.id, str(tmp_path / "mine"), stdout=subprocess.DEVNULL) as process:
        assert process.wait(60) == 0
    own, mine = (load_file(folder / "model.safetensors") for folder in (run.run.export_of(STEPS), tmp_path / "mine"))
    assert own.keys() == mine.keys()
    assert all(torch.equal(own[name], mine[name]) for name in own)
    model = AutoModelForCausalLM.from_pretrained(run.run.export_of(STEPS))
    assert {name for name, _ in model.named_parameters()} == own.keys()


def test_summary_and_status_name_the_newest_checkpoint_and_export(run: TestRun) -> None:
    summary = run.summary()
    assert summary["checkpoint"]["step"] == STEPS
    assert (Path(summary["checkpoint"]["path"]) / ".metadata").exists()
    assert summary["export"] == {"step": STEPS, "path": str(run.run.export_of(STEPS))}
    assert summary["export_failure"] == ""
    with run.call("status", run.run.id, "--json", stdout=subprocess.PIPE) as process:
        status = json.loads(process.communicate(timeout=60)[0])
    assert {key: status[key] for key in ("checkpoint", "export")} == {
        key: summary[key] for key in ("checkpoint", "export")
    }
    with run.call("status", run.run.id, stdout=subprocess.PIPE) as process:
        shown = "".join(process.communicate(timeout=60)[0].split())
    assert f"checkpointstep{STEPS}:{summary['checkpoint']['path']}" in shown
    assert f"exportedstep{STEPS}:{run.run.export_of(STEPS)}" in shown
