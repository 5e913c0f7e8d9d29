"""Counts how a worker's process uses its time: by phase, and by what the process waits for.

A process is in exactly one phase at a time, whichever of its threads entered the phase, and waits for at most one
cause. So each moment of its lifetime is counted once, even if phases are nested or other threads enter phases, and all
times add up to the lifetime. If the process is stopped (SIGSTOP) or its machine is suspended, this time counts for the
phase in which the stop happened.

The journal's phases are too coarse for these times: a phase that lasts less than 0.25 s is not reported. The counted
times are shown to people only; no detector and no plan reads them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ....core.phases import MAX_CLOCK_ENTRIES, OTHER_PHASE, WAIT_EXTERNAL, ClockReading, PhaseTime, phase


def boot_time_ns() -> int:
    """Return the time (ns) since the machine's boot, in which a suspended machine's time is included."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)


def _no_external_wait(now: int) -> int:
    return 0


class PhaseClock:
    """The clock of one process. All methods may be called in any thread.

    Args:
        name: The phase in which the process begins.
        now: A monotonic clock (ns).
        external: Returns the total time (ns) in which at least one thread of this process waited for a service outside
            of the run, up to the time of ``now`` that is its argument. These waits count as
            :data:`rrl.core.phases.WAIT_EXTERNAL` instead of the phase in which the wait happened.
    """

    def __init__(
        self, name: str, now: Callable[[], int] = boot_time_ns, external: Callable[[int], int] = _no_external_wait
    ) -> None:
        self._now, self._external = now, external
        self._lock = threading.Lock()
        self._thread = threading.get_ident()
        """Thread that entered the current phase: only its waits make the process idle."""
        self._waits: list[tuple[int, str]] = []
        """(thread, cause) of each wait that has begun and not ended, oldest first."""
        self._start(name)

    def restart(self, name: str) -> None:
        """Begin again in phase ``name``, as for a new process, after the promotion of a standby process."""
        with self._lock:
            self._start(name)

    def enter(self, name: str, idle_cause: str = "") -> None:
        """Enter a phase; ``idle_cause`` names what the process waits for in this phase, or is empty if it works."""
        with self._lock:
            self._count()
            self._phase, self._idle_cause, self._thread = name, idle_cause, threading.get_ident()

    @contextmanager
    def idle(self, cause: str) -> Iterator[None]:
        """Count the time inside the block as idle, waiting for ``cause``. The phase stays.

        The wait of a thread counts only while the process is in a phase that the same thread entered: while another
        thread works, the process is not idle. A phase that is itself a wait keeps its own cause.
        """
        wait = (threading.get_ident(), cause)
        with self._lock:
            self._count()
            self._waits.append(wait)
        try:
            yield
        finally:
            with self._lock:
                self._count()
                self._waits.remove(wait)

    def read(self, done: int = 0) -> ClockReading:
        """Return the times until now, and ``done``, the progress of the process."""
        with self._lock:
            self._count()
            times = tuple(PhaseTime(name, cause, ns) for (name, cause), ns in self._times.items())
            return ClockReading(self._began, done, times)

    def _start(self, name: str) -> None:
        self._began = self._counted_until = self._now()
        self._external_counted = self._external(self._began)
        self._phase, self._idle_cause = name, ""
        self._times: dict[tuple[str, str], int] = {}

    def _count(self) -> None:
        """Add the time since the last count to the process's phase and idle cause."""
        now = self._now()
        passed, self._counted_until = now - self._counted_until, now
        # External waits are measured under another lock and may exceed the passed time. The excess is counted later.
        external = min(passed, max(0, self._external(now) - self._external_counted))
        self._external_counted += external
        self._add(WAIT_EXTERNAL, phase(WAIT_EXTERNAL).idle_cause, external)
        self._add(self._phase, self._idle_cause or self._cause_of_wait(), passed - external)

    def _cause_of_wait(self) -> str:
        """Return the cause of the newest wait of the thread that entered the phase; empty if it does not wait."""
        return next((cause for thread, cause in reversed(self._waits) if thread == self._thread), "")

    def _add(self, name: str, cause: str, ns: int) -> None:
        key = (name, cause)
        if key not in self._times:
            if not ns:
                return
            if len(self._times) >= MAX_CLOCK_ENTRIES - 1:
                key = (OTHER_PHASE, "")
        self._times[key] = self._times.get(key, 0) + ns
