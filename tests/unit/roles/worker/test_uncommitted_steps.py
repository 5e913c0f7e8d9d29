from __future__ import annotations

from itertools import count
from typing import Any

import msgspec
import numpy
import pytest

from rrl.roles.trajectories.types import PackedPart, PackedTrajectory
from rrl.roles.worker.uncommitted_steps import BATCH_METRICS, UncommittedSteps

_ids = count()


def _trajectory(reward: float, *runs: tuple[int, int]) -> PackedTrajectory:
    """Return a trajectory. ``runs`` are pairs of a number of tokens and the step of the weights that sampled them."""
    lengths = tuple((length, step, 1) for length, step in runs)
    return PackedTrajectory(next(_ids), 0, b"", b"", lengths, reward, reward + 1, 0)


FIRST = PackedPart(9, (4,), "first", (b"",), (_trajectory(1.0, (3, 8)), _trajectory(0.0, (2, 8))), 0, False, 0, 2)
SECOND = PackedPart(
    9, (2, 3), "second", (b"", b""), (_trajectory(0.5, (1, 8), (4, 5)), _trajectory(1.0, (1, 6))), 1, True, 6, 3
)


def test_metrics_of_a_step_are_those_of_all_its_parts() -> None:
    steps = UncommittedSteps(4)
    steps.add(FIRST)
    steps.add(SECOND)
    step = steps.get(9)
    assert step.digest == "second"
    ages = {"token_age_p50": 0.0, "token_age_max": 3.0, "token_age_run_max": 3.0}
    assert step.metrics == {
        "reward": 0.625,
        "training_reward": 1.625,
        "parts": 2.0,
        **ages,
        "stale_groups": 6.0,
        "stale_share": 6 / (6 + 9 * 3),
    }
    whole = UncommittedSteps(4)
    every = FIRST.trajectories + SECOND.trajectories
    whole.add(msgspec.structs.replace(SECOND, index=0, groups=(4, 2, 3), trajectories=every))
    assert whole.get(9).metrics == {**step.metrics, "parts": 1.0}


def test_samples_of_an_episode_count_its_reward_once_and_each_trained_token_once() -> None:
    given = (2, -1)
    first = msgspec.structs.replace(_trajectory(1.0, (3, 8), given, (1, 7)), masked=((3, 2),))
    second = msgspec.structs.replace(_trajectory(1.0, given, (4, 6)), id=first.id, masked=((0, 2),))
    steps = UncommittedSteps(None)
    steps.add(PackedPart(9, (4,), "", (b"",), (first, second, _trajectory(0.0, (1, 8)))))
    metrics = steps.get(9).metrics
    assert (metrics["reward"], metrics["token_age_p50"], metrics["token_age_max"]) == (0.5, 1.0, 2.0)
    assert first.trained_runs == ((3, 8), (1, 7))


def test_groups_without_a_score_are_metrics_of_the_step_if_there_are_any() -> None:
    steps = UncommittedSteps(None)
    steps.add(FIRST)
    steps.add(msgspec.structs.replace(SECOND, unscored=9))
    metrics = steps.get(9).metrics
    assert (metrics["unscored_groups"], metrics["unscored_share"]) == (9.0, 9 / (9 + 9 * 3))
    assert "stale_groups" not in metrics


def test_step_without_its_last_part_cannot_be_committed() -> None:
    steps = UncommittedSteps(None)
    steps.add(FIRST)
    with pytest.raises(ValueError, match=r"cannot commit step 9: it has no uncommitted batch; .* are \[\]"):
        steps.get(9)
    steps.add(SECOND)
    assert steps.get(9).metrics["parts"] == 2.0


def test_repeated_part_is_counted_once() -> None:
    steps = UncommittedSteps(None)
    for part in (FIRST, FIRST, SECOND):
        steps.add(part)
    assert steps.get(9).metrics["reward"] == 0.625


def test_committed_steps_are_forgotten() -> None:
    steps = UncommittedSteps(None)
    for number in (7, 8, 9):
        steps.add(msgspec.structs.replace(FIRST, number=number, last=True))
    steps.remove_through(8)
    assert steps.get(9).digest == "first"
    with pytest.raises(ValueError, match=r"the uncommitted steps are \[9\]"):
        steps.get(8)


def test_metric_of_the_trainer_does_not_replace_one_of_the_batch() -> None:
    steps = UncommittedSteps(None)
    steps.add(FIRST)
    steps.add(SECOND)
    own = {"reward": 7.0, "loss": 1.0}
    steps.trained(9, own)
    for step in (steps.get(9), steps.with_metrics(9, {"kl": 2.0})):
        values = [step.metrics[name] for name in ("reward", "trainer_reward", "training_reward", "loss")]
        assert values == [0.625, 7.0, 1.625, 1.0]


def test_commit_may_give_metrics_again_that_the_step_has() -> None:
    steps = UncommittedSteps(None)
    steps.add(FIRST)
    steps.add(SECOND)
    steps.trained(9, {"reward": 7.0, "loss": 1.0})
    metrics = steps.with_metrics(9, {"reward": 8.0, "loss": 2.0}).metrics
    assert metrics == steps.get(9).metrics | {"trainer_reward": 8.0, "loss": 2.0}


def test_all_metrics_of_a_batch_are_named() -> None:
    steps = UncommittedSteps(4)
    steps.add(FIRST)
    steps.add(msgspec.structs.replace(SECOND, unscored=9))
    assert steps.get(9).metrics.keys() == BATCH_METRICS


@pytest.mark.parametrize(
    ("metrics", "why"),
    [
        ({"loss": "0.5"}, r"metrics of step 9: 'loss' = '0\.5' is not a name and a number"),
        ({"loss": numpy.zeros(2)}, r"'loss' = array\(\[0\., 0\.\]\) is not"),
        ({"loss": None}, "'loss' = None is not"),
        ({1: 0.5}, r"1 = 0\.5 is not a name and a number"),
        ([0.5], r"metrics of step 9: \[0\.5\] is not a dict of names and numbers"),
    ],
)
def test_metric_that_the_store_would_drop_is_refused(metrics: Any, why: str) -> None:
    steps = UncommittedSteps(None)
    steps.add(SECOND)
    with pytest.raises(TypeError, match=why):
        steps.with_metrics(9, metrics)
    right: Any = {"loss": numpy.float32(0.5)}
    assert steps.with_metrics(9, right).metrics["loss"] == 0.5


@pytest.mark.parametrize("number", ["9", 9.0, None, numpy.int64(9)])
def test_step_that_is_no_int_is_refused(number: Any) -> None:
    steps = UncommittedSteps(None)
    steps.add(SECOND)
    with pytest.raises(ValueError, match="cannot commit step "):
        steps.get(number)
