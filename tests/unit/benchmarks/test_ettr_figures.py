"""benchmarks/ettr.py draws the same faults for each arm, and reads clocks and outages from the journal."""

from __future__ import annotations

import pytest

from rrl.benchmarks._ettr_arms import HEAVY_TAIL
from rrl.benchmarks._ettr_faults import MIXED, Kill, schedule
from rrl.benchmarks._ettr_figures import (
    Account,
    Outage,
    Sample,
    commits_of,
    lost_by_stage,
    outage_median,
    robustrl_ettr,
    share_at,
    sliding_ettr,
    strict,
    trained_again,
)
from rrl.benchmarks._ettr_runs import Plan
from rrl.core.types import TRAINER, Incarnation
from rrl.manager.model import events as ev
from rrl.tests.support.manager.accounted import OUTAGE_S, STEP_S, accounted, begun, failed, trained

FIRST, SECOND = Incarnation(TRAINER, 1), Incarnation(TRAINER, 2)


def _stamped(*events: tuple[float, ev.Event]) -> list[ev.Stamped]:
    return [ev.Stamped(seq, at, 1, event) for seq, (at, event) in enumerate(events, start=1)]


def test_each_part_of_the_steps_has_one_fault_and_the_seed_decides_where() -> None:
    faults = schedule(100, 10, seed=3)
    assert [fault.step // 10 for fault in faults] == list(range(10))
    assert all(0 <= fault.fraction < 1 for fault in faults)
    assert schedule(100, 10, seed=3) == faults != schedule(100, 10, seed=4)


def test_a_mixed_plan_hits_each_target_once_in_an_order_of_the_seed() -> None:
    orders = {tuple(fault.target for fault in schedule(50, len(MIXED), seed, MIXED)) for seed in range(10)}
    assert all(sorted(order) == sorted(MIXED) for order in orders)
    assert len(orders) > 1


def test_no_fault_comes_before_the_first_commit_or_at_the_last_step() -> None:
    for seed in range(200):
        steps = [fault.step for fault in schedule(20, 10, seed)]
        assert min(steps) >= 1
        assert max(steps) <= 18


def test_the_clock_runs_from_the_first_training_to_each_commit() -> None:
    events = _stamped(
        (5.0, ev.PhaseEntered(FIRST, "wait_data")),
        (7.0, ev.PhaseEntered(FIRST, "train")),
        (9.0, ev.StepCommitted(FIRST, 1, {})),
        (12.0, ev.PhaseEntered(SECOND, "train")),
        (14.0, ev.StepCommitted(SECOND, 2, {})),
    )
    assert commits_of(events) == (7.0, [9.0, 14.0])


def test_an_outage_ends_when_a_later_incarnation_of_the_trainer_trains() -> None:
    events = _stamped(
        (7.0, ev.PhaseEntered(FIRST, "train")),
        (11.0, ev.PhaseEntered(FIRST, "train")),
        (12.0, ev.PhaseEntered(SECOND, "checkpoint")),
        (13.0, ev.PhaseEntered(SECOND, "train")),
    )
    assert trained_again(events, Kill(10.0, 1, FIRST)) == (13.0, SECOND)
    assert trained_again(events, Kill(13.5, 1, SECOND)) is None


def test_strict_ettr_divides_the_clean_run_of_the_same_seed() -> None:
    samples = [
        Sample("clean", 0, 60.0, ()),
        Sample("clean", 1, 66.0, ()),
        Sample("job", 1, 110.0, (), (Outage(1.0, 4.0, 0), Outage(2.0, 6.0, 1))),
    ]
    assert strict(samples[2], samples) == pytest.approx(0.6)
    other = Sample("job", 1, 110.0, (), clean="100 steps")
    assert strict(other, [*samples, Sample("clean", 1, 88.0, (), clean="100 steps")]) == pytest.approx(0.8)
    assert outage_median(samples, "job") == 5.0
    assert outage_median(samples, "clean") is None


def test_lost_seconds_of_a_stage_are_those_of_all_causes_for_each_fault() -> None:
    faults = ((1.0, "trainer"), (2.0, "trainer"))
    first = Account(lost={"process": {"detect": 1.0, "start": 3.0}, "slow steps": {"other": 0.4}})
    second = Account(lost={"process": {"start": 5.0}})
    samples = [Sample("job", 0, 9.0, (), faults=faults, account=first), Sample("job", 1, 9.0, (), account=second)]
    assert lost_by_stage(samples) == {"detect": 0.5, "start": 4.0, "other": 0.2}
    assert lost_by_stage([Sample("clean", 0, 9.0, ())]) == {}


def test_plans_that_differ_in_their_faults_alone_share_a_clean_run() -> None:
    assert Plan("10 %", 100, 10).clean == Plan("5 %", 100, 5).clean
    assert (
        len(
            {
                Plan("10 %", 100, 10).clean,
                Plan("short", 50, 5).clean,
                Plan("long", 100, 10, step_factor=4.0).clean,
                Plan("tail", 100, 10, HEAVY_TAIL).clean,
            }
        )
        == 4
    )


def test_the_published_outages_give_the_published_ettr() -> None:
    """ByteRobust has outages of 277.8 s, and a fault every 10 steps of 42 s.

    The published ETTR is 0.60, without the half step that is trained again.
    """
    assert share_at(42.0, 10, 277.8 - 21.0) == pytest.approx(0.60, abs=0.005)


def test_while_the_trainer_is_down_robustrl_counts_the_rollouts_nodes() -> None:
    run = accounted(trained(failed(trained(begun(), 1, 5).wait(2), "trainer/0"), 6, 10))
    assert robustrl_ettr(run) == pytest.approx(1 - OUTAGE_S / 3 / (9 * STEP_S + 2 + OUTAGE_S), abs=0.001)


def test_lowest_window_of_the_sliding_ettr_is_that_of_the_outage() -> None:
    steps = accounted(trained(failed(trained(begun(), 1, 40).wait(2), "trainer/0"), 41, 80)).steps
    window_s, points = sliding_ettr(steps)
    lowest, at = min((share, at) for at, share in points)
    assert lowest == pytest.approx(1 - (OUTAGE_S + 2) / window_s, abs=0.05)
    assert steps.steps[40].since < at < steps.steps[40].at + window_s
