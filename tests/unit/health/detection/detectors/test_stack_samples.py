"""The times at which the stacks of a trainer are sampled, and the shorter deadline of a pass with equal samples."""

from __future__ import annotations

import pytest

from rrl.core.types import Incarnation, ReplicaId
from rrl.health.detection.detectors.pass_deadlines import MAX_BLIND_TRAINING_S, MAX_ONE_FUNCTION_S
from rrl.health.detection.detectors.stack_samples import FIRST_SAMPLE_S, SAMPLE_INTERVAL_S, due_stack_samples
from rrl.health.detection.records import StackSample
from rrl.tests.support.health.traces import IDLE, LIMITS, ROLLOUT, TRAINER, Trace, fail

BLIND = (1.0, 1.0, None)
"""Load of a rank whose kernels run on a node without DCGM."""
RANKS = (TRAINER, *(Incarnation(ReplicaId(f"trainer/0.{rank}"), 1) for rank in (1, 2, 3)))
HANG = StackSample("wait (c10d.py:7)", "wait (c10d.py)", alike=True)
APART = StackSample("wait (c10d.py:7), read (data.py:3)", "wait (c10d.py), read (data.py)", alike=False)
WORK = (
    StackSample("step (train.py:4)", "step (train.py)", True),
    StackSample("step (train.py:5)", "step (train.py)", True),
)
TWO_FUNCTIONS = (*WORK, StackSample("score (train.py:9)", "score (train.py)", True))
Samples = tuple[StackSample | None, ...]


def training(load: tuple[float, float | None, float | None] = BLIND) -> Trace:
    """Return a trace of a gang of four ranks in its first training step, without a completed pass."""
    trace = Trace()
    for number, rank in enumerate(RANKS):
        trace.node(f"n{number}", rank, phase="train")
        trace.loads[rank] = load
    return trace


def play(trace: Trace, seconds: float, *stacks: StackSample | None) -> int:
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


@pytest.mark.parametrize(
    "stacks",
    [
        WORK,  # it moves on
        (APART,),  # the ranks are at different lines
        (None,),  # their stacks cannot be read
        (HANG, HANG, None),  # the ranks are at one line for two samples at most
    ],
)
def test_gang_that_does_not_stand_at_one_line_has_its_deadline(stacks: Samples) -> None:
    trace = training()
    play(trace, MAX_BLIND_TRAINING_S - 10, *stacks)
    assert trace.found() == set()
    play(trace, 20, *stacks)
    assert trace.found() == {fail("phase_overdue", TRAINER)}


def test_samples_of_an_earlier_step_do_not_count() -> None:
    trace = training()
    play(trace, FIRST_SAMPLE_S + 4 * SAMPLE_INTERVAL_S, HANG)
    for rank in RANKS:
        trace.enter(rank, "wait_data")
        trace.enter(rank, "train")
    view = trace.monitor.replicas[TRAINER.replica]
    assert view.stacks.sample is None


@pytest.mark.parametrize(("stacks", "limit_s"), [(WORK, MAX_ONE_FUNCTION_S), (TWO_FUNCTIONS, 3600.0)])
def test_step_on_the_cpu_alone_fails_sooner_if_it_stays_in_one_function(stacks: Samples, limit_s: float) -> None:
    trace = Trace().node("n1", TRAINER, phase="wait_data")
    trace.learn(TRAINER, "train", 60.0, passes=4, between="wait_data")
    trace.loads[TRAINER] = (1.0, 0.0, 0.0)
    trace.enter(TRAINER, "train")
    play(trace, limit_s - 5, *stacks)
    assert trace.found() == set()
    play(trace, 10, *stacks)
    assert trace.found() == {fail("phase_overdue", TRAINER)}


def test_stacks_are_sampled_at_intervals_and_once_for_each_gang() -> None:
    trace = training()
    assert play(trace, FIRST_SAMPLE_S - 1, HANG) == 0
    assert play(trace, 3 * SAMPLE_INTERVAL_S, HANG) == 3


@pytest.mark.parametrize("load", [IDLE, (1.0, 1.0, 0.5), (1.0, 0.0, None)])
def test_no_stacks_are_sampled_where_loads_show_what_the_trainer_does(
    load: tuple[float, float | None, float | None],
) -> None:
    trace = training(load)
    assert play(trace, 2 * FIRST_SAMPLE_S, HANG) == 0


def test_no_stacks_of_rollouts_are_sampled() -> None:
    trace = Trace().node("n1", ROLLOUT)
    trace.loads[ROLLOUT] = BLIND
    trace.still.add(ROLLOUT)
    assert play(trace, 2 * FIRST_SAMPLE_S, HANG) == 0
