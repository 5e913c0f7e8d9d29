"""The choice of the engine for each waiting answer."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rrl.roles.trajectories.dispatch.work_sharing import EngineView, length_class, share

STEEP = (0.0, *(0.015 + 0.004 * b for b in range(1, 129)))
SLOW = tuple(3 * time for time in STEEP)
ENGINE = st.builds(EngineView, st.sampled_from([STEEP, SLOW]), st.integers(0, 8), st.integers(1, 6))


@settings(max_examples=120, deadline=None)
@given(st.integers(0, 20), ENGINE, st.lists(ENGINE, max_size=5))
def test_a_rollout_gets_at_most_its_places_and_an_idle_one_gets_work(
    count: int, own: EngineView, others: list[EngineView]
) -> None:
    waiting = list(range(count))
    given_to = share(waiting, own, others)
    assert len(given_to) <= own.free
    assert given_to == sorted(set(given_to) & set(waiting))
    if waiting and not own.running:
        assert given_to
    if not others:
        assert given_to == waiting[: own.free], "without other engines, the engine must get the first answers in order"


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 24), st.integers(2, 4), st.integers(1, 8))
def test_every_waiting_answer_is_eventually_leased(count: int, engines: int, places: int) -> None:
    """Engines request work in turn, as often as they have free places, and no answer waits without end."""
    left, running = list(range(count)), [0] * engines
    for turn in range(8 * count * engines):
        views = [EngineView(SLOW if not index else STEEP, each, places - each) for index, each in enumerate(running)]
        own = views.pop(turn % engines)
        if left and own.free:
            got = share(left, own, [view for view in views if view.free])
            running[turn % engines] += len(got)
            left = [each for each in left if each not in got]
        elif left and all(not view.free for view in views):
            running = [0] * engines  # everything is done
    assert not left


def test_long_answers_are_distributed_over_engines() -> None:
    engine = EngineView(STEEP, 0, 4)
    assert share(list(range(8)), engine, [engine]) == [0, 2, 4, 6]


def test_slow_engine_gets_fewer_answers_than_a_fast_one() -> None:
    slow, fast = EngineView(SLOW, 0, 16), EngineView(STEEP, 0, 16)
    few, many = share(list(range(16)), slow, [fast]), share(list(range(16)), fast, [slow])
    assert 1 <= len(few) < len(many)


def test_many_answers_balance_the_load_despite_unequal_free_places() -> None:
    given_to = share(list(range(120)), EngineView(STEEP, 0, 128), [EngineView(STEEP, 60, 452)])
    assert len(given_to) == pytest.approx((120 + 60) / 2, abs=1), (
        "the idle engine must get 90 answers, so that both run 90"
    )


def test_busy_engine_leaves_the_last_answer_to_an_idle_one() -> None:
    busy, idle = EngineView(STEEP, 3, 4), EngineView(STEEP, 0, 4)
    assert share([0], busy, [idle]) == []
    assert share([0], idle, [busy]) == [0]


def test_an_idle_engine_gets_work_also_if_another_one_would_be_faster() -> None:
    assert share([0], EngineView(SLOW, 0, 4), [EngineView(STEEP, 0, 4)]) == [0]


def test_length_classes_are_half_octaves() -> None:
    assert length_class(1000.0) == length_class(1010.0)
    assert length_class(1000.0) < length_class(1600.0) < length_class(2400.0)
    assert length_class(0.0) == length_class(1.0) == 0
