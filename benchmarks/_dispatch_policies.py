"""The policies that benchmarks/dispatch.py compares."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rrl.benchmarks._dispatch_traces import LIMIT
from rrl.benchmarks._dispatch_world import READ_S_PER_TOKEN, SEGMENT_TOKENS, Answer, Engine, World
from rrl.roles.trajectories.dispatch import lengths as product_lengths
from rrl.roles.trajectories.dispatch.engine_load import Curve, CurveTable, EngineLoad
from rrl.roles.trajectories.dispatch.lengths import GroupEstimate, Lengths
from rrl.roles.trajectories.dispatch.token_times import TokenTimes
from rrl.roles.trajectories.dispatch.work_sharing import (
    CONSIDERED,
    EngineView,
    Running,
    Waiting,
    _fill,
    hand_back,
    length_class,
    share,
)

_CURVES = CurveTable(LIMIT)
"""The table of curves, which all arms share, because a simulation spends most of its time on them. A curve has the
probability that an answer still runs, by tokens; it depends only on the answer's estimate and progress."""
_TAIL = 0.2
"""Share of the answers that StreamRL's dispatcher treats as long."""


class FirstCome:
    """First come, first served: an engine that requests work gets the waiting answers that were created first."""

    def choose(self, world: World, engine: Engine) -> list[Answer]:
        numbers = sorted(world.waiting)[: engine.free]
        return [world.waiting[number] for number in numbers]

    def hand_back(self, world: World, engine: Engine) -> list[tuple[Answer, int]]:
        return []

    def ended(self, world: World, answer: Answer) -> None:
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
        expected: Estimate of the lengths in each group, made before the group begins; None if the true length of each
            answer is known.
        lengths: Refines the estimates while answers are generated.
        separates: True if answers are leased by expected length instead of in the order of their creation.
        informed: True if enough lengths were observed to decide about moving running answers.
        times: Each engine's times per token as learned in earlier steps; this policy updates them.
        by_pace: True if waiting answers are dealt out by the engines' times per token alone, without the expected
            time in which an engine finishes its answers.
    """

    def __init__(
        self,
        expected: Sequence[GroupEstimate] | None,
        lengths: Lengths,
        separates: bool,
        informed: bool,
        times: dict[int, TokenTimes],
        by_pace: bool = False,
    ) -> None:
        self._by_pace = by_pace
        self._expected = expected
        self._lengths = lengths
        self._separates = separates
        self._informed = informed
        self._groups: dict[int, GroupEstimate] = {}
        self._loads: dict[int, tuple[int, EngineLoad, float]] = {}
        self._times = times
        self._read_before: dict[int, int] = {}
        self._last: dict[int, tuple[float, float]] = {}

    def ended(self, world: World, answer: Answer) -> None:
        self._groups.pop(answer.group, None)

    def estimate(self, world: World, answer: Answer) -> GroupEstimate:
        if self._expected is None:
            return GroupEstimate(math.log(answer.length), 0.0, 1e-4)
        if (known := self._groups.get(answer.group)) is None:
            own = [product_lengths.Answer(world.progress(each), each.done) for each in world.groups[answer.group]]
            known = self._groups[answer.group] = self._lengths.refine(self._expected[answer.group], own)
        return known

    def curve(self, world: World, answer: Answer) -> Curve:
        return _CURVES.curve(self.estimate(world, answer), world.progress(answer))

    def choose(self, world: World, engine: Engine) -> list[Answer]:
        own = [number for number, target in world.reserved.items() if target == engine.number]
        if own := [number for number in own if number in world.waiting][: engine.free]:
            self._read_before |= {number: world.waiting[number].progress for number in own}
            return [world.waiting[number] for number in own]
        free = sorted(number for number in world.waiting if number not in world.reserved)
        if not free:
            return []
        if not self._separates:
            return [world.waiting[number] for number in free[: engine.free]]
        order = sorted(free, key=lambda number: (-self._class(world.answers[number]), number))[:CONSIDERED]
        waiting = [Waiting(number, self.curve(world, world.waiting[number])) for number in order]
        others = [self._view(world, other) for other in world.engines if other is not engine and other.free > 0]
        if self._by_pace:
            return [world.waiting[number] for number in share_by_pace(waiting, self._view(world, engine), others)]
        return [world.waiting[number] for number in share(waiting, self._view(world, engine), others)]

    def hand_back(self, world: World, engine: Engine) -> list[tuple[Answer, int]]:
        self._observe(engine)
        if not self._informed or any(number not in world.reserved for number in world.waiting):
            return []
        finish = self._loaded(world, engine)[2]
        if any(self._loaded(world, other)[2] > finish for other in world.engines):
            return []
        for number in engine.running:
            self._groups.pop(world.answers[number].group, None)
        self._loads.pop(engine.number)
        running = [
            Running(
                number,
                self.curve(world, world.answers[number]),
                engine.progress(number),
                self._read_before.get(number, 0),
            )
            for number in engine.running
            if number not in engine.requested_back
        ]
        others = [self._view(world, other) for other in world.engines if other is not engine]
        moves = hand_back(self._view(world, engine), running, others, READ_S_PER_TOKEN)
        return [(world.answers[move.trajectory], int(move.target)) for move in moves]

    def _class(self, answer: Answer) -> int:
        """Return the length class of an answer; answers of a class of longer answers are considered first for a lease.

        As in the store, the class is that of the group's expected length before the group began.
        """
        if self._expected is None:
            return length_class(answer.length)
        return length_class(math.exp(self._expected[answer.group].mean))

    def _observe(self, engine: Engine) -> None:
        """Record the engine's mean time per token since the engine last appended tokens."""
        clock, tokens = self._last.get(engine.number, (0.0, 0.0))
        if engine.running and engine.tokens - tokens >= SEGMENT_TOKENS / 2:
            times = self._times.setdefault(engine.number, TokenTimes())
            times.observe(len(engine.running), (engine.clock - clock) / (engine.tokens - tokens))
        self._last[engine.number] = engine.clock, engine.tokens

    def _loaded(self, world: World, engine: Engine) -> tuple[int, EngineLoad, float]:
        known = self._loads.get(engine.number)
        times = self._times.get(engine.number) or TokenTimes()
        if known is None or known[0] != engine.changes or not times.observed:
            on_the_way = [number for number, target in world.reserved.items() if target == engine.number]
            here = [number for number in engine.running if number not in engine.requested_back]
            numbers = {*here, *(number for _, number in engine.reading), *on_the_way}
            load = EngineLoad(
                _CURVES.widths,
                times.table_among(self._times.values()),
                [self.curve(world, world.answers[number]) for number in sorted(numbers)],
            )
            known = self._loads[engine.number] = engine.changes, load, load.finish()
        return known

    def _view(self, world: World, engine: Engine) -> EngineView:
        on_the_way = sum(target == engine.number for target in world.reserved.values())
        running = len(engine.running) + len(engine.reading)
        return EngineView(str(engine.number), self._loaded(world, engine)[1], running, engine.free - on_the_way)


def share_by_pace(waiting: Sequence[Waiting], rollout: EngineView, others: Sequence[EngineView]) -> list[int]:
    """Return what :func:`share` would return if each answer went to the engine that makes tokens fastest with it."""
    engines = [rollout, *(other for other in others if other.free > 0)]
    places = [engine.free for engine in engines]
    given = _fill(waiting[: sum(places)], [engine.load for engine in engines], places)
    return given or ([] if rollout.running else [waiting[0].trajectory])


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
