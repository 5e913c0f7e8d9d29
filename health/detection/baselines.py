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

from ...core.types import Life

WINDOW = 60.0
"""s of one round of a role that makes tokens"""
SLOW_ROLLOUT = 0.5
"""of the median of its peers. NVRx says 0.75 of ranks that do the same; rollouts do not: fewer answers at once are
fewer tokens"""
SLOW_RANK = 0.75
"""of the median of its gang (NVRx)"""
ROUNDS = 5
"""in a row before one speaks of a straggler"""
_SHARE = 0.5
"""of a window that must have been spent generating"""
_LEAST_WORK = 64
"""units (tokens) of the median of a window; below it nobody works enough to be compared"""
_LEAST_PEERS = 2
_LEAST_SECONDS = 2.0
"""s that a rank must be slower by: its beats come once in a second"""


@dataclass(slots=True)
class Pace:
    """Of one life."""

    work: int = 0
    """units done in this round"""
    seconds: float = 0.0
    """s at it in this round"""
    at: float | None = None
    """when it was last added to"""
    slow: int = 0
    """rounds in a row in which it was"""
    slow_since: float = 0.0
    by_tokens: bool = True
    """else: by passes of its gang"""


@dataclass(slots=True)
class _Round:
    began: float
    members: dict[Life, Pace] = field(default_factory=dict)


class Paces:
    """The rounds that run. ``add`` and ``passed`` return whom a detector has to look at again."""

    def __init__(self) -> None:
        self._rounds: dict[str, _Round] = {}
        self._passes: dict[Life, dict[Life, tuple[Pace, float]]] = {}

    def add(self, role: str, who: Life, pace: Pace, work: int, working: bool, now: float) -> list[Life]:
        """``work`` more is done; ``working``: it was at it since last time. Returns whose standing has changed."""
        running = self._rounds.setdefault(role, _Round(now))
        changed: list[Life] = []
        if now - running.began >= WINDOW:
            changed = _compare(running.members, now)
            self._rounds[role] = running = _Round(now)
        if working and pace.at is not None and 0 < now - pace.at < WINDOW / 4:
            pace.work += work
            pace.seconds += now - pace.at
        pace.at = now
        running.members[who] = pace
        return changed

    def passed(self, gang: Life, who: Life, pace: Pace, seconds: float, now: float) -> list[Life]:
        """A member came through a pass of training in so many s; the round ends when one comes for the second time."""
        members = self._passes.setdefault(gang, {})
        changed: list[Life] = []
        if who in members:
            changed = _compare_ranks(members, now)
            members.clear()
        members[who] = pace, seconds
        pace.by_tokens = False
        return changed

    def forget(self, who: Life, gang: Life) -> None:
        for running in self._rounds.values():
            running.members.pop(who, None)
        self._passes.pop(gang, None)

    def restart(self) -> None:
        self._rounds.clear()
        self._passes.clear()


def _compare(members: Mapping[Life, Pace], now: float) -> list[Life]:
    rates = {who: pace.work / pace.seconds for who, pace in members.items() if pace.seconds >= _SHARE * WINDOW}
    changed: list[Life] = []
    if len(rates) > _LEAST_PEERS and median(members[who].work for who in rates) >= _LEAST_WORK:
        ordered = sorted(rates.values())
        for who, rate in rates.items():
            if _told(members[who], rate < SLOW_ROLLOUT * _median_without(ordered, rate), now):
                changed.append(who)
    for pace in members.values():
        pace.work, pace.seconds = 0, 0.0
    return changed


def _compare_ranks(members: Mapping[Life, tuple[Pace, float]], now: float) -> list[Life]:
    if len(members) < 2:
        return []
    ordered = sorted(seconds for _, seconds in members.values())
    changed: list[Life] = []
    for who, (pace, seconds) in members.items():
        others = _median_without(ordered, seconds)
        if _told(pace, others < SLOW_RANK * seconds and seconds - others >= _LEAST_SECONDS, now):
            changed.append(who)
    return changed


def _median_without(ordered: list[float], one: float) -> float:
    """Of its peers: all but itself. ``ordered`` ascending, ``one`` of them; the upper of two middle ones."""
    middle = (len(ordered) - 1) // 2
    return ordered[middle + 1] if one <= ordered[middle] else ordered[middle]


def _told(pace: Pace, slow: bool, now: float) -> bool:
    before = pace.slow >= ROUNDS
    if slow and pace.slow == 0:
        pace.slow_since = now
    pace.slow = pace.slow + 1 if slow else 0
    return before != (pace.slow >= ROUNDS)


_WINDOW = 32
"""durations remembered per role and phase"""
_ENOUGH = 3
"""durations before one speaks of usual (docs/sources.md, guard rails: three in a row)"""


class Took(Struct, frozen=True):
    """So many durations in a few words: their median and the longest of them (s)."""

    count: int
    median: float
    longest: float


class Measure(Struct, frozen=True):
    """``median`` (s; None: too few are known) and the longest of them."""

    median: float | None = None
    longest: float = 0.0


_UNKNOWN = Measure()


class Usual:
    """Over all replicas of a role: a replacement inherits it, and one outlier does not move it."""

    def __init__(self) -> None:
        self._durations: dict[tuple[str, str], deque[float]] = {}
        self._measures: dict[tuple[str, str], Measure] = {}

    def add(self, role: str, phase: str, seconds: float) -> None:
        key = role, phase
        self._durations.setdefault(key, deque(maxlen=_WINDOW)).append(seconds)
        self._measures.pop(key, None)

    def remember(self, role: str, phase: str, took: Took) -> None:
        """What was usual before anything is added. The longest counts as the newest: it is forgotten last."""
        count = min(max(took.count, _ENOUGH), _WINDOW)
        self._durations[role, phase] = deque([took.median] * (count - 1) + [took.longest], maxlen=_WINDOW)
        self._measures.pop((role, phase), None)

    def took(self) -> dict[str, dict[str, Took]]:
        """By role and phase, where enough is known."""
        known: dict[str, dict[str, Took]] = {}
        for (role, phase), durations in self._durations.items():
            if (measure := self.of(role, phase)).median is not None:
                known.setdefault(role, {})[phase] = Took(len(durations), measure.median, measure.longest)
        return known

    def of(self, role: str, phase: str) -> Measure:
        """Sorted once for each new duration, not for each that asks."""
        key = role, phase
        if (known := self._measures.get(key)) is None:
            durations = sorted(self._durations.get(key, ()))
            known = Measure(durations[len(durations) // 2], durations[-1]) if len(durations) >= _ENOUGH else _UNKNOWN
            self._measures[key] = known
        return known


CHANGE = 0.2
"""share by which a duration must change to be worth a record (ours: a tenth of what ``adaptive`` leaves)"""
LEAST = 1.0
"""s by which it must, too: below it no deadline moves"""


class Lesson(Struct, frozen=True):
    """Of one role."""

    phases: dict[str, Took] = {}
    tensor_seen: bool = False
    """tensor cores were seen at work: where they can be seen, their rest says something"""
    answers: bool = False
    """it answers probes while it waits"""
    slowest_load: float = 0.0
    """s: the longest that it lately took to load weights"""


def noticeable(before: Mapping[str, Lesson], after: Mapping[str, Lesson]) -> bool:
    """A deadline would be another one, or rest on twice as much."""
    return before.keys() != after.keys() or any(_differs(before[role], lesson) for role, lesson in after.items())


def _differs(before: Lesson, after: Lesson) -> bool:
    if before.phases.keys() != after.phases.keys():
        return True
    if (before.tensor_seen, before.answers) != (after.tensor_seen, after.answers):
        return True
    return _moved(before.slowest_load, after.slowest_load) or any(
        took.count >= 2 * old.count or _moved(old.median, took.median) or _moved(old.longest, took.longest)
        for old, took in ((before.phases[name], took) for name, took in after.phases.items())
    )


def _moved(before: float, after: float) -> bool:
    return abs(after - before) > max(LEAST, CHANGE * max(before, after))
