"""The choice of the engine for each waiting answer, and of the running answers that move."""

from __future__ import annotations

import math
import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rrl.roles.trajectories.dispatch import engine_load
from rrl.roles.trajectories.dispatch.engine_load import Curve, CurveTable, EngineLoad
from rrl.roles.trajectories.dispatch.lengths import GroupEstimate
from rrl.roles.trajectories.dispatch.work_sharing import (
    CONSIDERED,
    EngineView,
    Running,
    Waiting,
    hand_back,
    length_class,
    share,
)

LIMIT = 4_000
TABLE = CurveTable(LIMIT)
STEEP = (0.0, *(0.015 + 0.004 * b for b in range(1, 129)))
FLAT = (0.0, *(0.01 for _ in range(1, 129)))
READ = 1e-4


def curve(tokens: float, progress: int = 0, deviation: float = 0.1) -> Curve:
    return TABLE.curve(GroupEstimate(math.log(tokens), 0.0, deviation**2), progress)


def engine(name: str, free: int, *lengths: float, times: tuple[float, ...] = STEEP) -> EngineView:
    load = EngineLoad(TABLE.widths, times, [curve(each) for each in lengths])
    return EngineView(name, load, len(lengths), free)


def waiting(*lengths: float) -> list[Waiting]:
    return [Waiting(number, curve(length)) for number, length in enumerate(lengths)]


LENGTHS = st.lists(st.floats(10.0, 3000.0), max_size=8)
ENGINES = st.lists(st.tuples(st.integers(0, 6), LENGTHS), max_size=5)


@settings(max_examples=120, deadline=None)
@given(LENGTHS, st.tuples(st.integers(1, 6), LENGTHS), ENGINES)
def test_a_rollout_gets_at_most_its_places_and_an_idle_one_gets_work(
    lengths: list[float], own: tuple[int, list[float]], others: list[tuple[int, list[float]]]
) -> None:
    work = waiting(*lengths)
    views = [engine(f"rollout/{i}", free, *those) for i, (free, those) in enumerate(others, 1)]
    given_to = share(work, engine("rollout/0", own[0], *own[1]), views)
    assert len(given_to) <= own[0]
    assert len(set(given_to)) == len(given_to)
    assert set(given_to) <= {each.trajectory for each in work}
    assert given_to == share(work, engine("rollout/0", own[0], *own[1]), views), (
        "a repeated decision has another result"
    )
    if lengths and not own[1]:
        assert given_to
    if all(not free for free, _ in others):
        assert given_to == [each.trajectory for each in work[: own[0]]], (
            "without free places elsewhere, the engine must get the first answers in order"
        )


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(10.0, 3000.0), min_size=1, max_size=24), st.integers(2, 4), st.integers(1, 8))
def test_every_waiting_answer_is_eventually_leased(lengths: list[float], count: int, places: int) -> None:
    """Engines request work in turn, as often as they have free places, and no answer waits without end."""
    left = waiting(*sorted(lengths, reverse=True))
    running: list[list[Waiting]] = [[] for _ in range(count)]
    for turn in range(8 * len(lengths) * count):
        turn_of = turn % count
        views = [
            EngineView(
                str(i), EngineLoad(TABLE.widths, STEEP, [each.curve for each in those]), len(those), places - len(those)
            )
            for i, those in enumerate(running)
        ]
        if left and views[turn_of].free:
            got = set(share(left, views[turn_of], [view for i, view in enumerate(views) if i != turn_of]))
            running[turn_of] += [each for each in left if each.trajectory in got]
            left = [each for each in left if each.trajectory not in got]
        elif left and all(not view.free for view in views):
            running = [[] for _ in range(count)]  # everything is done
    assert not left


def test_long_answers_are_distributed_over_engines() -> None:
    work = waiting(2000, 2000, 100, 100, 100, 100, 100, 100)
    own, other = engine("a", 4), engine("b", 4)
    first = share(work, own, [other])
    rest = [each for each in work if each.trajectory not in first]
    assert len({0, 1} & set(first)) == 1, "the two long answers did not go to different engines"
    assert len(first) <= 4
    assert len(rest) >= 4


def test_slow_engine_gets_fewer_answers_than_a_fast_one() -> None:
    slow = tuple(3 * time for time in STEEP)
    work = waiting(*[500.0] * 16)
    few = share(work, engine("slow", 16, times=slow), [engine("fast", 16)])
    many = share(work, engine("fast", 16), [engine("slow", 16, times=slow)])
    assert 1 <= len(few) < len(many)


def test_many_equal_answers_balance_the_load_despite_unequal_free_places() -> None:
    given_to = share(waiting(*[500.0] * 120), engine("idle", 128), [engine("busy", 452, *[500.0] * 60)])
    assert len(given_to) == pytest.approx((120 + 60) / 2, abs=5), (
        "the idle engine must get 90 answers, so that both run 90"
    )


def test_busy_engine_leaves_the_last_answer_to_an_idle_one() -> None:
    work = waiting(900)
    assert share(work, engine("busy", 4, 500, 500, 500), [engine("idle", 4)]) == []
    assert share(work, engine("idle", 4), [engine("busy", 4, 500, 500, 500)]) == [0]


def test_an_idle_engine_gets_work_also_if_another_one_would_end_earlier() -> None:
    slow = tuple(3 * time for time in STEEP)
    assert share(waiting(900), engine("slow", 4, times=slow), [engine("fast", 4)]) == [0]


def test_length_classes_are_half_octaves() -> None:
    assert length_class(1000.0) == length_class(1010.0)
    assert length_class(1000.0) < length_class(1600.0) < length_class(2400.0)
    assert length_class(0.0) == length_class(1.0) == 0


# ── moves of running answers ─────────────────────────────────────────────────────────────────────────────────────────
def running(*lengths: float, progress: int = 64) -> list[Running]:
    return [Running(number, curve(length, progress), 20 + progress) for number, length in enumerate(lengths)]


def source(those: list[Running], times: tuple[float, ...] = STEEP) -> EngineView:
    return EngineView("source", EngineLoad(TABLE.widths, times, [each.curve for each in those]), len(those), 0)


def test_an_answer_moves_from_the_engine_that_ends_last_to_an_idle_one() -> None:
    those = running(1500, 1500, 1500, 200)
    moves = hand_back(source(those), those, [engine("idle", 4), engine("full", 0, 300)], READ)
    assert len(moves) == 1
    assert (moves[0].trajectory in (0, 1, 2), moves[0].target) == (True, "idle")
    assert moves[0].gain > 0


@pytest.mark.parametrize(
    ("why", "others", "read", "times"),
    [
        ("no engine has a free place", [("full", 0)], READ, STEEP),
        ("reading costs more than is gained", [("idle", 4)], 10.0, STEEP),
        ("engines are as fast with many answers", [("idle", 4)], READ, FLAT),
    ],
)
def test_no_answer_moves_without_sufficient_gain(
    why: str, others: list[tuple[str, int]], read: float, times: tuple[float, ...]
) -> None:
    those = running(1500, 1500, 1500, 1500)
    views = [engine(name, free, times=times) for name, free in others]
    assert hand_back(source(those, times), those, views, read) == [], why


def test_no_answer_moves_if_only_the_risk_of_a_long_answer_would_move() -> None:
    """A move would not help: a long answer takes equally long on either engine, whatever else runs there."""
    those = [Running(number, curve(500, 64, deviation=1.0), 84) for number in range(6)]
    other = EngineView("other", EngineLoad(TABLE.widths, FLAT, [those[0].curve]), 1, 4)
    assert source(those, FLAT).load.finish() > 1.2 * other.load.finish(), (
        "the source must have the larger expected time for this test"
    )
    assert hand_back(source(those, FLAT), those, [other], READ) == []


@pytest.mark.parametrize(("share_of_gain", "moves"), [(0.4, 0), (0.2, 1)])
def test_prefix_reading_may_cost_half_of_the_gain_of_a_move(share_of_gain: float, moves: int) -> None:
    those, other = running(1500, 1500, 1500, 1500), [engine("other", 1, 1450, 1450)]
    (free,) = hand_back(source(those), those, other, 0.0)
    read = share_of_gain * free.gain / those[0].prefix
    assert len(hand_back(source(those), those, other, read)) == moves


def test_moved_answer_moves_again_only_once_its_prefix_has_doubled() -> None:
    those = running(1500, 1500, 1500, 1500)
    for read_before, moves in ((those[0].prefix // 2 + 1, 0), (those[0].prefix // 2, 1)):
        moved = [Running(each.trajectory, each.curve, each.prefix, read_before) for each in those]
        assert len(hand_back(source(moved), moved, [engine("idle", 1)], READ)) == moves


def test_no_answer_moves_from_an_engine_that_does_not_end_last() -> None:
    those = running(300, 300)
    assert hand_back(source(those), those, [engine("idle", 4), engine("later", 0, 3000, 3000)], READ) == []


@settings(max_examples=80, deadline=None)
@given(st.lists(st.floats(10.0, 3000.0), max_size=10), ENGINES, st.floats(1e-6, 1e-2), st.integers(0, 2000))
def test_gain_of_every_move_is_at_least_twice_its_cost(
    lengths: list[float], others: list[tuple[int, list[float]]], read: float, progress: int
) -> None:
    those = running(*lengths, progress=progress)
    views = [engine(f"rollout/{i}", free, *more) for i, (free, more) in enumerate(others)]
    moves = hand_back(source(those), those, views, read)
    free = {view.name: view.free for view in views}
    assert all(count <= free[name] for name, count in Counter(move.target for move in moves).items())
    assert len({move.trajectory for move in moves}) == len(moves)
    by_number = {each.trajectory: each for each in those}
    assert all(move.gain >= 2 * read * by_number[move.trajectory].prefix for move in moves)


# ── cost ─────────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_a_decision_evaluates_a_bounded_number_of_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bound holds for any number of waiting answers and places. The benchmark measures the time of a decision."""
    evaluated = 0
    real = engine_load._finish

    def counting(*arguments: object) -> float:
        nonlocal evaluated
        evaluated += 1
        return real(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(engine_load, "_finish", counting)
    rng = random.Random(0)
    counts = []
    for number in (CONSIDERED, 10_000):
        work = waiting(*[rng.uniform(10, 3000) for _ in range(number)])
        others = [engine(str(i), 64, *[500.0] * 64) for i in range(1, 9)]
        evaluated = 0
        share(work[:CONSIDERED], engine("0", 64, *[500.0] * 64), others)
        counts.append(evaluated)
    assert max(counts) <= 9 + 2 * 64
