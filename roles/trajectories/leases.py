"""Which incarnations are current, and which trajectory is leased to which of them.

Volatile: a store that restarts receives the membership again, and grants new leases.
"""

from __future__ import annotations

from collections.abc import Iterable

from ...core.types import Incarnation, ReplicaId


class Membership:
    """The current incarnations as the manager last reported them, and which others are therefore fenced."""

    def __init__(self) -> None:
        self.current: frozenset[Incarnation] = frozenset()
        self._newest: dict[ReplicaId, int] = {}
        self._departed: set[Incarnation] = set()

    def update(self, current: Iterable[Incarnation]) -> None:
        """Replace the current incarnations.

        An incarnation that was current before, is not now, and has no successor, has departed.
        """
        before, self.current = self.current, frozenset(current)
        self._departed = {
            incarnation for incarnation in (self._departed | before) - self.current if not self._succeeded(incarnation)
        }
        for incarnation in self.current:
            self.observe(incarnation)

    def observe(self, incarnation: Incarnation) -> None:
        """Record that ``incarnation`` exists, which fences every older incarnation of its whole gang."""
        for replica in (incarnation.replica, incarnation.gang.replica):
            self._newest[replica] = max(incarnation.number, self._newest.get(replica, 0))

    def fenced_reason(self, incarnation: Incarnation) -> str | None:
        """Return why ``incarnation`` is fenced, or None.

        An incarnation that the manager has not reported yet is not fenced: its worker may have joined before the report
        arrived here.
        """
        if self._succeeded(incarnation):
            return f"{incarnation} was succeeded by incarnation {self._newest[incarnation.replica]}"
        return f"{incarnation} is no longer current (fenced)" if incarnation in self._departed else None

    def _succeeded(self, incarnation: Incarnation) -> bool:
        return incarnation.number < self._newest.get(incarnation.replica, 0)


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
        """Return the incarnation that a trajectory is leased to, or None."""
        return self._holder.get(trajectory)

    def leased_to(self, incarnation: Incarnation) -> frozenset[int]:
        """Return the trajectories that are leased to an incarnation."""
        return frozenset(self._by_incarnation.get(incarnation, ()))

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
