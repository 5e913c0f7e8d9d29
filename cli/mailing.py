"""Letters to a run's manager through its run directory, and waiting until they are taken."""

from __future__ import annotations

import os
import socket
import time

import msgspec

from rrl.cli.asking import Failed, job_of
from rrl.manager.lease import holder
from rrl.manager.mailbox import Letter
from rrl.spec.jobview import Limits
from rrl.spec.rundir import RunDir, write_atomically

PAUSE = 0.2
"""s between two looks"""


def send(run: RunDir, letter: Letter) -> str:
    """Leave a letter; returns its file's name. Raises Failed when the run directory cannot be written."""
    name = f"{time.time_ns()}-{socket.gethostname()}-{os.getpid()}.json"
    try:
        write_atomically(run.mailbox / name, msgspec.json.encode(letter))
    except OSError as error:
        raise Failed(f"{run.mailbox}: {error.strerror}") from None
    return name


def await_taken(run: RunDir, name: str, what: str) -> None:
    """Until the manager has taken the letter. Raises Failed when its lease stands still meanwhile: nobody is there to
    do ``what``."""
    job = job_of(run)
    patience = 2 * (job.limits.lease if job is not None else Limits().lease)
    held, moved = holder(run), time.monotonic()
    while (run.mailbox / name).exists():
        if (now := holder(run)) != held:
            held, moved = now, time.monotonic()
        if time.monotonic() - moved > patience:
            raise Failed(_nobody(run, what, "" if job is None else job.cluster))
        time.sleep(PAUSE)


def _nobody(run: RunDir, what: str, cluster: str) -> str:
    waiting = f" (or, if its manager still waits in the queue: scancel --name={run.id}.manager)"
    return (
        f"no manager of {run.id} is alive to {what}; start one, which will do so: rrl manage {run.id}"
        f"{waiting if cluster == 'slurm' else ''}"
    )
