"""A trainer that waits for data is blamed if, and only if, the store has data for it and gets no request."""

from __future__ import annotations

import pytest

from rrl.core.phases import LEND, PHASES, WAIT_DATA
from rrl.core.types import DataReport, Incarnation, ReplicaId
from rrl.health.detection.attribution.untaken_data import UNTAKEN_FACTOR
from rrl.tests.support.health.traces import IDLE, LIMITS, ROLLOUTS, STORE, TRAINER, Trace, fail

LONGEST_S = PHASES[WAIT_DATA].longest
LIMIT_S = UNTAKEN_FACTOR * PHASES[WAIT_DATA].shortest
RANK_1 = Incarnation(ReplicaId("trainer/0.1"), 1)
CHARGED = {fail("data_untaken", TRAINER)}


@pytest.fixture
def trace() -> Trace:
    return job()


def job(loads: tuple[float, float | None, float | None] | None = IDLE) -> Trace:
    """Return a trace of a trainer that waits for data, a store that has data for it, and rollouts at work."""
    trace = Trace().node("n1", TRAINER, phase=WAIT_DATA).node("n2", *ROLLOUTS).node("n3", STORE, phase="serve")
    trace.still.add(TRAINER)
    trace.data = DataReport(untaken=True)
    if loads is not None:
        trace.loads[TRAINER] = loads
    return trace


def test_time_of_untaken_data_restarts_when_the_store_gets_a_request(trace: Trace) -> None:
    trace.play(LIMIT_S - 5)
    trace.data = DataReport()
    trace.play(1)
    trace.data = DataReport(untaken=True)
    trace.play(LIMIT_S - 5)
    assert trace.found() == set()
    trace.play(10)
    assert trace.found() == CHARGED


def test_data_that_lay_ready_during_a_training_step_do_not_shorten_the_next_wait(trace: Trace) -> None:
    trace.enter(TRAINER, "train")
    trace.loads[TRAINER] = (1.0, 0.9, 0.5)
    trace.play(10 * LIMIT_S)
    trace.enter(TRAINER, WAIT_DATA)
    trace.loads[TRAINER] = IDLE
    trace.play(LIMIT_S - 5)
    assert trace.found() == set()


def test_trainer_that_takes_its_gpus_back_is_not_charged(trace: Trace) -> None:
    """It requests nothing while it waits for a guest, which may still build its engine."""
    trace.enter(TRAINER, LEND)
    trace.play(2 * LIMIT_S)
    assert trace.found() == set()


def test_trainer_at_work_on_its_data_has_the_longest_time_of_the_phase() -> None:
    trace = job((1.0, 0.0, 0.0))
    trace.play(LONGEST_S - 5)
    assert trace.found() == set()
    trace.play(10)
    assert trace.found() == CHARGED


def test_heartbeats_of_a_silent_store_do_not_count(trace: Trace) -> None:
    trace.play(LIMIT_S - 30)
    trace.heartbeat_missing.add(STORE)
    trace.play(LIMITS.silence - 2)
    trace.play(20)
    assert not CHARGED & trace.found()


def test_first_rank_of_a_gang_is_charged_and_its_other_ranks_are_not(trace: Trace) -> None:
    trace.node("n4", RANK_1, phase=WAIT_DATA)
    trace.loads[RANK_1] = IDLE
    trace.play(LIMIT_S + 5)
    assert trace.found() == CHARGED


def test_rank_waiting_for_rank_0_is_not_charged_while_rank_0_is_in_another_phase(trace: Trace) -> None:
    trace.waiting[RANK_1] = TRAINER.replica
    trace.node("n4", RANK_1, phase=WAIT_DATA)
    trace.loads[RANK_1] = IDLE
    trace.enter(TRAINER, "checkpoint")
    trace.loads[TRAINER] = (1.0, 0.0, 0.0)
    trace.play(2 * LIMIT_S)
    assert trace.found() == set()


def test_next_manager_counts_from_its_own_start(trace: Trace) -> None:
    trace.play(LIMIT_S - 5)
    trace.restart()
    trace.play(LIMIT_S - 5)
    assert trace.found() == set()
    trace.play(10)
    assert trace.found() == CHARGED
