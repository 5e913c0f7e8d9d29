"""How fast each replica works, against its peers. Kept as it is heard, in rounds: all are compared at a round's end,
and what comes out lies with each replica, so that a detector need look at one of them only.

Rollouts: tokens per second in which they generate and are not idle (a tool that is waited for makes nobody slow), over
a minute. Members of a gang: from the begin of a training pass to its last sign of progress, or to its end where there
is none. In lockstep that tells nothing apart, and nobody is called slow. Thresholds: docs/sources.md (NVRx: < 0.75).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median

from rrl.spec.words import Life

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
