"""Watch several runs in one pass: each poll reads only what is new in their run directories. Slurm is never queried.

Polls are frequent, and a file server may be slow. So a run that has ended is read less often than a run that goes on.
A poll reads runs that no poll has read yet only in its first :data:`FIRST_READS_S` seconds. If there are many such
runs, the next polls read the rest.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from msgspec import Struct

from ...cluster.traits import traits_of
from ...core.run_dir import RunDir
from ...core.run_spec import RunSpec
from ...core.types import OperationFailed, UsageError
from ...manager.model.state import State
from ..runs import StateReader, all_runs, job_of, resume_pending
from .manager_liveness import Liveness, liveness_without_slurm
from .run_state import RunState, assembled, submitted, unreadable
from .start_check import StartCheck

LIST_INTERVAL_S = 5.0
"""Interval (s) of listing the folder of runs, and of reading an ended run, which only a resume changes."""
FIRST_READS_S = 1.0
"""Seconds from the beginning of a poll in which the poll may read runs that no poll has read yet."""
UNREAD = "not read yet"
"""Standing of a run that no poll has read yet."""


class WatchedRun(Struct, frozen=True):
    """The result of polling one run."""

    run: RunDir
    entry: RunState
    """State of the run, as in ``rrl list``."""
    state: State | None = None
    """State from the run's journal; None if there is none, or if it cannot be read."""
    liveness: Liveness = Liveness()
    trouble: str = ""
    """Why the run cannot be read; empty if it can be read."""
    start_failure: str = ""
    """Why no manager will ever begin or resume the run; empty if a manager may."""


class RunsWatcher:
    """Watches all runs of this user.

    Args:
        further: A run that is watched too, even if it is outside of the folder of runs.
        now: The wall clock (s).
    """

    def __init__(self, further: RunDir | None = None, now: Callable[[], float] = time.time) -> None:
        self._further, self.now = further, now
        self._listed: list[RunDir] = []
        self._listed_at = -LIST_INTERVAL_S
        """Time (time.monotonic()) at which the folder of runs was last listed."""
        self._runs: dict[Path, _Run] = {}

    def poll(self) -> list[WatchedRun]:
        """Read what is new, and return all runs, newest first.

        Raises OperationFailed if the folder of runs cannot be listed.
        """
        began = time.monotonic()
        if began - self._listed_at >= LIST_INTERVAL_S:
            self._list(began)
        for one in self._runs.values():
            if one.found.entry.standing != UNREAD or time.monotonic() - began < FIRST_READS_S:
                one.read(self.now(), began)
        return [self._runs[run.path].found for run in self._listed]

    def _list(self, at: float) -> None:
        runs = all_runs()
        further = self._further
        if further is not None and further.journal.is_dir() and all(run.path != further.path for run in runs):
            runs = [further, *runs]
        self._runs = {run.path: self._runs.get(run.path) or _Run(run) for run in runs}
        self._listed, self._listed_at = runs, at


class _Run:
    """One watched run, with its readers and the data that they have read so far."""

    def __init__(self, run: RunDir) -> None:
        self._run = run
        self._reader = StateReader(run)
        self._start = StartCheck(run)
        self._job: RunSpec | None = None
        self._read_at = 0.0
        """Time (time.monotonic()) at which the run was last read."""
        self.found = WatchedRun(run, submitted(run, None, UNREAD))

    def read(self, now: float, at: float) -> None:
        """Read what is new; ``now`` is the wall clock (s), ``at`` the time (s) of time.monotonic()."""
        if self.found.entry.outcome is not None and at - self._read_at < LIST_INTERVAL_S:
            return
        self._read_at = at
        try:
            self._job = self._job or job_of(self._run)
            self.found = self._found(now)
        except (UsageError, OperationFailed) as error:
            self.found = WatchedRun(self._run, unreadable(self._run, self._job, error), trouble=str(error))

    def _found(self, now: float) -> WatchedRun:
        run, job, state = self._run, self._job, self._reader.state()
        resumes = resume_pending(run)
        failure, liveness = "", Liveness()
        if state is None or (state.outcome is not None and resumes):
            queued = job is not None and traits_of(job.cluster).manager_is_a_job  # only the queue knows its state
            failure = "" if queued else self._start.failure(state)
        else:
            liveness = liveness_without_slurm(run, state)
        entry = assembled(run, job, state, liveness, resumes=resumes, start_failure=failure, now=now)
        return WatchedRun(run, entry, state, liveness, start_failure=failure)
