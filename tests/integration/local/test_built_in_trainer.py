"""In the example of streaming, the built-in trainer trains in parts, dies once and exports its checkpoints.

tests/unit/roles/trainer/test_checkpoint_export.py tests the export of checkpoints of a trainer with two ranks.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from rrl.core.types import Outcome, ReplicaId
from rrl.manager.model import events as ev
from rrl.roles.checkpoints.stored_tensors import INDEX
from rrl.tests.support.runs import TestRun, check_sound, submit_here, with_light_task

pytestmark = pytest.mark.torch

EXAMPLES = Path(__file__).parents[3] / "examples"
TIMEOUT_S = 240.0
STEPS = 16


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> TestRun:
    """Play a short run of the example of streaming, with exports, to its end."""
    toml = with_light_task((EXAMPLES / "stream.toml").read_text())
    for old, new in (
        ("\nsteps = 300", f"\nsteps = {STEPS}"),
        ('at = "step=60"', 'at = "step=4"'),
        ("spares = 1", "spares = 0"),
        ("replicas = 2", "replicas = 1"),  # each process loads torch: 4 s of CPU
        ("[roles.trainer]\n", "[roles.trainer]\nwarm = false\nexport = 10\nkeep_checkpoints = 10\n"),
    ):
        assert toml.count(old) == 1, old
        toml = toml.replace(old, new)
    run = submit_here(tmp_path_factory.mktemp("built_in"), toml)
    state = run.wait_end(TIMEOUT_S)
    assert (state.outcome, state.step) == (Outcome.COMPLETED, STEPS), state.why
    run.wait_gone()
    check_sound(run.run)
    return run


def test_example_trains_in_parts_although_its_trainer_dies(run: TestRun) -> None:
    state = run.state()
    assert state.replica(ReplicaId("trainer/0")).incarnation_number == 2
    commits = {one.event.step: one.event.metrics for one in run.events() if isinstance(one.event, ev.StepCommitted)}
    assert max(metrics["parts"] for metrics in commits.values() if metrics) > 1, (
        "no step was trained in parts: every step waited for its last group"
    )
    audit = json.loads((run.run.store / "audit.json").read_text())
    assert audit["max_age"] <= state.job.sampling.staleness
    assert set(audit["dropped"]) <= {"the run is complete"}


def test_run_exports_the_requested_checkpoints_before_it_ends(run: TestRun) -> None:
    assert sorted(path.name for path in run.run.exports.iterdir()) == ["step-10", "step-16"]
    assert not run.run.export_failure.exists()
    model = AutoModelForCausalLM.from_pretrained(run.run.export_of(STEPS))
    assert {name for name, _ in model.named_parameters()} == load_file(
        run.run.export_of(STEPS) / "model.safetensors"
    ).keys()


def test_summary_and_status_name_the_newest_checkpoint_and_export(run: TestRun) -> None:
    summary = run.summary()
    assert summary["checkpoint"]["step"] == STEPS
    assert (Path(summary["checkpoint"]["path"]) / INDEX).exists()
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
