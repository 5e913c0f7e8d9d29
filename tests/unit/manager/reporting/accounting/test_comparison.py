"""Two runs are compared at equal steps and times, as far as both have come, and by their keys."""

from __future__ import annotations

from typing import Any

import pytest

from rrl.manager.reporting.accounting.comparison import Course, compare
from rrl.manager.reporting.step_metrics import StepRow


def course(
    rewards: list[float | None],
    step_s: float = 10.0,
    train_s: float = 5.0,
    evaluations: dict[int, float] | None = None,
    job: dict[str, Any] | None = None,
) -> Course:
    """Return a run that commits a step every ``step_s`` seconds, ``train_s`` of which it trains."""
    results = {step: {"step": float(step), "reward": reward} for step, reward in (evaluations or {}).items()}
    rows = [StepRow(0, 1000.0, "", evaluation=results[0])] if 0 in results else []
    for step, reward in enumerate(rewards, 1):
        metrics = {} if reward is None else {"reward": reward, "reward_right": reward / 2, "loss": 1.0}
        rows.append(
            StepRow(
                step,
                1000.0 + step * step_s,
                "trainer/0#1",
                step_s,
                phase_seconds={"train": train_s} if train_s else {},
                metrics=metrics,
                evaluation=results.get(step, {}),
            )
        )
    return Course(rows, 1000.0, {} if job is None else job)


def test_rewards_are_compared_at_equal_steps_up_to_the_end_of_the_shorter_run() -> None:
    found = compare(course([step / 16 for step in range(1, 17)]), course([1.0] * 40, step_s=20.0))
    assert [point.at for point in found.by_step] == [2, 4, 6, 8, 10, 12, 14, 16]
    first, last = found.by_step[0], found.by_step[-1]
    assert first.runs[0].rewards == {"reward": 1.5 / 16, "reward_right": 0.75 / 16}  # the mean of steps 1 and 2
    assert [place.step for place in last.runs] == [16, 16]
    assert [(place.train_s, place.wall_s) for place in last.runs] == [(80.0, 160.0), (80.0, 320.0)]
    assert all(point.runs[1].rewards["reward"] == 1.0 for point in found.by_step)


def test_rewards_and_evaluations_are_compared_at_equal_times() -> None:
    slow = course([0.5] * 8, step_s=20.0, train_s=10.0, evaluations={0: 0.1, 4: 0.3, 8: 0.4})
    quick = course([0.75] * 40, step_s=10.0, train_s=2.0, evaluations={0: 0.1, 8: 0.5, 16: 0.6, 24: 0.7})
    found = compare(slow, quick)
    wall, train = found.by_wall_time[-1], found.by_training_time[-1]
    assert (wall.at, train.at) == (160.0, 80.0)
    assert [place.step for place in wall.runs] == [8, 16]
    assert [place.evaluation["reward"] for place in wall.runs] == [0.4, 0.6]
    assert [place.step for place in train.runs] == [8, 40]
    assert [place.evaluation["reward"] for place in train.runs] == [0.4, 0.7]
    assert [(one.step, *(result["reward"] for result in one.runs)) for one in found.evaluations] == [
        (0, 0.1, 0.1),
        (8, 0.4, 0.5),
    ]
    assert found.missing == []


def test_interval_in_which_a_run_committed_no_step_has_no_reward() -> None:
    found = compare(course([0.5] * 2, step_s=80.0), course([0.75] * 16, step_s=10.0))
    assert [bool(point.runs[0].rewards) for point in found.by_wall_time] == [False] * 3 + [True] + [False] * 3 + [True]
    assert all(point.runs[1].rewards == {"reward": 0.75, "reward_right": 0.375} for point in found.by_wall_time)


@pytest.mark.parametrize(
    ("one", "other", "missing"),
    [
        (course([]), course([0.5]), "A run has no committed step: rewards are not compared."),
        (
            Course([StepRow(1, 1001.0, "", logged={"eval/0": {"loss": 1.0}})], None, {}),
            course([0.5]),
            "A run has no commi",
        ),
        (course([0.5], train_s=0), course([0.5]), "The trainer of a run did not report the phase `train`"),
        (course([0.5], evaluations={1: 0.5}), course([0.5]), "Only one of the runs has evaluations."),
        (course([0.5], evaluations={1: 0.5}), course([0.5], evaluations={0: 0.5}), "The runs have evaluated no step"),
        (Course([], None, None), course([]), "The job spec of a run cannot be read: its keys are not compared."),
    ],
)
def test_what_cannot_be_compared_is_listed(one: Course, other: Course, missing: str) -> None:
    for pair in ((one, other), (other, one)):
        found = compare(*pair)
        assert any(sentence.startswith(missing) for sentence in found.missing)


def test_step_without_metrics_counts_in_the_times_alone() -> None:
    found = compare(course([None, 0.5]), course([0.5, None]))
    assert [point.runs[0].rewards for point in found.by_step] == [{}, {"reward": 0.5, "reward_right": 0.25}]
    assert found.by_step[-1].runs[0].wall_s == 20.0


def test_keys_that_differ_have_the_values_of_both_runs() -> None:
    one = {
        "run": {"seed": 0},
        "task": {"files": [{"path": "a", "weight": 1.0}], "args": {}},
        "roles": {"trainer": {"learning_rate": 1e-6, "betas": [0.9, 0.95]}},
    }
    other = {
        "run": {"seed": 0},
        "task": {"files": [{"path": "a", "weight": 2.0}, {"path": "b", "weight": 1.0}], "args": {"n": 3}},
        "roles": {"trainer": {"learning_rate": 1e-5, "betas": [0.9, 0.99]}},
        "eval": {"every": 5},
    }
    found = compare(course([0.5], job=one), course([0.5], job=other))
    assert {one.key: one.values for one in found.keys} == {
        "task.files.0.weight": [1.0, 2.0],
        "task.files.1.path": [None, "b"],
        "task.files.1.weight": [None, 1.0],
        "task.args.n": [None, 3],
        "roles.trainer.learning_rate": [1e-6, 1e-5],
        "roles.trainer.betas": [[0.9, 0.95], [0.9, 0.99]],
        "eval.every": [None, 5],
    }
