"""Figures of generation and training over the newest steps."""

from __future__ import annotations

import pytest

from rrl.core.phases import ClockReading, PhaseTime
from rrl.core.types import Incarnation, ReplicaId
from rrl.manager.model.figures.balance import MAX_SAMPLES, Sample, balance, with_sample
from rrl.manager.model.figures.idle_times import IdleTimes, with_readings
from rrl.tests.support.manager.jobs import gang_job, job, with_pool

NS = 1_000_000_000


def sample(step: int, *, fast: float = 0.0, burst: float = 0.0) -> Sample:
    """Return totals of 10 s a step, of which the trainer waits 4 s and trains on 600 tokens."""
    rollouts = {"rollout": (fast, int(100 * fast)), "burst": (burst, int(20 * burst))}
    return Sample(step, 10.0 * step, 600 * step, 6.0 * step, 4.0 * step, rollouts)


def test_figures_are_those_of_at_least_five_steps() -> None:
    samples = tuple(sample(step, fast=float(step)) for step in (1, 3, 4, 5))
    assert balance(samples) is None
    figures = balance((*samples, sample(9, fast=9.0)))
    assert figures is not None
    assert (figures.steps, figures.step_s, figures.waited, figures.need) == (5, 10.0, 0.4, 100.0)
    assert figures.paces == {"rollout": 100.0}


def test_pace_of_a_pool_that_never_worked_is_that_of_the_others_and_that_of_an_idle_pool_its_earlier_one() -> None:
    never = balance((sample(1, fast=1.0), sample(6, fast=6.0)))
    assert never is not None
    assert never.pace("burst") == 100.0
    idle = balance((sample(1, fast=1.0, burst=5.0), sample(6, fast=6.0, burst=5.0)))
    assert idle is not None
    assert idle.pace("burst") == 20.0


def test_steps_without_tokens_or_work_give_no_figures() -> None:
    old, new = sample(1, fast=1.0), sample(6, fast=6.0)
    none = Sample(6, 60.0, old.trained_tokens, new.worked_s, new.waited_s, new.rollouts)
    assert balance((old, none)) is None
    assert balance(()) is None


@pytest.mark.parametrize("counted", [0, 4000])
def test_sample_has_the_seconds_of_one_rank_and_the_generated_tokens_if_the_trainer_counts_none(counted: int) -> None:
    def reading(replica: str, done: int) -> tuple[Incarnation, ClockReading]:
        times = (PhaseTime("work", "", 8 * NS), PhaseTime("wait", "rollouts", 4 * NS))
        return Incarnation(ReplicaId(replica), 1), ClockReading(1, done, times)

    spec = with_pool(gang_job(2, 1, spares=0))
    read = [reading("trainer/0", 3), reading("trainer/0.1", 3), reading("rollout/0", 500), reading("burst/0", 70)]
    times = with_readings(IdleTimes(trained_tokens=counted), 12.0, read)
    (made,) = with_sample((), spec, 3, times)
    assert (made.worked_s, made.waited_s, made.trained_tokens) == (8.0, 4.0, counted or 570)
    assert made.rollouts == {"rollout": (8.0, 500), "burst": (8.0, 70)}
    assert with_sample((made,), spec, 3, times) == (made,)
    assert with_sample((), job(), 3, times) == ()
    many: tuple[Sample, ...] = ()
    for step in range(1, 40):
        many = with_sample(many, spec, step, times)
    assert [one.step for one in many] == list(range(40 - MAX_SAMPLES, 40))
