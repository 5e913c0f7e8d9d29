"""Guests: asleep they are judged only by their heartbeats, at work like rollouts; and a trainer that lends."""

from __future__ import annotations

import pytest

from rrl.core.phases import ASLEEP, LEND, WAIT_DATA
from rrl.core.types import DataReport, Incarnation, ReplicaId
from rrl.health.detection.attribution.untaken_data import UNTAKEN_FACTOR
from rrl.tests.support.health.traces import IDLE, LIMITS, REWARD, ROLLOUTS, STORE, TRAINER, Trace, fail, until_found
from rrl.tests.support.manager.jobs import gang_job, with_guests

GUESTS = tuple(Incarnation(ReplicaId(f"guest/n{index}"), 1) for index in (1, 2))
COLOCATED = with_guests(gang_job(2, 1, rollouts=0, min_rollouts=0))
LONG = 900 + LIMITS.first_pass + 5
"""A time (s) that is longer than any permitted wait."""


def colocated(trainer: str, guests: str) -> Trace:
    """Return a trace of a trainer, a store and a reward role that make no progress, and of guests on two nodes."""
    trace = Trace()
    trace.monitor.set_roles(COLOCATED.roles)
    trace.node("n1", TRAINER, GUESTS[0], phase=trainer).node("n2", GUESTS[1], phase=guests)
    trace.enter(GUESTS[0], guests)
    trace.node("n3", STORE, phase="serve").node("n4", REWARD, phase="wait_work")
    trace.still |= {TRAINER, STORE, REWARD, *GUESTS}
    return trace


def test_sleeping_guest_never_hangs_and_is_never_probed() -> None:
    trace = Trace().node("n1", TRAINER, phase="train").node("n2", *GUESTS, phase=ASLEEP)
    trace.loads.update(dict.fromkeys(GUESTS, IDLE))
    trace.answers = dict.fromkeys(GUESTS)
    trace.play(3 * LONG)
    assert trace.found() == set()
    assert not [one for _, one in trace.probed_at if one in GUESTS]


@pytest.mark.parametrize("phase", [ASLEEP, "generate"])
def test_stopped_guest_is_found_by_its_silence(phase: str) -> None:
    trace = Trace().node("n1", TRAINER, phase="train").node("n2", GUESTS[0], phase=phase)
    trace.loads[TRAINER] = (1.0, 0.9, 0.5)
    trace.play(60)
    trace.heartbeat_missing.add(GUESTS[0])
    assert until_found(trace, LIMITS.silence + 5) <= LIMITS.silence + 1
    assert trace.found() == {fail("worker_silence", GUESTS[0])}


def test_guest_that_generates_nothing_is_found_like_a_rollout() -> None:
    trace = Trace().node("n1", TRAINER, phase=LEND).node("n2", GUESTS[0], phase="generate")
    trace.loads[GUESTS[0]] = IDLE
    trace.answers = {}
    trace.play(60)
    trace.still.add(GUESTS[0])
    trace.answers = {GUESTS[0]: None}
    until_found(trace, 600)
    assert trace.found() == {fail("no_answer", GUESTS[0])}


def test_sleeping_guests_explain_no_wait_and_do_not_count_as_waiting() -> None:
    """The rollouts wait for work, and the trainer for data: the store is at fault, with or without sleeping guests."""
    without, beside = Trace(), Trace()
    for trace in (without, beside):
        trace.node("n1", TRAINER, phase=WAIT_DATA).node("n2", *ROLLOUTS, phase="wait_work")
        trace.node("n3", STORE, phase="serve").node("n4", REWARD, phase="wait_work")
        trace.still |= {TRAINER, STORE, REWARD, *ROLLOUTS, *GUESTS}
    beside.node("n5", *GUESTS, phase=ASLEEP)
    for trace in (without, beside):
        trace.play(LONG)
    assert without.found() == beside.found() == {fail("standstill", STORE)}


@pytest.mark.parametrize("trainer", [LEND, WAIT_DATA])
def test_wait_of_the_trainer_ends_at_the_guests_that_work(trainer: str) -> None:
    """Without rollouts a trainer waits for the guests: while they wait for work, the idle store is at fault."""
    trace = colocated(trainer, "wait_work")
    trace.play(LONG)
    assert trace.found() == {fail("standstill", STORE)}
    evidence = {line.text.partition(":")[0] for line in trace.only().evidence}
    assert {TRAINER.replica, GUESTS[0].replica} <= evidence


def test_trainer_and_guests_that_wait_for_each_other_do_not_wait_for_ever() -> None:
    trace = Trace()
    trace.monitor.set_roles(COLOCATED.roles)
    trace.node("n1", TRAINER, phase=LEND).node("n2", *GUESTS, phase="wait_weights")
    trace.play(1.25 * 900 + LIMITS.first_pass + 10)
    assert trace.found() == {fail("standstill", TRAINER)}


def test_trainer_waits_as_long_as_the_guests_start() -> None:
    trace = colocated(LEND, "starting")
    trace.play(500)
    assert trace.found() == set()


def test_trainer_that_lends_leaves_no_data_untaken() -> None:
    trace = Trace().node("n1", TRAINER, phase=LEND).node("n2", *ROLLOUTS).node("n3", STORE, phase="serve")
    trace.still.add(TRAINER)
    trace.loads[TRAINER] = IDLE
    trace.data = DataReport(untaken=True)
    trace.play(2 * LONG)
    assert trace.found() == set()
    trace.enter(TRAINER, WAIT_DATA)  # it takes the GPUs back, and has the whole time again
    trace.play(UNTAKEN_FACTOR * 60 - 10)
    assert trace.found() == set()
    trace.play(30)
    assert trace.found() == {fail("data_untaken", TRAINER)}
