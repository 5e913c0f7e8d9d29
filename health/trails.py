"""The past of one counter: totals by time, as few as its rates need."""

from __future__ import annotations

from collections.abc import Iterator

_STEP = 5.0
"""s: rises closer to each other than this are one"""
_BLINK = 300.0
"""s after a fall within which a total that is back where it was has never been away (ours)"""
_Past = tuple[float, float, int, int, list[tuple[float, int]], int]
"""when it fell, and ``start``, ``first``, ``_before``, ``_rises`` and ``last`` of then"""
_KEPT = 7200.0
"""s of past; longer than any window of a rule but "within a day", which asks for the whole rise"""


class Trail:
    """Totals only grow; one that shrinks (a driver was loaded anew) starts over. One that comes back in one step was
    misread meanwhile: only what it grew beyond its old total is a rise."""

    __slots__ = ("_before", "_fallen", "_rises", "first", "last", "start")

    def __init__(self, at: float, total: int) -> None:
        self.start, self.first, self.last, self._before = at, total, total, total
        self._rises: list[tuple[float, int]] = []
        """(at, total from then on), oldest first"""
        self._fallen: _Past | None = None
        """what it was before it fell, until it rises again"""

    def add(self, at: float, total: int) -> None:
        if total == self.last:
            return
        if total < self.last:
            self._fallen = self._fallen or (at, self.start, self.first, self._before, self._rises, self.last)
            self.start, self.first, self._before, self._rises, self.last = at, total, total, [], total
            return
        if self._fallen is not None:
            fell_at, start, first, before, rises, last = self._fallen
            self._fallen = None
            if total >= last and at - fell_at <= _BLINK:
                self.start, self.first, self._before, self._rises, self.last = start, first, before, rises, last
                self.add(at, total)
                return
        if self._rises and at - self._rises[-1][0] < _STEP:
            self._rises[-1] = (self._rises[-1][0], total)
        else:
            self._rises.append((at, total))
            while len(self._rises) > 1 and self._rises[0][0] < at - _KEPT:
                self._before = self._rises.pop(0)[1]
        self.last = total

    @property
    def rise(self) -> int:
        """Since we look."""
        return self.last - self.first

    def within(self, window: float, now: float) -> int:
        """Its rise in the last ``window`` s."""
        before = self._before if window <= _KEPT else self.first
        for at, total in self._rises:
            if at > now - window:
                break
            before = total
        return self.last - before

    def rises(self) -> Iterator[float]:
        """When it rose (s)."""
        return (at for at, _ in self._rises)
