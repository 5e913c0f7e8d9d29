"""With commits of several steps (``checkpoint_every``), a death between two commits loses no trajectory.

The steps since the last commit are trained again on the same batches, and each trajectory counts once.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from rrl.core.processes import read_process
from rrl.core.types import Outcome, ReplicaId
from rrl.manager.model import events as ev
from rrl.manager.model.state import State
from rrl.roles.trajectories.durable.log import read_commits
from rrl.tests.support.runs import (
    QUICKSTART,
    Incarnations,
    TestRun,
    all_work,
    check_sound,
    current_incarnations,
    joined_incarnations,
    light_job,
    submit_here,
)

EVERY, STEPS = 3, 40
STORE, TRAINER = ReplicaId("trajectories/0"), ReplicaId("trainer/0")
OFTEN = '[recovery]\nbackoff = "100ms"\nper_node = 50\nper_replica = 50\nfull_restarts = 0\n'


def _job(**changed: Any) -> str:
    toml = light_job("local", STEPS, spares=0, warm=False, extra=OFTEN, **changed)
    return toml.replace("[roles.trainer]\n", f"[roles.trainer]\ncheckpoint_every = {EVERY}\n")


def _kill_between_commits(run: TestRun, victim: ReplicaId) -> Incarnations:
    """Kill a replica after the light trainer's first step since its commit; return the earlier incarnations."""
    with run.hold_between_commits():
        before = current_incarnations(run.state())
        _kill(before, victim)
    return before


def _kill(incarnations: Incarnations, victim: ReplicaId) -> None:
    pid = incarnations[victim][1]
    assert pid is not None
    os.kill(pid, signal.SIGKILL)


def _batches(run: TestRun) -> dict[int, list[list[dict[str, Any]]]]:
    """Return the batch of each step, with one entry for each incarnation of the trainer that trained the step."""
    found: dict[int, list[list[dict[str, Any]]]] = defaultdict(list)
    for path in (run.run.path / "batches").glob("*.json"):
        found[int(path.name.split(".")[0])].append(json.loads(path.read_text()))
    return found


def _committed(run: TestRun) -> list[ev.StepCommitted]:
    return [stamped.event for stamped in run.events() if isinstance(stamped.event, ev.StepCommitted)]


def test_trainer_store_and_manager_are_killed_between_commits_and_no_trajectory_is_lost_or_trained_twice(
    tmp_path: Path,
) -> None:
    run = submit_here(tmp_path, _job())
    joined_incarnations(run)
    for victim in (TRAINER, STORE, TRAINER):
        run.wait_back_alone(_kill_between_commits(run, victim), victim)
    manager = json.loads((run.run.epochs / "000001").read_text())["pid"]
    os.kill(manager, signal.SIGKILL)
    run.wait(lambda state: read_process(manager) is None)
    with run.call("manage", run.run.id):
        state = run.wait_end()
    assert (state.outcome, state.step) == (Outcome.COMPLETED, STEPS), state.why
    run.wait_gone()
    check_sound(run.run)
    trained = _batches(run)
    assert sorted(trained) == list(range(1, STEPS + 1))
    assert any(len(attempts) > 1 for attempts in trained.values()), "no step was trained again"
    assert all(attempt == attempts[0] for attempts in trained.values() for attempt in attempts)
    assert [event.step for event in _committed(run)] == list(range(1, STEPS + 1)), (
        "a step was reported twice or not at all"
    )
    commits = {event.step for event in _committed(run) if event.completes_commit}
    assert {number for number in range(1, STEPS) if number % EVERY == 0} <= commits
    assert sorted(read_commits(run.run.store))[-2:] == [STEPS - STEPS % EVERY, STEPS]


@pytest.mark.long  # test_resume.py resumes a cancelled run; tests/unit/roles/trainer has the last commit at a stop
def test_cancelled_run_commits_its_last_step_and_is_resumed_after_it(tmp_path: Path) -> None:
    run = submit_here(tmp_path, _job())
    run.wait_steps(4)
    cancel = run.call("cancel", run.run.id, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    output, _ = cancel.communicate(timeout=120)
    assert cancel.returncode == 0, output
    ended = run.wait_end()
    run.wait_gone()
    trained = _batches(run)
    assert ended.step == max(trained), "a trained step was lost"
    resume = run.call("resume", run.run.id, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    output, _ = resume.communicate(timeout=120)
    assert resume.returncode == 0, output
    run.wait_resumed()
    state = run.wait_end()
    assert (state.outcome, state.step) == (Outcome.COMPLETED, STEPS), state.why
    run.wait_gone()
    check_sound(run.run)
    assert all(len(attempts) == 1 for attempts in _batches(run).values()), "a step was trained again"


WHOLE_JOB = ("full_restarts = 0", 'full_restarts = 9\npolicy = "job"')
GANG = ("[roles.trainer]\n", "[roles.trainer]\nranks = 2\n")
STREAMED = ("[sampling]\n", "[sampling]\nstream = true\n")


@pytest.mark.long
@pytest.mark.parametrize("change", [WHOLE_JOB, GANG, STREAMED])
def test_trainer_that_dies_between_two_commits_trains_the_same_batches_again(
    tmp_path: Path, change: tuple[str, str]
) -> None:
    toml = _job()
    assert change[0] in toml
    run = submit_here(tmp_path, toml.replace(*change))
    joined_incarnations(run)
    restarted = (TRAINER, STORE) if change == WHOLE_JOB else (TRAINER,)
    for _ in range(2):
        before = _kill_between_commits(run, TRAINER)
        run.wait(partial(_all_work_again, before, restarted))
    state = run.wait_end()
    assert (state.outcome, state.step) == (Outcome.COMPLETED, STEPS), state.why
    run.wait_gone()
    check_sound(run.run)
    trained = _batches(run)
    assert any(len(attempts) > 1 for attempts in trained.values()), "no step was trained again"
    assert all(attempt == attempts[0] for attempts in trained.values() for attempt in attempts)
    assert [event.step for event in _committed(run)] == list(range(1, STEPS + 1))


def _all_work_again(before: Incarnations, restarted: Sequence[ReplicaId], state: State) -> bool:
    return all_work(state) and all(state.replica(id).incarnation != before[id][0] for id in restarted)


def _between_commits(state: State) -> bool:
    """Return whether the trainer has published a step of which the next commit is at least two steps away."""
    published = state.replica(TRAINER).weight_version
    return all_work(state) and published is not None and published.step % 5 in (1, 2, 3)


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("snapshots", [True, False])
def test_built_in_trainer_continues_between_two_commits_from_a_snapshot_only(tmp_path: Path, snapshots: bool) -> None:
    toml = QUICKSTART.read_text().partition("[[faults.planned]]")[0].replace("steps = 300", "steps = 150")
    keys = f"checkpoint_every = 5\nsnapshots = {str(snapshots).lower()}\n"
    run = submit_here(tmp_path, toml.replace("[roles.trainer]\n", f"[roles.trainer]\n{keys}") + OFTEN)
    joined_incarnations(run)
    for _ in range(3):
        before = current_incarnations(run.wait(_between_commits))
        _kill(before, TRAINER)
        run.wait_back_alone(before, TRAINER)
    state = run.wait_end(600.0)
    assert (state.outcome, state.step) == (Outcome.COMPLETED, 150), state.why
    run.wait_gone()
    check_sound(run.run)
    logs = "\n".join(path.read_text() for path in sorted(run.run.logs.glob("*.log")))
    continued = re.findall(r"trainer/0#\d+ continues from (.+)", logs)
    assert len(continued) == 4, continued
    restored = [int(step) for text in continued for step in re.findall(r"the snapshot of step (\d+)", text)]
    assert bool(restored) == snapshots, continued
    assert not snapshots or any(step % 5 for step in restored), "no snapshot between two commits was used"
    assert [event.step for event in _committed(run)] == list(range(1, 151))
