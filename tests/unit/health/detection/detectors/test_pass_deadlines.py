"""The deadline of a pass (one stay of a replica in a phase): how the phase, loads and storage stalls change it."""

from __future__ import annotations

import pytest

from rrl.core.phases import PHASES, PhaseSpec
from rrl.core.run_spec import Limits
from rrl.core.types import Incarnation, NodeName, ReplicaId, member_id
from rrl.health.detection.detectors.pass_deadlines import MAX_STORAGE_STALL_S
from rrl.tests.support.health.traces import IDLE, LIMITS, TRAINER, Trace, fail, until_found

N1, N2 = NodeName("n1"), NodeName("n2")
CPU_ONLY = (1.0, 0.0, 0.0)
BLIND = (1.0, 1.0, None)
"""Load of a trainer whose kernels run on a node without DCGM."""
Load = tuple[float, float | None, float | None]
MINUTE = 60.0
PASS_S = 20.0
"""Duration of each completed pass (s)."""


def trainer_in(phase: str, load: Load | None, ended_passes: int) -> Trace:
    """Return a trace of a trainer in a phase of which it has completed ``ended_passes`` passes."""
    trace = Trace().node("n1", TRAINER, phase="wait_data")
    trace.learn(TRAINER, phase, PASS_S, passes=ended_passes, between="wait_data")
    if load is not None:
        trace.loads[TRAINER] = load
        trace.play(20)
    trace.enter(TRAINER, phase)
    return trace


def minutes_until_found(phase: str, load: Load | None, ended_passes: int) -> float:
    """Return the minutes until a trainer without progress fails, rounded up to half a minute."""
    trace = trainer_in(phase, load, ended_passes)
    began = trace.now
    while not any(observed[2] == "FAIL" for observed in trace.found()):
        assert trace.now - began < 7 * 3600.0
        trace.play(MINUTE / 2)
    return (trace.now - began) / MINUTE


# ── the passes of a run ──────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize(
    ("phase", "load", "first", "second_to_fourth", "later"),
    [
        ("publish", IDLE, 15, 5, 5),
        ("checkpoint", IDLE, 15, 5, 5),
        ("checkpoint", CPU_ONLY, 90, 10, 5),
        ("checkpoint", None, 90, 10, 5),
        ("train", BLIND, 120, 60, 60),
        ("train", None, 390, 20, 10),
    ],
)
def test_deadline_is_never_longer_in_a_later_pass(
    phase: str, load: Load | None, first: float, second_to_fourth: float, later: float
) -> None:
    found = [minutes_until_found(phase, load, ended_passes) for ended_passes in (0, 1, 2, 3, 4, 8)]
    assert found == pytest.approx([first, *[second_to_fourth] * 3, *[later] * 2], abs=0.6)


def test_longest_of_the_first_passes_decides_until_three_durations_are_known() -> None:
    trace = Trace().node("n1", TRAINER, phase="wait_data")
    for seconds in (10.0, 90.0, 200.0):
        trace.learn(TRAINER, "checkpoint", seconds, passes=1, between="wait_data")
    trace.enter(TRAINER, "checkpoint")
    trace.play(2000 - 1)
    assert trace.found() == set()
    trace.play(1)
    text = trace.only().evidence[0].text
    assert text == "phase checkpoint: it has not ended within 2000 s (2 x 5 x 200 s so far, within 300 to 3600 s)"


def test_job_that_raises_the_shortest_deadline_extends_blind_training() -> None:
    limits = Limits(phases={"train": PhaseSpec(shortest=3 * 3600.0)})
    trace = Trace(limits).node("n1", TRAINER, phase="train")
    trace.loads[TRAINER] = BLIND
    trace.play(3 * 3600.0 - 1)
    assert trace.found() == set()
    trace.play(2)
    assert trace.found() == {fail("phase_overdue", TRAINER)}


def test_idle_phase_of_the_jobs_own_has_its_longest_and_grace() -> None:
    limits = Limits(phases={"judge_batch": PhaseSpec(longest=3600.0, progresses=False)})
    trace = Trace(limits).node("n1", TRAINER, phase="judge_batch")
    trace.loads[TRAINER] = IDLE
    trace.play(3600 + LIMITS.first_pass - 1)
    assert trace.found() == set()


def test_passes_of_a_wait_do_not_shorten_its_deadline() -> None:
    trace = Trace().node("n1", TRAINER, phase="train")
    trace.learn(TRAINER, "wait_data", PASS_S, passes=2, between="train")
    trace.loads[TRAINER] = IDLE
    trace.enter(TRAINER, "wait_data")
    trace.play(PHASES["wait_data"].longest - 1)
    assert trace.found() == set()


# ── storage stalls ───────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("phase", ["checkpoint", "publish", "starting", "loading_weights"])
def test_storage_stall_of_its_node_extends_a_phase_that_uses_storage(phase: str) -> None:
    trace = trainer_in(phase, IDLE, ended_passes=5)
    trace.play(180)
    trace.monitor.on_storage_report(N1, stalled=True, now=trace.now)
    first = trace.monitor.replicas[TRAINER.replica].first_pass
    most = max(PHASES[phase].longest + first * LIMITS.first_pass, MAX_STORAGE_STALL_S)
    trace.play(most - 180 - 1)
    assert trace.found() == set()
    trace.play(1)
    assert trace.found() == {fail("phase_overdue", TRAINER)}, "a storage stall extends the deadline beyond its limit"


def test_stall_that_ended_before_the_pass_changes_nothing() -> None:
    trace = trainer_in("checkpoint", IDLE, ended_passes=5)
    trace.enter(TRAINER, "train")
    trace.monitor.on_storage_report(N1, stalled=True, now=trace.now)
    trace.play(5)
    trace.monitor.on_storage_report(N1, stalled=False, now=trace.now)
    trace.play(5)
    trace.enter(TRAINER, "checkpoint")
    assert until_found(trace, 3600.0) == PHASES["checkpoint"].shortest


def test_stall_does_not_explain_an_idle_training_step() -> None:
    trace = trainer_in("train", IDLE, ended_passes=5)
    trace.monitor.on_storage_report(N1, stalled=True, now=trace.now)
    assert until_found(trace, 3600.0) <= 2 * LIMITS.idle


def test_stall_of_one_members_node_extends_the_deadline_of_its_gang() -> None:
    other = Incarnation(member_id(ReplicaId("trainer/0"), 1), 1)
    trace = Trace().node("n1", TRAINER, phase="wait_data").node("n2", other, phase="wait_data")
    for incarnation in (TRAINER, other):
        trace.learn(incarnation, "checkpoint", PASS_S, between="wait_data")
    trace.monitor.on_storage_report(N2, stalled=True, now=trace.now)
    for incarnation in (TRAINER, other):
        trace.enter(incarnation, "checkpoint")
    trace.play(2 * PHASES["checkpoint"].shortest)
    assert trace.found() == set()


def test_replica_that_starts_on_a_node_with_stalled_storage_is_extended() -> None:
    trace = Trace().node("n1")
    trace.monitor.on_storage_report(N1, stalled=True, now=trace.now)
    trace.node("n1", TRAINER, phase="checkpoint")
    assert trace.monitor.replicas[TRAINER.replica].storage_stall.stalled
