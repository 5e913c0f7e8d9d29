"""``rrl cancel``: a letter in the run's mailbox, which its manager takes; it works where no socket can be reached."""

from __future__ import annotations

import getpass
import os
import socket
import sys
import time

import msgspec

from rrl.cli.asking import Failed, Reader, find_run, job_of
from rrl.manager.lease import holder
from rrl.spec.jobview import Limits
from rrl.spec.rundir import RunDir, write_atomically

PAUSE = 0.2
"""s between two looks"""
ENDS_WITHIN = 120.0
"""s that a run is waited for once its manager has taken the command"""


def cancel(name: str, *, wait: bool) -> int:
    """Exit code 0 when the run has ended, or, without ``wait``, when the command was left for its manager."""
    run = find_run(name)
    reader = Reader(run)
    state = reader.state()
    if state is not None and state.outcome is not None:
        print(f"{run.id} has ended already: {state.outcome.value}")
        return 0
    letter = _send(run)
    if not wait:
        print(f"{run.id}: its manager is asked to end it")
        return 0
    print(f"{run.id}: ending ...", file=sys.stderr, flush=True)
    _await_taken(run, letter)
    return _await_end(run, reader)


def _send(run: RunDir) -> str:
    name = f"{time.time_ns()}-{socket.gethostname()}-{os.getpid()}.json"
    try:
        write_atomically(run.mailbox / name, msgspec.json.encode({"command": "cancel", "by": getpass.getuser()}))
    except OSError as error:
        raise Failed(f"{run.mailbox}: {error.strerror}") from None
    return name


def _await_taken(run: RunDir, letter: str) -> None:
    """Until the manager has taken the letter. Raises Failed when its lease stands still meanwhile: nobody is there."""
    job = job_of(run)
    patience = 2 * (job.limits.lease if job is not None else Limits().lease)
    held, moved = holder(run), time.monotonic()
    while (run.mailbox / letter).exists():
        if (now := holder(run)) != held:
            held, moved = now, time.monotonic()
        if time.monotonic() - moved > patience:
            raise Failed(_nobody(run, "" if job is None else job.cluster))
        time.sleep(PAUSE)


def _nobody(run: RunDir, cluster: str) -> str:
    waiting = f" (or, if its manager still waits in the queue: scancel --name={run.id}.manager)"
    return (
        f"no manager of {run.id} is alive to end it; start one, which will do so: rrl manage {run.id}"
        f"{waiting if cluster == 'slurm' else ''}"
    )


def _await_end(run: RunDir, reader: Reader) -> int:
    began = time.monotonic()
    while time.monotonic() - began < ENDS_WITHIN:
        state = reader.state()
        if state is not None and state.outcome is not None:
            print(f"{run.id}: {state.outcome.value} after {state.step} steps; everything is given back")
            return 0
        time.sleep(PAUSE)
    raise Failed(f"{run.id} is still ending after {ENDS_WITHIN:.0f} s; see: rrl status {run.id}")
