"""benchmarks/ettr.py draws the same faults for each arm, and reads clocks and outages from the journal."""

from __future__ import annotations

from pathlib import Path

import pytest

from rrl.benchmarks._ettr_arms import ARMS, budgets, job
from rrl.benchmarks._ettr_faults import Kill, schedule
from rrl.benchmarks._ettr_figures import Outage, Sample, commits_of, outage_median, share_at, strict, trained_again
from rrl.config.job.load import load_job
from rrl.core.types import TRAINER, Incarnation
from rrl.manager.model import events as ev

FIRST, SECOND = Incarnation(TRAINER, 1), Incarnation(TRAINER, 2)


def _stamped(*events: tuple[float, ev.Event]) -> list[ev.Stamped]:
    return [ev.Stamped(seq, at, 1, event) for seq, (at, event) in enumerate(events, start=1)]


def test_each_part_of_the_steps_has_one_fault_and_the_seed_decides_where() -> None:
    faults = schedule(100, 10, seed=3)
    assert [fault.step // 10 for fault in faults] == list(range(10))
    assert all(0 <= fault.fraction < 1 for fault in faults)
    assert schedule(100, 10, seed=3) == faults != schedule(100, 10, seed=4)


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
    assert outage_median(samples, "job") == 5.0
    assert outage_median(samples, "clean") is None


def test_the_published_outages_give_the_published_ettr() -> None:
    """ByteRobust's 277.8 s, and a fault every 10 steps of 42 s: 0.60 without the half step that is trained again."""
    assert share_at(42.0, 10, 277.8 - 21.0) == pytest.approx(0.60, abs=0.005)


def test_every_arm_is_a_valid_job_with_the_same_budgets(tmp_path: Path) -> None:
    for arm in ARMS.values():
        path = tmp_path / f"{arm.name}.toml"
        path.write_text(job(arm, "slurm", 30, 1.05, 2, tmp_path))
        assert load_job(path).recovery.policy == arm.policy
    assert 'window = "15000ms"' in budgets(ARMS["role"], 1.05)
    assert 'window = "15000ms"' in budgets(ARMS["job"], 1.05)
