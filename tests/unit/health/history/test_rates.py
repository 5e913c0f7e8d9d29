"""Rates and their intervals agree with published tables, and exposure is counted once."""

from __future__ import annotations

import pytest

from rrl.health.history.rates import (
    DAY_S,
    clip,
    gamma_quantile,
    gamma_share,
    merge_intervals,
    mtbf,
    poisson_at_least,
    poisson_interval,
    rate_per,
    total_length,
)


@pytest.mark.parametrize(
    ("count", "low", "high"),
    [
        (0, 0.0, 3.6889),
        (1, 0.0253, 5.5716),
        (2, 0.2422, 7.2247),
        (5, 1.6235, 11.6683),
        (10, 4.7954, 18.3904),
        (20, 12.2165, 30.8884),
        (50, 37.1108, 65.9188),
    ],
)
def test_exact_poisson_interval_matches_tabulated_values(count: int, low: float, high: float) -> None:
    assert poisson_interval(count) == pytest.approx((low, high), abs=2e-4)


def test_poisson_interval_of_many_failures_is_nearly_the_normal_one() -> None:
    low, high = poisson_interval(10_000)
    assert (low, high) == pytest.approx((10_000 - 1.96 * 100, 10_000 + 1.96 * 100), abs=4)


@pytest.mark.parametrize("shape", [1, 2, 7, 40, 400])
@pytest.mark.parametrize("share", [0.005, 0.025, 0.5, 0.975, 0.995])
def test_gamma_quantile_is_the_inverse_of_the_gamma_distribution(shape: int, share: float) -> None:
    assert gamma_share(gamma_quantile(share, shape), shape) == pytest.approx(share, abs=1e-9)


def test_published_failure_rate_is_reproduced() -> None:
    """The published rate is that of RSC-1 (docs/sources.md): 6.50 failures per 1000 node-days."""
    rate = rate_per(65, 10_000, 1000.0)
    assert rate.value == 6.5
    assert rate.low is not None
    assert rate.high is not None
    assert rate.low < 6.5 < rate.high
    assert rate.confidence == 0.95


def test_the_mean_time_between_failures_is_the_rates_inverse() -> None:
    time, rate = mtbf(4, 800.0), rate_per(4, 800.0)
    assert time.value == 200.0
    assert (time.low, time.high) == pytest.approx((1 / (rate.high or 0), 1 / (rate.low or 0)))


def test_without_a_failure_the_mean_time_has_only_a_lower_bound() -> None:
    time = mtbf(0, 1000.0)
    assert (time.value, time.high) == (None, None)
    assert time.low == pytest.approx(1000.0 / 3.6889, abs=0.1)


def test_without_exposure_no_rate_is_known() -> None:
    assert rate_per(3, 0.0).value is None
    assert mtbf(0, 0.0).low is None


def test_poisson_tail_probability_is_small_if_many_failures_exceed_the_mean() -> None:
    assert poisson_at_least(0, 2.0) == 1.0
    assert poisson_at_least(1, 0.1) == pytest.approx(0.0951626, abs=1e-6)
    assert poisson_at_least(10, 1.0) < 1e-6


def test_overlapping_intervals_are_counted_once() -> None:
    spans = merge_intervals([(0.0, DAY_S), (DAY_S / 2, 2 * DAY_S), (3 * DAY_S, 4 * DAY_S), (5 * DAY_S, 5 * DAY_S)])
    assert spans == [(0.0, 2 * DAY_S), (3 * DAY_S, 4 * DAY_S)]
    assert total_length(clip(spans, DAY_S, 3.5 * DAY_S)) == 1.5 * DAY_S
