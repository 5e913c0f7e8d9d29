"""A trainer lends the GPUs of its nodes to guests on a real Slurm."""

from __future__ import annotations

import pytest

from rrl.core.types import TRAINER
from rrl.tests.support.lending import LendingRun
from rrl.tests.support.runs import TestRun, submit_on
from rrl.tests.support.slurm.lab import SlurmLab

pytestmark = [pytest.mark.torch, pytest.mark.timeout(900)]


def test_guest_overlaps_the_trainers_step_and_the_colocated_run_completes(slurm_lab: SlurmLab) -> None:
    folder = slurm_lab.user_home / "colocated"
    slurm_lab.call_as_user(lambda: (folder / "gpu").mkdir(parents=True))

    def submit(_: object, toml: str) -> TestRun:
        return submit_on(slurm_lab, "colocated-run", toml)

    with LendingRun(folder, 3, submit, cluster="slurm", rollouts=0, ranks=1) as run:
        guest, member = run.guest(run.wait_awake()), run.member(0)
        listed = [line.split() for line in slurm_lab.slurm("squeue", "-h", "-s", "-o", "%j %i %N").splitlines()]
        places = {name: (id.partition(".")[0], node) for name, id, node in listed}  # the job and the node of a step
        assert places[guest.step or ""] == places[member.step or ""]
        state = run.finish()
        assert state.replica(TRAINER).incarnation_number == 1
        assert all(commit.metrics["lent_s"] > 0 for commit in run.commits())
    slurm_lab.wait_no_jobs()
