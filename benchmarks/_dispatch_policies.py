"""The policies that benchmarks/dispatch.py compares."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rrl.benchmarks._dispatch_world import SEGMENT_TOKENS, Answer, Engine, World
from rrl.roles.trajectories.dispatch.token_times import TokenTimes
from rrl.roles.trajectories.dispatch.work_sharing import CONSIDERED, EngineView, length_class, share

_TAIL = 0.2
"""Share of the answers that StreamRL's dispatcher treats as long."""


class FirstCome:
    """First come, first served: an engine that requests work gets the waiting answers that were created first."""

    def choose(self, world: World, engine: Engine) -> list[Answer]:
        numbers = sorted(world.waiting)[: engine.free]
        return [world.waiting[number] for number in numbers]

    def appended(self, engine: Engine) -> None:
        pass


class FixedLists(FirstCome):
    """Assigns the answers to engines before the step: each engine gets the answers of its list in order."""

    def __init__(self, lists: Sequence[Sequence[int]]) -> None:
        self._lists = [list(reversed(each)) for each in lists]

    def choose(self, world: World, engine: Engine) -> list[Answer]:
        left = self._lists[engine.number]
        return [world.waiting[left.pop()] for _ in range(min(engine.free, len(left)))]


class Product(FirstCome):
    """The dispatch policy of the store. It calls the functions that the store calls (``roles/trajectories/dispatch``).

    Args:
        points: Expected number of tokens of each answer, made before the step begins; None if answers are leased in the
            order of their creation.
        times: Each engine's times per token as learned in earlier steps; this policy updates them.
    """

    def __init__(self, points: Sequence[float] | None, times: dict[int, TokenTimes]) -> None:
        self._classes = None if points is None else [length_class(point) for point in points]
        self._times = times
        self._last: dict[int, tuple[float, float]] = {}

    def choose(self, world: World, engine: Engine) -> list[Answer]:
        if (classes := self._classes) is None:
            return super().choose(world, engine)
        order = sorted(world.waiting, key=lambda number: (-classes[number], number))[:CONSIDERED]
        others = [self._view(other) for other in world.engines if other is not engine and other.free > 0]
        return [world.waiting[number] for number in share(order, self._view(engine), others)]

    def appended(self, engine: Engine) -> None:
        """Record the engine's mean time per token since the engine last appended tokens."""
        clock, tokens = self._last.get(engine.number, (0.0, 0.0))
        if engine.running and engine.tokens - tokens >= SEGMENT_TOKENS / 2:
            times = self._times.setdefault(engine.number, TokenTimes())
            times.observe(engine.running, (engine.clock - clock) / (engine.tokens - tokens))
        self._last[engine.number] = engine.clock, engine.tokens

    def _view(self, engine: Engine) -> EngineView:
        times = self._times.get(engine.number) or TokenTimes()
        return EngineView(times.table_among(self._times.values()), engine.running, engine.free)


def two_pools(world: World, points: Sequence[float], tau: Sequence[float]) -> FixedLists:
    """Return the schedule of StreamRL's Algorithm 2, with point estimates: long answers get their own engines."""
    order = sorted(range(len(points)), key=lambda number: -points[number])
    count, places = len(world.engines), world.engines[0].places
    split = int(_TAIL * len(order))
    tail, rest = order[:split], order[split:]
    ascending = sorted(points)
    long, usual = ascending[int(0.9 * len(points))], ascending[int(0.5 * len(points))]

    def latency(answers: int, length: float, engines: int) -> float:
        at_once = min(places, math.ceil(answers / engines))
        return tau[at_once] * length * math.ceil(answers / (engines * at_once))

    first = min(range(1, count), key=lambda n: max(latency(len(tail), long, n), latency(len(rest), usual, count - n)))
    lists: list[list[int]] = [[] for _ in range(count)]
    for index, number in enumerate(tail):
        lists[index % first].append(number)
    for index, number in enumerate(rest):
        lists[first + index % (count - first)].append(number)
    return FixedLists(lists)


def clairvoyant(world: World) -> FixedLists:
    """Return a schedule from all true lengths: longest first, each answer goes to the engine that then ends first."""
    finish = [0.0] * len(world.engines)
    lists: list[list[int]] = [[] for _ in world.engines]
    for answer in sorted(world.answers, key=lambda answer: -answer.length):
        best, least = 0, math.inf
        for index, engine in enumerate(world.engines):
            running = min(len(lists[index]) + 1, engine.places)
            with_it = finish[index] + answer.length * max(
                engine.times[running] - engine.times[running - 1],
                engine.times[engine.places] / engine.places if len(lists[index]) >= engine.places else 0.0,
            )
            if with_it < least:
                best, least = index, with_it
        finish[best] = least
        lists[best].append(answer.number)
    return FixedLists(lists)
