"""A trainer lends the GPUs of its nodes to guests on a real Slurm."""

from __future__ import annotations

from rrl.core.types import TRAINER
from rrl.tests.support.lending import LendingRun
from rrl.tests.support.runs import TestRun, submit_on
from rrl.tests.support.slurm.lab import SlurmLab


def test_guests_overlap_the_trainers_steps_and_the_colocated_run_completes(slurm_lab: SlurmLab) -> None:
    folder = slurm_lab.user_home / "colocated"
    slurm_lab.call_as_user(lambda: (folder / "gpu").mkdir(parents=True))

    def submit(_: object, toml: str) -> TestRun:
        return submit_on(slurm_lab, "colocated-run", toml)

    with LendingRun(folder, 3, submit, cluster="slurm", rollouts=0) as run:
        run.wait_awake()
        members = [run.member(rank) for rank in range(2)]
        guests = [run.guest(member.node) for member in members if member.node is not None]
        listed = [line.split() for line in slurm_lab.slurm("squeue", "-h", "-s", "-o", "%j %i %N").splitlines()]
        places = {name: (id.partition(".")[0], node) for name, id, node in listed}  # the job and the node of a step
        assert [places[one.step or ""] for one in guests] == [places[one.step or ""] for one in members]
        state = run.finish()
        assert state.replica(TRAINER).incarnation_number == 1
        assert all(commit.metrics["lent_s"] > 0 for commit in run.commits())
    slurm_lab.wait_no_jobs()
