"""Judges whether a run that has not ended still has a manager and, if not, which jobs of the run Slurm lists.

A manager shows that it runs by renewing the run's lease. Slurm is queried only for runs whose lease is not renewed: at
most once for each ``rrl status`` or ``rrl list``, and once per :data:`SQUEUE_EVERY_S` while a run is followed.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from msgspec import Struct

from ...core.run_dir import RunDir
from ...core.text import span
from ...core.types import OperationFailed
from ...manager.model.state import State

if TYPE_CHECKING:  # both imports take long, and most runs need neither
    from ...manager.cluster.slurm.parsing import Job
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


def liveness(run: RunDir, state: State) -> Liveness:
    """Return whether a run still has a manager; Slurm is queried at most once.

    Raises OperationFailed if the lease cannot be read.
    """
    stale = stale_lease(run, state)
    if not stale:
        return Liveness()
    if state.job.cluster != "slurm":
        return judge(state, stale, None)
    slurm = ask_slurm(owner_of(run))
    if _manager_runs(state, slurm):  # Slurm shows the manager: it has just begun, or the clocks differ
        return Liveness()
    return judge(state, stale, slurm)


def liveness_without_slurm(run: RunDir, state: State) -> Liveness:
    """Return whether a run still has a manager, without querying Slurm.

    If the lease of a run on Slurm is stale, the standing of the run is therefore unknown.

    Raises OperationFailed if the lease cannot be read.
    """
    stale = stale_lease(run, state)
    if not stale or state.job.cluster != "slurm":
        return judge(state, stale, None) if stale else Liveness()
    note = f"{stale}; whether the roles go on is unknown"
    return Liveness(note, f"Slurm is not asked here: rrl status {state.run} asks it", UNKNOWN)


def stale_lease(run: RunDir, state: State) -> str:
    """Return why the run seems to have no manager; empty if it may have a manager, or has ended.

    Raises OperationFailed if the lease cannot be read.
    """
    from ...manager.storage.lease import holder, renewed_at

    if state.outcome is not None:
        return ""
    try:
        lease_holder, renewed = holder(run), renewed_at(run)
    except OSError as error:
        raise OperationFailed(f"{run.epochs}: {error.strerror}") from None
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
    try:
        return run.path.stat().st_uid
    except OSError as error:
        raise OperationFailed(f"{run.path}: {error.strerror}") from None


def ask_slurm(uid: int) -> SlurmJobs:
    """Query Slurm once for all jobs of a user. Blocks for :data:`SQUEUE_TIMEOUT_S` at most."""
    from ...core.command_runner import run_coroutine
    from ...manager.cluster.base import AllocationState, Refused, Unanswered
    from ...manager.cluster.slurm.commands import execute, failure
    from ...manager.cluster.slurm.parsing import JOBS_FORMAT, Unreadable, read_jobs

    try:
        ended = run_coroutine(execute(("squeue", "-u", str(uid), "-h", "-o", JOBS_FORMAT), SQUEUE_TIMEOUT_S))
        if ended.code:
            raise failure("squeue", ended)
        jobs = read_jobs(ended.out)
    except (Refused, Unanswered, Unreadable) as error:
        return SlurmJobs(unknown=str(error).partition("\n")[0])
    return SlurmJobs(tuple(job for job in jobs if job.state is not AllocationState.ENDED))


def judge(state: State, stale: str, slurm: SlurmJobs | None) -> Liveness:
    """Return whether a run whose lease is stale still has a manager, according to Slurm's answer. The function is pure.

    ``stale`` says why the lease is stale. ``slurm`` is None if the run is not on Slurm.
    """
    manage = f"rrl manage {state.run}"
    if slurm is None:
        return Liveness(f"{stale}; the roles go on. Start one: {manage}", standing=UNATTENDED)
    if slurm.unknown:
        note = f"{stale}; whether the roles go on is unknown"
        return Liveness(note, f"Slurm cannot be asked: {slurm.unknown}", UNKNOWN)
    run_jobs = [job for job in slurm.jobs if _belongs_to_run(job, state.run)]
    managers = [job for job in run_jobs if _brings_a_manager(job, state)]
    if not run_jobs:
        goes_on = f"{manage} goes on from step {state.step}" if state.job.steps else f"{manage} goes on"
        return Liveness(f"{stale}, and Slurm lists no job of this run", goes_on, INTERRUPTED)
    holds_nodes = len(run_jobs) > len(managers) or state.job.manager.where == "pool"
    roles = "the roles go on" if holds_nodes else "no nodes are held"
    if not managers:
        return Liveness(f"{stale}; {roles}. Start one: {manage}", standing=UNATTENDED)
    standing = "" if _manager_runs(state, slurm) else UNATTENDED
    return Liveness(f"{stale}; {roles}", _managers_text(managers), standing)


def _belongs_to_run(job: Job, run_id: str) -> bool:
    """Return whether the job belongs to the run according to its comment or, if a site changes comments, its name."""
    return job.comment.split()[:2] == ["rrl", run_id] or job.name.startswith(f"{run_id}.")


def _brings_a_manager(job: Job, state: State) -> bool:
    from ...manager.bootstrap.manager_job import job_name

    return job.name == job_name(state.run, state.job)


def _manager_runs(state: State, slurm: SlurmJobs) -> bool:
    from ...manager.cluster.base import AllocationState

    return any(job.state is AllocationState.RUNNING and _brings_a_manager(job, state) for job in slurm.jobs)


def _managers_text(managers: Sequence[Job]) -> str:
    """Return Slurm's view of the running manager job, else of a queued manager job."""
    from ...manager.cluster.base import AllocationState

    job = min(managers, key=lambda one: one.state is not AllocationState.RUNNING)
    if job.state is AllocationState.RUNNING:
        return f"its job {job.id} is running"
    return f"the next manager waits in Slurm's queue: job {job.id} ({job.detail})"


def manager_gone(run: RunDir) -> str:
    """Return a message that no manager runs, and what to do; empty if a manager may run (:func:`surely_gone`).

    Raises OperationFailed if the lease cannot be read.
    """
    from ...manager.storage.lease import holder

    try:
        lease_holder = holder(run)
    except OSError as error:
        raise OperationFailed(f"{run.epochs}: {error.strerror}") from None
    return (
        f"no manager is running; the roles go on. Start one: rrl manage {run.id}" if surely_gone(lease_holder) else ""
    )
