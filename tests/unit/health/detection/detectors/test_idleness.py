"""Detectors by load: idle replicas are found early, gangs are judged as a whole, other explanations come first."""

from __future__ import annotations

import pytest

from rrl.core.phases import PHASES
from rrl.core.types import Incarnation, NodeName, ReplicaId
from rrl.health.detection.attribution.gangs import MIN_INACTIVE_S
from rrl.health.detection.detectors.idleness import (
    EVEN_SPLIT_FACTOR,
    FALSE_PROGRESS_FACTOR,
    IDLE_FACTOR,
    RANK_0_IDLE_FACTOR,
)
from rrl.tests.support.health.traces import (
    BUSY,
    IDLE,
    LIMITS,
    ROLLOUTS,
    SPINNING,
    TRAINER,
    Trace,
    agent_of,
    fail,
    until_found,
)

RANKS = (TRAINER, *(Incarnation(ReplicaId(f"trainer/0.{rank}"), 1) for rank in range(1, 4)))
COMPILING = (1.0, 0.0, 0.0)


def training(ranks: int = 1) -> Trace:
    """Return a trace of a gang on one node per member, in its seventh training step after six steps of 20 s."""
    trace = Trace()
    gang = RANKS[:ranks]
    for rank, incarnation in enumerate(gang):
        trace.node(f"n{rank}", incarnation, phase="wait_data")
    trace.loads = dict.fromkeys(gang, BUSY)
    for _ in range(6):
        for phase, seconds in (("train", 20), ("checkpoint", 6), ("wait_data", 4)):
            for incarnation in gang:
                trace.enter(incarnation, phase)
            trace.play(seconds)
            assert trace.found() == set()
    for incarnation in gang:
        trace.enter(incarnation, "train")
    trace.play(10)
    return trace


def loads(trace: Trace, **of: tuple[float, float | None, float | None]) -> None:
    """Set the loads of the ranks: ``r0`` is that of rank 0, with the same three values as :data:`BUSY`."""
    for name, load in of.items():
        trace.loads[RANKS[int(name[1:])]] = load


# ── hangs ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_cpu_load_decides_without_a_gpu() -> None:
    trace = training()
    loads(trace, r0=(0.01, None, None))
    assert until_found(trace, 200) <= IDLE_FACTOR * LIMITS.idle + 4


def test_rank_with_least_progress_is_blamed_if_all_are_idle() -> None:
    trace = training(4)
    for incarnation in RANKS:
        trace.done[incarnation] = 9
    trace.done[RANKS[3]] = 8
    trace.play(4)
    loads(trace, r0=IDLE, r1=IDLE, r2=IDLE, r3=IDLE)
    assert until_found(trace, 100) <= IDLE_FACTOR * LIMITS.idle + 4
    trace.play(4)
    assert trace.found() == {fail("idle_hang", RANKS[3])}


def test_idle_one_of_two_ranks_is_blamed_once_behind_or_after_a_longer_time() -> None:
    trace = training(2)
    loads(trace, r1=IDLE, r0=(1.0, 1.0, None))
    assert 2 * IDLE_FACTOR * LIMITS.idle < until_found(trace, 300) <= 3 * IDLE_FACTOR * LIMITS.idle + 4
    assert trace.found() == {fail("idle_hang", RANKS[1])}
    trace = training(2)
    trace.done = {RANKS[0]: 4, RANKS[1]: 3}
    trace.play(2)
    loads(trace, r1=IDLE, r0=(1.0, 1.0, None))
    assert until_found(trace, 300) <= IDLE_FACTOR * LIMITS.idle + 4


def replaced(load: tuple[float, float | None, float | None]) -> tuple[Trace, Incarnation]:
    """Return (trace, second incarnation of the trainer). This incarnation is in its first step and has ``load``.

    The first incarnation was observed with busy tensor cores.
    """
    trace = training()
    second = Incarnation(TRAINER.replica, 2)
    trace.launch(second, "n0")
    trace.monitor.on_hello(second, NodeName("n0"), "starting", trace.now)
    trace.enter(second, "train")
    trace.loads = {second: load}
    return trace, second


def test_node_without_tensor_core_loads_makes_no_later_step_a_hang() -> None:
    trace, second = replaced(SPINNING)
    trace.play(100)
    for phase in ("publish", "train"):
        trace.enter(second, phase)
        trace.play(400)
    assert trace.found() == set()


# ── idle states that are no hang ─────────────────────────────────────────────────────────────────────────────────────


def test_first_rank_evaluating_is_no_hang_if_its_loads_arrive_later() -> None:
    trace = training(4)
    loads(trace, r3=IDLE)
    trace.play(4)
    loads(trace, r1=IDLE, r2=IDLE)
    trace.play(400)
    assert trace.found() == set()


@pytest.mark.parametrize("stored", [SPINNING, IDLE])
def test_first_rank_resuming_after_a_cpu_evaluation_is_not_inactive(
    stored: tuple[float, float | None, float | None],
) -> None:
    trace = training(4)
    loads(trace, r0=COMPILING, r1=stored, r2=stored, r3=stored)
    trace.play(180)
    assert trace.found() == set()
    loads(trace, r0=SPINNING)  # the sample of its tensor cores is older than the sample of its kernels
    trace.play(16)
    assert trace.found() == set()
    loads(trace, r0=IDLE)
    assert until_found(trace, RANK_0_IDLE_FACTOR * LIMITS.idle + 4) >= MIN_INACTIVE_S - 2


def test_idle_one_of_two_ranks_is_not_blamed_while_the_other_computes() -> None:
    trace = training(2)
    loads(trace, r1=IDLE)
    trace.play(3 * EVEN_SPLIT_FACTOR * LIMITS.idle)
    assert trace.found() == set()


def test_rank_with_continuing_passes_does_not_explain_a_stalled_one() -> None:
    trace = training(2)
    loads(trace, r1=(1.0, 0.0, 0.0))
    for _ in range(30):
        for phase, seconds in (("train", 20), ("checkpoint", 1)):
            trace.enter(RANKS[0], phase)
            trace.play(seconds)
    assert trace.found() == {fail("phase_overdue", RANKS[1])}


def loading(*idle: Incarnation) -> Trace:
    """Return a trace of three rollouts after three weight loads of 5 s. Those in ``idle`` load again and are idle."""
    trace = Trace().node("n1", *ROLLOUTS)
    trace.loads = dict.fromkeys(ROLLOUTS, BUSY)
    for _ in range(3):
        for phase, seconds in (("loading_weights", 5), ("generate", 20)):
            for incarnation in ROLLOUTS:
                trace.enter(incarnation, phase)
            trace.play(seconds)
    for incarnation in idle:
        trace.enter(incarnation, "loading_weights")
        trace.loads[incarnation] = IDLE
    trace.play(30)
    return trace


def loads_meanwhile(trace: Trace, incarnation: Incarnation) -> None:
    trace.enter(incarnation, "loading_weights")
    trace.play(5)
    trace.enter(incarnation, "generate")


@pytest.mark.parametrize("idle", [ROLLOUTS, ROLLOUTS[:2], ROLLOUTS[:1]])
def test_idle_load_is_no_hang_if_others_idle_too_or_none_has_loaded_since(idle: tuple[Incarnation, ...]) -> None:
    trace = loading(*idle)
    if len(idle) > 1 and idle != ROLLOUTS:
        loads_meanwhile(trace, ROLLOUTS[2])
        trace.play(PHASES["loading_weights"].longest - 5 - 31)
    else:
        trace.play(PHASES["loading_weights"].longest - 31)
    assert trace.found() == set()
    trace.play(2)
    assert {observed[0] for observed in trace.found()} == {"phase_overdue"}


def test_gang_that_only_spins_hangs_if_tensor_cores_are_observable() -> None:
    trace = training(4)
    loads(trace, r0=SPINNING, r1=SPINNING, r2=SPINNING, r3=SPINNING)
    assert until_found(trace, 200) <= 1.5 * LIMITS.idle + 4
    assert {finding.detector for finding in trace.findings()} == {"idle_hang"}
    assert len(trace.findings()) == 1


def test_silent_agent_gives_no_evidence_of_idleness() -> None:
    trace = training()
    loads(trace, r0=IDLE)
    trace.play(30)
    trace.heartbeat_missing.add(agent_of("n0"))
    trace.play(400)
    assert all(observed[1] != str(TRAINER) for observed in trace.found())


def test_pauses_of_half_a_minute_are_no_hang_and_do_not_add_up() -> None:
    trace = training()
    for _ in range(10):
        loads(trace, r0=IDLE)
        trace.play(LIMITS.idle / 2)
        loads(trace, r0=BUSY)
        trace.play(4)
        assert trace.found() == set()


def reports_progress(trace: Trace, seconds: float) -> None:
    """Let the replica report progress every few seconds, regardless of its load."""
    for _ in range(int(seconds / 4)):
        trace.done[TRAINER] = trace.done.get(TRAINER, 0) + 1
        trace.play(4)


def test_progress_reported_while_idle_for_far_too_long_is_a_hang() -> None:
    trace = training()
    loads(trace, r0=IDLE)
    reports_progress(trace, FALSE_PROGRESS_FACTOR * LIMITS.idle + 10)
    assert trace.found() == {fail("idle_hang", TRAINER)}
    text = "phase train: neither its CPU nor its GPU has worked for 300 s, although it reports progress"
    assert trace.only().evidence[0].text == text


def test_progress_of_a_replica_whose_gpu_never_worked_is_accepted() -> None:
    trace = Trace().node("n0", TRAINER, phase="publish")
    trace.loads[TRAINER] = IDLE
    trace.learn(TRAINER, "train", 20.0)
    trace.enter(TRAINER, "train")
    reports_progress(trace, 3000)
    assert trace.found() == set()


def test_tensor_cores_that_never_worked_give_no_evidence() -> None:
    trace = Trace().node("n0", TRAINER, phase="publish")
    trace.loads[TRAINER] = SPINNING
    trace.learn(TRAINER, "train", 20.0)
    trace.enter(TRAINER, "train")
    trace.play(400)
    assert trace.found() == set()
