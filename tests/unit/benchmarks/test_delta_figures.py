"""The figures of benchmarks/delta.py, and the content with which the torture test is deterministic."""

from __future__ import annotations

from itertools import pairwise

import numpy
import pytest

from rrl.benchmarks import _delta_loopback, _delta_namespaces
from rrl.benchmarks._delta_fleet import ARMS, Series, Transfer
from rrl.benchmarks._delta_loopback import Loopback
from rrl.benchmarks._delta_namespaces import LINKS, Nics
from rrl.core.types import Version
from rrl.tests.support.weights.sparse_content import LINE, sparse_content

NBYTES = 1000


def _transfers(first: tuple[float, int], later: tuple[float, int], count: int = 3) -> list[Transfer]:
    return [Transfer(seconds, 0.5, 0.1, (got,), 0, 0) for seconds, got in (first, *[later] * (count - 1))]


def test_figures_are_means_of_the_later_versions_and_the_worst_learning_rate() -> None:
    results = Loopback(nbytes=NBYTES)
    for rate, seconds, got in (("1e-6", (0.9, 0.8, 1.0), 30), ("1e-3", (1.01, 1.2, 1.0), 1000)):
        series = results.series[rate] = Series()
        for arm in ARMS:
            for each in seconds:
                late = (1.0, NBYTES) if arm == "plain" else (each, got)
                series.rounds[arm].append(_transfers((9.0, NBYTES), late))
    figures = _delta_loopback.report(results)
    assert (figures["bytes_share_1e6"], figures["bytes_share_1e3"]) == (0.03, 1.0)
    assert (figures["worst_over_plain_time"], figures["worst_over_plain_time_range"]) == (1.01, [1.0, 1.2])


def test_speedup_compares_the_means_of_the_later_versions_though_fewer_are_sent_whole() -> None:
    results = Nics(nbytes=NBYTES)
    for link in LINKS:
        series = results.series[link.name] = Series()
        series.rounds["auto"].append(_transfers((12.0, NBYTES), (2.0, 20), 10))
        series.rounds["delta"].append(_transfers((12.0, NBYTES), (1.5, 20), 10))
        series.rounds["plain"].append(_transfers((99.0, NBYTES), (12.0, NBYTES), 4))
        results.over_counters[link.name] = [1.0, 1.1]
    figures = _delta_namespaces.report(results)
    assert figures["speedup_1gbit_1e6_delta"] == 8.0
    assert (figures["speedup_1gbit_1e6"], figures["bytes_share_200mbit_1e6"]) == (6.0, 0.02)


def _words(version: Version) -> numpy.ndarray[tuple[int], numpy.dtype[numpy.uint16]]:
    return numpy.frombuffer(sparse_content(version, 200_000), numpy.uint16)


def test_a_step_changes_few_words_of_the_sparse_content_and_each_word_in_its_turn() -> None:
    versions = [_words(Version(step, 1)) for step in range(130)]
    shares = [float(numpy.mean(new != old)) for old, new in pairwise(versions)]
    assert min(shares) > 0.01
    assert max(shares) < 0.022
    assert (versions[0] != versions[64]).all()
    assert (versions[64] != versions[128]).all()


@pytest.mark.parametrize(("incarnation", "differs"), [(2, 0.0), (LINE - 1, 0.0), (LINE, 1.0), (7 * LINE, 1.0)])
def test_incarnations_of_another_line_have_other_words(incarnation: int, differs: float) -> None:
    assert numpy.mean(_words(Version(5, 1)) != _words(Version(5, incarnation))) == differs
