"""Runs of a plain user without operator rights survive failures on a real Slurm."""

from __future__ import annotations

import os
import signal

import pytest

from rrl.core.run_dir import RUNS_ENV
from rrl.core.types import ReplicaId
from rrl.tests.support.runs import (
    RRL,
    TestRun,
    all_work,
    cancel,
    check_sound,
    current_incarnations,
    joined_incarnations,
    light_job,
    submit_on,
    without_replicas,
    write_job,
)
from rrl.tests.support.slurm.lab import SlurmLab

pytestmark = pytest.mark.slurm
VICTIM = ReplicaId("rollout/1")


def _end_well(run: TestRun, lab: SlurmLab) -> None:
    state = run.wait_end()
    assert (state.outcome, state.step) == ("completed", state.job.steps), state.why
    run.wait_gone()
    check_sound(run.run)
    lab.wait_no_jobs()


def _hold_all(run: TestRun) -> None:
    """Stop the rollouts while they work, so that the run cannot end before the next manager has started."""
    for index in (0, 1):
        run.hold_in_the_middle(index)


def _let_all_go(run: TestRun) -> None:
    for index in (0, 1):
        run.let_go(index)


@pytest.mark.long  # as on the local cluster; the next test has a rollout that starts again on Slurm
def test_killed_rollout_alone_restarts_and_its_prompts_continue_from_their_prefix(slurm_lab: SlurmLab) -> None:
    run = submit_on(slurm_lab, "kill-role", light_job("slurm", 30, spares=0, warm=False))
    before = joined_incarnations(run)
    pid = before[VICTIM][1]
    assert pid is not None
    run.hold_in_the_middle(1)
    os.killpg(os.getpgid(pid), signal.SIGKILL)
    run.let_go(1)
    run.wait_back_alone(before, VICTIM)
    _end_well(run, slurm_lab)
    assert run.continued(dead=-101.0), "no trajectory that the dead rollout began was continued"


@pytest.mark.long
def test_killed_slurmstepd_restarts_only_its_own_replica(slurm_lab: SlurmLab) -> None:
    run = submit_on(slurm_lab, "kill-stepd", light_job("slurm", 40, spares=0))
    before = joined_incarnations(run)
    step = run.state().replica(VICTIM).step
    assert step is not None
    ids = slurm_lab.slurm("squeue", "-h", "-s", "-o", "%j %i").splitlines()
    assert slurm_lab.kill_stepd(next(line.split()[1] for line in ids if line.split()[0] == step))
    run.wait_back_alone(before, VICTIM)
    _end_well(run, slurm_lab)


def test_crashed_node_is_excluded_and_its_rollout_moves_to_the_spare(slurm_lab: SlurmLab) -> None:
    run = submit_on(slurm_lab, "crash", light_job("slurm", 100_000, spares=1))
    before = joined_incarnations(run)
    node = before[VICTIM][2]
    assert node is not None
    slurm_lab.crash(node)
    try:
        after = run.wait_back_alone(before, VICTIM, ReplicaId(f"agent/{node}"))
        assert after[VICTIM][2] != node
        run.wait_steps(run.state().step + 4)
        cancel(run)
        slurm_lab.wait_no_jobs()
    finally:
        slurm_lab.up(node)
        slurm_lab.clear()


def _form(form: str, steps: int, rollouts: int) -> str:
    return light_job("slurm", steps, rollouts=rollouts, spares=0).replace("spares = 0", f'form = "{form}"')


def _managers(lab: SlurmLab, run: TestRun) -> dict[str, str]:
    """Return the state of each job of a manager of this run, by job id."""
    jobs = (line.split() for line in lab.jobs())
    return {id: state for id, name, state in jobs if name == f"{run.run.id}.manager"}


def _running_manager(lab: SlurmLab, run: TestRun) -> str:
    managers = _managers(lab, run)
    assert sorted(managers.values()) == ["PENDING", "RUNNING"], (
        "the run does not have one running and one pending manager"
    )
    return next(id for id, state in managers.items() if state == "RUNNING")


@pytest.mark.long
def test_pending_manager_takes_over_from_a_cancelled_one_with_a_hetjob(slurm_lab: SlurmLab) -> None:
    toml = _form("hetjob", 60, rollouts=2).replace("[task]", "one_node_components = true\n[task]", 1)
    run = submit_on(slurm_lab, "hetjob", toml)
    before = joined_incarnations(run)
    assert {line.split()[0].partition("+")[2] for line in slurm_lab.jobs()} == {"", "0", "1", "2"}
    slurm_lab.run_as_user(["scancel", _running_manager(slurm_lab, run)])
    step = run.state().step
    run.wait(lambda s: s.epoch == 2 and s.step > step + 3)
    kept, now = without_replicas(before, current_incarnations(run.state()), [])
    assert now == kept, "a role was replaced when the manager changed"
    _end_well(run, slurm_lab)


@pytest.mark.long
def test_replica_of_a_crashed_node_gets_a_new_job_from_the_next_manager(slurm_lab: SlurmLab) -> None:
    victim = ReplicaId("rollout/0")
    run = submit_on(slurm_lab, "replica", _form("replica", 80, rollouts=1))
    before = joined_incarnations(run)
    node = before[victim][2]
    assert node is not None
    slurm_lab.run_as_user(["scancel", "--signal=USR2", _running_manager(slurm_lab, run)])  # as Slurm does before it
    run.wait(lambda s: s.epoch == 2 and s.step > 3)
    slurm_lab.wait_for(
        lambda: sorted({*_managers(slurm_lab, run).values()} - {"COMPLETING"}) == ["PENDING", "RUNNING"],
        "the next manager does not run in a job, or has queued no successor",
    )
    slurm_lab.crash(node)
    try:
        state = run.wait(lambda s: s.replica(victim).incarnation_number == 2 and all_work(s))
        after = current_incarnations(state)
        fresh = after[victim][2]
        gone = [victim, ReplicaId(f"agent/{node}"), ReplicaId(f"agent/{fresh}")]
        assert without_replicas(before, after, gone)[1] == without_replicas(before, after, gone)[0], (
            "a replica on another node was replaced"
        )
        assert state.replica(victim).allocation == f"{run.run.id}.rollout-1"
        _end_well(run, slurm_lab)
    finally:
        slurm_lab.up(node)
        slurm_lab.clear()


@pytest.mark.long
def test_killed_manager_in_the_pool_is_restarted_there(slurm_lab: SlurmLab) -> None:
    run = submit_on(slurm_lab, "within", light_job("slurm", 60, spares=0, extra='[manager]\nwhere = "pool"\n'))
    before = joined_incarnations(run)
    assert [line.split()[1:] for line in slurm_lab.jobs()] == [[f"{run.run.id}.pool", "RUNNING"]]
    managing = [pid for pid, command in run.processes().items() if "run_manager" in command]
    os.kill(managing[0], signal.SIGKILL)
    run.wait(lambda s: s.epoch == 2 and s.step > 3)
    kept, now = without_replicas(before, current_incarnations(run.state()), [])
    assert now == kept, "a role was replaced when the manager changed"
    _end_well(run, slurm_lab)


def test_cancelled_run_leaves_no_job_no_step_and_no_process(slurm_lab: SlurmLab) -> None:
    run = submit_on(slurm_lab, "cancel", light_job("slurm", 10_000, spares=0, warm=False))
    run.wait_steps(2)
    with run.call("cancel", run.run.id) as process:
        assert process.wait(90) == 0
    assert run.wait_end().outcome == "cancelled"
    run.wait_gone()
    slurm_lab.wait_no_jobs()
    states = slurm_lab.slurm("squeue", "-h", "-t", "all", "-n", f"{run.run.id}.manager", "-o", "%T").split()
    assert sorted(states) == ["CANCELLED", "COMPLETED"], "the pending manager was not cancelled"


@pytest.mark.parametrize("how", ["--foreground", "--wait"])
def test_unknown_partition_is_refused_with_slurms_message_before_a_run_exists(slurm_lab: SlurmLab, how: str) -> None:
    toml = light_job("slurm", 10, extra='[slurm]\npartition = "nowhere"\n')
    folder = slurm_lab.user_home / f"nowhere{how}"
    slurm_lab.call_as_user(folder.mkdir)
    env = {RUNS_ENV: str(folder / "runs")}
    job = str(write_job(folder, toml))
    done = slurm_lab.run_as_user([RRL, "submit", how, job], check=False, env=env)
    assert done.returncode == 2
    assert "nvalid partition" in done.stderr
    assert "slurm.partition: " in done.stderr
    assert done.stderr.count("\n") == 1
    assert not (folder / "runs").exists()
    assert slurm_lab.jobs() == []


def test_cancel_removes_a_run_that_has_not_begun_from_the_queue(slurm_lab: SlurmLab) -> None:
    blocker = slurm_lab.run_as_user(["sbatch", "--parsable", "-N5", "--exclusive", "-o/dev/null", "--wrap=sleep 600"])
    run = submit_on(slurm_lab, "queued", light_job("slurm", 10))
    assert set(_managers(slurm_lab, run).values()) == {"PENDING"}
    with run.call("cancel", run.run.id) as process:
        assert process.wait(60) == 0
    assert [line.split()[0] for line in slurm_lab.jobs()] == [blocker.stdout.strip()]
    slurm_lab.clear()
