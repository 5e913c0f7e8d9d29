"""If the store or the reward role dies or hangs at any moment of a run, only this role is restarted.

The other roles wait for it without being suspected, and nothing is lost or trained twice.
"""

from __future__ import annotations

import os
import random
import signal
from functools import partial
from pathlib import Path

import pytest

from rrl.core.types import ReplicaId
from rrl.manager.model import events as ev
from rrl.manager.model.actions import Fence
from rrl.manager.model.state import State
from rrl.tests.support.runs import (
    TestRun,
    all_work,
    check_sound,
    current_incarnations,
    joined_incarnations,
    light_job,
    submit_here,
)

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]
STORE, REWARD = ReplicaId("trajectories/0"), ReplicaId("reward/0")
KILLS = 8
HASTY = 'first_pass = "1s"\n' + "".join(
    f'[phases.{phase}]\nshortest = "3s"\nlongest = "3s"\n' for phase in ("train", "checkpoint", "publish", "wait_data")
)
"""Limits that are so short that a blamed replica would be restarted.

They show whether a replica is blamed while the store is away.
"""
OFTEN = '[recovery]\nbackoff = "100ms"\nper_node = 50\nper_replica = 50\n'


def _ends_well(run: TestRun) -> None:
    state = run.wait_end(240.0)
    assert (state.outcome, state.step) == ("completed", state.job.steps), state.why
    run.wait_gone()
    check_sound(run.run)


def _fenced(run: TestRun) -> set[ReplicaId]:
    actions = [s.event.action for s in run.events() if isinstance(s.event, ev.Decided)]
    return {action.incarnation.replica for action in actions if isinstance(action, Fence)}


def _has(records: int, state: State) -> bool:
    return state.seq >= records and all_work(state)


@pytest.mark.parametrize("victim", [STORE, REWARD])
def test_store_or_reward_role_killed_at_random_records_restarts_alone_and_loses_nothing(
    tmp_path: Path, victim: ReplicaId
) -> None:
    chance = random.Random(victim)
    run = submit_here(tmp_path, light_job("local", 200, extra=OFTEN))
    run.wait_steps(2)
    for _ in range(KILLS):
        before = current_incarnations(run.wait(partial(_has, run.state().seq + chance.randrange(40))))
        pid = before[victim][1]
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        run.wait_back_alone(before, victim)
    _ends_well(run)
    assert _fenced(run) == {victim}
    assert {recovery["replica"] for recovery in run.summary()["recoveries"]} == {victim}


@pytest.mark.parametrize("victim", [STORE, REWARD])
def test_stopped_store_or_reward_role_is_fenced_alone_without_blaming_the_trainer(
    tmp_path: Path, victim: ReplicaId
) -> None:
    toml = light_job("local", 60, extra=HASTY + OFTEN).replace('silence = "4s"', 'silence = "12s"')
    run = submit_here(tmp_path, toml)
    before = joined_incarnations(run)
    pid = before[victim][1]
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    run.wait_back_alone(before, victim)
    _ends_well(run)
    assert _fenced(run) == {victim}
