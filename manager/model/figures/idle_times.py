"""Total time of the run's processes by role, phase and idle cause, including processes that were replaced. Pure.

Each worker reports totals since its process joined (``rrl.core.phases.ClockReading``). The newest reading of each
replica is kept. When a new process of the replica reports, the last reading of the previous process is added to the
totals of the role. So the last report of a killed process counts, and a report that arrives twice counts once.

Detectors do not read these totals. The planner reads them in jobs with an elastic rollout pool (:mod:`.balance`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from msgspec import Struct
from msgspec.structs import replace

from ....core.phases import LEND, OTHER_PHASE, ClockReading, PhaseTime
from ....core.types import Incarnation, ReplicaId, role_of
from .stream_figures import as_count

RECENT_S = 300.0
"""Minimum length (s) of the interval from which recent idle shares and rates are computed. It may be longer by the time
between two entries (:class:`Point`) of ``IdleTimes.points``."""
POINT_INTERVAL_S = 20.0
"""Minimum seconds between two entries (:class:`Point`) of ``IdleTimes.points``, except before the newest entry. This
limits the number of entries within :data:`RECENT_S`."""
MAX_PHASES = 64
"""Maximum number of (phase, idle cause) pairs kept for a role; the time of further pairs is added up in one entry."""


class ProcessTime(Struct, frozen=True):
    """The newest reading of a replica's clock, and the number of the incarnation that reported it."""

    number: int
    clock: ClockReading


class RoleTime(Struct, frozen=True):
    """Total times and progress of the replaced processes of a role."""

    times: tuple[PhaseTime, ...] = ()
    done: int = 0


class RolePoint(Struct, frozen=True, array_like=True):
    """Total time (ns) of a role's processes by idle cause (empty for time at work), and their total progress."""

    ns: dict[str, int] = {}
    done: int = 0
    lent_ns: int = 0
    """Time (ns) of the phase ``lend``, which ``ns`` counts as time at work."""

    @property
    def total_ns(self) -> int:
        """Return the total time (ns) of the role's processes, idle or at work."""
        return sum(self.ns.values())


class Point(Struct, frozen=True, array_like=True):
    """The totals of all roles at the manager's time ``at`` (s)."""

    at: float
    roles: dict[str, RolePoint] = {}
    trained_tokens: int = 0


START = Point(0.0)
"""The totals before the run."""


class IdleTimes(Struct, frozen=True):
    """The readings of all processes of a run."""

    newest: dict[ReplicaId, ProcessTime] = {}
    replaced: dict[str, RoleTime] = {}
    """Totals of the processes that were replaced, by role."""
    points: tuple[Point, ...] = ()
    """Totals of the last minutes, oldest first; the last entry contains the newest totals."""
    trained_tokens: int = 0
    """Number of tokens in all committed steps whose metrics include ``tokens``."""

    @property
    def now(self) -> Point:
        """Return the newest totals."""
        return self.points[-1] if self.points else START

    @property
    def before(self) -> Point:
        """Return the point from which recent shares and rates are computed: the oldest of ``points``.

        If there are fewer than two points, this is ``START``.
        """
        return self.points[0] if len(self.points) > 1 else START


def with_readings(times: IdleTimes, at: float, readings: Iterable[tuple[Incarnation, ClockReading]]) -> IdleTimes:
    """Return the times with these readings, received until ``at`` (s); outdated readings are ignored."""
    newest, replaced = dict(times.newest), dict(times.replaced)
    for incarnation, clock in sorted(readings, key=lambda reading: (reading[0], reading[1].began)):
        held = newest.get(incarnation.replica)
        if held is not None and not _is_newer(incarnation.number, clock, held):
            continue
        if held is not None and (held.number, held.clock.began) != (incarnation.number, clock.began):
            role = role_of(incarnation.replica)
            total = replaced.get(role, RoleTime())
            replaced[role] = RoleTime(_sum(total.times, held.clock.times), total.done + held.clock.done)
        newest[incarnation.replica] = ProcessTime(incarnation.number, clock)
    changed = replace(times, newest=newest, replaced=replaced)
    return replace(changed, points=_with_point(times.points, _point(changed, at)))


def with_step(times: IdleTimes, metrics: Mapping[str, float]) -> IdleTimes:
    """Return the times with one more committed step, whose metric ``tokens`` is added to ``trained_tokens``."""
    return replace(times, trained_tokens=times.trained_tokens + as_count(metrics.get("tokens", 0.0)))


def phase_times(times: IdleTimes, role: str) -> tuple[PhaseTime, ...]:
    """Return the time (ns) of all processes of a role by phase and idle cause."""
    total = times.replaced.get(role, RoleTime()).times
    return _sum(total, *(held.clock.times for id, held in times.newest.items() if role_of(id) == role))


def idle_shares(now: Point, before: Point, role: str) -> dict[str, float]:
    """Return the idle shares of a role between two points (0 to 1), by idle cause, largest first."""
    new, old = now.roles.get(role, RolePoint()), before.roles.get(role, RolePoint())
    total = new.total_ns - old.total_ns
    if total <= 0:
        return {}
    shares = {cause: (ns - old.ns.get(cause, 0)) / total for cause, ns in new.ns.items() if cause}
    return dict(sorted(((cause, share) for cause, share in shares.items() if share > 0), key=lambda item: -item[1]))


def lent_share(now: Point, before: Point, role: str) -> float:
    """Return the share of a role's time between two points (0 to 1) in which its GPUs were lent."""
    new, old = now.roles.get(role, RolePoint()), before.roles.get(role, RolePoint())
    total = new.total_ns - old.total_ns
    return (new.lent_ns - old.lent_ns) / total if total > 0 else 0.0


def rate(units: int, now: Point, before: Point) -> float | None:
    """Return ``units`` per second between two points; None without an earlier point."""
    return units / (now.at - before.at) if before != START and now.at > before.at else None


def _is_newer(number: int, clock: ClockReading, held: ProcessTime) -> bool:
    """Return whether the reading is from a later process than ``held``, or a later reading of the same process."""
    if (number, clock.began) != (held.number, held.clock.began):
        return (number, clock.began) > (held.number, held.clock.began)
    return _total(clock.times) > _total(held.clock.times)


def _total(times: tuple[PhaseTime, ...]) -> int:
    return sum(time.ns for time in times)


def _sum(*readings: tuple[PhaseTime, ...]) -> tuple[PhaseTime, ...]:
    """Return the sums of the readings by phase and idle cause; pairs beyond ``MAX_PHASES`` are summed in one entry."""
    ns: dict[tuple[str, str], int] = {}
    for times in readings:
        for time in times:
            known = (time.phase, time.idle_cause) in ns or len(ns) < MAX_PHASES
            key = (time.phase if known else OTHER_PHASE, time.idle_cause if known else "")
            ns[key] = ns.get(key, 0) + time.ns
    return tuple(PhaseTime(phase, cause, spent) for (phase, cause), spent in ns.items())


def _point(times: IdleTimes, at: float) -> Point:
    roles: dict[str, RolePoint] = {}
    totals = [(role, total.times, total.done) for role, total in times.replaced.items()]
    totals += [(role_of(id), held.clock.times, held.clock.done) for id, held in times.newest.items()]
    for role, spent, done in totals:
        point = roles.get(role, RolePoint())
        ns, lent = dict(point.ns), point.lent_ns
        for time in spent:
            is_lent = time.phase == LEND  # then its GPUs work, although it may wait for the store
            cause, lent = "" if is_lent else time.idle_cause, lent + time.ns * is_lent
            ns[cause] = ns.get(cause, 0) + time.ns
        roles[role] = RolePoint(ns, point.done + done, lent)
    return Point(at, roles, times.trained_tokens)


def _with_point(points: tuple[Point, ...], new: Point) -> tuple[Point, ...]:
    """Return ``points`` with ``new`` added.

    ``new`` replaces the last entry if that entry is less than :data:`POINT_INTERVAL_S` after the one before it. Old
    entries are dropped if the recent figures no longer need them.
    """
    if len(points) > 1 and points[-1].at - points[-2].at < POINT_INTERVAL_S:
        points = points[:-1]
    points = (*points, new)
    while len(points) > 2 and points[1].at <= new.at - RECENT_S:
        points = points[1:]
    return points
