"""Seconds that an engine takes for a token, learned for each rollout from the times of its own appends.

An engine that runs b answers takes τ(b) seconds for one token of each answer. τ differs between models, GPUs and
engines, so τ is observed in a rollout's appends rather than looked up in a table of devices. A rollout also pauses (it
loads weights, or waits for work), so τ is a low quantile of the last observations. τ never decreases as b grows.

:class:`AppendTimes` turns appends into observations, and :class:`TokenTimes` is a fold over observations. The store
writes each observation to its log before the observation counts, so a restarted store has the same times.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence

from msgspec import Struct

MAX_RUNNING = 512
"""Largest number of running answers with its own τ (seconds for a token); any larger number has the same τ."""
_RECENT = 16
"""Number of newest observations that are kept for each range of numbers of running answers."""
_QUANTILE = 0.33
"""Share of the observations that are assumed not to contain a pause."""
_FIRST_TOKEN_S = 0.02
"""Assumed seconds for a token of the only running answer, before a rollout has appended anything."""
_SHORTEST_TOKEN_S = 1e-7
"""Seconds below which an observation is an error of the clock."""
_GROWTH_PER_ANSWER = 1 / 64
"""Assumed growth g of the time that a token takes. Where the time was not observed, it is assumed to be proportional to
1 + g * b, where b is the number of running answers. The value is between those of a dense 7B model on a GPU (1/160) and
of a CPU (1/4)."""
_SAMPLES_PER_APPEND = 4
"""Number of trajectories of an append that are evaluated. More are not needed, because all of them ran side by side and
so have equal times."""


class Observed(Struct, frozen=True, array_like=True):
    """Durations that were observed in the appends of one rollout, in the order of observation."""

    tokens: tuple[tuple[int, float], ...] = ()
    """Pairs of (number of running answers, seconds for one token of each answer)."""


class TokenTimes:
    """The seconds that one rollout takes to make a token (τ)."""

    def __init__(self) -> None:
        self._ranges: dict[int, deque[tuple[int, float]]] = {}
        """Newest (number b of running answers, seconds per token), by range of b. Each range is half an octave."""
        self._table: tuple[float, ...] | None = None

    def add(self, observed: Observed) -> None:
        """Add observations."""
        for running, seconds in observed.tokens:
            self.observe(running, seconds)

    def observations(self) -> Observed:
        """Return the observations that still count; adding them to a new object makes it equal to this one."""
        return Observed(tuple(pair for ring in self._ranges.values() for pair in ring))

    def observe(self, running: int, seconds: float) -> None:
        """Record that a token took ``seconds`` while this number of answers was running."""
        if running < 1 or not _SHORTEST_TOKEN_S <= seconds < math.inf:
            return
        ring = self._ranges.setdefault(round(2 * math.log2(running)), deque(maxlen=_RECENT))
        ring.append((running, seconds))
        self._table = None

    @property
    def observed(self) -> bool:
        """True if the seconds for a token were observed, with any number of running answers."""
        return bool(self._ranges)

    def table_among(self, others: Iterable[TokenTimes]) -> Sequence[float]:
        """Return :attr:`table`, or the median table of other engines if nothing was observed of this one.

        Engines of a run are usually alike, whereas the default may be wrong by a factor of ten. With the default, a new
        engine would get far too little or too much work beside engines whose times are known.
        """
        if self.observed or not (known := sorted(other.table for other in others if other.observed)):
            return self.table
        return known[len(known) // 2]

    @property
    def table(self) -> tuple[float, ...]:
        """Seconds for a token of each answer, by the number of running answers (0 to :data:`MAX_RUNNING`)."""
        if self._table is None:
            self._table = _tabled(self._points())
        return self._table

    def _points(self) -> list[tuple[float, float]]:
        """Return (mean number of running answers, seconds for a token) of each range, in ascending order of both."""
        points: list[tuple[float, float, int]] = []
        for index in sorted(self._ranges):
            ring = self._ranges[index]
            seconds = sorted(seconds for _, seconds in ring)[int(_QUANTILE * (len(ring) - 1))]
            points.append((sum(running for running, _ in ring) / len(ring), seconds, len(ring)))
            while len(points) > 1 and points[-1][1] < points[-2][1]:  # pool neighbours that would fall
                (b1, s1, n1), (b2, s2, n2) = points[-2:]
                n = n1 + n2
                points[-2:] = [((b1 * n1 + b2 * n2) / n, (s1 * n1 + s2 * n2) / n, n)]
        return [(running, seconds) for running, seconds, _ in points]


class AppendTimes:
    """Turns a rollout's appends into observations of its times. All times are in seconds of any monotonic clock."""

    def __init__(self) -> None:
        self._last: dict[int, tuple[float, int]] = {}
        """For each running answer: the time of its last append, and the number of answers that ran at this time."""

    def appended(self, tokens: Sequence[tuple[int, int]], running: int, now: float) -> Observed:
        """Record an append of (trajectory, number of new tokens), and how many answers the rollout runs.

        Returns the observations that follow from the append. The first append of a trajectory after its lease shows
        nothing, because the rollout has first read its prompt or prefix.
        """
        pairs: list[tuple[int, float]] = []
        for trajectory, count in tokens:
            before, self._last[trajectory] = self._last.get(trajectory), (now, running)
            if before is not None and count >= 1 and len(pairs) < _SAMPLES_PER_APPEND:
                since, then = before
                pairs.append(((running + then + 1) // 2, (now - since) / count))
        return Observed(tuple(pairs))

    def ended(self, trajectories: Iterable[int]) -> None:
        """Forget answers that the rollout no longer runs."""
        for trajectory in trajectories:
            self._last.pop(trajectory, None)


def _tabled(points: Sequence[tuple[float, float]]) -> tuple[float, ...]:
    """Return the table through the points, interpolated between them, and with the default growth outside of them."""
    if not points:
        points = [(1.0, _FIRST_TOKEN_S)]
    # This runs after most observations. One comprehension per interval is three times as fast as a search for each b.
    ends = [min(math.ceil(running), MAX_RUNNING + 1) for running, _ in points]
    table = [0.0, *_grown(points[0], range(1, ends[0]))]
    for (b1, s1), (b2, s2), end in zip(points, points[1:], ends[1:], strict=False):
        growth, distance = s2 - s1, b2 - b1
        table += [s1 + growth * (running - b1) / distance for running in range(len(table), end)]
    return (*table, *_grown(points[-1], range(len(table), MAX_RUNNING + 1)))


def _grown(point: tuple[float, float], numbers: range) -> list[float]:
    """Return the seconds for a token with these numbers of answers, extrapolated from ``point`` with default growth."""
    running, seconds = point
    share = 1 + running * _GROWTH_PER_ANSWER
    return [seconds * (1 + number * _GROWTH_PER_ANSWER) / share for number in numbers]
