"""How much rollouts have generated, by what their beats tell: what was made while the trainer was away."""

from __future__ import annotations

from rrl.health.sightings import Watch
from rrl.spec.words import Life, role_of


class Tokens:
    """Counts while one manager hears; two totals of the same epoch can be compared, no others."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._ended = 0

    def ends(self, life: Life) -> None:
        """This life is about to be forgotten; what it made stays."""
        seen = self._watch.replicas.get(life.replica)
        if seen is not None and seen.life == life and role_of(life.replica) == "rollout":
            self._ended += seen.done or 0

    def total(self) -> int:
        living = (seen.done or 0 for id, seen in self._watch.replicas.items() if role_of(id) == "rollout")
        return self._ended + sum(living)
