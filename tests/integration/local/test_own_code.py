"""An engine and a loss of the user's own, each one file beside job.toml and one line in it, train a model."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from rrl.core.types import Outcome
from rrl.manager.model import events as ev
from rrl.tests.support.runs import QUICKSTART, check_sound, submit_here, with_light_task

pytestmark = pytest.mark.torch

OWN_CODE = Path(__file__).parents[2] / "support" / "own_code"
STEPS = 5


def test_run_samples_with_the_users_engine_and_trains_with_the_users_loss(tmp_path: Path) -> None:
    for file in OWN_CODE.glob("*.py"):
        shutil.copy(file, tmp_path)
    toml = with_light_task(QUICKSTART.read_text().partition("[[faults.planned]]")[0])
    for old, new in (
        ("\nsteps = 300", f"\nsteps = {STEPS}"),
        ("spares = 1", "spares = 0"),
        ("prompts_per_step = 16", 'prompts_per_step = 4\nextras = { experts = { per_token = "6B" } }'),
        ("group_size = 16", "group_size = 4"),
        ("warm_start_steps = 30 ", 'warm = false\nloss = "reinforce:loss" '),
        ("replicas = 2\n", 'engine = "plain_engine:PlainEngine"\n'),
    ):
        assert toml.count(old) == 1, old
        toml = toml.replace(old, new)
    run = submit_here(tmp_path, toml)
    state = run.wait_end()
    assert (state.outcome, state.step) == (Outcome.COMPLETED, STEPS), state.why
    run.wait_gone()
    check_sound(run.run)
    assert (tmp_path / "engine.txt").read_text() == "rollout/0#1"
    committed = [one.event.metrics for one in run.events() if isinstance(one.event, ev.StepCommitted)]
    assert len(committed) == STEPS
    for metrics in committed:
        assert metrics is not None
        assert {"loss", "surprise", "longest", "grad_norm", "sampler_kl"} <= metrics.keys()
        assert "clipped_low" not in metrics, "GRPO's statistics are of another loss"
        assert 0.5 < metrics["surprise"] < 5  # nats of a token, of a nearly uniform policy over 14 tokens
        assert 1 <= metrics["longest"] <= 5
