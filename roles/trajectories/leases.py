"""The current incarnations, the trajectories that are leased to them, and the order of the next leases.

All of this is volatile: a store that restarts receives the membership again, and grants new leases.
"""

from __future__ import annotations

from collections.abc import Iterable
from heapq import heapify, heappop, heappush

from ...core.types import Incarnation, ReplicaId
from .durable.state import Group, State, TrajectoryState
from .staleness import StalenessLimit


class Membership:
    """The current incarnations according to the manager's last report, and the incarnations that are fenced."""

    def __init__(self) -> None:
        self.current: frozenset[Incarnation] = frozenset()
        self._newest: dict[ReplicaId, int] = {}
        self._departed: set[Incarnation] = set()

    def update(self, current: Iterable[Incarnation]) -> None:
        """Replace the current incarnations.

        An incarnation that was current before, is not current now, and has no successor, counts as departed.
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

        An incarnation that the manager has not reported yet is not fenced: its worker may have joined before the
        manager's report arrived.
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


class WorkQueue:
    """The unfinished trajectories of a store: their leases to rollouts, and which trajectory is leased next.

    The trajectories are ordered by the last step that may train their group, then by number. Without a limit on
    staleness they are ordered by number alone.
    """

    def __init__(self, state: State, staleness: StalenessLimit) -> None:
        self._state = state
        self._staleness = staleness
        self.leases = Leases()
        self._heap: list[tuple[float, int]] = []
        """(step of the weights that the trajectory's group was begun with, trajectory); an outdated entry is skipped
        when it is popped. See :mod:`.staleness` for "begun with"."""

    def rebuild(self) -> None:
        """Build the heap from the state."""
        tracks = self._state.trajectories.values()
        self._heap = [(self._staleness.begun_with(track.group), track.id) for track in tracks if not track.finished]
        heapify(self._heap)

    def first(self) -> TrajectoryState | None:
        """Return the first unfinished trajectory that is not leased, and leave it in the queue."""
        while self._heap:
            begun, trajectory = self._heap[0]
            track = self._state.trajectories.get(trajectory)
            free = track is not None and not track.finished and self.leases.holder(trajectory) is None
            if track is not None and free and begun == self._staleness.begun_with(track.group):
                return track
            heappop(self._heap)
        return None

    def pop(self) -> None:
        """Remove the trajectory that :meth:`first` returned."""
        heappop(self._heap)

    def offer(self, track: TrajectoryState) -> None:
        """Add an unfinished trajectory that is not leased."""
        heappush(self._heap, (self._staleness.begun_with(track.group), track.id))

    def mark_begun(self, group: Group, weights: int | None) -> None:
        """Count the group as begun with the weights of this step; its other trajectories move up in the queue."""
        if self._staleness.mark_begun(group, weights):
            for track in group.trajectories:
                if not track.finished and self.leases.holder(track.id) is None:
                    self.offer(track)

    def may_write(self, incarnation: Incarnation, trajectory: int) -> bool:
        """Return whether the trajectory exists and is leased to the incarnation.

        The lease may have been lost in a restart of the store. So a trajectory without a lease counts as leased to its
        last writer or, if it has no token yet, to every incarnation.
        """
        if (track := self._state.trajectories.get(trajectory)) is None:
            return False
        holder = self.leases.holder(trajectory)
        return holder == incarnation or (holder is None and track.writer in (None, incarnation))
