"""Judges whether a run that has not ended still has a manager and, if not, which jobs of the run Slurm lists.

A manager shows that it runs by renewing the run's lease. Slurm is queried only for runs whose lease is not renewed: at
most once for each ``rrl status`` or ``rrl list``, and once per :data:`SQUEUE_EVERY_S` while a run is followed.
"""

from __future__ import annotations

import errno
import os
import socket
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from msgspec import Struct

from ...cluster.traits import traits_of
from ...core.run_dir import STORAGE_FULL_ERRNOS, RunDir, errors_about
from ...core.text import span
from ...manager.model.state import State

if TYPE_CHECKING:  # both imports take long, and most runs need neither
    from ...cluster.slurm.parsing import Job
    from ...manager.storage.lease import LeaseHolder

STALE_LEASES = 3.0
"""A lease is stale if it was not renewed for this many times its duration.

A manager renews its lease five times within one duration of the lease, so a short hang of the storage does not make the
lease stale.
"""
SQUEUE_TIMEOUT_S = 5.0
"""Time limit (s) for Slurm's answer, for which a person waits. A healthy slurmctld answers within 0.1 s."""
SQUEUE_EVERY_S = 30.0
"""Interval (s) of querying Slurm while a run is followed.

It is as long as the default interval between two polls of a manager (``limits.poll``), since several people may follow
many runs.
"""
MIN_FREE_BYTES = 64 * 2**10
"""Free bytes below which a manager may be unable to write one decision."""
INTERRUPTED = "interrupted"
"""Standing of a run of which no process is left."""
UNATTENDED = "unattended"
"""Standing of a run whose roles go on while no manager works: nothing that fails is replaced."""
UNKNOWN = "unknown"
"""Standing of a run without a manager if Slurm was not, or could not be, queried for the run's jobs."""


class Liveness(Struct, frozen=True):
    """Whether a run still has a manager.

    ``note`` says what is wrong with the manager, and is empty if nothing is wrong. ``advice`` says what to do.
    ``standing`` is :data:`INTERRUPTED`, :data:`UNATTENDED` or :data:`UNKNOWN`. It is shown instead of the status that
    the journal records, because no process updates the journal any more. ``standing`` is empty if a manager runs.
    """

    note: str = ""
    advice: str = ""
    standing: str = ""

    def __str__(self) -> str:
        return "; ".join(part for part in (self.note, self.advice) if part)


class SlurmJobs(Struct, frozen=True):
    """The jobs of a user that have not ended; ``unknown`` says why Slurm could not be queried, or is empty."""

    jobs: tuple[Job, ...] = ()
    unknown: str = ""


def liveness(run: RunDir, state: State, ask: Callable[[], SlurmJobs] | None = None) -> Liveness:
    """Return whether a run still has a manager, and whether this manager can write.

    ``ask`` is called at most once, and only for a run on Slurm; by default, Slurm is queried for the owner's jobs.

    Raises OperationFailed if the lease cannot be read.
    """
    if state.outcome is not None:
        return Liveness()
    if trouble := storage_trouble(run):
        return Liveness(trouble)
    stale = stale_lease(run, state)
    if not stale or not traits_of(state.job.cluster).manager_is_a_job:
        return judge(state, stale, None) if stale else Liveness()
    slurm = ask() if ask is not None else ask_slurm(owner_of(run))
    if _manager_runs(state, slurm):  # Slurm shows the manager: it has just begun, or the clocks differ
        return Liveness()
    return judge(state, stale, slurm)


def liveness_without_slurm(run: RunDir, state: State) -> Liveness:
    """Do the same as :func:`liveness`, without querying Slurm: the standing of a run on Slurm may be unknown.

    Raises OperationFailed if the lease cannot be read.
    """
    return liveness(run, state, lambda: SlurmJobs(unknown=f"Slurm is not asked here: rrl status {state.run} asks it"))


def storage_trouble(run: RunDir) -> str:
    """Return why the manager of an unfinished run cannot write; empty if it can, or if it is certain that none runs.

    The journal cannot contain this. This machine sees most causes; a manager names the others, such as a quota, in its
    lease. While storage is unwritable, an old lease does not show that the manager has ended.
    """
    from ...manager.storage.lease import holder

    try:
        file_system, lease = os.statvfs(run.path), holder(run)
    except OSError as error:
        trouble = f"the run directory is unavailable ({error.strerror})"
        return f"{trouble}: the manager decides nothing until it is available; the roles go on"
    if lease is None or surely_gone(lease):
        return ""
    number = lease.write_errno
    if file_system.f_flag & os.ST_RDONLY or number == errno.EROFS:
        return "the run directory is read-only: the manager decides nothing until it can be written; the roles go on"
    if number in STORAGE_FULL_ERRNOS or file_system.f_bavail * file_system.f_frsize < MIN_FREE_BYTES:
        why = f" ({os.strerror(number)})" if number == errno.EDQUOT else ""
        return (
            f"the run directory is full{why}: the manager decides nothing until space is free; the roles go on;"
            " rrl cancel works"
        )
    failure = f"the run directory cannot be written ({os.strerror(number)})"
    return f"{failure}: the manager decides nothing until it can; the roles go on" if number else ""


def stale_lease(run: RunDir, state: State) -> str:
    """Return why an unfinished run seems to have no manager; empty if it may have a manager.

    Raises OperationFailed if the lease cannot be read.
    """
    from ...manager.storage.lease import holder, renewed_at

    with errors_about(run.epochs):
        lease_holder, renewed = holder(run), renewed_at(run)
    if surely_gone(lease_holder):
        return "no manager is running"
    age = time.time() - renewed  # if the two clocks differ, the only effect is a query of Slurm
    if abs(age) <= STALE_LEASES * state.job.limits.lease:
        return ""
    return f"the manager's lease has not been renewed for {span(max(0.0, age))}"


def surely_gone(lease_holder: LeaseHolder | None) -> bool:
    """Return whether it is certain that no manager runs.

    This is certain if the lease has no holder, or if the holder's process ran on this machine and has ended.
    """
    return lease_holder is None or (
        lease_holder.host == socket.gethostname() and not os.path.exists(f"/proc/{lease_holder.pid}")
    )


def owner_of(run: RunDir) -> int:
    """Return the uid whose jobs belong to the run. Raises OperationFailed if the run directory cannot be read."""
    with errors_about(run.path):
        return run.path.stat().st_uid


def ask_slurm(uid: int) -> SlurmJobs:
    """Query Slurm once for all jobs of a user. Blocks for :data:`SQUEUE_TIMEOUT_S` at most."""
    from ...cluster.base import AllocationState, Refused, Unanswered
    from ...cluster.slurm.commands import output_of
    from ...cluster.slurm.parsing import JOBS_FORMAT, parsed, read_jobs
    from ...core.command_runner import run_coroutine

    try:
        argv = ("squeue", "-u", str(uid), "-h", "-o", JOBS_FORMAT)
        jobs = parsed("squeue", read_jobs, run_coroutine(output_of(argv, SQUEUE_TIMEOUT_S)))
    except (Refused, Unanswered) as error:
        return SlurmJobs(unknown=f"Slurm cannot be asked: {str(error).partition(chr(10))[0]}")
    return SlurmJobs(tuple(job for job in jobs if job.state is not AllocationState.ENDED))


def judge(state: State, stale: str, slurm: SlurmJobs | None) -> Liveness:
    """Return whether a run whose lease is stale still has a manager, according to Slurm's answer. The function is pure.

    ``stale`` says why the lease is stale. ``slurm`` is None if the run is not on Slurm.
    """
    left, advice = _left(state.run, state)
    if slurm is None:
        return Liveness(f"{stale}; {left}", advice, UNATTENDED)
    if slurm.unknown:
        return Liveness(f"{stale}; whether the roles go on is unknown", slurm.unknown, UNKNOWN)
    run_jobs = [job for job in slurm.jobs if _belongs_to_run(job, state.run)]
    managers = [job for job in run_jobs if _brings_a_manager(job, state)]
    if not run_jobs:
        ending = f"; {left}" if state.finish is not None else ""
        if not ending:
            advice = f"rrl manage {state.run} goes on" + (f" from step {state.step}" if state.job.steps else "")
        return Liveness(f"{stale}, and Slurm lists no job of this run{ending}", advice, INTERRUPTED)
    if len(run_jobs) == len(managers) and state.job.manager.where != "pool":
        left = "no nodes are held"
    standing = "" if _manager_runs(state, slurm) else UNATTENDED
    return Liveness(f"{stale}; {left}", _managers_text(managers) if managers else advice, standing)


def _left(run: str, state: State | None) -> tuple[str, str]:
    """Return what is left of a run without a manager, and what to do: texts short enough for a command to copy."""
    if state is not None and state.finish is not None:
        return f"the run was ending ({state.finish.outcome})", f"rrl manage {run} ends it"
    return "the roles go on", f"start one: rrl manage {run}"


def _belongs_to_run(job: Job, run_id: str) -> bool:
    """Return whether the job belongs to the run according to its comment or, if a site changes comments, its name."""
    return job.comment.split()[:2] == ["rrl", run_id] or job.name.startswith(f"{run_id}.")


def _brings_a_manager(job: Job, state: State) -> bool:
    from ...manager.bootstrap.manager_job import job_name

    return job.name == job_name(state.run, state.job)


def _manager_runs(state: State, slurm: SlurmJobs) -> bool:
    from ...cluster.base import AllocationState

    return any(job.state is AllocationState.RUNNING and _brings_a_manager(job, state) for job in slurm.jobs)


def _managers_text(managers: Sequence[Job]) -> str:
    """Return Slurm's view of the running manager job, else of a queued manager job."""
    from ...cluster.base import AllocationState

    job = min(managers, key=lambda one: one.state is not AllocationState.RUNNING)
    if job.state is AllocationState.RUNNING:
        return f"its job {job.id} is running"
    return f"the next manager waits in Slurm's queue: job {job.id} ({job.detail})"


def manager_gone(run: RunDir, state: State | None) -> str:
    """Return a message that no manager runs, and what to do; empty if a manager may run (:func:`surely_gone`).

    Raises OperationFailed if the lease cannot be read.
    """
    from ...manager.storage.lease import holder

    with errors_about(run.epochs):
        lease_holder = holder(run)
    return "; ".join(("no manager is running", *_left(run.id, state))) if surely_gone(lease_holder) else ""
