"""What is usual in a run: durations of phases, gaps between signs of progress, and throughput against peers.

Durations are kept per role and phase (:class:`Usual`). Throughput is compared in rounds: at the end of a round all
replicas of a role are compared, and the result is stored with each replica, so that a detector needs only that replica.
For rollouts it is tokens per second, over a minute, while they generate and are not idle (waiting for a tool is not
slow). For members of a gang it is the time from the start of a training pass to its last sign of progress, or to its
end where there is none; members in lockstep cannot be told apart, and none is called slow. Thresholds: docs/sources.md
(NVRx: < 0.75). Baselines are journaled, so that the next manager does not have to learn them again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median

from msgspec import Struct

from ...core.types import Incarnation

THROUGHPUT_WINDOW_S = 60.0
"""s of one round of a role that makes tokens"""
SLOW_ROLLOUT_SHARE = 0.5
"""of the median of its peers. NVRx says 0.75 of ranks that do the same; rollouts do not: fewer answers at once are
fewer tokens"""
SLOW_RANK_SHARE = 0.75
"""of the median of its gang (NVRx)"""
STRAGGLER_ROUNDS = 5
"""in a row before one speaks of a straggler"""
_MIN_ACTIVE_SHARE = 0.5
"""of a window that must have been spent generating"""
_MIN_MEDIAN_WORK = 64
"""units (tokens) of the median of a window; below it nobody works enough to be compared"""
_MIN_PEERS = 2
_MIN_SLOWER_BY_S = 2.0
"""s that a rank must be slower by: its beats come once in a second"""


@dataclass(slots=True)
class Throughput:
    """Of one life."""

    work: int = 0
    """units done in this round"""
    seconds: float = 0.0
    """s at it in this round"""
    last_added_at: float | None = None
    """when it was last added to"""
    slow_rounds: int = 0
    """rounds in a row in which it was"""
    slow_since: float = 0.0
    by_tokens: bool = True
    """else: by passes of its gang"""


@dataclass(slots=True)
class _Round:
    began: float
    members: dict[Incarnation, Throughput] = field(default_factory=dict)


class ThroughputRounds:
    """The rounds that run. ``add`` and ``passed`` return whom a detector has to look at again."""

    def __init__(self) -> None:
        self._rounds: dict[str, _Round] = {}
        self._passes: dict[Incarnation, dict[Incarnation, tuple[Throughput, float]]] = {}

    def add(
        self, role: str, incarnation: Incarnation, pace: Throughput, work: int, working: bool, now: float
    ) -> list[Incarnation]:
        """``work`` more is done; ``working``: it was at it since last time. Returns whose standing has changed."""
        running = self._rounds.setdefault(role, _Round(now))
        changed: list[Incarnation] = []
        if now - running.began >= THROUGHPUT_WINDOW_S:
            changed = _compare(running.members, now)
            self._rounds[role] = running = _Round(now)
        if working and pace.last_added_at is not None and 0 < now - pace.last_added_at < THROUGHPUT_WINDOW_S / 4:
            pace.work += work
            pace.seconds += now - pace.last_added_at
        pace.last_added_at = now
        running.members[incarnation] = pace
        return changed

    def on_pass(
        self, gang: Incarnation, incarnation: Incarnation, pace: Throughput, seconds: float, now: float
    ) -> list[Incarnation]:
        """A member came through a pass of training in so many s; the round ends when one comes for the second time."""
        members = self._passes.setdefault(gang, {})
        changed: list[Incarnation] = []
        if incarnation in members:
            changed = _compare_ranks(members, now)
            members.clear()
        members[incarnation] = pace, seconds
        pace.by_tokens = False
        return changed

    def remove(self, incarnation: Incarnation, gang: Incarnation) -> None:
        for running in self._rounds.values():
            running.members.pop(incarnation, None)
        self._passes.pop(gang, None)

    def reset(self) -> None:
        self._rounds.clear()
        self._passes.clear()


def _compare(members: Mapping[Incarnation, Throughput], now: float) -> list[Incarnation]:
    rates = {
        incarnation: pace.work / pace.seconds
        for incarnation, pace in members.items()
        if pace.seconds >= _MIN_ACTIVE_SHARE * THROUGHPUT_WINDOW_S
    }
    changed: list[Incarnation] = []
    if len(rates) > _MIN_PEERS and median(members[incarnation].work for incarnation in rates) >= _MIN_MEDIAN_WORK:
        ordered = sorted(rates.values())
        for incarnation, rate in rates.items():
            if _update_slow_rounds(
                members[incarnation], rate < SLOW_ROLLOUT_SHARE * _median_without(ordered, rate), now
            ):
                changed.append(incarnation)
    for pace in members.values():
        pace.work, pace.seconds = 0, 0.0
    return changed


def _compare_ranks(members: Mapping[Incarnation, tuple[Throughput, float]], now: float) -> list[Incarnation]:
    if len(members) < 2:
        return []
    ordered = sorted(seconds for _, seconds in members.values())
    changed: list[Incarnation] = []
    for incarnation, (pace, seconds) in members.items():
        others = _median_without(ordered, seconds)
        if _update_slow_rounds(pace, others < SLOW_RANK_SHARE * seconds and seconds - others >= _MIN_SLOWER_BY_S, now):
            changed.append(incarnation)
    return changed


def _median_without(ordered: list[float], value: float) -> float:
    """Of its peers: all but itself. ``ordered`` ascending, ``one`` of them; the upper of two middle ones."""
    middle = (len(ordered) - 1) // 2
    return ordered[middle + 1] if value <= ordered[middle] else ordered[middle]


def _update_slow_rounds(pace: Throughput, slow: bool, now: float) -> bool:
    before = pace.slow_rounds >= STRAGGLER_ROUNDS
    if slow and pace.slow_rounds == 0:
        pace.slow_since = now
    pace.slow_rounds = pace.slow_rounds + 1 if slow else 0
    return before != (pace.slow_rounds >= STRAGGLER_ROUNDS)


_MAX_DURATIONS = 32
"""durations remembered per role and phase"""
_MIN_DURATIONS = 3
"""durations before one speaks of usual (docs/sources.md, guard rails: three in a row)"""


class DurationStats(Struct, frozen=True):
    """So many durations in a few words: their median and the longest of them (s)."""

    count: int
    median: float
    longest: float


class TypicalDuration(Struct, frozen=True):
    """``median`` (s; None: too few are known) and the longest of them."""

    median: float | None = None
    longest: float = 0.0


_UNKNOWN = TypicalDuration()


class PhaseDurations:
    """Over all replicas of a role: a replacement inherits it, and one outlier does not move it."""

    def __init__(self) -> None:
        self._durations: dict[tuple[str, str], deque[float]] = {}
        self._typical: dict[tuple[str, str], TypicalDuration] = {}

    def add(self, role: str, phase: str, seconds: float) -> None:
        key = role, phase
        self._durations.setdefault(key, deque(maxlen=_MAX_DURATIONS)).append(seconds)
        self._typical.pop(key, None)

    def restore(self, role: str, phase: str, stats: DurationStats) -> None:
        """What was usual before anything is added. The longest counts as the newest: it is forgotten last."""
        count = min(max(stats.count, _MIN_DURATIONS), _MAX_DURATIONS)
        self._durations[role, phase] = deque([stats.median] * (count - 1) + [stats.longest], maxlen=_MAX_DURATIONS)
        self._typical.pop((role, phase), None)

    def stats(self) -> dict[str, dict[str, DurationStats]]:
        """By role and phase, where enough is known."""
        known: dict[str, dict[str, DurationStats]] = {}
        for (role, phase), durations in self._durations.items():
            if (typical := self.typical(role, phase)).median is not None:
                known.setdefault(role, {})[phase] = DurationStats(len(durations), typical.median, typical.longest)
        return known

    def typical(self, role: str, phase: str) -> TypicalDuration:
        """Sorted once for each new duration, not for each that asks."""
        key = role, phase
        if (known := self._typical.get(key)) is None:
            durations = sorted(self._durations.get(key, ()))
            known = (
                TypicalDuration(durations[len(durations) // 2], durations[-1])
                if len(durations) >= _MIN_DURATIONS
                else _UNKNOWN
            )
            self._typical[key] = known
        return known


MIN_CHANGE_SHARE = 0.2
"""share by which a duration must change to be worth a record (ours: a tenth of what ``adaptive`` leaves)"""
MIN_CHANGE_S = 1.0
"""s by which it must, too: below it no deadline moves"""


class RoleBaseline(Struct, frozen=True):
    """Of one role."""

    phases: dict[str, DurationStats] = {}
    uses_tensor_cores: bool = False
    """tensor cores were seen at work: where they can be seen, their rest says something"""
    answers_probes: bool = False
    """it answers probes while it waits"""
    slowest_load: float = 0.0
    """s: the longest that it lately took to load weights"""


def changed_noticeably(before: Mapping[str, RoleBaseline], after: Mapping[str, RoleBaseline]) -> bool:
    """A deadline would be another one, or rest on twice as much."""
    return before.keys() != after.keys() or any(_differs(before[role], baseline) for role, baseline in after.items())


def _differs(before: RoleBaseline, after: RoleBaseline) -> bool:
    if before.phases.keys() != after.phases.keys():
        return True
    if (before.uses_tensor_cores, before.answers_probes) != (after.uses_tensor_cores, after.answers_probes):
        return True
    return _moved(before.slowest_load, after.slowest_load) or any(
        stats.count >= 2 * old.count or _moved(old.median, stats.median) or _moved(old.longest, stats.longest)
        for old, stats in ((before.phases[name], stats) for name, stats in after.phases.items())
    )


def _moved(before: float, after: float) -> bool:
    return abs(after - before) > max(MIN_CHANGE_S, MIN_CHANGE_SHARE * max(before, after))
