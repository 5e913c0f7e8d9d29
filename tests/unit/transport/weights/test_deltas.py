"""How a process learns from its pulls whether deltas are faster than whole chunks."""

from __future__ import annotations

import logging

import pytest

from rrl.core.types import WeightTraffic
from rrl.transport.weights.deltas import Deltas

SIZE = 2**30


def pulled(deltas: Deltas, by_deltas: bool, seconds: float) -> None:
    """Record a version that arrived by this way."""
    deltas.on_pulled(SIZE, 0 if by_deltas else SIZE, SIZE if by_deltas else 0, seconds)


def learn(deltas: Deltas, count: int, by_deltas_s: float, whole_s: float) -> list[bool]:
    """Pull this many versions, each way in its time, and return for each whether deltas were requested."""
    chosen = []
    for _ in range(count):
        chosen.append(deltas.choose())
        pulled(deltas, chosen[-1], by_deltas_s if chosen[-1] else whole_s)
    return chosen


def attempts(chosen: list[bool], slower: bool) -> list[int]:
    """Return how many versions arrived by the faster way before each attempt with the slower way."""
    pauses, count = [], 0
    for by_deltas in chosen:
        if by_deltas is slower:
            pauses.append(count)
            count = 0
        else:
            count += 1
    return pauses


def begun(by_deltas_s: float, whole_s: float) -> Deltas:
    """Return what a process knows after its first version, which is always whole, and one version by deltas."""
    deltas = Deltas("auto")
    assert deltas.choose()
    pulled(deltas, False, whole_s)
    assert deltas.choose(), "a way that was never tried is tried"
    pulled(deltas, True, by_deltas_s)
    return deltas


def test_deltas_are_requested_where_they_are_faster_and_whole_versions_are_tried_ever_more_rarely() -> None:
    chosen = learn(begun(1.0, 1.01), 300, 1.0, 1.01)
    assert attempts(chosen, slower=False) == [2, 4, 8, 16, 32, 65, 65, 65]


def test_whole_versions_are_requested_where_they_are_faster_and_deltas_are_tried_ever_more_rarely() -> None:
    chosen = learn(begun(5.0, 1.0), 300, 5.0, 1.0)
    assert attempts(chosen, slower=True) == [2, 4, 8, 16, 32, 64, 64, 64]


def test_whole_versions_that_take_much_longer_are_tried_so_rarely_that_it_costs_little() -> None:
    chosen = learn(begun(1.0, 8.0), 1000, 1.0, 8.0)
    assert attempts(chosen, slower=False) == [128, 256, 512]


def test_first_version_that_waited_does_not_keep_whole_versions_from_being_tried() -> None:
    chosen = learn(begun(1.4, 4.0), 300, 1.4, 1.0)
    assert not all(chosen[:20])
    assert chosen[100:].count(False) > 150


def test_way_that_has_become_faster_is_used_from_its_next_attempt_on_and_the_pauses_begin_again() -> None:
    deltas = begun(1.0, 1.2)
    learn(deltas, 300, 1.0, 1.2)
    chosen = learn(deltas, 200, 1.0, 0.1)
    attempt = chosen.index(False)
    assert attempt <= 92
    assert attempts(chosen[attempt + 1 :], slower=True)[:4] == [2, 4, 8, 16]


def test_duration_of_a_version_counts_per_byte_that_arrived() -> None:
    """A pull that continues after a cancellation receives only the rest."""
    deltas = begun(1.0, 1.5)
    for _ in range(20):
        deltas.on_pulled(SIZE, SIZE // 10, 0, 0.15)
    assert attempts(learn(deltas, 300, 1.0, 1.5), slower=False)[:3] == [4, 9, 18]


def test_version_counts_as_made_from_deltas_if_some_of_its_chunks_were() -> None:
    """With a high learning rate deltas are requested, but whole chunks arrive, except of some chunks."""
    deltas = Deltas("auto")
    for _ in range(10):
        assert deltas.choose()
        pulled(deltas, False, 1.0)
    deltas.on_pulled(SIZE, SIZE - 100, 100, 9.0)
    assert not deltas.choose()


def test_version_of_which_nothing_had_to_arrive_says_nothing() -> None:
    deltas = begun(1.0, 1.5)
    deltas.on_pulled(SIZE, 0, 0, 100.0)
    assert deltas.choose()


@pytest.mark.parametrize("setting", [True, False])
def test_fixed_setting_learns_nothing(setting: bool) -> None:
    deltas = Deltas(setting)
    assert deltas.enabled is setting
    pulled(deltas, False, 1.0)
    pulled(deltas, True, 9.0 if setting else 0.1)
    assert learn(deltas, 100, 9.0 if setting else 0.1, 1.0) == [setting] * 100


def test_automatic_setting_keeps_changes_for_others_even_while_it_requests_whole_chunks() -> None:
    deltas = begun(5.0, 1.0)
    assert not deltas.choose()
    assert deltas.enabled


def test_traffic_counts_bytes_versions_and_fallbacks() -> None:
    deltas = Deltas()
    assert deltas.traffic == WeightTraffic(0, 0, 0)
    deltas.on_received(30)
    deltas.on_received(12)
    pulled(deltas, True, 1.0)
    deltas.on_wrong("a")
    deltas.on_wrong("a")
    assert deltas.traffic == WeightTraffic(42, SIZE, 2)


def test_source_of_wrong_deltas_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "rrl.weights")
    deltas = Deltas()
    for source in ("a", "a", "b", "a", "b"):
        deltas.on_wrong(source)
    assert [record.message.split(" results")[0] for record in caplog.records] == ["a delta of a", "a delta of b"]
