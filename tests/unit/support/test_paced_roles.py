"""benchmarks/_pace.py only changes the times at which tokens and steps are ready."""

from __future__ import annotations

import io
import json

import pytest
import torch

from rrl.benchmarks._pace import Pace, Paced, PacedEngine, PacedLearner, Tau, overrun, paced
from rrl.benchmarks._stream_task import MEAN_POINTS, ThinkingTask, kind_of
from rrl.roles.models.policy import build_model
from rrl.roles.models.tokenizer import EOS
from rrl.roles.rollout.engine import Sampling
from rrl.roles.trajectories.types import Item
from rrl.tests.support.roles.trainer import harness

pytestmark = pytest.mark.torch


def test_a_step_takes_the_time_of_each_token_with_the_trajectories_that_get_one() -> None:
    tau = Tau(1.0, 0.1)
    assert tau.seconds_of([3, 1]) == pytest.approx(1.2 + 1.1 + 1.1)
    assert tau.seconds_of([]) == 0.0


def test_paced_engine_samples_the_tokens_of_the_wrapped_engine() -> None:
    weights = harness.learner()
    items = [Item(number, number, (2, 3), max_new=6) for number in range(5)]
    sampling = Sampling(segment_tokens=2)
    alone = harness.roll_out(harness.engine(weights, seed=1, sampling=sampling), items)
    engine = PacedEngine(harness.engine(weights, seed=1, sampling=sampling), 5, Tau(0.0, 0.0), Pace(io.StringIO()))
    assert harness.roll_out(engine, items) == alone


def test_a_paced_engine_takes_work_in_each_free_place_while_others_run() -> None:
    engine = PacedEngine(
        harness.engine(harness.learner(), sampling=Sampling(segment_tokens=1)), 3, Tau(0.0, 0.0), Pace(io.StringIO())
    )
    engine.add([Item(0, 0, (2, 3), max_new=1), Item(1, 1, (2, 3), max_new=40), Item(2, 2, (2, 3), max_new=40)])
    assert engine.free_slots == 0
    _, finished = engine.step()
    assert 0 in finished
    assert engine.free_slots == len(finished)
    engine.abort([1, 2])
    assert engine.free_slots == 3
    engine.add([Item(3, 3, (2, 3), max_new=1)])
    assert engine.step()[1] == [3]


def test_a_paced_learner_gets_the_same_weights_and_records_each_part() -> None:
    record = io.StringIO()
    settings = harness.settings(learning_rate=1e-2)

    make = paced(PacedLearner, Pace(record), 1e-4)
    plain = harness.learner(learning_rate=1e-2, steps=10)
    slow = make(build_model(harness.SMALL, 13, 0), settings, steps=10, temperature=1.0)
    prompts = [(2, 3), (4, 5)]
    batch = harness.sampled_batch(
        harness.engine(plain), prompts, 0, 4, 5, 1, lambda _, tokens: (float(tokens[-1] == EOS), float(len(tokens)))
    )
    harness.step_in_parts(plain, batch, [1, 1])
    slow.open(1)
    for part in harness.parts_of(batch, [1, 1]):
        slow.add(part)
    slow.close()
    one, two = plain.weights(), slow.weights()
    assert all(torch.equal(one[name], two[name]) for name in one)
    lines = [Paced(*json.loads(line)) for line in record.getvalue().splitlines()]
    tokens = [sum(len(each.tokens) for each in part.trajectories) for part in harness.parts_of(batch, [1, 1])]
    assert [line.due for line in lines] == pytest.approx([count * 1e-4 for count in tokens], abs=1e-5)
    assert all(line.took >= max(line.due, line.computed) for line in lines)


def test_the_overrun_is_the_share_of_seconds_beyond_the_pace() -> None:
    assert overrun([Paced(1.0, 0.2, 1.0), Paced(1.0, 1.5, 1.5)]) == pytest.approx(0.25)
    assert overrun([]) == 0.0


def test_eight_consecutive_prompts_have_every_length_once() -> None:
    assert all(sorted(map(kind_of, range(first, first + 8))) == sorted(MEAN_POINTS) for first in range(0, 800, 8))


def test_answer_is_right_only_with_swapped_last_symbols_after_optional_points() -> None:
    task = ThinkingTask(0)
    symbols = task.prompt(5)[1:5]
    right = symbols[:2] + symbols[3] + symbols[2]
    assert [task.score(5, answer) for answer in (right, f"...{right}")] == [(1.0, 1.0)] * 2
    assert [task.score(5, answer) for answer in (symbols, f"{right}.", right[:3], "")] == [(0.0, 0.0)] * 4
