"""``rrl list``: all runs of this user, newest first."""

from __future__ import annotations

import time
from typing import Any

from rrl.cli.asking import BadInput, Failed, all_runs, job_of, read
from rrl.cli.run_jobs import SlurmJobs, ask_slurm, judge, owner_of, stale_lease
from rrl.cli.screen import print_json, show
from rrl.cli.views.runs import runs_view
from rrl.cli.views.status import standing
from rrl.manager.state import State
from rrl.spec.rundir import RunDir, runs_root


def list_runs(*, json: bool) -> int:
    slurm: dict[int, SlurmJobs] = {}
    rows = [_row(run, slurm) for run in all_runs()]
    if json:
        print_json(rows)
    elif rows:
        show(runs_view(rows, time.time()))
    else:
        print(f"no runs in {runs_root()}")
    return 0


def _row(run: RunDir, slurm: dict[int, SlurmJobs]) -> dict[str, Any]:
    """One run as plain values; a run that cannot be read says so instead of hiding the others. ``slurm``: what Slurm
    said of each user's jobs, asked once for all runs and only where a lease stands still."""
    job = job_of(run)
    row: dict[str, Any] = {
        "run": run.id, "name": job.name if job else "", "outcome": None, "standing": "submitted", "step": 0,
        "steps": job.steps if job else None, "reward": None, "recoveries": 0, "started": None, "ended": None,
        "run_dir": str(run.path),
    }  # fmt: skip
    try:
        state = read(run)
    except (BadInput, Failed) as error:
        return row | {"standing": f"unreadable: {str(error).removeprefix(f'{run.id} is ')}"}
    if state is None:
        return row
    stands = _stands(run, state, slurm) or standing(state)[0]
    return row | {
        "outcome": state.outcome, "standing": stands, "step": state.step, "steps": state.job.steps,
        "reward": state.rewards.latest, "recoveries": state.recoveries,
        "started": state.started, "ended": state.ended,
    }  # fmt: skip


def _stands(run: RunDir, state: State, slurm: dict[int, SlurmJobs]) -> str:
    """Where the run stands, where more is known of it than its journal says."""
    try:
        if state.job.cluster != "slurm" or not (stale := stale_lease(run, state)):
            return ""
        owner = owner_of(run)
    except Failed:
        return ""
    if owner not in slurm:
        slurm[owner] = ask_slurm(owner)
    return judge(state, stale, slurm[owner]).standing
