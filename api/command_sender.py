"""Send a user's command to a run's manager through the run directory, and wait until the manager has taken it."""

from __future__ import annotations

import os
import socket
import time
from functools import partial

import msgspec

from ..cluster.traits import traits_of
from ..core.run_dir import RunDir, errors_about, write_atomically
from ..core.run_spec import Limits
from ..core.types import OperationFailed
from ..manager.intake.user_commands import Command
from ..manager.storage.lease import holder
from ..manager.storage.space_reserve import write_from_reserve
from .runs import check_own, job_of

POLL_INTERVAL_S = 0.2
"""Interval (s) between two checks of the run directory while a function waits for the manager."""


def send(run: RunDir, command: Command) -> str:
    """Write a user command into the run's mailbox and return the name of its file.

    If the file system is full, a cancellation takes space from the run's reserve. The manager carries out no other
    command on a full file system.

    Raises OperationFailed if the run directory cannot be written, or is another user's.
    """
    check_own(run)
    name = f"{time.time_ns()}-{socket.gethostname()}-{os.getpid()}.json"
    write = partial(write_atomically, run.mailbox / name, msgspec.json.encode(command))
    with errors_about(run.mailbox):
        if command.command == "cancel":
            write_from_reserve(run, write)
        else:
            write()
    return name


class ManagerPresence:
    """Observes whether a run's manager renews its lease; times are measured with the clock of this process."""

    def __init__(self, run: RunDir) -> None:
        job = job_of(run)
        self._run, self._job = run, job
        self._timeout_s = 2 * (job.limits.lease if job is not None else Limits().lease)
        self._holder, self._renewed_at = holder(run), time.monotonic()

    def is_gone(self) -> bool:
        """Return whether the lease was not renewed for twice its duration; a running manager renews it sooner."""
        if (now := holder(self._run)) != self._holder:
            self._holder, self._renewed_at = now, time.monotonic()
        return time.monotonic() - self._renewed_at > self._timeout_s

    def absent_message(self, action: str) -> str:
        """Return a message that no manager is running to carry out ``action``, and how to start one."""
        waiting = ""
        if self._job is not None and traits_of(self._job.cluster).manager_is_a_job:
            from ..manager.bootstrap.manager_job import job_name

            queued = job_name(self._run.id, self._job)
            waiting = f" (or, if its manager still waits in the queue: scancel --name={queued})"
        return f"no manager of {self._run.id} is running to {action}; to start one: rrl manage {self._run.id}{waiting}"


def wait_until_taken(run: RunDir, name: str, action: str) -> None:
    """Wait until the manager has taken the command file ``name``.

    Raises OperationFailed, with ``action`` in its message, if the lease is no longer renewed: no manager is running.
    """
    manager = ManagerPresence(run)
    while (run.mailbox / name).exists():
        if manager.is_gone():
            raise OperationFailed(manager.absent_message(action))
        time.sleep(POLL_INTERVAL_S)
