"""``rrl cancel``: a letter in the run's mailbox, which its manager takes; it works where no socket can be reached."""

from __future__ import annotations

import asyncio
import getpass
import sys
import time

from rrl.cli.asking import BadInput, Failed, Reader, find_run, job_of
from rrl.cli.mailing import PAUSE, await_taken, send
from rrl.cli.views.status import kept_jobs
from rrl.manager.mailbox import Letter
from rrl.spec.rundir import RunDir

ENDS_WITHIN = 120.0
"""s that a run is waited for once its manager has taken the command"""


def cancel(name: str, *, wait: bool, keep: bool = False) -> int:
    """Exit code 0 when the run has ended, or, without ``wait``, when the command was left for its manager. ``keep``:
    its nodes are not given back."""
    run = find_run(name)
    if keep:
        _check_keeps(run)
    reader = Reader(run)
    state = reader.state()
    if state is not None and state.outcome is not None:
        _withdrawn(run)
        print(f"{run.id} has ended already: {state.outcome.value}")
        return 0
    letter = send(run, Letter("cancel", getpass.getuser(), keep=keep))
    if state is None and _withdrawn(run):
        print(f"{run.id}: taken from the queue before it began")
        return 0
    if not wait:
        print(f"{run.id}: its manager is asked to end it")
        return 0
    print(f"{run.id}: ending ...", file=sys.stderr, flush=True)
    await_taken(run, letter, "end it")
    return _await_end(run, reader)


def _check_keeps(run: RunDir) -> None:
    job = job_of(run)
    if job is not None and job.cluster != "slurm":
        raise BadInput(f"{run.id} runs on this machine: there are no allocations to keep")
    if job is not None and job.manager.where == "pool":
        raise BadInput(f'{run.id} has its manager in its pool ([manager] where = "pool"), which ends with it')


def _withdrawn(run: RunDir) -> bool:
    """Managers that wait in Slurm's queue are taken from it, and none is there any more."""
    job = job_of(run)
    if job is None or job.cluster != "slurm":
        return False
    from rrl.manager import own_job

    return asyncio.run(own_job.withdrawn(run.id, job))


def _await_end(run: RunDir, reader: Reader) -> int:
    began = time.monotonic()
    while time.monotonic() - began < ENDS_WITHIN:
        state = reader.state()
        if state is not None and state.outcome is not None:
            kept = kept_jobs(state)
            left = f"kept: {kept} (rrl resume {run.id} uses it, scancel {kept} gives it back)"
            given = left if kept else "everything is given back"
            print(f"{run.id}: {state.outcome.value} after {state.step} steps; {given}")
            return 0
        time.sleep(PAUSE)
    raise Failed(f"{run.id} is still ending after {ENDS_WITHIN:.0f} s; see: rrl status {run.id}")
