"""The time after which a source that sends nothing counts as faulty."""

from __future__ import annotations

from rrl.transport.weights.protocol import NOT_READY_INTERVAL_S
from rrl.transport.weights.pull import FIRST_CHUNK_TIMEOUT_S, MIN_CHUNK_TIMEOUT_S, AdaptiveTimeout


def test_timeout_before_the_first_chunk_is_the_initial_one() -> None:
    assert AdaptiveTimeout().timeout() == FIRST_CHUNK_TIMEOUT_S


def test_timeout_is_a_multiple_of_the_usual_time_and_covers_several_not_ready_replies() -> None:
    pace = AdaptiveTimeout()
    pace.observe(0.5)
    assert pace.timeout() == 2.0
    for _ in range(100):
        pace.observe(0.001)
    assert pace.timeout() == MIN_CHUNK_TIMEOUT_S >= 4 * NOT_READY_INTERVAL_S


def test_timeout_ignores_one_slow_chunk_and_follows_a_new_pace_within_a_window() -> None:
    pace = AdaptiveTimeout()
    for _ in range(20):
        pace.observe(0.1)
    pace.observe(0.2)
    assert pace.timeout() < 0.51
    for _ in range(8):
        pace.observe(1.0)
    assert pace.timeout() > 3.5
