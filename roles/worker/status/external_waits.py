"""Waits of this process for services that are not part of the run, such as a judge model behind an HTTP interface.

A service that limits the rate of its clients (HTTP 429) may make them wait for a quarter of an hour. A role that waits
in such a back-off looks like a hung role. Therefore it reports the wait as a phase of its own
(:data:`rrl.core.phases.WAIT_EXTERNAL`), which may last much longer than the phase in which the role calls the service.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from ....core.phases import WAIT_EXTERNAL
from ....core.types import ReplicaId
from ...launcher.end_report import mark_environmental
from .clocks import boot_time_ns

REPORTED_AFTER_S = 5.0
"""Seconds that a wait must last before it is reported. Ordinary calls of a service are shorter. They are not reported,
because a role may make many of them, and each report is an event in the run's journal."""
_services = Counter[str]()
"""Number of threads that wait, by service. It is a global variable, because a process is a single member of a run."""
_waiting_since = 0.0
"""Time (s, monotonic clock) since which at least one thread has waited."""
_began_ns, _waited_ns = 0, 0
"""Start (ns, :func:`rrl.roles.worker.status.clocks.boot_time_ns`) of the present wait, and total duration of the
earlier waits. A wait lasts while at least one thread waits."""
_lock = threading.Lock()


@contextmanager
def waiting(service: str) -> Iterator[None]:
    """Report inside the block that this process waits for ``service``, which is not part of the run.

    Any thread may use this, also several at a time. Outside of a run it has no effect, so that a task's scorer can use
    it everywhere. An exception that leaves the block counts as caused by the service, not by the code.
    """
    global _waiting_since, _began_ns, _waited_ns
    with _lock:
        if not _services:
            _waiting_since, _began_ns = time.monotonic(), boot_time_ns()
        _services[service] += 1
    try:
        yield
    except BaseException as error:
        mark_environmental(error)  # the service may be at fault, not the code
        raise
    finally:
        with _lock:
            _services[service] -= 1
            if not _services[service]:
                del _services[service]
            if not _services:
                _waited_ns += boot_time_ns() - _began_ns


def awaited_service() -> str:
    """Return a service for which this process has waited for ``REPORTED_AFTER_S``; an empty text if there is none."""
    with _lock:
        if time.monotonic() < _waiting_since + REPORTED_AFTER_S:
            return ""
        return next(iter(_services), "")


def waited_ns(now: int) -> int:
    """Return the total time (ns) before ``now`` in which at least one thread of this process waited for a service.

    ``now`` is a time of :func:`boot_time_ns`. Waits that are too short to be reported count, too.
    """
    with _lock:
        return _waited_ns + (max(0, now - _began_ns) if _services else 0)


def reported_phase(phase: tuple[str, ReplicaId | None]) -> tuple[str, ReplicaId | None]:
    """Return what a process that is in ``phase`` reports: a phase, and the replica that it waits for, or None.

    If a service has been awaited for ``REPORTED_AFTER_S``, this is WAIT_EXTERNAL without a replica, else ``phase``.
    """
    return (WAIT_EXTERNAL, None) if awaited_service() else phase
