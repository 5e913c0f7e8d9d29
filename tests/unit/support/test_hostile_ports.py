"""The changes that benchmarks/hostile_ports.py counts as effects of an attack."""

from __future__ import annotations

import pytest

from rrl.benchmarks._load import cpu_seconds
from rrl.benchmarks.hostile_ports import Result, Round, _busy_loop
from rrl.tests.support.listening_manager import wait_until


def _round(alone: float, attack: float, busy: float) -> Round:
    return Round(alone, attack, busy, attack_cores=0.5, busy_cores=0.5, attack_s=10.0)


@pytest.mark.parametrize(
    ("rounds", "affected"),
    [
        ([_round(10.0, 7.0, 7.0)], False),  # the attack slows the run no more than a busy loop does
        ([_round(10.0, 7.0, 10.0)], True),  # the busy loop does not slow the run, but the attack does
        ([_round(10.0, 5.0, 10.0), _round(10.0, 9.5, 10.0), _round(10.0, 9.6, 10.0)], False),  # one round in three
    ],
)
def test_steps_under_attack_are_compared_with_those_beside_a_busy_loop(rounds: list[Round], affected: bool) -> None:
    assert Result("tcp", rounds, [], [], disturbed=False).affected is affected


def test_a_restart_counts_as_an_effect_however_many_steps_are_made() -> None:
    assert Result("tcp", [_round(10.0, 10.0, 10.0)], [], [], disturbed=True).affected


def test_busy_loop_uses_a_process_for_each_core_and_ends_with_its_block() -> None:
    with _busy_loop(1.2) as pids:
        assert len(pids) == 2
        wait_until(lambda: cpu_seconds(pids) > 0.1)
    with pytest.raises(FileNotFoundError):
        cpu_seconds(pids)
