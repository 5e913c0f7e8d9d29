"""Who is believed, and who works on what. Volatile: a store that restarts hears it again and leases anew."""

from __future__ import annotations

from collections.abc import Iterable

from ...core.types import Life, ReplicaId


class Believed:
    """The manager's newest word on who lives, and what follows from it for those it did not name."""

    def __init__(self) -> None:
        self.living: frozenset[Life] = frozenset()
        self._newest: dict[ReplicaId, int] = {}
        self._gone: set[Life] = set()

    def told(self, living: Iterable[Life]) -> None:
        """``living`` are all that live: whoever was named before and is not now is gone."""
        before, self.living = self.living, frozenset(living)
        self._gone = {life for life in (self._gone | before) - self.living if not self._succeeded(life)}
        for life in self.living:
            self.saw(life)

    def saw(self, life: Life) -> None:
        """A word of ``life`` is evidence that every older incarnation has been succeeded, of its whole gang."""
        for replica in (life.replica, life.gang.replica):
            self._newest[replica] = max(life.incarnation, self._newest.get(replica, 0))

    def refused(self, life: Life) -> str | None:
        """Why ``life`` must leave, or None. One that nobody has named yet is not refused: its welcome may have
        overtaken the word to us."""
        if self._succeeded(life):
            return f"{life} was succeeded by incarnation {self._newest[life.replica]}"
        return f"{life} is not among the living any more" if life in self._gone else None

    def _succeeded(self, life: Life) -> bool:
        return life.incarnation < self._newest.get(life.replica, 0)


class Leases:
    """Which trajectory is in whose hands."""

    def __init__(self) -> None:
        self._holder: dict[int, Life] = {}
        self._held: dict[Life, set[int]] = {}

    def take(self, trajectory: int, life: Life) -> None:
        self._holder[trajectory] = life
        self._held.setdefault(life, set()).add(trajectory)

    def release(self, trajectory: int) -> None:
        if (life := self._holder.pop(trajectory, None)) is not None:
            self._held[life].discard(trajectory)

    def holder(self, trajectory: int) -> Life | None:
        return self._holder.get(trajectory)

    def held(self, life: Life) -> frozenset[int]:
        return frozenset(self._held.get(life, ()))

    def keep(self, living: frozenset[Life]) -> list[int]:
        """Free what the others hold; the trajectories that are free now."""
        freed = [trajectory for life in self._held.keys() - living for trajectory in self._held.pop(life)]
        for trajectory in freed:
            del self._holder[trajectory]
        return freed
