"""Watch a run until it has ended, and notice when no manager is left to begin or end it."""

from __future__ import annotations

import time

import msgspec

from ...cluster.traits import traits_of
from ...core.run_dir import RunDir
from ...core.types import OperationFailed, Outcome, UsageError
from ...manager.model.state import State
from ...manager.reporting.summary import Summary
from ...manager.storage.lease import LeaseHolder, holder
from ..runs import StateReader, job_of, read_state, resume_pending
from .manager_liveness import (
    INTERRUPTED,
    SQUEUE_EVERY_S,
    STALE_LEASES,
    Liveness,
    SlurmJobs,
    ask_slurm,
    judge,
    manager_gone,
    owner_of,
    storage_trouble,
)
from .start_check import NeverBegan, StartCheck

POLL_INTERVAL_S = 0.5
"""Interval (s) between two polls of the run directory."""
SUMMARY_TIMEOUT_S = 10.0
"""Time (s) to wait for the summary of an ended run, from the last renewal of the manager's lease."""


def completed_summary(run: RunDir) -> Summary:
    """Wait until the run has completed, and return its summary.

    Raises:
        UsageError: The cluster rejected the run, or no manager will ever begin it.
        OperationFailed: The run failed or was cancelled, or no manager is left to end it.
    """
    await_resumed(run)
    watcher = RunWatcher(run, require_manager=True)
    while not watcher.poll():
        time.sleep(POLL_INTERVAL_S)
    state = watcher.state
    assert state is not None
    reason = f": {state.why}" if state.why else ""
    if state.outcome is Outcome.REJECTED:
        raise UsageError(f"{run.id} was rejected{reason}")
    if state.outcome is not Outcome.COMPLETED:
        verb = "was cancelled" if state.outcome is Outcome.CANCELLED else "failed"
        raise OperationFailed(f"{run.id} {verb} after {state.step} steps{reason}; see: rrl status {run.id}")
    try:
        return msgspec.json.decode(run.summary.read_bytes(), type=Summary)
    except (OSError, msgspec.MsgspecError):
        raise OperationFailed(f"{run.id} has ended, but left no summary; see: rrl status {run.id}") from None


def await_resumed(run: RunDir) -> None:
    """Wait until a manager has carried out a request to resume the run; return at once if there is none.

    Raises NeverBegan if no manager will carry it out.
    """
    start = StartCheck(run)
    while resume_pending(run):
        if failure := start.failure(read_state(run)):
            raise NeverBegan(f"{run.id} does not go on: {failure}; to try again: rrl manage {run.id}")
        time.sleep(POLL_INTERVAL_S)


class RunWatcher:
    """Holds the newest state that was read, and the time since the manager's lease was last renewed (local clock)."""

    def __init__(self, run: RunDir, require_manager: bool) -> None:
        self.run = run
        self.state: State | None = None
        self._require_manager = require_manager
        self._reader = StateReader(run)
        self._start_check = StartCheck(run)
        self.start_failure = ""
        """Why no manager will ever begin the run; empty if a manager may."""
        self._holder: LeaseHolder | None = None
        self._renewed_at = time.monotonic()
        self._slurm: SlurmJobs | None = None
        """Slurm's newest answer; None if Slurm was not queried since the lease was last renewed."""
        self._slurm_polled_at = 0.0

    def poll(self) -> bool:
        """Read the state and the lease; return whether the run has ended and its summary exists.

        If the run has ended without a summary, returns True after ``SUMMARY_TIMEOUT_S``. If the watcher was created
        with ``require_manager``, raises NeverBegan or OperationFailed once no manager is left to begin or end the run.
        """
        self.state = self._reader.state()
        try:
            current = holder(self.run)
        except OSError:
            current = None
        self.start_failure = self._start_check.failure(self.state)
        if self._require_manager and self.start_failure:
            raise NeverBegan(f"{self.run.id} is rejected: {self.start_failure}")
        if current != self._holder:
            self._holder, self._renewed_at, self._slurm = current, time.monotonic(), None
        if self.state is not None and self.state.outcome is not None:
            return self.run.summary.exists() or time.monotonic() - self._renewed_at > SUMMARY_TIMEOUT_S
        if (
            self._require_manager
            and self.silence_s
            and (gone := manager_gone(self.run, self.state))
            and not _manager_is_a_job(self.run)
        ):
            raise OperationFailed(f"the manager of {self.run.id} is gone (its output: {self.run.submit}): {gone}")
        if self._require_manager and (liveness := self.liveness).standing == INTERRUPTED:
            raise OperationFailed(f"{self.run.id} is interrupted: {liveness}")
        return False

    @property
    def silence_s(self) -> float:
        """Return the seconds since the manager's lease was last renewed; 0 while the lease is not stale."""
        silent = time.monotonic() - self._renewed_at
        patience = STALE_LEASES * self.state.job.limits.lease if self.state is not None else 60.0
        return silent if silent > patience else 0.0

    @property
    def liveness(self) -> Liveness:
        """Return what is known about the manager if its lease is not renewed or it cannot write, else an empty result.

        Slurm is queried once in ``SQUEUE_EVERY_S`` at most.
        """
        if self.state is None or self.state.outcome is not None:
            return Liveness()
        if (trouble := storage_trouble(self.run)) or not self.silence_s:
            return Liveness(trouble)
        if traits_of(self.state.job.cluster).manager_is_a_job:
            now = time.monotonic()
            if self._slurm is None or now - self._slurm_polled_at >= SQUEUE_EVERY_S:
                self._slurm, self._slurm_polled_at = ask_slurm(owner_of(self.run)), now
        return judge(self.state, f"silent for {self.silence_s:.0f} s", self._slurm)


def _manager_is_a_job(run: RunDir) -> bool:
    """Return whether the run is on a cluster that restarts a lost manager by itself."""
    job = job_of(run)
    return job is not None and traits_of(job.cluster).manager_is_a_job
