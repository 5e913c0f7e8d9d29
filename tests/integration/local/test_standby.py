"""Failed trainers continue in a standby process, in whole runs of light roles."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest

from rrl.core.types import Incarnation
from rrl.manager.model import events as ev
from rrl.manager.model.state import Replica
from rrl.tests.support.runs import TestRun, all_work, cancel, current_incarnations, light_job, submit_here, submit_on
from rrl.tests.support.slurm.lab import SlurmLab
from rrl.tests.support.standbys import TRAINER, adoptions, end_well, standbys


def wait_for_standby(run: TestRun) -> Replica:
    """Pause the rollouts; return the standby process of the trainer's node once it is ready and every role works."""
    run.wait_steps(3)
    for index in (0, 1):
        run.hold_in_the_middle(index)
    state = run.wait(lambda s: any(one.node == s.replica(TRAINER).node for one in standbys(s)) and all_work(s))
    for index in (0, 1):
        run.let_go(index)
    return next(one for one in standbys(state) if one.node == state.replica(TRAINER).node)


def pid_of(replica: Replica) -> int:
    assert replica.pid is not None
    return replica.pid


def is_promoted_to_trainer(run: TestRun, standby: Replica) -> None:
    """Kill the trainer; check that it continues in this standby process, and that no other replica changes."""
    before = current_incarnations(run.state())
    os.kill(pid_of(run.state().replica(TRAINER)), signal.SIGKILL)
    after = run.wait_back_alone(before, TRAINER)
    assert after[TRAINER] == (Incarnation(TRAINER, 2), standby.pid, standby.node)
    run.wait(lambda state: state.replica(TRAINER).commits > 0)
    (adoption,) = adoptions(run)
    assert adoption.standby == standby.incarnation


def test_killed_trainer_continues_at_once_in_its_nodes_standby(tmp_path: Path) -> None:
    run = submit_here(tmp_path, light_job("local", 100_000))
    standby_process = wait_for_standby(run)
    is_promoted_to_trainer(run, standby_process)
    run.wait_steps(run.state().step + 4)
    cancel(run)
    reported = run.call("logs", str(run.run.path), f"{TRAINER}#2", "--json", stdout=subprocess.PIPE)
    lines = [json.loads(line) for line in reported.communicate(timeout=60)[0].splitlines()]
    own = [line["text"] for line in lines if line["incarnation"] == "trainer/0#2"]
    assert f"INFO rrl.worker: {standby_process.incarnation} is promoted to trainer/0#2" in own
    [recovery] = run.summary()["recoveries"]
    assert (recovery["replica"], recovery["incarnation"]) == (TRAINER, 2)


@pytest.mark.long
def test_next_manager_completes_a_promotion_interrupted_by_the_managers_death(tmp_path: Path) -> None:
    """The next manager completes the promotion of a standby process that was frozen while its manager promoted it."""
    run = submit_here(tmp_path, light_job("local", 100))
    standby_process = wait_for_standby(run)
    before = current_incarnations(run.state())
    os.kill(pid_of(standby_process), signal.SIGSTOP)
    os.kill(pid_of(run.state().replica(TRAINER)), signal.SIGKILL)
    run.wait(lambda state: state.replica(TRAINER).promoted_from == standby_process.incarnation)
    os.kill(json.loads((run.run.epochs / "000001").read_text())["pid"], signal.SIGKILL)
    os.kill(pid_of(standby_process), signal.SIGCONT)
    with run.call("manage", run.run.id):
        after = run.wait_back_alone(before, TRAINER)
        assert after[TRAINER] == (Incarnation(TRAINER, 2), standby_process.pid, standby_process.node)
        end_well(run)
    assert len(adoptions(run)) == 1


@pytest.mark.long
def test_standby_that_does_not_answer_is_given_up_and_the_trainer_returns(tmp_path: Path) -> None:
    run = submit_here(tmp_path, light_job("local", 60, extra='[recovery]\npromote = "3s"\n'))
    standby_process = wait_for_standby(run)
    os.kill(pid_of(standby_process), signal.SIGSTOP)
    os.kill(pid_of(run.state().replica(TRAINER)), signal.SIGKILL)
    run.wait(lambda state: state.replica(TRAINER).incarnation_number >= 3 and all_work(state))
    fenced = [
        s.event.action.why.evidence
        for s in run.events()
        if isinstance(s.event, ev.Decided) and s.event.action.tag == "trainer/0#2!fence"
    ]
    assert f"{standby_process.incarnation} on {standby_process.node} was promoted to it" in str(fenced)
    end_well(run)


@pytest.mark.long
def test_standby_that_dies_with_its_trainer_leaves_the_next_best_start(tmp_path: Path) -> None:
    run = submit_here(tmp_path, light_job("local", 60))
    standby_process = wait_for_standby(run)
    before = current_incarnations(run.state())
    for pid in (pid_of(standby_process), pid_of(run.state().replica(TRAINER))):
        os.kill(pid, signal.SIGKILL)
    run.wait(lambda state: state.replica(TRAINER).incarnation_number >= 2 and all_work(state))
    after = current_incarnations(run.state())
    assert {id: one for id, one in after.items() if id != TRAINER} == {
        id: one for id, one in before.items() if id != TRAINER
    }
    end_well(run)


@pytest.mark.long
@pytest.mark.slurm
def test_slurm_standby_waits_beside_steps_with_the_whole_node_and_is_promoted(slurm_lab: SlurmLab) -> None:
    job = light_job("slurm", 60, spares=0)
    whole = 'cpus = 2\nmem = "1GiB"'
    job = job.replace('light_trainer.py"]\nmem = "256MiB"', f'light_trainer.py"]\n{whole}')
    run = submit_on(slurm_lab, "standby", job)
    standby_process = wait_for_standby(run)
    is_promoted_to_trainer(run, standby_process)
    assert run.state().replica(TRAINER).step is not None
    end_well(run)
