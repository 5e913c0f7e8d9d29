"""Checks from time to time whether a manager can still begin a submitted run.

The interval between two checks limits the load on Slurm.
"""

from __future__ import annotations

import time

from ...cluster.traits import traits_of
from ...core.run_dir import RunDir
from ...core.types import UsageError
from ...manager.bootstrap.pool_supervisor import awaits_manager
from ...manager.model.state import State
from ..runs import job_of, read_state

SLURM_CHECK_EVERY_S = 10.0
"""Interval (s) of querying Slurm, whose queue may hold the manager for days.

The load is six commands a minute, the same as that of a manager (three commands in each poll, one poll every 30 s).
"""


class NeverBegan(UsageError):
    """All submitted managers have ended before the run began. The run is ``rejected``, and the exit code is 2."""


class StartCheck:
    """Watches the managers that were submitted for one run, until one of them begins the run."""

    def __init__(self, run: RunDir) -> None:
        self._run = run
        self._checked_at = 0.0
        """Time (time.monotonic()) of the last check whether a manager can still begin the run."""
        self._failure = ""

    def failure(self, state: State | None) -> str:
        """Return why the run will never start, or will never resume if a resume was requested.

        ``state`` is the state that was last read. The result is empty if the run may still start, has started, or
        cannot be read.
        """
        try:
            if not awaits_manager(self._run, state) or (job := job_of(self._run)) is None:
                return ""
            every = SLURM_CHECK_EVERY_S if traits_of(job.cluster).manager_is_a_job else 0.0
            now = time.monotonic()
            if not self._checked_at or now - self._checked_at >= every:
                from ...manager.bootstrap.start_failure import start_failure

                self._failure, self._checked_at = start_failure(self._run, job), now
                if self._failure and not awaits_manager(self._run, read_state(self._run)):
                    self._failure = ""  # a manager began the run, and ended, since its journal was read
        except OSError:
            return ""
        return self._failure
