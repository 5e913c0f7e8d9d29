"""How long things usually take: durations of phases and gaps between two signs of progress, per role and phase."""

from __future__ import annotations

from collections import deque

from msgspec import Struct

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
