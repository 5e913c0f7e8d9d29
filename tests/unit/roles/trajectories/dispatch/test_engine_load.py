"""The expected time of an engine, compared with a simulation of this engine."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rrl.roles.trajectories.dispatch.engine_load import Curve, CurveTable, EngineLoad, finish_of_both
from rrl.roles.trajectories.dispatch.lengths import GroupEstimate, expected_left

LIMIT = 4_000
TABLE = CurveTable(LIMIT)
TIMES = (0.0, *(0.004 * (1 + 0.5 * math.sqrt(b)) for b in range(1, 65)))
ESTIMATES = st.builds(GroupEstimate, st.floats(2.0, 8.0), st.floats(0.0, 1.0), st.floats(0.05, 1.0))


def seconds(lengths: list[float]) -> float:
    """Return the time (s) in which an engine completes answers of these lengths (tokens).

    It is Σ L_j (τ(j) - τ(j - 1)) over the lengths L_j, longest first. τ(j) is the time of a token while j answers run.
    """
    return sum(length * (TIMES[j] - TIMES[j - 1]) for j, length in enumerate(sorted(lengths, reverse=True), 1))


def test_time_of_known_lengths_is_the_sum_over_the_longest_first() -> None:
    lengths = [2000, 700, 650, 300, 120, 40]
    curves = [TABLE.curve(GroupEstimate(math.log(length), 0.0, 1e-4), 0) for length in lengths]
    assert EngineLoad(TABLE.widths, TIMES, curves).finish() == pytest.approx(seconds([*map(float, lengths)]), rel=0.06)


@pytest.mark.parametrize("progress", [0, 500])
def test_time_of_uncertain_lengths_is_the_mean_over_their_distribution(progress: int) -> None:
    rng, estimate = random.Random(0), GroupEstimate(math.log(400), 0.1, 0.4)
    taken: list[float] = []
    while len(taken) < 1500:
        lengths: list[float] = []
        while len(lengths) < 16:
            if (length := rng.lognormvariate(estimate.mean, estimate.deviation)) > progress:
                lengths.append(min(LIMIT, length) - progress)
        taken.append(seconds(lengths))
    load = EngineLoad(TABLE.widths, TIMES, [TABLE.curve(estimate, progress)] * 16)
    assert load.finish() == pytest.approx(sum(taken) / len(taken), rel=0.06)


@settings(max_examples=80, deadline=None)
@given(st.lists(st.tuples(ESTIMATES, st.integers(0, LIMIT)), min_size=1, max_size=12))
def test_added_answer_lengthens_the_time_and_can_be_removed_again(those: list[tuple[GroupEstimate, int]]) -> None:
    curves: list[Curve] = [TABLE.curve(*each) for each in those]
    load = EngineLoad(TABLE.widths, TIMES, curves[1:])
    before = load.finish()
    after = load.plus(curves[0]).finish()
    assert after >= before - 1e-9
    load.add(curves[0])
    assert load.finish() == after
    assert finish_of_both(load.course_without(curves[0]), []) == pytest.approx(before, abs=1e-6)
    other = load.copy()
    other.remove(curves[0])
    assert other.finish() == pytest.approx(before, abs=1e-6)
    assert load.finish() == after, "a change of the copy has changed the original"


def test_finish_of_two_engines_is_the_mean_of_the_later_of_both_times() -> None:
    rng, estimate = random.Random(0), GroupEstimate(math.log(400), 0.1, 0.4)

    def drawn(count: int) -> list[float]:
        return [min(LIMIT, rng.lognormvariate(estimate.mean, estimate.deviation)) for _ in range(count)]

    taken = [max(seconds(drawn(16)), seconds(drawn(12))) for _ in range(3000)]
    many, few = (EngineLoad(TABLE.widths, TIMES, [TABLE.curve(estimate, 0)] * count) for count in (16, 12))
    both = finish_of_both(many.course(), few.course())
    assert both == pytest.approx(sum(taken) / len(taken), rel=0.06)
    assert both > 1.05 * max(many.finish(), few.finish()), (
        "the time of both engines must exceed that of each: either may have the longest answer"
    )


@settings(max_examples=80, deadline=None)
@given(*[st.lists(st.tuples(ESTIMATES, st.integers(0, LIMIT)), max_size=8)] * 2)
def test_finish_of_two_engines_is_between_the_slower_time_and_the_sum_of_both(
    one: list[tuple[GroupEstimate, int]], other: list[tuple[GroupEstimate, int]]
) -> None:
    first, second = (EngineLoad(TABLE.widths, TIMES, [TABLE.curve(*each) for each in those]) for those in (one, other))
    both = finish_of_both(first.course(), second.course())
    assert both == pytest.approx(finish_of_both(second.course(), first.course()))
    assert max(first.finish(), second.finish()) - 1e-9 <= both <= first.finish() + second.finish() + 1e-9
    if one:
        curve = TABLE.curve(*one[0])
        assert finish_of_both(first.course_with(curve), []) == pytest.approx(first.plus(curve).finish())
        rest = first.copy()
        rest.remove(curve)
        assert finish_of_both(first.course_without(curve), []) == pytest.approx(rest.finish())


def test_curve_sums_to_the_expected_remaining_length() -> None:
    estimate = GroupEstimate(math.log(300), 0.2, 0.3)
    for progress in (0, 64, 300, 1000, 3900):
        goes_on, _ = TABLE.curve(estimate, progress)
        left = sum(p * width for p, width in zip(goes_on, TABLE.widths, strict=True))
        assert left == pytest.approx(expected_left(estimate, progress, LIMIT), rel=0.05)


def test_an_answer_far_longer_than_expected_has_a_curve_too() -> None:
    goes_on, _ = TABLE.curve(GroupEstimate(math.log(10), 0.0, 0.01), 2000)
    assert 0.1 < goes_on[0] <= 1.0
