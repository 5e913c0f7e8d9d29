"""Who is believed, and who works on what. Volatile: a store that restarts hears it again and leases anew."""

from __future__ import annotations

from collections.abc import Iterable

from ...core.types import Incarnation, ReplicaId


class Membership:
    """The manager's newest word on who lives, and what follows from it for those it did not name."""

    def __init__(self) -> None:
        self.current: frozenset[Incarnation] = frozenset()
        self._newest: dict[ReplicaId, int] = {}
        self._departed: set[Incarnation] = set()

    def update(self, current: Iterable[Incarnation]) -> None:
        """``living`` are all that live: whoever was named before and is not now is gone."""
        before, self.current = self.current, frozenset(current)
        self._departed = {
            incarnation for incarnation in (self._departed | before) - self.current if not self._succeeded(incarnation)
        }
        for incarnation in self.current:
            self.observe(incarnation)

    def observe(self, incarnation: Incarnation) -> None:
        """A word of ``life`` is evidence that every older incarnation has been succeeded, of its whole gang."""
        for replica in (incarnation.replica, incarnation.gang.replica):
            self._newest[replica] = max(incarnation.number, self._newest.get(replica, 0))

    def fenced_reason(self, incarnation: Incarnation) -> str | None:
        """Why ``life`` must leave, or None. One that nobody has named yet is not refused: its welcome may have
        overtaken the word to us."""
        if self._succeeded(incarnation):
            return f"{incarnation} was succeeded by incarnation {self._newest[incarnation.replica]}"
        return f"{incarnation} is not among the living any more" if incarnation in self._departed else None

    def _succeeded(self, incarnation: Incarnation) -> bool:
        return incarnation.number < self._newest.get(incarnation.replica, 0)


class Leases:
    """Which trajectory is in whose hands."""

    def __init__(self) -> None:
        self._holder: dict[int, Incarnation] = {}
        self._by_incarnation: dict[Incarnation, set[int]] = {}

    def assign(self, trajectory: int, incarnation: Incarnation) -> None:
        self._holder[trajectory] = incarnation
        self._by_incarnation.setdefault(incarnation, set()).add(trajectory)

    def release(self, trajectory: int) -> None:
        if (incarnation := self._holder.pop(trajectory, None)) is not None:
            self._by_incarnation[incarnation].discard(trajectory)

    def holder(self, trajectory: int) -> Incarnation | None:
        return self._holder.get(trajectory)

    def leased_to(self, incarnation: Incarnation) -> frozenset[int]:
        return frozenset(self._by_incarnation.get(incarnation, ()))

    def release_departed(self, current: frozenset[Incarnation]) -> list[int]:
        """Free what the others hold; the trajectories that are free now."""
        freed = [
            trajectory
            for incarnation in self._by_incarnation.keys() - current
            for trajectory in self._by_incarnation.pop(incarnation)
        ]
        for trajectory in freed:
            del self._holder[trajectory]
        return freed
