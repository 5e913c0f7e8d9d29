"""The seconds that a token takes, learned from appends."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rrl.roles.trajectories.dispatch.token_times import MAX_RUNNING, AppendTimes, Observed, TokenTimes


@given(st.lists(st.tuples(st.integers(-1, 600), st.floats(-1.0, 10.0)), max_size=80))
def test_time_per_token_never_falls_with_more_answers(observed: list[tuple[int, float]]) -> None:
    times = TokenTimes()
    for running, seconds in observed:
        times.observe(running, seconds)
    table = times.table
    assert len(table) == MAX_RUNNING + 1
    assert table[0] == 0.0
    assert all(before <= after * (1 + 1e-9) for before, after in itertools.pairwise(table))
    assert table[1] > 0.0


def test_token_times_follow_the_observations() -> None:
    times = TokenTimes()
    for running in (1, 4, 16, 64):
        for _ in range(8):
            times.observe(running, 0.01 + 0.002 * running)
    for running in (1, 2, 4, 10, 16, 40, 64):
        assert times.table[running] == pytest.approx(0.01 + 0.002 * running, rel=0.02)
    assert times.table[128] > times.table[64]


def test_pauses_do_not_count_but_a_slower_engine_does() -> None:
    times = TokenTimes()
    for number in range(16):
        times.observe(8, 5.0 if number % 2 else 0.01)  # every second time includes a load of weights
    assert times.table[8] == pytest.approx(0.01)
    for _ in range(16):
        times.observe(8, 0.03)
    assert times.table[8] == pytest.approx(0.03)


def test_engine_without_observations_has_the_median_times_of_the_others() -> None:
    fast, usual, slow, new = TokenTimes(), TokenTimes(), TokenTimes(), TokenTimes()
    for times, seconds in ((fast, 0.001), (usual, 0.002), (slow, 0.009)):
        times.observe(8, seconds)
    assert new.table_among([slow, new, fast, usual]) == usual.table
    assert new.table_among([new, TokenTimes()]) == TokenTimes().table
    assert slow.table_among([slow, fast, usual]) == slow.table


def test_appends_after_the_first_show_the_time_of_a_token() -> None:
    appends, times = AppendTimes(), TokenTimes()
    assert appends.appended([(1, 64)], 2, 100.0) == Observed(), "the time since the lease includes that for the prompt"
    for number in range(1, 9):
        times.add(appends.appended([(1, 64)], 2, 100.0 + number * 64 * 0.01))
    assert times.table[2] == pytest.approx(0.01)


def test_append_of_an_ended_answer_gives_no_observation() -> None:
    appends = AppendTimes()
    appends.appended([(1, 64)], 1, 0.0)
    appends.ended([1])
    assert appends.appended([(1, 64)], 1, 0.64) == Observed()


@given(
    st.lists(st.tuples(st.integers(-1, 600), st.floats(-1.0, 10.0)), max_size=80),
    st.lists(st.tuples(st.integers(1, 600), st.floats(0.001, 10.0)), max_size=20),
)
def test_times_restored_from_counted_observations_stay_equal_after_further_ones(
    tokens: list[tuple[int, float]], later: list[tuple[int, float]]
) -> None:
    one = TokenTimes()
    one.add(Observed(tuple(tokens)))
    other = TokenTimes()
    other.add(one.observations())
    for times in (one, other):
        times.add(Observed(tuple(later)))
    assert one.table == other.table
    assert one.observations() == other.observations()
