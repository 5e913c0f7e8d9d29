"""The rewards of a run take bounded memory, and are the same in whatever order they are reported."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rrl.manager.model.figures.reward_curve import MAX_CURVE_POINTS, MAX_GAPS, MAX_LAST_STEPS, Rewards, add_step


def reported(*reports: tuple[int, float | None], rewards: Rewards | None = None) -> Rewards:
    rewards = rewards or Rewards()
    for step, reward in reports:
        rewards = add_step(rewards, step, reward)
    return rewards


def test_last_ten_rewards_and_a_curve_are_kept() -> None:
    rewards = reported(*((step, float(step)) for step in range(1, 601)))
    assert list(rewards.last) == list(range(591, 601))
    assert (rewards.mean_last, rewards.latest) == (595.5, 600.0)
    assert len(rewards.points) <= MAX_CURVE_POINTS
    assert [*rewards.points[:2], *rewards.points[-2:]] == [2.5, 6.5, 594.5, 598.5], (
        "a point of the curve is not the mean of four steps"
    )


def test_steps_without_a_reported_reward_leave_no_figures() -> None:
    rewards = reported((1, None), (3, None))
    assert (rewards.mean_last, rewards.latest, rewards.points) == (None, None, ())


@settings(max_examples=200, deadline=None)
@given(st.data(), st.integers(1, 1200))
def test_order_and_repetition_of_reports_do_not_matter(data: st.DataObject, newest: int) -> None:
    steps = data.draw(st.lists(st.integers(1, newest), min_size=1, max_size=40, unique=True))
    reports = [(step, float(step % 7)) for step in steps]
    hellos: list[tuple[int, float | None]] = [(step, None) for step in data.draw(st.lists(st.sampled_from(steps)))]
    shuffled = data.draw(st.permutations([*reports, *hellos, *reports[:5]]))
    assert reported(*shuffled) == reported(*sorted(reports))


def test_first_of_repeated_reports_counts() -> None:
    assert reported((1, 0.1), (2, 0.2), (1, 9.0), (2, 9.0)) == reported((1, 0.1), (2, 0.2))


@pytest.mark.parametrize("steps", [range(2, 20_000, 3), range(19_999, 1, -3)], ids=["upwards", "downwards"])
def test_memory_is_bounded_however_many_steps_go_unreported(steps: range) -> None:
    rewards = reported(*((step, 0.5) for step in steps))
    assert len(rewards.unreported) <= MAX_GAPS
    assert len(rewards.last) == MAX_LAST_STEPS
    assert len(msgspec.msgpack.encode(rewards)) < 6000


def test_trainer_that_reports_no_reward_leaves_one_gap() -> None:
    assert reported(*((step, None) for step in range(1, 1000))).unreported == ((1, 999),)
