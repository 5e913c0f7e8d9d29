"""Checks whether a submitted run can still be begun by a manager, as often as Slurm can bear."""

from __future__ import annotations

import time

from ...core.run_dir import RunDir
from ...manager.bootstrap.pool_supervisor import awaits_manager
from ...manager.model.state import State
from ..common.runs import UsageError, job_of, read_state

SLURM_CHECK_EVERY_S = 10.0
"""Interval (s) of querying Slurm, whose queue may hold the manager for days.

This makes six commands a minute, as many as a manager makes itself (three in each poll, one poll each ``limits.poll``).
"""


class NeverBegan(UsageError):
    """All managers that were submitted have ended before the run began: it ends as ``rejected``, exit code 2."""


class StartCheck:
    """Watches the managers that were submitted for one run, until one of them begins it."""

    def __init__(self, run: RunDir) -> None:
        self._run = run
        self._checked_at = 0.0
        """Time (time.monotonic()) of the last check."""
        self._failure = ""

    def failure(self, state: State | None) -> str:
        """Return why the run with this ``state`` will never start, or resume if that was requested.

        Empty while it still may, once it has, and if that is unknown.
        """
        try:
            if not awaits_manager(self._run, state) or (job := job_of(self._run)) is None:
                return ""
            every = SLURM_CHECK_EVERY_S if job.cluster == "slurm" else 0.0
            now = time.monotonic()
            if not self._checked_at or now - self._checked_at >= every:
                from ...manager.bootstrap.start_failure import start_failure

                self._failure, self._checked_at = start_failure(self._run, job), now
                if self._failure and not awaits_manager(self._run, read_state(self._run)):
                    self._failure = ""  # a manager began the run, and ended, since its journal was read
        except OSError:
            return ""
        return self._failure
