"""Deaths of the manager on a real Slurm: no role is affected, and nothing is started twice."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from rrl.core.launch import ExitReason, read_exit
from rrl.core.processes import read_process
from rrl.core.run_dir import RUNS_ENV, RunDir
from rrl.core.types import ReplicaId
from rrl.manager.model import events as ev
from rrl.manager.model.actions import Launch, Request
from rrl.manager.model.state import State
from rrl.manager.storage.lease import holder
from rrl.tests.support.runs import (
    RRL,
    TIMEOUT_S,
    Incarnations,
    TestRun,
    all_work,
    check_sound,
    current_incarnations,
    light_job,
    processes_of,
    submit_on,
    without_replicas,
    write_job,
)
from rrl.tests.support.slurm.lab import SlurmLab

pytestmark = [pytest.mark.slurm, pytest.mark.long, pytest.mark.timeout(900)]
VICTIM = ReplicaId("rollout/1")
KILLS = 12
DELAYED_START_TIMEOUT_S = 300.0
"""Timeout (s) for a manager whose job may start only a minute after it was queued."""
MANY_STEPS = 100_000
"""Number of steps of a run that does not end before the test cancels it."""


@pytest.fixture(autouse=True)
def _idle(slurm_lab: SlurmLab) -> Iterator[None]:
    """Remove after each test what a failure may have left."""
    yield
    slurm_lab.clear()


def _until(condition: Callable[[], bool], failure_text: str, timeout_s: float = TIMEOUT_S) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, failure_text
        time.sleep(0.02)


def _cancelled_well(run: TestRun, lab: SlurmLab) -> None:
    with run.call("cancel", run.run.id) as process:
        assert process.wait(TIMEOUT_S) == 0
    assert run.wait_end().outcome == "cancelled"
    _left_nothing(run, lab)


def _left_nothing(run: TestRun, lab: SlurmLab) -> None:
    run.wait_gone(60.0)
    check_sound(run.run)
    lab.wait_no_jobs()
    assert lab.slurm("squeue", "-h", "-s").split() == []


def _launched_once(run: TestRun, requests: int = 1) -> None:
    """Check that no tag was launched twice, and that nodes were requested ``requests`` times."""
    intended = [s.event.action for s in run.events() if isinstance(s.event, ev.Intended)]
    tags = [action.tag for action in intended if isinstance(action, Launch)]
    assert len(tags) == len(set(tags))
    assert sum(isinstance(action, Request) for action in intended) == requests


def _nobody_noticed(before: Incarnations, run: TestRun) -> None:
    kept, now = without_replicas(before, current_incarnations(run.state()), [])
    assert now == kept, "a role was replaced when the manager changed"


def _manager(run: TestRun) -> int:
    """Return the pid of the current manager once it has begun its epoch."""
    run.wait(
        lambda state: (current := holder(run.run)) is not None and _epoch(run.run) == state.epoch and current.pid > 0
    )
    current = holder(run.run)
    assert current is not None
    return current.pid


def _has(records: int, state: State) -> bool:
    return state.seq >= records


def _is_after(epoch: int, state: State) -> bool:
    return state.epoch > epoch


def _epoch(run: RunDir) -> int:
    return max(int(path.name) for path in run.epochs.iterdir() if path.name.isdigit())


@contextlib.contextmanager
def _ended(processes: list[subprocess.Popen[str]]) -> Iterator[None]:
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _has_pending_manager(lab: SlurmLab, run: TestRun) -> bool:
    return lab.slurm("squeue", "-h", "-t", "PENDING", "-n", f"{run.run.id}.manager").split() != []


def _free_of_successors(lab: SlurmLab, run: TestRun) -> None:
    """Cancel pending managers, because the test starts the next one by hand."""
    lab.run_as_user(["scancel", "--state=PENDING", f"--name={run.run.id}.manager"])


def test_managers_killed_at_random_records_have_no_effect_on_the_run(slurm_lab: SlurmLab) -> None:
    """Twelve managers are killed one after the other, each after a random number of records.

    The second manager dies with its own job.
    """
    chance = random.Random(4)
    run = submit_on(slurm_lab, "deaths", light_job("slurm", MANY_STEPS, spares=0))
    before = current_incarnations(run.wait_steps(2))
    managers: list[subprocess.Popen[str]] = []
    with _ended(managers):
        for kill in range(KILLS):
            pid, epoch, first_record = _manager(run), run.state().epoch, run.state().seq
            after = chance.choice([0, 1, 2, 5, 20, 60])
            run.wait(partial(_has, first_record + after))
            if kill == 1:  # the queued successor of the first manager
                _until(partial(_has_pending_manager, slurm_lab, run), "the second manager has queued no successor")
                jobs = (line.split() for line in slurm_lab.jobs())
                own = [id for id, name, state in jobs if name == f"{run.run.id}.manager" and state == "RUNNING"]
                slurm_lab.run_as_user(["scancel", *own])
            else:
                os.kill(pid, signal.SIGKILL)
            if kill >= 1:
                _free_of_successors(slurm_lab, run)
                managers.append(run.call("manage", run.run.id, stdout=subprocess.DEVNULL))
            run.wait(partial(_is_after, epoch))
        step = run.state().step
        run.wait(lambda s: s.step > step + 3 and all_work(s))
        assert run.state().epoch == KILLS + 1
        _nobody_noticed(before, run)
        _launched_once(run)
        _cancelled_well(run, slurm_lab)
    assert run.summary()["recoveries"] == []


def test_pending_manager_takes_over_after_the_loss_of_the_managers_node(slurm_lab: SlurmLab) -> None:
    separate_nodes = '[slurm]\nexclude = "n4,n5"\n[manager]\nslurm = { exclude = "n1,n2,n3" }\n'
    run = submit_on(slurm_lab, "node", light_job("slurm", MANY_STEPS, rollouts=1, spares=0, extra=separate_nodes))
    before = current_incarnations(run.wait_steps(2))
    jobs = slurm_lab.slurm("squeue", "-h", "-t", "R", "-n", f"{run.run.id}.manager", "-o", "%N").split()
    assert jobs in (["n4"], ["n5"])
    slurm_lab.crash(jobs[0])
    try:
        step = run.state().step
        run.wait(lambda s: s.epoch == 2 and s.step > step + 3)
        _nobody_noticed(before, run)
        _launched_once(run)
        _cancelled_well(run, slurm_lab)
    finally:
        slurm_lab.up(jobs[0])
        slurm_lab.clear()


def test_manager_killed_right_after_it_took_over_is_succeeded(slurm_lab: SlurmLab) -> None:
    """The second manager queues the third one as soon as it has begun, and is killed as soon as that job waits."""
    run = submit_on(slurm_lab, "quick-deaths", light_job("slurm", MANY_STEPS, rollouts=1, spares=0))
    before = current_incarnations(run.wait_steps(2))
    os.kill(_manager(run), signal.SIGKILL)
    run.wait(partial(_is_after, 1))
    second = _manager(run)
    _until(partial(_has_pending_manager, slurm_lab, run), "the second manager has queued no successor")
    os.kill(second, signal.SIGKILL)
    step = run.state().step
    run.wait(lambda s: s.epoch == 3 and s.step > step + 3, DELAYED_START_TIMEOUT_S)
    _nobody_noticed(before, run)
    _launched_once(run)
    _cancelled_well(run, slurm_lab)


@pytest.mark.parametrize("first", ["srun", "manager"])
def test_thawed_manager_that_was_succeeded_does_nothing_and_exits(slurm_lab: SlurmLab, first: str) -> None:
    """A thawed srun of a manager that was succeeded can launch no step.

    If the srun thaws before its manager, the step that it launches is rejected and exits. If the manager thaws first,
    it ends its srun when it exits.
    """
    run = submit_on(slurm_lab, f"thaw-{first}", light_job("slurm", MANY_STEPS, spares=0))
    before = current_incarnations(run.wait_steps(2))
    frozen, pid = _manager(run), before[VICTIM][1]
    assert pid is not None
    run.hold_in_the_middle(1)
    tag = f"{run.run.id}.rollout-1.2"
    with slurm_lab.controller_stopped():  # so that the srun has not launched anything yet when it is stopped
        os.killpg(os.getpgid(pid), signal.SIGKILL)
        sruns = _stopped_at_birth(run.run, tag)
        os.kill(frozen, signal.SIGSTOP)
    managers = [run.call("manage", run.run.id, stdout=subprocess.DEVNULL)]
    with _ended(managers):
        run.let_go(1)
        state = run.wait(lambda s: s.epoch == 2 and s.replica(VICTIM).incarnation_number == 3 and all_work(s))
        seq = state.seq
        if first == "srun":
            for srun in sruns:
                os.kill(srun, signal.SIGCONT)
            _until(lambda: _ended_unwanted(run.run, tag), "the step of the thawed srun keeps running, or never started")
        os.kill(frozen, signal.SIGCONT)
        _until(lambda: read_process(frozen) is None, "the thawed manager keeps running")
        _until(
            lambda: all(read_process(srun) is None for srun in sruns), "the srun of the thawed manager keeps running"
        )
        assert first == "srun" or not run.run.exit_file(tag).exists()
        run.wait(lambda s: s.step > state.step + 5 and all_work(s))
        assert run.state().epoch == 2
        kept, now = without_replicas(current_incarnations(state), current_incarnations(run.state()), [])
        assert now == kept, "a role was replaced when the manager changed"
        assert [s.epoch for s in run.events() if s.seq > seq] == [2] * (run.state().seq - seq)
        _launched_once(run)
        _cancelled_well(run, slurm_lab)


def _stopped_at_birth(run: RunDir, tag: str) -> list[int]:
    """Stop the sruns of this tag as soon as they appear, and return their pids."""
    until = time.monotonic() + TIMEOUT_S
    while time.monotonic() < until:
        mark = f"--job-name={tag} "
        pids = [pid for pid, command in processes_of(run) if command.startswith("srun ") and mark in command]
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)
        if pids:
            return pids
    raise AssertionError(f"no srun of {tag} appeared")


def _ended_unwanted(run: RunDir, tag: str) -> bool:
    record = read_exit(run.exit_file(tag))
    return record is not None and record.reason in (ExitReason.NOT_ADMITTED, ExitReason.FENCED)


def test_second_of_two_concurrent_managers_exits_with_one_line(slurm_lab: SlurmLab) -> None:
    run = submit_on(slurm_lab, "managers", light_job("slurm", MANY_STEPS, spares=0))
    before = current_incarnations(run.wait_steps(2))
    pid = _manager(run)
    _free_of_successors(slurm_lab, run)
    os.kill(pid, signal.SIGKILL)
    managers = [run.call("manage", run.run.id, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) for _ in range(2)]
    with _ended(managers):
        _until(lambda: any(manager.poll() is not None for manager in managers), "neither exits")
        gone = next(manager for manager in managers if manager.poll() is not None)
        assert gone.returncode == 1
        assert gone.stderr is not None
        (line,) = [line for line in gone.stderr.read().splitlines() if line]
        assert f"manager of {run.run.id}" in line
        step = run.state().step
        run.wait(lambda s: s.step > step + 3)
        _nobody_noticed(before, run)
        _launched_once(run)
        _cancelled_well(run, slurm_lab)


def _group_of(leader: int) -> list[int]:
    """Return all processes of the session of ``leader``, which end together when a login node dies."""
    pids = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            if int((entry / "stat").read_text().rpartition(")")[2].split()[3]) == os.getsid(leader):
                pids.append(int(entry.name))
    return pids if os.getsid(leader) != os.getsid(0) else [leader]


MOMENTS: dict[str, Callable[[Path], bool]] = {
    "a folder is first_record": lambda runs: runs.is_dir() and any(runs.iterdir()),
    "the run is there": lambda runs: any(runs.glob("[!.]*/run_spec.json")),
    "sbatch is about to be called": lambda runs: any(runs.glob("[!.]*/submit/*.sh")),
    "it is submitted": lambda runs: any(runs.glob("[!.]*/submit/*_submission.sh")),
}
"""Moments at which rrl submit is killed with all processes that it has started."""


@pytest.mark.parametrize("moment", MOMENTS)
def test_login_node_death_during_rrl_submit_leaves_a_valid_run_or_none(slurm_lab: SlurmLab, moment: str) -> None:
    folder = slurm_lab.user_home / f"login-{moment.replace(' ', '-')}"
    slurm_lab.call_as_user(folder.mkdir)
    runs = folder / "runs"
    job = write_job(folder, light_job("slurm", 5, spares=0))

    def call(*argv: str, **popen: Any) -> subprocess.Popen[str]:
        return slurm_lab.popen_as_user([RRL, *argv], env={RUNS_ENV: str(runs)}, cwd=folder, **popen)

    submit = call("submit", str(job), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _until(lambda: MOMENTS[moment](runs) or submit.poll() is not None, f"never: {moment}")
    for pid in _group_of(submit.pid):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    submit.wait()
    with call("list", "--json", stdout=subprocess.PIPE) as listing:
        assert listing.stdout is not None
        listed = listing.stdout.read()
    made = [RunDir(path) for path in runs.iterdir() if not path.name.startswith(".")] if runs.exists() else []
    assert listed.count('"run_dir"') == len(made) <= 1
    if made:
        run = TestRun(made[0], call)
        if not any(f"{run.run.id}.manager" in line for line in slurm_lab.jobs()) and not list(run.run.epochs.iterdir()):
            managed = call("manage", run.run.id, stdout=subprocess.DEVNULL)  # as rrl status says
        else:
            managed = None
        state = run.wait_end()
        assert (state.outcome, state.step) == ("completed", 5), state.why
        if managed is not None:
            assert managed.wait(60) == 0
        _left_nothing(run, slurm_lab)
    else:
        slurm_lab.wait_no_jobs()
