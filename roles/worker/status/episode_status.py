"""Phase and progress of a process that makes attempts at episodes.

The process's own code reports how many attempts are at work; the thread of its endpoint reports how many calls wait and
were answered. So the phase is right even if the code of an agent blocks its thread. As soon as no call waits for
tokens, the phase is ``act``, in which a process without progress becomes overdue.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType

from ....core.phases import BETWEEN
from ....core.run_spec import RunSpec
from ....core.types import ReplicaId
from .work_status import entered_phase


class EpisodeStatus:
    """Reports the phase and progress of a process that makes attempts at episodes.

    It is a context manager. The phases are reported inside its block; at the end the process enters the phase
    ``between``.

    Args:
        job: The job.
        set_phase: Enters the phase with this name; the further arguments are the replica that it waits for, and its
            idle cause.
        count: Adds units of work.
    """

    def __init__(
        self, job: RunSpec, set_phase: Callable[[str, ReplicaId | None, str | None], None], count: Callable[[int], None]
    ) -> None:
        self._job, self._set_phase, self._count = job, set_phase, count
        self._lock = threading.Lock()
        self._waiting = self._answered = 0
        self.at_work = 0
        """Number of attempts at work."""
        self._phase = ""

    def __enter__(self) -> EpisodeStatus:
        with self._lock:
            self._enter()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._set_phase(BETWEEN, None, None)

    def attempts_changed(self, at_work: int) -> None:
        """Report the number of attempts at work."""
        with self._lock:
            self.at_work = at_work
            self._enter()

    def endpoint_changed(self, waiting: int, answered: int) -> None:
        """Report the number of calls that wait for tokens, and the number of calls that were answered so far."""
        with self._lock:
            if answered > self._answered:
                self._count(answered - self._answered)
            self._waiting, self._answered = waiting, answered
            self._enter()

    def _enter(self) -> None:
        phase = "wait_work" if not self.at_work else "wait_turn" if self._waiting else "act"
        if phase != self._phase:
            self._phase = phase
            self._set_phase(*entered_phase(self._job, phase, None))
