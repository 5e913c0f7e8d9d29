"""Killed rollouts continue in a preloaded process on their node, in whole runs of light roles."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest

from rrl.cluster.base import RejectReason
from rrl.core.phases import STANDBY
from rrl.core.run_dir import RUNS_ENV
from rrl.core.types import Incarnation, ReplicaId, preloaded_id
from rrl.manager.model import events as ev
from rrl.manager.model.state import Replica, State, Status
from rrl.tests.support.runs import RRL, TestRun, all_work, check_sound, current_incarnations, light_job, submit_here

ROLLOUT = ReplicaId("rollout/1")


def preloading_job(steps: int) -> str:
    """Return a job whose light rollouts are preloaded; the trainer has no standby process."""
    job = light_job("local", steps, spares=0, warm=False, one_node=True)
    return job.replace("[roles.rollout]\n", "[roles.rollout]\npreload = true\n")


def preloaded_beside(state: State, replica: ReplicaId) -> Replica | None:
    """Return the ready preloaded process on the node of a replica; None if there is none."""
    node = state.replica(replica).node
    waiting = None if node is None else state.replica(preloaded_id("rollout", node))
    is_ready = waiting is not None and waiting.status is Status.JOINED and waiting.phase == STANDBY
    return waiting if is_ready else None


def wait_with_unfinished_work(run: TestRun) -> Replica:
    """Stop the rollout while it works, and wait until all roles work and its node has a ready preloaded process."""
    run.wait_steps(2)
    run.hold_in_the_middle(1)
    state = run.wait(lambda s: preloaded_beside(s, ROLLOUT) is not None and all_work(s))
    waiting = preloaded_beside(state, ROLLOUT)
    assert waiting is not None
    return waiting


def kill(*replicas: Replica) -> None:
    for replica in replicas:
        assert replica.pid is not None
        os.kill(replica.pid, signal.SIGKILL)


def end_well(run: TestRun) -> None:
    assert run.call("cancel", run.run.id, stdout=subprocess.DEVNULL).wait(90) == 0
    run.wait_end()
    run.wait_gone()
    check_sound(run.run)
    assert run.continued(dead=-101.0), "the next incarnation has not continued the unfinished trajectories"


def test_killed_rollout_continues_in_the_preloaded_process_and_gets_a_new_one(tmp_path: Path) -> None:
    run = submit_here(tmp_path, preloading_job(100_000))
    waiting = wait_with_unfinished_work(run)
    shown = run.call("status", str(run.run.path), stdout=subprocess.PIPE).communicate(timeout=60)[0]
    assert "preloaded rollout on local" in shown
    before = current_incarnations(run.state())
    kill(run.state().replica(ROLLOUT))
    run.let_go(1)
    after = run.wait_back_alone(before, ROLLOUT)
    assert after[ROLLOUT] == (Incarnation(ROLLOUT, 2), waiting.pid, waiting.node)
    state = run.wait(lambda s: preloaded_beside(s, ROLLOUT) is not None)
    successor = preloaded_beside(state, ROLLOUT)
    assert successor is not None
    assert (successor.id, successor.incarnation_number) == (waiting.id, waiting.incarnation_number + 1)
    assert state.replica(ROLLOUT).promoted_from == waiting.incarnation
    run.wait_steps(state.step + 2)
    end_well(run)
    [recovery] = run.summary()["recoveries"]
    assert (recovery["replica"], recovery["incarnation"], recovery["rung"]) == (ROLLOUT, 2, "restart in place")


@pytest.mark.long
def test_rollout_whose_preloaded_process_was_killed_too_starts_cold(tmp_path: Path) -> None:
    run = submit_here(tmp_path, preloading_job(100_000))
    waiting = wait_with_unfinished_work(run)
    kill(waiting, run.state().replica(ROLLOUT))
    run.let_go(1)
    state = run.wait(lambda s: s.replica(ROLLOUT).incarnation_number >= 2 and all_work(s))
    assert state.replica(ROLLOUT).promoted_from is None
    run.wait_steps(state.step + 2)
    run.wait(lambda s: preloaded_beside(s, ROLLOUT) is not None)
    end_well(run)


@pytest.mark.long
def test_preloaded_process_of_an_older_environment_is_not_used(tmp_path: Path) -> None:
    run = submit_here(tmp_path, preloading_job(100_000))
    waiting = wait_with_unfinished_work(run)
    os.kill(json.loads((run.run.epochs / "000001").read_text())["pid"], signal.SIGKILL)
    elsewhere = {**os.environ, RUNS_ENV: str(run.run.path.parent), "TZ": "Antarctica/Troll"}
    with subprocess.Popen([RRL, "manage", run.run.id], env=elsewhere, stderr=subprocess.PIPE, text=True) as manager:
        run.wait(lambda s: s.epoch == 2 and preloaded_beside(s, ROLLOUT) is not None)
        kill(run.state().replica(ROLLOUT))
        run.let_go(1)
        state = run.wait(lambda s: s.replica(ROLLOUT).incarnation_number >= 3 and all_work(s))
        assert state.replica(ROLLOUT).promoted_from is None
        assert len(state.replica(ROLLOUT).failures) == 1, "the refused promotion counted against the budget"
        settled = [s.event for s in run.events() if isinstance(s.event, ev.IntentSettled)]
        [refused] = [event for event in settled if event.reason is RejectReason.STANDBY_OUTDATED]
        assert refused.detail == (f"{waiting.incarnation} is not used, because it was started with other values of TZ")
        run.wait(lambda s: (p := preloaded_beside(s, ROLLOUT)) is not None and p.incarnation != waiting.incarnation)
        end_well(run)
        log = manager.communicate(timeout=60)[1]
    assert log.count(f"{refused.detail}; {ROLLOUT}#2 starts in a new process") == 1
