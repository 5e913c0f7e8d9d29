"""A run that trains adapters (LoRA) trains each group once and exports them, whatever dies on the way."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rrl.core.types import ReplicaId
from rrl.manager.model import events as ev
from rrl.tests.support.roles import folders
from rrl.tests.support.runs import TestRun, check_sound, submit_here

pytestmark = [pytest.mark.torch, pytest.mark.long, pytest.mark.timeout(900)]

TIMEOUT_S = 600.0
STEPS, CUT_STEP = 8, 3
"""Number of steps, and the step between whose adapters and moments the first trainer dies."""
RANK, ALPHA = 4, 8.0
_TASK = f"""
import sys
from pathlib import Path
from light_task import make

if sys.modules["__main__"].__spec__.name == "rrl.roles.trainer.main":
    from rrl.tests.support.roles.trainer.mortal import MOMENTS
    died = Path(__file__).with_name("died")
    if not died.exists():
        died.touch()
        MOMENTS["between two files"]({CUT_STEP})
"""
"""A task, which the trainer imports for its warm start. It lets the first trainer kill itself."""
_JOB = f"""
[run]
name = "adapters"
steps = {STEPS}
seed = 0
[cluster]
kind = "local"
spares = 0
node = {{ cpus = 2, mem = "3GiB" }}
[task]
function = "dying_task:make"
[model]
path = "llama"
max_length = 64
[sampling]
prompts_per_step = 2
group_size = 4
max_new_tokens = 6
[roles.trainer]
warm = false
warm_start_steps = 1
learning_rate = 1e-3
lora = {{ rank = {RANK}, alpha = {ALPHA} }}
[roles.rollout]
segment_tokens = 2
[tags]
rollout = []
[[faults.planned]]
kind = "kill"
target = "rollout/0"
at = "step=2"
[[faults.planned]]
kind = "kill"
target = "trainer/0"
at = "step=5"
"""


@pytest.fixture
def run(tmp_path: Path) -> TestRun:
    folders.tied_llama(tmp_path / "llama")
    (tmp_path / "dying_task.py").write_text(_TASK)
    run = submit_here(tmp_path, _JOB)
    state = run.wait_end(TIMEOUT_S)
    assert (state.outcome, state.step) == ("completed", STEPS), state.why
    run.wait_gone()
    check_sound(run.run)
    return run


def _exported(run: TestRun, folder: Path, *words: str) -> dict[str, torch.Tensor]:
    with run.call("export", run.run.id, str(folder), *words, stdout=subprocess.DEVNULL) as process:
        assert process.wait(TIMEOUT_S) == 0
    (file,) = folder.glob("*.safetensors")
    return load_file(file)


def test_adapters_are_trained_once_and_exported_although_trainer_and_rollout_die(tmp_path: Path, run: TestRun) -> None:
    state = run.state()
    numbers = {name: state.replica(ReplicaId(name)).incarnation_number for name in ("trainer/0", "rollout/0")}
    assert numbers == {"trainer/0": 3, "rollout/0": 2}
    committed = [one.event for one in run.events() if isinstance(one.event, ev.StepCommitted)]
    assert [one.step for one in committed if one.step] == list(range(1, STEPS + 1))
    again = next(
        one.event.incarnation
        for one in run.events()
        if isinstance(one.event, ev.StepCommitted) and one.event.step == CUT_STEP
    )
    assert again.number == 2, "the first trainer did not die between the adapters and the moments of the step"

    base = load_file(tmp_path / "llama" / "model.safetensors")
    merged, adapters = _exported(run, tmp_path / "merged"), _exported(run, tmp_path / "adapter", "--adapter")
    assert all(tensor.any() for name, tensor in adapters.items() if ".lora_B." in name), "an adapter was not trained"
    for name, tensor in merged.items():
        a, b = (adapters.get(f"base_model.model.{name.removesuffix('.weight')}.lora_{side}.weight") for side in "AB")
        product = torch.zeros(()) if a is None or b is None else ALPHA / RANK * b @ a
        assert torch.allclose(tensor, base[name] + product, atol=1e-6), name
