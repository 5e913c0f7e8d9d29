"""TRL's GRPOTrainer trains in a run, whatever TRL trains, and a killed rank costs no group."""

from __future__ import annotations

from pathlib import Path

import pytest

from rrl.core.types import TRAINER
from rrl.tests.support.runs import check_sound
from rrl.tests.support.trainers import TIMEOUT_S, kill_rank, submit_example, trained_groups

pytestmark = [pytest.mark.trainers, pytest.mark.timeout(900)]

STEPS = 100
GROUPS_PER_STEP = 16


@pytest.mark.parametrize(
    "trainer",
    [
        pytest.param("", id="dapo"),
        pytest.param("ranks = 2\nranks_per_node = 2", id="two ranks"),
        # long: TRL's own losses and adapters; rrl's part is the same
        pytest.param('env = { LOSS = "cispo" }', id="cispo", marks=pytest.mark.long),
        pytest.param('env = { LORA = "16" }', id="lora", marks=pytest.mark.long),
    ],
)
def test_reward_rises_and_each_group_is_trained_once_although_the_trainer_is_killed(
    tmp_path: Path, trainer: str
) -> None:
    changes = [("steps = 240", f"steps = {STEPS}"), ("[roles.trainer]\n", f"[roles.trainer]\n{trainer}\n")]
    run = submit_example("trl", tmp_path, changes)
    kill_rank(run, -1, at_step=STEPS // 2)
    state = run.wait_end(TIMEOUT_S)
    assert (state.outcome, state.step) == ("completed", STEPS), state.why
    run.wait_gone()
    check_sound(run.run)
    assert state.replica(TRAINER).incarnation_number == 2
    groups = trained_groups(run)
    assert (len(groups), len(set(groups))) == (STEPS * GROUPS_PER_STEP,) * 2
    summary = run.summary()
    assert summary["reward_last10"] > summary["reward_first10"] + 0.3, "the reward did not grow by 0.3"
