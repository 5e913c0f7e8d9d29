"""A run whose jobs are all cancelled, its managers' jobs included, continues once a person starts a new manager."""

from __future__ import annotations

import json
import subprocess
from typing import Any

import pytest

from rrl.manager.model import events as ev
from rrl.manager.model.actions import Request
from rrl.tests.support.runs import TestRun, all_work, check_sound, light_job, submit_on
from rrl.tests.support.slurm.lab import SlurmLab

pytestmark = pytest.mark.slurm


def _cancel_everything(lab: SlurmLab) -> None:
    """Cancel all jobs of the user with ``scancel -u``; return once no job and no manager is left."""
    lab.run_as_user(["scancel", "-u", lab.user])
    lab.clear()


def _requests(run: TestRun) -> list[str]:
    intended = (stamped.event.action for stamped in run.events() if isinstance(stamped.event, ev.Intended))
    return [action.tag for action in intended if isinstance(action, Request)]


def _status(run: TestRun) -> dict[str, Any]:
    with run.call("status", run.run.id, "--json", stdout=subprocess.PIPE) as process:
        out, _ = process.communicate(timeout=60)
    status: dict[str, Any] = json.loads(out)
    return status


def test_rrl_manage_on_a_cancelled_run_requests_one_pool_only(slurm_lab: SlurmLab) -> None:
    run = submit_on(slurm_lab, "all-cancelled", light_job("slurm", 100_000, spares=0, warm=False))
    before = run.wait_steps(2)
    _cancel_everything(slurm_lab)
    run.wait_gone()
    status = _status(run)
    assert status["standing"] == "interrupted"
    assert status["note"].endswith(f"rrl manage {run.run.id} goes on from step {status['step']}"), status["note"]
    with slurm_lab.controller_stopped():
        assert _status(run)["standing"] == "unknown"
    with run.call("manage", run.run.id, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as manager:
        try:
            state = run.wait(lambda s: s.epoch > before.epoch and s.step > before.step + 2 and all_work(s))
            pools = [line for line in slurm_lab.jobs() if ".manager" not in line]
            assert len(_requests(run)) == 2, f"requests besides the first pool and its successor: {_requests(run)}"
            assert len(state.allocations) == 1, list(state.allocations)
            assert len(pools) == 1, pools
            assert not [replica for replica in state.workers if replica.failures], (
                "a cancellation was taken for a failure"
            )
            with run.call("cancel", run.run.id) as cancel:
                assert cancel.wait(90) == 0
            assert run.wait_end().outcome == "cancelled"
        finally:
            manager.kill()
    run.wait_gone()
    check_sound(run.run)
