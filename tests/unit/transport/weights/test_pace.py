"""How long the silence of a source is normal."""

from __future__ import annotations

from rrl.transport.weights.protocol import NOT_YET_EVERY
from rrl.transport.weights.pull import FIRST, LEAST, Pace


def test_before_anything_has_come_a_second_is_normal() -> None:
    assert Pace().patience() == FIRST


def test_a_few_times_the_usual_is_normal_but_never_less_than_several_not_yets() -> None:
    pace = Pace()
    pace.took(0.5)
    assert pace.patience() == 2.0
    for _ in range(100):
        pace.took(0.001)
    assert pace.patience() == LEAST >= 4 * NOT_YET_EVERY


def test_one_odd_chunk_changes_little_and_a_new_pace_is_learnt_within_a_window() -> None:
    pace = Pace()
    for _ in range(20):
        pace.took(0.1)
    pace.took(0.2)
    assert pace.patience() < 0.51
    for _ in range(8):
        pace.took(1.0)
    assert pace.patience() > 3.5
