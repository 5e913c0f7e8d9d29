"""Send a user's command to a run's manager through the run directory, and wait until the manager has taken it."""

from __future__ import annotations

import os
import socket
import time

import msgspec

from ...core.run_dir import RunDir, write_atomically
from ...core.run_spec import Limits
from ...manager.intake.user_commands import Letter
from ...manager.storage.lease import holder
from .runs import Failed, job_of

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


class Presence:
    """Whether a run's manager is there, by what this process itself sees of its lease."""

    def __init__(self, run: RunDir) -> None:
        job = job_of(run)
        self._run, self._job = run, job
        self._patience = 2 * (job.limits.lease if job is not None else Limits().lease)
        self._held, self._moved = holder(run), time.monotonic()

    def gone(self) -> bool:
        """The lease has stood still for longer than a manager leaves it."""
        if (now := holder(self._run)) != self._held:
            self._held, self._moved = now, time.monotonic()
        return time.monotonic() - self._moved > self._patience

    def nobody(self, what: str) -> str:
        """That nobody is there to do ``what``, and who would."""
        waiting = ""
        if self._job is not None and self._job.cluster == "slurm":
            from ...manager.bootstrap.manager_job import starting

            queued = starting(self._run.id, self._job)
            waiting = f" (or, if its manager still waits in the queue: scancel --name={queued})"
        return (
            f"no manager of {self._run.id} is alive to {what}; start one, which will do so: rrl manage {self._run.id}"
            f"{waiting}"
        )


def await_taken(run: RunDir, name: str, what: str) -> None:
    """Until the manager has taken the letter. Raises Failed when its lease stands still meanwhile: nobody is there to
    do ``what``."""
    manager = Presence(run)
    while (run.mailbox / name).exists():
        if manager.gone():
            raise Failed(manager.nobody(what))
        time.sleep(PAUSE)
