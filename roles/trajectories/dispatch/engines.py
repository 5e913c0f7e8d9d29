"""What the store knows of each rollout's engine: its places for answers, its weights and its times.

Everything here except the times is volatile, like leases. A store that restarts learns the places of an engine with the
engine's first request. Times are a fold over the store's log (:mod:`.token_times`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from collections.abc import Set as AbstractSet
from math import inf

from msgspec import Struct, field

from ....core.types import Incarnation
from .token_times import MAX_RUNNING, AppendTimes, Observed, TokenTimes
from .work_sharing import EngineView, share


class _Engine(Struct):
    places: int = 0
    """Number of answers that the engine can run, according to its last request."""
    appends: AppendTimes = field(default_factory=AppendTimes)
    weights: int | None = None
    """Step of the engine's weights, according to its last request."""
    open_until: float = -inf
    """Time (s) until which the engine's request for work is open."""


class Engines:
    """Shares work among engines.

    Args:
        running: Returns the trajectories that an engine runs.
        times: Returns the seconds that an engine takes per token.
    """

    def __init__(
        self, running: Callable[[Incarnation], AbstractSet[int]], times: Callable[[Incarnation], TokenTimes]
    ) -> None:
        self._running = running
        self._times = times
        self._engines: dict[Incarnation, _Engine] = {}
        self.places = 0
        """Number of answers that all engines together can run."""

    # ── what happens ───────────────────────────────────────────────────────────────────────────────────────────────
    def requested(self, engine: Incarnation, free: int, weights: int | None = None, open_until: float = -inf) -> None:
        """Record that an engine with the weights of step ``weights`` requests work for ``free`` places.

        The request is open until the time ``open_until`` (s).
        """
        entry = self._engine(engine)
        before, entry.places = entry.places, len(self._running(engine)) + free
        self.places += entry.places - before
        entry.weights, entry.open_until = weights, open_until

    def leased(self, engine: Incarnation) -> None:
        """Record that the engine's request for work is answered."""
        self._engine(engine).open_until = -inf

    def appended(
        self, engine: Incarnation, tokens: Sequence[tuple[int, int]], ended: Iterable[int], now: float | None
    ) -> Observed:
        """Record an append of (trajectory, number of new tokens), and the trajectories that are complete with it.

        Returns the observations of the engine's times that follow from the append. The caller must record them.
        """
        observed = Observed()
        if now is not None:
            observed = self._engine(engine).appends.appended(tokens, max(1, len(self._running(engine))), now)
        self.released(engine, ended)
        return observed

    def released(self, engine: Incarnation, trajectories: Iterable[int]) -> None:
        """Record that an engine no longer runs these trajectories."""
        self._engine(engine).appends.ended(trajectories)

    def retain(self, current: frozenset[Incarnation]) -> None:
        """Forget all engines that are not current."""
        self._engines = {engine: entry for engine, entry in self._engines.items() if engine in current}
        self.places = sum(entry.places for entry in self._engines.values())

    # ── deciding ───────────────────────────────────────────────────────────────────────────────────────────────────
    def open_places(self, without: Incarnation, now: float | None) -> dict[Incarnation, int]:
        """Return the free places of all other engines whose requests for work are open."""
        return {
            engine: free
            for engine, entry in self._engines.items()
            if engine != without and now is not None and entry.open_until > now and (free := self._free(engine)) > 0
        }

    def has_weights(self, engine: Incarnation, step: int) -> bool:
        """Return whether an engine has the weights of a step, according to its last request."""
        entry = self._engines.get(engine)
        return entry is not None and entry.weights == step

    def share(self, engine: Incarnation, waiting: Sequence[int], at_most: int) -> list[int]:
        """Return which of the waiting trajectories an engine gets, at most ``at_most``."""
        free = {other: free for other in self._engines if other != engine and (free := self._free(other)) > 0}
        return share(waiting, self._view(engine, at_most), [self._view(*other) for other in free.items()])

    def tokens_per_second(self, counts: Callable[[Incarnation], bool], answers: int) -> float:
        """Return how many tokens the engines for which ``counts`` is true make together in a second of full work.

        At most ``answers`` answers run at the same time. Returns 0 as long as no times of these engines are known.
        """
        engines = [engine for engine, entry in self._engines.items() if entry.places and counts(engine)]
        if not any(self._times(engine).observed for engine in engines):
            return 0.0
        each = max(1, answers // len(engines))
        running = {engine: min(self._engines[engine].places, each, MAX_RUNNING) for engine in engines}
        return sum(count / self._view(engine, 0).times[count] for engine, count in running.items())

    def _engine(self, engine: Incarnation) -> _Engine:
        return self._engines.setdefault(engine, _Engine())

    def _free(self, engine: Incarnation) -> int:
        return self._engines[engine].places - len(self._running(engine))

    def _view(self, engine: Incarnation, free: int) -> EngineView:
        times = self._times(engine).table_among(map(self._times, self._engines))
        return EngineView(times, len(self._running(engine)), free)
