"""Stragglers are replicas that are slower than their peers for minutes, where speed can be measured."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rrl.core.run_spec import Limits
from rrl.core.types import Incarnation, NodeName, Remedy, ReplicaId
from rrl.health.detection.baselines import STRAGGLER_ROUNDS, THROUGHPUT_WINDOW_S
from rrl.tests.support.examples import examples
from rrl.tests.support.health.traces import BUSY, LIMITS, Trace, detect_fresh, warn

ROLLOUTS = tuple(Incarnation(ReplicaId(f"rollout/{index}"), 1) for index in range(6))
RANKS = tuple(Incarnation(ReplicaId("trainer/0" + (f".{rank}" if rank else "")), 1) for rank in range(4))
LONG = (STRAGGLER_ROUNDS + 1.5) * THROUGHPUT_WINDOW_S
SLOW = ROLLOUTS[4]


@pytest.fixture
def trace() -> Paced:
    return generating()


class Paced(Trace):
    """A trace of rollouts that make a given number of tokens per second (7 by default)."""

    rates: dict[Incarnation, float]

    def play(self, seconds: float) -> None:
        for _ in range(int(seconds)):
            for incarnation, rate in self.rates.items():
                self.done[incarnation] = self.done.get(incarnation, 0) + int(rate) - 7  # Trace adds 7
            super().play(1)


def generating(**limits: str) -> Paced:
    trace = Paced(Limits(**limits) if limits else LIMITS)  # type: ignore[arg-type]
    trace.rates = {}
    for index, incarnation in enumerate(ROLLOUTS):
        trace.node(f"n{index}", incarnation)
        trace.loads[incarnation] = BUSY
    trace.rates = dict.fromkeys(ROLLOUTS, 100.0)
    return trace


def test_node_of_a_straggler_is_excluded_only_if_the_job_says_so() -> None:
    trace = generating(stragglers="exclude")
    trace.rates[SLOW] = 33.0
    trace.play(LONG)
    assert [finding.remedy for finding in trace.findings()] == [Remedy.EXCLUDE]


def test_slightly_slower_rollout_is_no_straggler(trace: Paced) -> None:
    trace.rates |= {SLOW: 60.0, ROLLOUTS[0]: 140.0}
    trace.play(LONG)
    assert trace.found() == set()


def test_last_generating_rollout_has_no_peers(trace: Paced) -> None:
    trace.rates = {SLOW: 20.0}
    for incarnation in ROLLOUTS:
        if incarnation != SLOW:
            trace.enter(incarnation, "wait_work")
    trace.play(LONG)
    assert trace.found() == set()


def test_rollouts_of_a_slower_pool_are_compared_only_with_each_other(trace: Paced) -> None:
    pool = [Incarnation(ReplicaId(f"h20/{index}"), 1) for index in range(3)]
    for index, incarnation in enumerate(pool):
        trace.node(f"h{index}", incarnation)
        trace.loads[incarnation] = BUSY
        trace.rates[incarnation] = 30.0
    trace.play(LONG)
    assert trace.found() == set()
    trace.rates[pool[1]] = 10.0
    trace.play(LONG)
    assert {finding.incarnation for finding in trace.findings()} == {pool[1]}


def test_rollouts_with_little_work_are_not_compared(trace: Paced) -> None:
    trace.rates = dict.fromkeys(ROLLOUTS, 1.0) | {SLOW: 0.0}
    trace.play(LONG)
    assert all(observed[0] != "straggler" for observed in trace.found())


def test_replacement_starts_without_the_slow_rounds_of_its_predecessor(trace: Paced) -> None:
    trace.rates[SLOW] = 33.0
    trace.play(LONG)
    second = Incarnation(SLOW.replica, 2)
    trace.launch(second, "n4")
    trace.monitor.on_hello(second, NodeName("n4"), "generate", trace.now)
    trace.rates[second] = 100.0
    trace.play(30)
    assert trace.found() == set()


def test_rounds_start_again_after_a_manager_restart(trace: Paced) -> None:
    trace.rates[SLOW] = 33.0
    trace.play(LONG)
    trace.restart()
    trace.play(3 * THROUGHPUT_WINDOW_S)
    assert trace.found() == set()


def gang(slow: float, passes: int, reported: bool) -> Trace:
    """Play passes of 20 s in which the last rank takes ``slow`` seconds.

    With ``reported``, ranks report progress when they have completed the pass.
    """
    trace = Trace()
    for rank, incarnation in enumerate(RANKS):
        trace.node(f"n{rank}", incarnation, phase="publish")
    for _ in range(passes):
        for incarnation in RANKS:
            trace.enter(incarnation, "train")
        for second in range(20):
            if reported:
                for incarnation in RANKS:
                    if second == int(slow if incarnation == RANKS[3] else 10):
                        trace.done[incarnation] = trace.done.get(incarnation, 0) + 1
            trace.play(1)
        for incarnation in RANKS:
            trace.enter(incarnation, "publish")
        trace.play(2)
    return trace


def test_rank_with_longer_passes_is_a_straggler_if_it_reports_progress() -> None:
    assert gang(18, STRAGGLER_ROUNDS + 3, reported=True).found() == {warn("straggler", RANKS[3])}
    assert gang(11, STRAGGLER_ROUNDS + 3, reported=True).found() == set()


def test_ranks_in_lockstep_have_no_straggler() -> None:
    assert gang(18, STRAGGLER_ROUNDS + 3, reported=False).found() == set()


@examples(6, many=150)
@given(st.lists(st.sampled_from([20.0, 100.0]), min_size=6, max_size=6), st.integers(1, 9))
def test_conclusions_across_nodes_are_the_same_with_and_without_earlier_results(rates: list[float], every: int) -> None:
    trace = generating()
    trace.rates = dict(zip(ROLLOUTS, rates, strict=True))
    for _ in range(45):
        trace.play(every)
        assert trace.detection.detect(LIMITS, trace.now) == detect_fresh(trace.monitor, trace.now)
    trace.rates = dict.fromkeys(ROLLOUTS, 100.0)
    for _ in range(15):
        trace.play(every)
        assert trace.detection.detect(LIMITS, trace.now) == detect_fresh(trace.monitor, trace.now)
