"""The current status of this process: its phase, what it waits for, its progress and its clock.

The worker's threads change the status, and the thread of the connection reports it. Only the manager draws conclusions
from it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from math import inf
from typing import NamedTuple

from ....core.phases import ClockReading, idle_cause, phase
from ....core.run_spec import RunSpec
from ....core.types import STORE, DataReport, Incarnation, ReplicaId, Version, WeightTraffic, replica_id
from ....transport.messages import MAX_LOGGED_NAME_CHARS, MAX_LOGGED_NAMES, Heartbeat
from . import external_waits
from .clocks import PhaseClock

STORE_CAUSE = "store"
"""Idle cause of a thread that waits for an answer of the trajectory store."""
REPORT_HOLDS_S = 5.0
"""Seconds for which the heartbeats of the store repeat a report of :meth:`WorkStatus.report_data`. The loop that serves
the store's requests repeats the report several times a second. If this loop hangs, the trainer cannot get its data, and
the report ends because the calls stop."""


class CurrentPhase(NamedTuple):
    """A phase, the replica that it waits for, and the idle cause under which its time counts."""

    name: str
    waits_for: ReplicaId | None = None
    idle_cause: str = ""


def entered_phase(job: RunSpec, name: str, waits_for: str | None) -> CurrentPhase:
    """Return phase ``name`` with the replica for which a process waits in this phase.

    ``waits_for`` is a replica, or what a phase may wait for (``Phase.waits_for``). None stands for what the phase
    declares, if anything. If that is a single replica, the result names it, else it names none.
    """
    target = waits_for or phase(name).waits_for
    cause = idle_cause(name, target)
    if target is None or "/" in target:
        return CurrentPhase(name, None if target is None else ReplicaId(target), cause)
    roles = [role for role in job.roles if role.awaited_as == target]
    may_grow = any(role.is_elastic or (role.traits.leases_turns and "rollout" in job.tags.spare) for role in roles)
    single = len(roles) == 1 and roles[0].replicas == 1 and not may_grow
    return CurrentPhase(name, replica_id(roles[0].name, 0) if single else None, cause)


class WorkStatus:
    """The status of one process, which begins in phase ``name``. All methods may be called in any thread."""

    def __init__(self, name: str) -> None:
        self.phase = CurrentPhase(name)
        """The current phase in one value, so that no heartbeat mixes two phases."""
        self.clock = PhaseClock(name, external=external_waits.waited_ns)
        self.blocked_on: ReplicaId | None = None
        """The replica that this process waits for in any phase; if None, heartbeats name the replica of the phase."""
        self.note = ""
        """The text shown beside this replica in `rrl status`; empty if there is none."""
        self.done = 0
        """Units of work that this process reported as progress."""
        self._data_report, self._data_reported_at = DataReport(), -inf
        """Report of the last call of :meth:`report_data`, and its monotonic time (s); -inf before the first call."""
        self._store_calls = 0
        """Number of threads that wait for the store; a trainer may have two, because it commits in a second thread."""
        self._logged: dict[str, float] = {}
        """Newest values that the role logged since the last report, by name."""
        self._lock = threading.Lock()
        """Held while ``done``, the number of waiting threads or the logged values change."""

    def restart(self, name: str) -> None:
        """Begin again in phase ``name``, as the status of another incarnation, whose clock starts now."""
        self.phase = CurrentPhase(name)
        self.clock.restart(name)

    def enter(self, name: str, waits_for: ReplicaId | None, cause: str | None = None) -> None:
        """Enter phase ``name``, in which the process waits for the replica ``waits_for``, or for none.

        ``cause`` is the phase's idle cause. If it is None, the idle cause follows from phase and replica.
        """
        self.phase = CurrentPhase(name, waits_for, idle_cause(name, waits_for) if cause is None else cause)
        self.clock.enter(name, self.phase.idle_cause)

    @contextmanager
    def store_call(self) -> Iterator[None]:
        """Report inside the block a wait for the store, and count it as idle (:meth:`PhaseClock.idle`)."""
        with self._lock:
            self._store_calls += 1
        try:
            with self.clock.idle(STORE_CAUSE):
                yield
        finally:
            with self._lock:
                self._store_calls -= 1

    @contextmanager
    def blocked_on_replica(self, replica: ReplicaId | None) -> Iterator[None]:
        """Report inside the block that this process waits for ``replica``, if it is not None, whatever its phase is."""
        self.blocked_on = replica
        try:
            yield
        finally:
            self.blocked_on = None

    def add_done(self, units: int) -> bool:
        """Add units of work, and return whether they are the first units."""
        with self._lock:
            first = self.done == 0 and units > 0
            self.done += units
        return first

    def log(self, values: Mapping[str, float]) -> None:
        """Keep the newest value of each name for the next report.

        Raises:
            TypeError: A value is not a number.
            ValueError: A name is longer than ``MAX_LOGGED_NAME_CHARS``, or there are more than ``MAX_LOGGED_NAMES``.
        """
        numbers: dict[str, float] = {}
        for name, value in values.items():
            if len(name) > MAX_LOGGED_NAME_CHARS:
                raise ValueError(f"me.log: the name {name[:20]!r}... has more than {MAX_LOGGED_NAME_CHARS} characters")
            try:
                numbers[name] = float(value)
            except (TypeError, ValueError, OverflowError):
                raise TypeError(f"me.log({name}=...): {value!r} is not a number") from None
        with self._lock:
            merged = {**self._logged, **numbers}
            if len(merged) > MAX_LOGGED_NAMES:
                raise ValueError(f"me.log: more than {MAX_LOGGED_NAMES} names within a few seconds; use fewer names")
            self._logged = merged

    def take_logged(self) -> dict[str, float]:
        """Return the logged values that are not reported yet; from now on they count as reported."""
        with self._lock:
            taken, self._logged = self._logged, {}
        return taken

    def report_data(self, report: DataReport) -> None:
        """Report in the heartbeats of the next ``REPORT_HOLDS_S`` what the store knows about the trainer's next data.

        Only the process of the store calls this method.
        """
        self._data_report, self._data_reported_at = report, time.monotonic()

    def reported_phase(self) -> tuple[str, ReplicaId | None]:
        """Return the phase to report now, and the replica that this process waits for in this phase, or None."""
        return external_waits.reported_phase(self.phase[:2])

    def heartbeat(
        self, incarnation: Incarnation, weights: Version | None = None, traffic: WeightTraffic = WeightTraffic()
    ) -> Heartbeat:
        """Return the heartbeat to send now; ``weights`` is the weight version that this process has got."""
        name, waits_for = self.reported_phase()
        blocked_by = STORE if self._store_calls else self.blocked_on or waits_for
        note = f"waits for {service}" if (service := external_waits.awaited_service()) else self.note
        fresh = time.monotonic() - self._data_reported_at < REPORT_HOLDS_S
        data = self._data_report if fresh else DataReport()
        return Heartbeat(incarnation, name, self.done, blocked_by, note, data, weights, traffic)

    def read_clock(self) -> ClockReading:
        """Return how this process has used its time until now."""
        return self.clock.read(self.done)
