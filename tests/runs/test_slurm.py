"""Whole runs on a real Slurm, submitted by a plain user without any operator right."""

from __future__ import annotations

import os
import signal
import time

import pytest

from rrl.spec.words import ReplicaId
from rrl.tests.lab.runs import RRL, TestRun, check_sound, light_job, lives, others, submit_on, write_job
from rrl.tests.lab.slurm import SlurmLab

pytestmark = pytest.mark.slurm
VICTIM = ReplicaId("rollout/1")


def _end_well(run: TestRun, lab: SlurmLab) -> None:
    state = run.wait_end()
    assert (state.outcome, state.step) == ("completed", state.job.steps), state.why
    run.wait_gone()
    check_sound(run.run)
    _wait_no_jobs(lab)


def _wait_no_jobs(lab: SlurmLab) -> None:
    """Neither of the run nor of its manager; a job is COMPLETING for a moment after its last process is gone."""
    until = time.monotonic() + 60
    while left := lab.jobs():
        assert time.monotonic() < until, left
        time.sleep(0.2)


def test_a_killed_rollout_alone_comes_back_and_its_unfinished_prompts_go_on_from_their_prefix(
    slurm_lab: SlurmLab,
) -> None:
    run = submit_on(slurm_lab, "kill-role", light_job("slurm", 30, spares=0))
    before = lives(run.wait_steps(3))
    pid = before[VICTIM][1]
    assert pid is not None
    run.hold_in_the_middle(1)
    os.killpg(os.getpgid(pid), signal.SIGKILL)
    run.let_go(1)
    run.wait_back_alone(before, VICTIM)
    _end_well(run, slurm_lab)
    assert run.continued(dead=-101.0), "nothing that the dead rollout began was gone on with"


def test_a_killed_slurmstepd_takes_its_role_along_and_only_that_replica_comes_back(slurm_lab: SlurmLab) -> None:
    run = submit_on(slurm_lab, "kill-stepd", light_job("slurm", 40, spares=0))
    before = lives(run.wait_steps(3))
    step = run.state().replica(VICTIM).step
    assert step is not None
    ids = slurm_lab.slurm("squeue", "-h", "-s", "-o", "%j %i").splitlines()
    assert slurm_lab.kill_stepd(next(line.split()[1] for line in ids if line.split()[0] == step))
    run.wait_back_alone(before, VICTIM)
    _end_well(run, slurm_lab)


def test_a_crashed_node_is_excluded_and_its_rollout_moves_to_the_spare(slurm_lab: SlurmLab) -> None:
    run = submit_on(slurm_lab, "crash", light_job("slurm", 60, spares=1))
    before = lives(run.wait_steps(3))
    node = before[VICTIM][2]
    assert node is not None
    slurm_lab.crash(node)
    try:
        after = run.wait_back_alone(before, VICTIM, ReplicaId(f"agent/{node}"))
        assert after[VICTIM][2] != node
        _end_well(run, slurm_lab)
    finally:
        slurm_lab.up(node)
        slurm_lab.clear()


def test_the_managers_job_is_cancelled_and_the_next_manager_adopts_what_lives(slurm_lab: SlurmLab) -> None:
    run = submit_on(slurm_lab, "manager", light_job("slurm", 60, spares=0))
    before = lives(run.wait_steps(3))
    job = next(line.split()[0] for line in slurm_lab.jobs() if f"{run.run.id}.manager" in line)
    slurm_lab.run_as_user(["scancel", job])
    step = run.state().step
    with run.call("manage", run.run.id):
        run.wait(lambda s: s.epoch == 2 and s.step > step + 3)
        kept, now = others(before, lives(run.state()), [])
        assert now == kept, "the roles noticed"
        _end_well(run, slurm_lab)


def test_a_manager_whose_walltime_ends_is_followed_by_another_job(slurm_lab: SlurmLab) -> None:
    run = submit_on(slurm_lab, "walltime", light_job("slurm", 60, spares=0))
    before = lives(run.wait_steps(3))
    job = next(line.split()[0] for line in slurm_lab.jobs() if f"{run.run.id}.manager" in line)
    slurm_lab.run_as_user(["scancel", "--signal=USR2", job])  # as Slurm does before the end
    run.wait(lambda s: s.epoch == 2 and s.step > 3)
    kept, now = others(before, lives(run.state()), [])
    assert now == kept, "the roles noticed"
    _end_well(run, slurm_lab)


def test_a_cancelled_run_leaves_no_job_no_step_and_no_process(slurm_lab: SlurmLab) -> None:
    run = submit_on(slurm_lab, "cancel", light_job("slurm", 10_000, spares=0))
    run.wait_steps(2)
    with run.call("cancel", run.run.id) as process:
        assert process.wait(90) == 0
    assert run.wait_end().outcome == "cancelled"
    run.wait_gone()
    _wait_no_jobs(slurm_lab)


def test_an_unknown_partition_ends_the_run_with_slurms_own_words(slurm_lab: SlurmLab) -> None:
    toml = light_job("slurm", 10, extra='[slurm]\npartition = "nowhere"\n')
    folder = slurm_lab.home / "nowhere"
    slurm_lab.call_as_user(folder.mkdir)
    done = slurm_lab.run_as_user([RRL, "submit", "--foreground", str(write_job(folder, toml))], check=False)
    assert done.returncode == 1
    assert "nvalid partition" in done.stdout + done.stderr
    _wait_no_jobs(slurm_lab)
