"""The ages of trained tokens: the figures that are kept, and the condition for a warning."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from rrl.core.run_spec import SamplingSpec
from rrl.core.types import Verdict
from rrl.manager.model.figures.token_ages import WINDOW_STEPS, TokenAges, token_age_finding, with_step


def reported(medians: Sequence[float], ages: TokenAges = TokenAges(), first: int = 1, ahead: int = 1) -> TokenAges:
    for step, median in enumerate(medians, first):
        ages = with_step(
            ages, step, {"token_age_p50": median, "token_age_max": median + 1}, at=100.0 + step, ahead=ahead
        )
    return ages


@pytest.mark.parametrize(
    ("medians", "warned"),
    [
        ([1.0] * 10, False),
        ([3.0] * 10, False),  # old, but not past three
        ([*[2.0] * 5, *[3.0] * 5], False),  # rises to three, the usual age on a busy machine
        ([4.0] * 10, False),  # above three, but it does not grow
        ([0.0, 1.0, 2.0, 3.0, 4.0], False),  # too few steps to tell
        ([*[1.0] * 9, 20.0], True),
        ([1.0, 1.0, 1.0, 1.0, 1.0, 2.0, 3.0, 4.0, 4.0, 4.0], True),
        ([5.0, 5.0, 5.0, 4.0, 4.0, 4.0, 4.0, 4.0, 4.0, 4.0], False),  # falling
    ],
)
def test_median_age_above_the_usual_age_gives_a_warning_once_it_grows(medians: list[float], warned: bool) -> None:
    assert (token_age_finding(reported(medians), SamplingSpec(ahead=1)) is not None) is warned


def test_warning_stays_the_same_until_the_median_is_young_again() -> None:
    ages = reported([*[1.0] * 5, *[4.0] * 5])
    first = token_age_finding(ages, SamplingSpec())
    assert first is not None
    assert (first.verdict, first.key) == (Verdict.WARN, "token_age:run")
    ages = reported([5.0] * 20, ages, 11)
    assert token_age_finding(ages, SamplingSpec()) == first, "the finding changes while the condition lasts"
    ages = reported([1.0] * 10, ages, 31)
    assert token_age_finding(ages, SamplingSpec()) is None


def test_rollouts_that_may_work_further_ahead_may_train_older_tokens() -> None:
    medians = [*[1.0] * 5, *[4.0] * 5]
    assert reported(medians, ahead=1).warned is not None
    assert reported(medians, ahead=2).warned is None


def test_ages_of_the_newest_steps_are_kept_in_any_order_of_reports() -> None:
    ages = TokenAges()
    for step in (3, 1, 2, 2, *range(20, 3, -1)):
        ages = with_step(ages, step, {"token_age_p50": float(step), "token_age_max": step + 0.5}, at=0.0, ahead=1)
    assert [entry.step for entry in ages.steps] == list(range(21 - WINDOW_STEPS, 21))
    assert (ages.p50, ages.max) == (15.5, 20.5)
    assert with_step(ages, 21, {"reward": 1.0}, at=0.0, ahead=1) == ages
