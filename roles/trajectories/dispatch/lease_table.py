"""The leases of one kind of work, by incarnation. Leases are volatile: a store that restarts grants new ones."""

from __future__ import annotations

from collections.abc import Set as AbstractSet

from ....core.types import Incarnation

_NOTHING: frozenset[int] = frozenset()


class Leases:
    """The trajectories that are leased, by incarnation."""

    def __init__(self) -> None:
        self._holder: dict[int, Incarnation] = {}
        self._by_incarnation: dict[Incarnation, set[int]] = {}

    def assign(self, trajectory: int, incarnation: Incarnation) -> None:
        """Lease a trajectory to an incarnation."""
        self._holder[trajectory] = incarnation
        self._by_incarnation.setdefault(incarnation, set()).add(trajectory)

    def release(self, trajectory: int) -> None:
        """End the lease of a trajectory, if there is one."""
        if (incarnation := self._holder.pop(trajectory, None)) is not None:
            self._by_incarnation[incarnation].discard(trajectory)

    def holder(self, trajectory: int) -> Incarnation | None:
        """Return the incarnation that a trajectory is leased to; None without a lease."""
        return self._holder.get(trajectory)

    def leased_to(self, incarnation: Incarnation) -> AbstractSet[int]:
        """Return the trajectories that are leased to an incarnation: the set itself, which later leases change."""
        return self._by_incarnation.get(incarnation, _NOTHING)

    def release_departed(self, current: frozenset[Incarnation]) -> list[int]:
        """End the leases of all incarnations that are not current, and return their trajectories."""
        freed = [
            trajectory
            for incarnation in self._by_incarnation.keys() - current
            for trajectory in self._by_incarnation.pop(incarnation)
        ]
        for trajectory in freed:
            del self._holder[trajectory]
        return freed
