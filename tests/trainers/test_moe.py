"""A mixture of experts is trained by TRL and sampled by vLLM, which gets its weights under the names of its files."""

from __future__ import annotations

from pathlib import Path

import pytest

from rrl.core.types import TRAINER
from rrl.tests.support.runs import check_sound
from rrl.tests.support.trainers import TIMEOUT_S, kill_rank, reward_gain, submit_example

pytestmark = [pytest.mark.trainers, pytest.mark.timeout(900)]

STEPS = 60


@pytest.mark.long  # it needs vLLM's environment, too; test_trl.py trains a dense model with the same program
def test_experts_learn_although_the_trainer_is_killed(tmp_path: Path) -> None:
    run = submit_example("moe", tmp_path, ())
    kill_rank(run, 0, at_step=STEPS // 2)
    state = run.wait_end(TIMEOUT_S)
    assert (state.outcome, state.step) == ("completed", STEPS), state.why
    run.wait_gone()
    check_sound(run.run)
    assert state.replica(TRAINER).incarnation_number == 2
    assert reward_gain(run) > 0.3
