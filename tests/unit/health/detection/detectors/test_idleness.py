"""Who must compute and does nothing is found early; a gang is judged as one; what else explains it is heard first."""

from __future__ import annotations

import pytest

from rrl.core.phases import PHASES
from rrl.core.types import Cause, Incarnation, NodeName, Remedy, ReplicaId
from rrl.health.detection.attribution.gangs import MIN_INACTIVE_S
from rrl.health.detection.detectors.idleness import (
    EVEN_SPLIT_FACTOR,
    FALSE_PROGRESS_FACTOR,
    IDLE_FACTOR,
    LOADING_IDLE_FACTOR,
    SPINNING_FACTOR,
)
from rrl.health.detection.detectors.progress import BUSY_DEADLINE_FACTOR
from rrl.tests.support.health.traces import (
    BUSY,
    IDLE,
    LIMITS,
    ROLLOUT,
    ROLLOUTS,
    SPINNING,
    TRAINER,
    Trace,
    agent_of,
    fail,
)
from rrl.tests.unit.health.detection.detectors.test_probing import until_found

RANKS = (TRAINER, *(Incarnation(ReplicaId(f"trainer/0.{rank}"), 1) for rank in range(1, 4)))
COMPILING = (1.0, 0.0, 0.0)
ROBUSTRL = 300.0
"""s of zero TensorCore activity in RobustRL's training phase (docs/sources.md)"""


def training(ranks: int = 1) -> Trace:
    """A gang, a node each, that has been through five training passes of 20 s and is in the next, all at work."""
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
    """``r0`` is the first rank."""
    for name, load in of.items():
        trace.loads[RANKS[int(name[1:])]] = load


# ── hangs ────────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_a_trainer_that_does_nothing_in_a_training_step_hangs_in_a_third_of_robustrl_s_time() -> None:
    trace = training()
    loads(trace, r0=IDLE)
    delay = until_found(trace, 200)
    assert trace.found() == {fail("idle_hang", TRAINER)}
    assert delay <= IDLE_FACTOR * LIMITS.idle + 4 <= ROBUSTRL / 3
    finding = trace.only()
    assert (finding.cause, finding.remedy) == (Cause.HANG, Remedy.RESTART)
    assert finding.evidence[0].text == "phase train: neither its CPU nor its GPU has worked for 90 s"
    found = trace.findings()
    trace.play(300)
    assert trace.findings() == found, "it says nothing that runs"


def test_without_a_gpu_the_cpu_tells() -> None:
    trace = training()
    loads(trace, r0=(0.01, None, None))
    assert until_found(trace, 200) <= IDLE_FACTOR * LIMITS.idle + 4


def test_the_rank_that_is_idle_while_a_collective_keeps_the_others_gpus_is_who_they_wait_for() -> None:
    trace = training(4)
    loads(trace, r2=IDLE, r0=SPINNING, r1=SPINNING, r3=SPINNING)
    until_found(trace, 100)
    assert trace.found() == {fail("idle_hang", RANKS[2])}


def test_so_it_is_where_nobody_can_tell_a_collective_from_work() -> None:
    trace = training(4)
    loads(trace, r2=IDLE, r0=(1.0, 1.0, None), r1=(1.0, 1.0, None), r3=(1.0, 1.0, None))
    assert until_found(trace, 100) <= IDLE_FACTOR * LIMITS.idle + 4
    assert trace.found() == {fail("idle_hang", RANKS[2])}


def test_where_all_ranks_rest_the_one_that_has_done_least_is_charged() -> None:
    trace = training(4)
    for incarnation in RANKS:
        trace.done[incarnation] = 9
    trace.done[RANKS[3]] = 8
    trace.play(4)
    loads(trace, r0=IDLE, r1=IDLE, r2=IDLE, r3=IDLE)
    assert until_found(trace, 100) <= IDLE_FACTOR * LIMITS.idle + 4
    trace.play(4)
    assert trace.found() == {fail("idle_hang", RANKS[3])}


def test_ranks_that_all_spin_and_compute_nothing_hang_where_tensor_cores_can_be_seen() -> None:
    trace = training(4)
    loads(trace, r0=SPINNING, r1=SPINNING, r2=SPINNING, r3=SPINNING)
    assert until_found(trace, 200) <= 1.5 * LIMITS.idle + 4 <= ROBUSTRL / 3
    assert {finding.detector for finding in trace.findings()} == {"idle_hang"}
    assert len(trace.findings()) == 1


def test_where_they_cannot_be_seen_time_alone_judges_and_charges_one_of_the_gang() -> None:
    trace = training(4)
    for incarnation in RANKS:
        trace.loads[incarnation] = (1.0, 1.0, None)
    delay = until_found(trace, 700)
    assert PHASES["train"].shortest - 11 <= delay <= PHASES["train"].shortest
    assert trace.found() == {fail("phase_overdue", TRAINER)}


def test_of_two_ranks_the_idle_one_is_charged_once_it_is_behind_or_the_doubt_is_over() -> None:
    trace = training(2)
    loads(trace, r1=IDLE, r0=(1.0, 1.0, None))
    assert 2 * IDLE_FACTOR * LIMITS.idle < until_found(trace, 300) <= 3 * IDLE_FACTOR * LIMITS.idle + 4
    assert trace.found() == {fail("idle_hang", RANKS[1])}
    trace = training(2)
    trace.done = {RANKS[0]: 4, RANKS[1]: 3}
    trace.play(2)
    loads(trace, r1=IDLE, r0=(1.0, 1.0, None))
    assert until_found(trace, 300) <= IDLE_FACTOR * LIMITS.idle + 4


def test_who_is_idle_in_its_very_first_step_has_twice_as_long() -> None:
    trace = Trace().node("n1", TRAINER, phase="train")
    trace.loads[TRAINER] = IDLE
    assert 2 * LIMITS.idle - 2 <= until_found(trace, 400) <= 2 * LIMITS.idle + 4


def loading(*idle: Incarnation) -> Trace:
    """Three rollouts that have loaded weights in 5 s a few times; these load again, and do nothing."""
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


def test_a_rollout_that_does_nothing_where_it_loads_weights_in_seconds_hangs() -> None:
    trace = loading(ROLLOUT)
    loads_meanwhile(trace, ROLLOUTS[1])
    assert LOADING_IDLE_FACTOR * LIMITS.idle - 35 <= until_found(trace, 400) <= LOADING_IDLE_FACTOR * LIMITS.idle - 31
    assert trace.found() == {fail("idle_hang", ROLLOUT)}


@pytest.mark.parametrize("idle", [ROLLOUTS, ROLLOUTS[:2], ROLLOUTS[:1]])
def test_not_where_others_do_nothing_there_either_or_none_has_loaded_since(idle: tuple[Incarnation, ...]) -> None:
    trace = loading(*idle)
    if len(idle) > 1 and idle != ROLLOUTS:
        loads_meanwhile(trace, ROLLOUTS[2])
        trace.play(PHASES["loading_weights"].longest - 5 - 31)
    else:
        trace.play(PHASES["loading_weights"].longest - 31)
    assert trace.found() == set()
    trace.play(2)
    assert {seen[0] for seen in trace.found()} == {"phase_overdue"}


def test_not_who_is_seen_at_work_or_loads_for_the_first_time() -> None:
    trace = loading()
    trace.enter(ROLLOUT, "loading_weights")
    loads_meanwhile(trace, ROLLOUTS[1])
    trace.play(PHASES["loading_weights"].longest - 6)
    assert trace.found() == set()
    trace = Trace().node("n1", *ROLLOUTS)
    trace.enter(ROLLOUT, "loading_weights")
    trace.loads = {ROLLOUT: IDLE}
    loads_meanwhile(trace, ROLLOUTS[1])
    trace.play(PHASES["loading_weights"].longest - 6)
    assert trace.found() == set()


def test_who_is_stuck_in_its_very_first_load_is_found_once_others_have_shown_how_long_that_takes() -> None:
    trace = Trace().node("n1", *ROLLOUTS, phase="wait_weights")
    trace.loads = dict.fromkeys(ROLLOUTS, BUSY)
    trace.loads[ROLLOUT] = IDLE
    trace.enter(ROLLOUT, "loading_weights")
    for _ in range(4):
        for incarnation in ROLLOUTS[1:]:
            trace.enter(incarnation, "loading_weights")
        trace.play(5)
        for incarnation in ROLLOUTS[1:]:
            trace.enter(incarnation, "generate")
        trace.play(20)
    assert trace.found() == set()
    assert until_found(trace, 60) <= LOADING_IDLE_FACTOR * LIMITS.idle - 96
    assert trace.found() == {fail("idle_hang", ROLLOUT)}


def replaced(load: tuple[float, float | None, float | None]) -> tuple[Trace, Incarnation]:
    """Of a trainer whose tensor cores were seen at work, the next life, in its first step."""
    trace = training()
    second = Incarnation(TRAINER.replica, 2)
    trace.launch(second, "n0")
    trace.monitor.on_hello(second, NodeName("n0"), "starting", trace.now)
    trace.enter(second, "train")
    trace.loads = {second: load}
    return trace, second


def test_a_first_step_that_spins_hangs_where_its_role_s_tensor_cores_were_seen_at_work() -> None:
    trace, second = replaced(SPINNING)
    assert 2 * SPINNING_FACTOR * LIMITS.idle - 4 <= until_found(trace, 400) <= 2 * SPINNING_FACTOR * LIMITS.idle + 4
    assert trace.found() == {fail("idle_hang", second)}


def test_a_node_on_which_nothing_tells_of_tensor_cores_makes_no_later_step_a_hang() -> None:
    trace, second = replaced(SPINNING)
    trace.play(100)
    for phase in ("publish", "train"):
        trace.enter(second, phase)
        trace.play(400)
    assert trace.found() == set()


# ── and what is none ─────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize("phase", ["train", "between"])
def test_an_evaluation_of_forty_minutes_that_is_seen_at_work_is_no_hang(phase: str) -> None:
    trace = training()
    trace.learn(TRAINER, phase, 5)
    trace.enter(TRAINER, phase)
    trace.play(2400)
    assert trace.found() == set()
    trace.play(1201)
    assert trace.found() == {fail("phase_overdue", TRAINER)}, "but not for ever"


def test_an_evaluation_on_the_cpu_is_no_hang_of_who_trains_alone() -> None:
    trace = training()
    loads(trace, r0=COMPILING)
    trace.play(5 * PHASES["train"].shortest)
    assert trace.found() == set()
    trace.play(PHASES["train"].shortest)
    assert trace.found() == {fail("phase_overdue", TRAINER)}


def test_a_file_system_that_keeps_a_step_for_a_minute_and_a_quarter_is_no_hang() -> None:
    trace = training()
    loads(trace, r0=IDLE)
    trace.play(75)
    loads(trace, r0=BUSY)
    trace.play(75)
    assert trace.found() == set()


def test_a_first_step_that_compiles_for_half_an_hour_is_no_hang() -> None:
    trace = Trace().node("n1", TRAINER, phase="train")
    trace.loads[TRAINER] = COMPILING
    trace.play(1800)
    assert trace.found() == set()


def test_a_later_step_that_compiles_anew_or_evaluates_is_no_hang() -> None:
    for load in (COMPILING, BUSY, (1.0, 0.05, 0.0), (8.0, None, None)):
        trace = training()
        loads(trace, r0=load)
        trace.play(360)
        assert trace.found() == set(), load


@pytest.mark.parametrize("phase", ["checkpoint", "publish"])
def test_storage_that_stalls_for_minutes_leaves_everybody_idle_and_is_no_hang_in_phases_that_do_not_compute(
    phase: str,
) -> None:
    trace = training(2)
    for incarnation in RANKS[:2]:
        trace.enter(incarnation, phase)
        trace.loads[incarnation] = IDLE
    trace.play(280)
    assert trace.found() == set()


def test_a_trainer_that_waits_for_data_is_idle_and_well() -> None:
    trace = training().node("n9", *ROLLOUTS)
    trace.enter(TRAINER, "wait_data")
    loads(trace, r0=IDLE)
    trace.play(2000)
    assert trace.found() == set()


def test_the_first_rank_that_evaluates_alone_while_the_others_rest_is_no_hang() -> None:
    trace = training(4)
    loads(trace, r1=IDLE, r2=IDLE, r3=IDLE)
    trace.play(500)
    assert trace.found() == set()


def test_not_even_where_the_others_loads_come_a_little_earlier() -> None:
    trace = training(4)
    loads(trace, r3=IDLE)
    trace.play(4)
    loads(trace, r1=IDLE, r2=IDLE)
    trace.play(400)
    assert trace.found() == set()


def test_the_first_rank_that_evaluates_alone_while_a_collective_keeps_the_others_is_no_hang() -> None:
    trace = training(4)
    loads(trace, r1=SPINNING, r2=SPINNING, r3=SPINNING)
    trace.play(500)
    assert trace.found() == set()


@pytest.mark.parametrize("stored", [SPINNING, IDLE])
def test_the_first_rank_that_goes_on_after_an_evaluation_on_its_cpu_does_not_rest_with_the_others(
    stored: tuple[float, float | None, float | None],
) -> None:
    trace = training(4)
    loads(trace, r0=COMPILING, r1=stored, r2=stored, r3=stored)
    trace.play(180)
    assert trace.found() == set()
    loads(trace, r0=SPINNING)  # what is known of its tensor cores is older than what is known of its kernels
    trace.play(16)
    assert trace.found() == set()
    loads(trace, r0=IDLE)
    assert until_found(trace, 60) >= MIN_INACTIVE_S - 2


def test_of_two_ranks_the_idle_one_is_not_charged_while_the_other_s_tensor_cores_work() -> None:
    trace = training(2)
    loads(trace, r1=IDLE)
    trace.play(3 * EVEN_SPLIT_FACTOR * LIMITS.idle)
    assert trace.found() == set()


@pytest.mark.parametrize("stored", [SPINNING, IDLE, (1.0, 1.0, None)])
def test_a_rank_at_work_explains_its_gang_for_as_long_as_its_own_deadline_lasts(
    stored: tuple[float, float | None, float | None],
) -> None:
    trace = training(4)
    loads(trace, r1=stored, r2=stored, r3=stored)
    trace.play(BUSY_DEADLINE_FACTOR * PHASES["train"].shortest - 15)
    assert trace.found() == set()
    trace.play(20)
    assert trace.found() == {fail("phase_overdue", RANKS[0])}


def test_a_rank_that_goes_from_pass_to_pass_does_not_explain_one_that_stands() -> None:
    trace = training(2)
    loads(trace, r1=(1.0, 0.0, 0.0))
    for _ in range(30):
        for phase, seconds in (("train", 20), ("checkpoint", 1)):
            trace.enter(RANKS[0], phase)
            trace.play(seconds)
    assert trace.found() == {fail("phase_overdue", RANKS[1])}


def test_a_rank_that_is_elsewhere_explains_why_the_others_rest() -> None:
    trace = training(2)
    trace.enter(RANKS[1], "checkpoint")
    loads(trace, r0=IDLE)
    trace.play(250)
    assert trace.found() == set()


def test_an_agent_that_is_silent_says_nothing_of_who_is_idle() -> None:
    trace = training()
    loads(trace, r0=IDLE)
    trace.play(30)
    trace.heartbeat_missing.add(agent_of("n0"))
    trace.play(400)
    assert all(seen[1] != str(TRAINER) for seen in trace.found())


def test_a_pause_of_half_a_minute_is_no_hang_and_does_not_add_up() -> None:
    trace = training()
    for _ in range(10):
        loads(trace, r0=IDLE)
        trace.play(LIMITS.idle / 2)
        loads(trace, r0=BUSY)
        trace.play(4)
        assert trace.found() == set()


def reports_progress(trace: Trace, seconds: float) -> None:
    """Every few seconds, whatever it does."""
    for _ in range(int(seconds / 4)):
        trace.done[TRAINER] = trace.done.get(TRAINER, 0) + 1
        trace.play(4)


def test_progress_is_progress_for_long_however_idle_it_looks() -> None:
    trace = training()
    loads(trace, r0=IDLE)
    reports_progress(trace, FALSE_PROGRESS_FACTOR * LIMITS.idle - 10)
    assert trace.found() == set()
    trace.enter(TRAINER, "publish")
    trace.enter(TRAINER, "train")
    reports_progress(trace, FALSE_PROGRESS_FACTOR * LIMITS.idle - 10)
    assert trace.found() == set()


def test_who_tells_of_progress_in_a_step_and_does_nothing_for_far_longer_hangs() -> None:
    trace = training()
    loads(trace, r0=IDLE)
    reports_progress(trace, FALSE_PROGRESS_FACTOR * LIMITS.idle + 10)
    assert trace.found() == {fail("idle_hang", TRAINER)}
    text = "phase train: neither its CPU nor its GPU has worked for 300 s, although it reports progress"
    assert trace.only().evidence[0].text == text
    assert FALSE_PROGRESS_FACTOR * LIMITS.idle <= ROBUSTRL


def test_whose_gpu_never_ran_a_kernel_works_elsewhere_and_its_progress_is_believed() -> None:
    trace = Trace().node("n0", TRAINER, phase="publish")
    trace.loads[TRAINER] = IDLE
    trace.learn(TRAINER, "train", 20.0)
    trace.enter(TRAINER, "train")
    reports_progress(trace, 3000)
    assert trace.found() == set()


def test_a_suspended_trainer_is_idle_and_well_and_has_all_its_time_when_it_goes_on() -> None:
    trace = training()
    loads(trace, r0=IDLE)
    trace.play(50)
    trace.heartbeat_missing |= {TRAINER, agent_of("n0")}
    trace.monitor.on_job_status(NodeName("n0"), True, trace.now + 1, trace.now + 1)
    trace.play(5000)
    assert trace.found() == set()
    trace.heartbeat_missing.clear()
    trace.play(LIMITS.idle - 5)
    assert trace.found() == set()


def test_tensor_cores_that_never_worked_say_nothing() -> None:
    trace = Trace().node("n0", TRAINER, phase="publish")
    trace.loads[TRAINER] = SPINNING
    trace.learn(TRAINER, "train", 20.0)
    trace.enter(TRAINER, "train")
    trace.play(400)
    assert trace.found() == set()
