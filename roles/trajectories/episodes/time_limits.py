"""Time limits of attempts by agents outside of the run, and of rewards that come later.

Time limits are not durable: after a restart of the store each limit begins again. The caller checks whether an expired
limit still applies, so that no limit has to be removed when an attempt ends or a reward arrives.
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heappop, heappush
from math import inf


class TimeLimits:
    """The time limits of episodes. Times are in seconds of the clock whose time is passed to :meth:`expired`."""

    def __init__(self) -> None:
        self._new: list[tuple[float, int, int]] = []
        """(duration in seconds, episode, attempt) of each limit that begins with the next call of :meth:`expired`."""
        self._heap: list[tuple[float, int, int]] = []
        """(time in seconds at which the limit ends, episode, attempt) of each limit that has begun."""

    def begin(self, episode: int, attempt: int, seconds: float) -> None:
        """Begin a time limit of an attempt."""
        self._new.append((seconds, episode, attempt))

    @property
    def due(self) -> float:
        """The time at which :meth:`expired` must be called next; inf if there are no limits."""
        return -inf if self._new else self._heap[0][0] if self._heap else inf

    def seconds_left(self, now: float) -> dict[tuple[int, int], float]:
        """Return the time (s) until the end of each limit that has begun, by episode and attempt."""
        return {(episode, attempt): end - now for end, episode, attempt in self._heap}

    def expired(self, now: float) -> Iterator[tuple[int, int]]:
        """Yield episode and attempt of each limit that has ended since the last call."""
        for seconds, episode, attempt in self._new:
            heappush(self._heap, (now + seconds, episode, attempt))
        self._new.clear()
        while self._heap and self._heap[0][0] <= now:
            _, episode, attempt = heappop(self._heap)
            yield episode, attempt
