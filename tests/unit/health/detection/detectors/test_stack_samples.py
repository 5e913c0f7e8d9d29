"""The times at which the stacks of a trainer are sampled, and the shorter deadline of a pass with equal samples."""

from __future__ import annotations

import pytest

from rrl.core.types import Incarnation, ReplicaId
from rrl.health.detection.detectors.pass_deadlines import MAX_BLIND_TRAINING_S, MAX_SAME_STACK_S
from rrl.health.detection.detectors.stack_samples import MIN_EQUAL_SAMPLES, SAMPLE_INTERVAL_S, due_stack_samples
from rrl.tests.support.health.traces import IDLE, LIMITS, ROLLOUT, TRAINER, Trace, fail

BLIND = (1.0, 1.0, None)
"""Load of a rank whose kernels run on a node without DCGM."""
RANKS = (TRAINER, *(Incarnation(ReplicaId(f"trainer/0.{rank}"), 1) for rank in (1, 2, 3)))
HANG = "wait (c10d.py:7)"


def training(load: tuple[float, float | None, float | None] = BLIND) -> Trace:
    """Return a trace of a gang of four ranks in its first training step, without a completed pass."""
    trace = Trace()
    for number, rank in enumerate(RANKS):
        trace.node(f"n{number}", rank, phase="train")
        trace.loads[rank] = load
    return trace


def play(trace: Trace, seconds: float, *stacks: str | None) -> int:
    """Advance the clock, and answer each due sample with the next of ``stacks``, beginning again after the last.

    Return the number of samples.
    """
    count, until = 0, trace.now + seconds
    while trace.now < until:
        trace.play(1)
        for gang in due_stack_samples(trace.monitor, LIMITS, trace.now)[0]:
            trace.monitor.on_stacks(gang, stacks[count % len(stacks)], trace.now)
            count += 1
    return count


def test_gang_that_stands_at_one_line_with_busy_gpus_fails_long_before_a_blind_step() -> None:
    trace = training()
    play(trace, MAX_SAME_STACK_S - 5, HANG)
    assert trace.found() == set()
    play(trace, 10, HANG)
    assert trace.found() == {fail("phase_overdue", TRAINER)}
    assert MAX_SAME_STACK_S <= MAX_BLIND_TRAINING_S / 4


@pytest.mark.parametrize(
    "stacks",
    [
        ("step (train.py:4)", "step (train.py:5)"),  # it moves on
        (None,),  # the ranks are at different lines, or their stacks cannot be read
        (HANG, HANG, None),  # the ranks are at one line for two samples at most
    ],
)
def test_gang_that_does_not_stand_at_one_line_has_its_deadline(stacks: tuple[str | None, ...]) -> None:
    trace = training()
    play(trace, MAX_BLIND_TRAINING_S - 10, *stacks)
    assert trace.found() == set()
    play(trace, 20, *stacks)
    assert trace.found() == {fail("phase_overdue", TRAINER)}


def test_collective_that_takes_minutes_once_is_no_hang() -> None:
    trace = training()
    play(trace, 900, HANG)
    play(trace, MAX_BLIND_TRAINING_S - 1000, "step (train.py:4)", "step (train.py:5)")
    assert trace.found() == set()


def test_samples_of_an_earlier_step_do_not_count() -> None:
    trace = training()
    play(trace, (MIN_EQUAL_SAMPLES + 1) * SAMPLE_INTERVAL_S, HANG)
    for rank in RANKS:
        trace.enter(rank, "wait_data")
        trace.enter(rank, "train")
    view = trace.monitor.replicas[TRAINER.replica]
    assert (view.stacks.count, view.stacks.stack) == (0, None)


def test_second_step_that_stands_at_one_line_is_not_extended_as_work() -> None:
    trace = Trace().node("n1", TRAINER, phase="wait_data")
    trace.learn(TRAINER, "train", 300.0, passes=4, between="wait_data")
    trace.loads[TRAINER] = BLIND
    trace.enter(TRAINER, "train")
    play(trace, MAX_SAME_STACK_S - 5, HANG)
    assert trace.found() == set()
    play(trace, 10, HANG)
    assert trace.found() == {fail("phase_overdue", TRAINER)}


def test_stacks_are_sampled_at_intervals_and_once_for_each_gang() -> None:
    trace = training()
    assert play(trace, SAMPLE_INTERVAL_S - 1, HANG) == 0
    assert play(trace, 3 * SAMPLE_INTERVAL_S, HANG) == 3


@pytest.mark.parametrize("load", [IDLE, (1.0, 1.0, 0.5), (1.0, 0.0, None)])
def test_no_stacks_are_sampled_where_loads_show_what_the_trainer_does(
    load: tuple[float, float | None, float | None],
) -> None:
    trace = training(load)
    assert play(trace, 2 * SAMPLE_INTERVAL_S, HANG) == 0


def test_no_stacks_of_rollouts_are_sampled() -> None:
    trace = Trace().node("n1", ROLLOUT)
    trace.loads[ROLLOUT] = BLIND
    trace.still.add(ROLLOUT)
    assert play(trace, 2 * SAMPLE_INTERVAL_S, HANG) == 0
