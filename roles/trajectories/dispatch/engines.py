"""What the store knows of each rollout's engine: its places for answers, its times, and answers that will move to it.

Everything here except the times is volatile, like leases. A store that restarts learns the places of an engine with the
engine's first request. Times are a fold over the store's log (:mod:`.token_times`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from collections.abc import Set as AbstractSet
from math import inf

from msgspec import Struct, field

from ....core.types import Incarnation
from .engine_load import CurveTable, EngineLoad
from .lengths import GroupEstimate
from .token_times import AppendTimes, Observed, TokenTimes
from .work_sharing import EngineView, Running, Waiting, hand_back, share

_TOKENS_PER_CHOICE = 4
"""Tokens that an engine appends for each running answer between two choices of moves. A choice compares all answers of
the engine (10 ms for 512 answers), whereas an append may contain a segment of one answer only. With 512 answers and
segments of 64 tokens, there is one choice for 32 appended segments. So 16 choices are made in the time in which each of
the 512 answers gets one segment."""


class Known(Struct, frozen=True, gc=False):
    """An unfinished trajectory: the estimate of its group, its tokens so far, and the number of prompt tokens."""

    estimate: GroupEstimate
    progress: int
    prompt: int


class _Engine(Struct):
    places: int = 0
    """Number of answers that the engine can run, according to its last request."""
    appends: AppendTimes = field(default_factory=AppendTimes)
    requested_back: set[int] = set()
    load: EngineLoad | None = None
    """Load of the engine's running answers, without those that it must hand over, and of the answers that will move to
    the engine. None if any of these answers have changed since the load was computed."""
    tokens: int = 0
    """Number of tokens that the engine has appended since its moves were last chosen."""
    weights: int | None = None
    """Step of the engine's weights, according to its last request."""
    open_until: float = -inf
    """Time (s) until which the engine's request for work is open."""


class Engines:
    """Shares work among engines, and decides which running trajectories move.

    Args:
        limit: Number of tokens at which answers are cut.
        known: Returns what is known of a trajectory.
        running: Returns the trajectories that an engine runs.
        times: Returns the seconds that an engine takes per token.
    """

    def __init__(
        self,
        limit: int,
        known: Callable[[int], Known],
        running: Callable[[Incarnation], AbstractSet[int]],
        times: Callable[[Incarnation], TokenTimes],
    ) -> None:
        self._curves = CurveTable(limit)
        self._known = known
        self._running = running
        self._times = times
        self._engines: dict[Incarnation, _Engine] = {}
        self._read_before: dict[int, int] = {}
        """For each trajectory that has moved, the number of tokens that its new engine had to read."""
        self.reserved: dict[int, Incarnation] = {}
        """For each trajectory that an engine was requested to hand over, the engine on which it should continue."""

    # ── what happens ───────────────────────────────────────────────────────────────────────────────────────────────
    def requested(self, engine: Incarnation, free: int, weights: int | None = None, open_until: float = -inf) -> None:
        """Record that an engine with the weights of step ``weights`` requests work for ``free`` places.

        The request is open until the time ``open_until`` (s).
        """
        entry = self._engine(engine)
        entry.places = len(self._running(engine)) + free
        entry.weights, entry.open_until = weights, open_until

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

    def leased(self, engine: Incarnation, trajectory: int, prefix: int, now: float | None) -> None:
        """Record that a trajectory was leased to an engine at the time ``now`` (s); None if the time is not known.

        The engine must read ``prefix`` tokens before it continues the trajectory.
        """
        entry = self._engine(engine)
        entry.load, entry.open_until = None, -inf  # the engine's request is answered
        if self._forget_reservation(trajectory):
            self._read_before[trajectory] = prefix
        if now is not None:
            entry.appends.leased(trajectory, prefix, len(self._running(engine)), now)

    def appended(
        self, engine: Incarnation, tokens: Sequence[tuple[int, int]], ended: Iterable[int], now: float | None
    ) -> Observed:
        """Record an append of (trajectory, number of new tokens), and the trajectories that are complete with it.

        Returns the observations of the engine's times that follow from the append. The caller must record them.
        """
        entry = self._engine(engine)
        entry.load = None
        entry.tokens += sum(count for _, count in tokens)
        observed = Observed()
        if now is not None:
            running = max(1, len(self._running(engine)))
            observed = entry.appends.appended(tokens, running, now, self._times(engine))
        self.released(engine, ended)
        return observed

    def released(self, engine: Incarnation, trajectories: Iterable[int]) -> None:
        """Record that an engine no longer runs these trajectories."""
        entry = self._engine(engine)
        entry.load = None
        for trajectory in trajectories:
            entry.requested_back.discard(trajectory)
            entry.appends.ended((trajectory,))
        if not self._running(engine):
            entry.tokens = 0

    def finished(self, trajectories: Iterable[int]) -> None:
        """Record that trajectories are complete or dropped, so that no engine continues them."""
        for trajectory in trajectories:
            self._forget_reservation(trajectory)
            self._read_before.pop(trajectory, None)

    def retain(self, current: frozenset[Incarnation]) -> None:
        """Forget all engines that are not current, and the reservations for them."""
        self._engines = {engine: entry for engine, entry in self._engines.items() if engine in current}
        self.reserved = {each: target for each, target in self.reserved.items() if target in current}
        for entry in self._engines.values():
            entry.requested_back &= self.reserved.keys()
            entry.load = None

    # ── deciding ───────────────────────────────────────────────────────────────────────────────────────────────────
    def withheld(self, trajectory: int, engine: Incarnation) -> bool:
        """Return whether a waiting trajectory is reserved for another engine than this one.

        A reservation counts while the other engine is current and has a free place, because that engine will soon
        request work.
        """
        target = self.reserved.get(trajectory)
        return target is not None and target != engine and self._free(target) > 0

    def share(self, engine: Incarnation, waiting: Sequence[int], at_most: int) -> list[int]:
        """Return which of the waiting trajectories an engine gets, at most ``at_most``."""
        if not waiting:
            return []
        own = [each for each in waiting if self.reserved.get(each) == engine]
        if own:
            return own[:at_most]
        others = [self._view(other) for other in self._engines if other != engine and self._free(other) > 0]
        if not others:
            return list(waiting[:at_most])
        view = self._view(engine)
        view.free = at_most
        return share([Waiting(each, self._curve(each)) for each in waiting], view, others)

    def choose_moves(self, engine: Incarnation) -> None:
        """Choose which trajectories an engine should hand over, and reserve these trajectories for other engines.

        Call it only while no trajectory waits for an engine.
        """
        entry = self._engine(engine)
        if entry.tokens < _TOKENS_PER_CHOICE * len(self._running(engine)):
            return
        if not any(other != engine and self._free(other) > 0 for other in self._engines):
            return
        entry.tokens = 0
        own = self._view(engine)
        others = [self._view(other) for other in self._engines if other != engine]
        by_name = {str(other): other for other in self._engines}
        running = []
        for trajectory in sorted(self._running(engine) - entry.requested_back):
            known = self._known(trajectory)
            curve = self._curves.curve(known.estimate, known.progress)
            before = self._read_before.get(trajectory, 0)
            running.append(Running(trajectory, curve, known.prompt + known.progress, before))
        moves = hand_back(own, running, others, self._times(engine).read)
        for move in moves:
            target = by_name[move.target]
            entry.requested_back.add(move.trajectory)
            self.reserved[move.trajectory] = target
            entry.load = self._engines[target].load = None

    def requested_back(self, engine: Incarnation) -> tuple[int, ...]:
        """Return all trajectories that an engine should hand over, each at the next append that contains it."""
        requested = self._engine(engine).requested_back & self._running(engine)
        return tuple(sorted(requested & self.reserved.keys()))

    def _engine(self, engine: Incarnation) -> _Engine:
        if (entry := self._engines.get(engine)) is None:
            entry = self._engines[engine] = _Engine()
        return entry

    def _free(self, engine: Incarnation) -> int:
        entry = self._engines.get(engine)
        return 0 if entry is None else entry.places - len(self._running(engine))

    def _forget_reservation(self, trajectory: int) -> bool:
        """Remove the reservation of a trajectory, and return whether there was one."""
        target = self.reserved.pop(trajectory, None)
        if target is not None and (entry := self._engines.get(target)) is not None:
            entry.load = None
        return target is not None

    def _curve(self, trajectory: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
        known = self._known(trajectory)
        return self._curves.curve(known.estimate, known.progress)

    def _view(self, engine: Incarnation) -> EngineView:
        entry, running = self._engine(engine), self._running(engine)
        coming = sorted(each for each, target in self.reserved.items() if target == engine)
        times = self._times(engine)
        if entry.load is None or not times.observed:  # times taken from other engines may change
            here = sorted({*(running - entry.requested_back), *coming})
            table = times.table_among(map(self._times, self._engines))
            entry.load = EngineLoad(self._curves.widths, table, map(self._curve, here))
        return EngineView(str(engine), entry.load, len(running), entry.places - len(running) - len(coming))
