"""Trainers that go on as the shadow of their node: whole runs of light roles."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest

from rrl.manager import events as ev
from rrl.manager.actions import Launch
from rrl.manager.state import Replica, State, Status
from rrl.spec.phases import STANDBY
from rrl.spec.words import SHADOW, Life, ReplicaId
from rrl.tests.lab.runs import TestRun, all_work, check_sound, light_job, lives, submit_here, submit_on
from rrl.tests.lab.slurm import SlurmLab

TRAINER = ReplicaId("trainer/0")


def shadows(state: State) -> list[Replica]:
    """Those that stand by."""
    return [one for one in state.replicas.values()
            if one.role == SHADOW and one.status is Status.JOINED and one.phase == STANDBY]  # fmt: skip


def wait_for_shadow(run: TestRun) -> Replica:
    """Of the trainer's own node; everybody works. Meanwhile the run stands, however slow the shadow is to start."""
    run.wait_steps(3)
    for index in (0, 1):
        run.hold_in_the_middle(index)
    state = run.wait(lambda s: any(one.node == s.replica(TRAINER).node for one in shadows(s)) and all_work(s))
    for index in (0, 1):
        run.let_go(index)
    return next(one for one in shadows(state) if one.node == state.replica(TRAINER).node)


def pid_of(replica: Replica) -> int:
    assert replica.pid is not None
    return replica.pid


def adoptions(run: TestRun) -> list[Launch]:
    events = (stamped.event for stamped in run.events())
    actions = (event.action for event in events if isinstance(event, ev.Intended))
    return [action for action in actions if isinstance(action, Launch) and action.shadow is not None]


def end_well(run: TestRun) -> None:
    state = run.wait_end()
    assert (state.outcome, state.step) == ("completed", state.job.steps), state.why
    run.wait_gone()
    check_sound(run.run)


def becomes_the_trainer(run: TestRun, shadow: Replica) -> None:
    """The trainer is killed; its next life is this process, and nobody else is touched."""
    before = lives(run.state())
    os.kill(pid_of(run.state().replica(TRAINER)), signal.SIGKILL)
    after = run.wait_back_alone(before, TRAINER)
    assert after[TRAINER] == (Life(TRAINER, 2), shadow.pid, shadow.node)
    run.wait(lambda state: state.replica(TRAINER).commits > 0)
    (adoption,) = adoptions(run)
    assert adoption.shadow == shadow.life


def test_a_killed_trainer_goes_on_at_once_as_the_shadow_of_its_node(tmp_path: Path) -> None:
    run = submit_here(tmp_path, light_job("local", 50))
    shadow = wait_for_shadow(run)
    becomes_the_trainer(run, shadow)
    end_well(run)
    told = run.call("logs", str(run.run.path), f"{TRAINER}#2", "--json", stdout=subprocess.PIPE)
    lines = [json.loads(line) for line in told.communicate(timeout=60)[0].splitlines()]
    assert [(line["life"], line["text"]) for line in lines] == [
        ("trainer/0#2", f"rrl: {shadow.life} becomes trainer/0#2")
    ]
    [recovery] = run.summary()["recoveries"]
    assert (recovery["replica"], recovery["incarnation"]) == (TRAINER, 2)


@pytest.mark.long
def test_a_manager_killed_over_the_adoption_is_followed_by_one_that_goes_through_with_it(tmp_path: Path) -> None:
    """The shadow hears nothing before the next manager is there: it is frozen when the first one tells it."""
    run = submit_here(tmp_path, light_job("local", 100))
    shadow = wait_for_shadow(run)
    before = lives(run.state())
    os.kill(pid_of(shadow), signal.SIGSTOP)
    os.kill(pid_of(run.state().replica(TRAINER)), signal.SIGKILL)
    run.wait(lambda state: state.replica(TRAINER).shadow == shadow.life)
    os.kill(json.loads((run.run.epochs / "000001").read_text())["pid"], signal.SIGKILL)
    os.kill(pid_of(shadow), signal.SIGCONT)
    with run.call("manage", run.run.id):
        after = run.wait_back_alone(before, TRAINER)
        assert after[TRAINER] == (Life(TRAINER, 2), shadow.pid, shadow.node)
        end_well(run)
    assert len(adoptions(run)) == 1


@pytest.mark.long
def test_a_shadow_that_does_not_answer_in_time_is_given_up_and_the_trainer_comes_back(tmp_path: Path) -> None:
    run = submit_here(tmp_path, light_job("local", 60, extra='[recovery]\nadopt = "3s"\n'))
    shadow = wait_for_shadow(run)
    os.kill(pid_of(shadow), signal.SIGSTOP)
    os.kill(pid_of(run.state().replica(TRAINER)), signal.SIGKILL)
    run.wait(lambda state: state.replica(TRAINER).incarnation >= 3 and all_work(state))
    fenced = [s.event.action.why.evidence for s in run.events()
              if isinstance(s.event, ev.Decided) and s.event.action.tag == "trainer/0#2!fence"]  # fmt: skip
    assert f"{shadow.life} on {shadow.node} was told to become it" in str(fenced)
    end_well(run)


@pytest.mark.long
def test_a_shadow_that_dies_with_its_trainer_leaves_the_next_best_start(tmp_path: Path) -> None:
    run = submit_here(tmp_path, light_job("local", 60))
    shadow = wait_for_shadow(run)
    before = lives(run.state())
    for pid in (pid_of(shadow), pid_of(run.state().replica(TRAINER))):
        os.kill(pid, signal.SIGKILL)
    run.wait(lambda state: state.replica(TRAINER).incarnation >= 2 and all_work(state))
    after = lives(run.state())
    assert {id: one for id, one in after.items() if id != TRAINER} == {
        id: one for id, one in before.items() if id != TRAINER
    }
    end_well(run)


@pytest.mark.long
@pytest.mark.slurm
def test_on_slurm_a_shadow_waits_beside_steps_that_have_its_whole_node_and_takes_over(slurm_lab: SlurmLab) -> None:
    job = light_job("slurm", 60, spares=0)
    whole = 'cpus = 2\nmem = "1GiB"\nexclusive = true'
    job = job.replace('light_trainer.py"]\nmem = "256MiB"', f'light_trainer.py"]\n{whole}')
    run = submit_on(slurm_lab, "standby", job)
    shadow = wait_for_shadow(run)
    becomes_the_trainer(run, shadow)
    assert run.state().replica(TRAINER).step is not None
    end_well(run)
