"""Rollouts continue to receive new weight versions while the manager is frozen, and after it has died.

The next manager finds what has failed meanwhile.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rrl.core.types import ReplicaId, Verdict
from rrl.manager.model import events as ev
from rrl.tests.support.runs import (
    TIMEOUT_S,
    TestRun,
    cancel,
    check_sound,
    current_incarnations,
    joined_incarnations,
    light_job,
    submit_here,
    submit_on,
    without_replicas,
)
from rrl.tests.support.slurm.lab import SlurmLab

STEPS_AWAY = 40
"""Number of steps that are trained while the manager is away."""
MAX_AGE = 10
"""Maximum age (training steps) of a trained token while the manager is away. As long as versions arrive, tokens of the
light run are 1 to 4 steps old (the default ``ahead`` and a pull). Without new versions, tokens of the last step would
be about 40 steps old.
"""


def _manager_pid(run: TestRun) -> int:
    pid: int = json.loads((run.run.epochs / "000001").read_text())["pid"]
    return pid


def _trained(run: TestRun, step: int) -> Path | None:
    """Return the file that the light trainer wrote for this step; None until it has trained the step."""
    return next((run.run.path / "batches").glob(f"{step}.*.json"), None)


def _wait_trained(run: TestRun, step: int) -> None:
    """Wait until a step is trained; do not read the journal, because no manager writes to it at that time."""
    until = time.monotonic() + TIMEOUT_S
    while _trained(run, step) is None:
        assert time.monotonic() < until, f"step {step} was never trained; the newest trained step is {_newest(run)}"
        time.sleep(0.05)


def _newest(run: TestRun) -> int:
    return max((int(path.name.partition(".")[0]) for path in (run.run.path / "batches").glob("*.json")), default=0)


def _age(run: TestRun, step: int) -> int:
    """Return the age of the step's oldest token, in training steps."""
    path = _trained(run, step)
    assert path is not None
    sampled_by: list[int] = [weights for one in json.loads(path.read_text()) for weights in one["weights"]]
    return step - 1 - min(sampled_by)


@contextmanager
def _frozen(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


@pytest.mark.long  # in the next test the manager is dead, which the other processes cannot distinguish
def test_rollouts_receive_new_versions_while_the_manager_is_frozen(tmp_path: Path) -> None:
    run = submit_here(tmp_path, light_job("local", 100_000, spares=0, warm=False))
    before = joined_incarnations(run)
    with _frozen(_manager_pid(run)):
        begun = _newest(run)
        _wait_trained(run, begun + STEPS_AWAY)
        ages = [_age(run, step) for step in range(begun + 1, begun + STEPS_AWAY + 1)]
    assert max(ages) <= MAX_AGE, ages
    step = run.state().step
    run.wait(lambda s: s.step > step + STEPS_AWAY)
    kept, now = without_replicas(before, current_incarnations(run.state()), [])
    assert now == kept, "a role was replaced while the manager was frozen"
    with run.call("cancel", run.run.id) as process:
        assert process.wait(60) == 0
    run.wait_end()
    run.wait_gone()
    check_sound(run.run)


def test_a_run_whose_manager_is_dead_trains_its_last_step_on_new_versions(tmp_path: Path) -> None:
    steps = 3 + STEPS_AWAY
    run = submit_here(tmp_path, light_job("local", steps, spares=0, warm=False))
    run.wait_steps(3)
    os.kill(_manager_pid(run), signal.SIGKILL)
    _wait_trained(run, steps)
    ages = [_age(run, step) for step in range(4, steps + 1)]
    assert max(ages) <= MAX_AGE, ages
    with run.call("manage", run.run.id):
        state = run.wait_end()
    assert (state.outcome, state.step) == ("completed", steps), state.why
    commits = [stamped.event for stamped in run.events() if isinstance(stamped.event, ev.StepCommitted)]
    assert [commit.step for commit in commits] == list(range(1, steps + 1)), "commits are out of order, or missing"
    assert all("reward" in commit.metrics for commit in commits)
    run.wait_gone()
    check_sound(run.run)


def test_rollout_that_is_stopped_as_its_manager_dies_is_found_by_its_silence(tmp_path: Path) -> None:
    victim = ReplicaId("rollout/1")
    run = submit_here(tmp_path, light_job("local", 100_000, spares=0, warm=False))
    before = joined_incarnations(run)
    incarnation, pid, _ = before[victim]
    assert pid is not None
    os.kill(_manager_pid(run), signal.SIGKILL)
    os.kill(pid, signal.SIGSTOP)
    with run.call("manage", run.run.id):
        run.wait_back_alone(before, victim)
        with run.call("explain", run.run.id, stdout=subprocess.PIPE) as explain:
            shown, _ = explain.communicate(timeout=60)
        cancel(run)
    found = [(s.at, s.event.finding) for s in run.events() if isinstance(s.event, ev.FindingChanged)]
    failures = [(at, finding) for at, finding in found if finding.verdict is Verdict.FAIL]
    assert [(finding.detector, finding.incarnation) for _, finding in failures] == [("worker_silence", incarnation)]
    (_, taken_over) = (stamped.at for stamped in run.events() if isinstance(stamped.event, ev.ManagerStarted))
    assert failures[0][0] - taken_over < run.state().job.limits.join, "it was found only as if it had never joined"
    assert "take over from manager 1" in shown


@pytest.mark.slurm
@pytest.mark.long
@pytest.mark.timeout(900)
def test_versions_arrive_although_both_managers_of_a_slurm_run_are_cancelled(slurm_lab: SlurmLab) -> None:
    """Versions still arrive when both the active and the waiting manager are cancelled.

    A person starts another manager after the last step.
    """
    steps = 3 + STEPS_AWAY
    run = submit_on(slurm_lab, "both-cancelled", light_job("slurm", steps, spares=0, warm=False))
    run.wait_steps(3)
    slurm_lab.run_as_user(["scancel", f"--name={run.run.id}.manager"])
    _wait_trained(run, steps)
    ages = [_age(run, step) for step in range(4, steps + 1)]
    assert max(ages) <= MAX_AGE, ages
    with run.call("manage", run.run.id, stdout=subprocess.DEVNULL):
        state = run.wait_end()
    assert (state.outcome, state.step) == ("completed", steps), state.why
    assert sum(isinstance(stamped.event, ev.ManagerStarted) for stamped in run.events()) == 2
    run.wait_gone(60.0)
    check_sound(run.run)
    slurm_lab.clear()
