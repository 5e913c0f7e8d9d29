"""Decides which rollout gets which answers, and which running answers should continue elsewhere.

Rollouts pull work. A rollout that requests work gets the first waiting answers. They are ordered by the last step that
may train them, then by expected length (:func:`length_class`, the longest first), then by creation. If other engines
have free places too, the waiting answers are dealt out in this order. Each of the first answers goes to the engine that
would finish first with it (:mod:`.engine_load`). Each further answer, which is shorter, goes to the engine that makes
tokens fastest with it. The rollout gets its share, and the rest is left to the other engines. A rollout that runs
nothing gets at least one answer if any waits.

Where lengths are not known to differ (:attr:`.lengths.Lengths.separates`), the caller leases one answer after another
in the order of creation.

A running answer moves only if nothing waits and its engine is expected to finish last. In addition, the gain must be
large enough. The gain is the decrease of the expected time until both engines are done, less the cost of reading the
prefix again. It must be at least twice this cost, and at least the share :data:`_LEAST_GAIN` of the time that the
engine still needs. The gain is computed for both engines together, because an answer that may become long delays the
new engine as much as the old one, so a move for this reason alone gains nothing. An answer moves again only once its
prefix is twice as long, so that all its moves together read less than twice its length.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from heapq import heapify, heappop, heappush, heapreplace

from msgspec import Struct

from .engine_load import Curve, EngineLoad, finish_of_both

_CLASSES_PER_OCTAVE = 2
"""Number of classes of expected length per factor 2. Smaller classes would be noise, because the logarithm has an error
of 0.3 to 0.6."""
CONSIDERED = 256
"""Number of waiting answers, from the first one on, among which one decision chooses. The limit bounds the time of the
decision."""
_DEALT = 64
"""Number of waiting answers, from the first one on, of which each goes to the engine that would finish first with it.
In a batch, these are the longest answers, which decide when the step ends."""
_CANDIDATES = 2
"""Number of engines that are compared for each answer that is dealt out: those that finish first."""
_COST_FACTOR = 2.0
"""Minimum expected gain of a move, as a multiple of the cost of reading the prefix again."""
_LEAST_GAIN = 0.05
"""Minimum expected gain of a move, as a share of the time that the answer's engine still needs. Estimates of a few
percent are noise: with 0.02, moves on engines with a flat τ lost 1 % in simulation."""
_LONGEST, _SHORTEST, _TARGETS = 4, 3, 2
"""A move is chosen among this many longest and this many shortest answers of an engine, and among this many engines to
which an answer may move."""


class EngineView(Struct):
    """The values of an engine on which decisions depend."""

    name: str
    load: EngineLoad
    running: int
    """Number of answers that the engine runs."""
    free: int
    """Number of further answers that the engine can take now."""


class Waiting(Struct, frozen=True, gc=False):
    """An answer that waits for a rollout."""

    trajectory: int
    curve: Curve


class Running(Struct, frozen=True, gc=False):
    """An answer that an engine runs."""

    trajectory: int
    curve: Curve
    prefix: int
    """Number of tokens that another engine would have to read."""
    read_before: int = 0
    """Number of tokens that the answer's engine had to read when the answer moved to this engine."""


class Move(Struct, frozen=True):
    """A running answer that should continue on another engine, and the seconds that the move is expected to gain."""

    trajectory: int
    target: str
    gain: float


def length_class(expected: float) -> int:
    """Return the class of an expected number of tokens; answers of one class count as equally long."""
    return math.floor(_CLASSES_PER_OCTAVE * math.log2(max(1.0, expected)))


def share(waiting: Sequence[Waiting], rollout: EngineView, others: Sequence[EngineView]) -> list[int]:
    """Return which of the waiting answers a rollout gets, at most ``rollout.free``.

    Each of the first :data:`_DEALT` answers goes to the engine that would finish first with it, each further answer to
    the engine that then makes tokens fastest. A rollout that runs nothing gets at least one answer. A rollout that has
    work may get none, if engines with free places would finish all waiting answers earlier.

    Args:
        waiting: The first answers that this rollout may get, in the order of leases; :data:`CONSIDERED` suffice.
        rollout: The engine that requests work.
        others: The other engines; those without free places are ignored.
    """
    free = [other for other in others if other.free > 0]
    if not free or not waiting:
        return [each.trajectory for each in waiting[: rollout.free]]
    engines = [rollout, *free]
    places = [engine.free for engine in engines]
    loads = [engine.load for engine in engines]
    finish = [(load.finish(), index) for index, load in enumerate(loads)]
    heapify(finish)
    given: list[int] = []
    for each in waiting[:_DEALT]:
        best, least, load = -1, math.inf, loads[0]
        candidates = [heappop(finish) for _ in range(min(_CANDIDATES, len(finish)))]
        for _, index in candidates:
            extended = loads[index].plus(each.curve)
            if (time := extended.finish()) < least:
                best, least, load = index, time, extended
        loads[best] = load
        places[best] -= 1
        for time, index in candidates:
            if places[index]:
                heappush(finish, (least if index == best else time, index))
        if best == 0:
            given.append(each.trajectory)
        if not places[0] or not finish:
            break
    given += _fill(waiting[_DEALT : sum(engine.free for engine in engines)], loads, places)
    return given or ([] if rollout.running else [waiting[0].trajectory])


def _fill(rest: Sequence[Waiting], loads: Sequence[EngineLoad], places: Sequence[int]) -> list[int]:
    """Deal out ``rest``, each answer to the engine that then is fastest per token. Return the first engine's share."""
    fastest = [(load.token_time(load.count + 1), index) for index, load in enumerate(loads) if places[index]]
    heapify(fastest)
    dealt, given = [0] * len(loads), []
    for each in rest:
        if not fastest or not places[0] - dealt[0]:
            break
        index = fastest[0][1]
        if not index:
            given.append(each.trajectory)
        dealt[index] += 1
        if dealt[index] < places[index]:
            heapreplace(fastest, (loads[index].token_time(loads[index].count + dealt[index] + 1), index))
        else:
            heappop(fastest)
    return given


def hand_back(
    source: EngineView, running: Sequence[Running], others: Sequence[EngineView], read: float, at_most: int = 4
) -> list[Move]:
    """Return which of an engine's answers should continue elsewhere, the best move first.

    Args:
        source: The engine that runs the answers.
        running: The engine's answers, except those that it was already requested to hand over.
        others: The other engines, with the answers that will move to them.
        read: Seconds to read one token of a prefix.
        at_most: Maximum number of moves.
    """
    finishes = [other.load.finish() for other in others]
    targets = sorted(
        ((at, other.name, other) for at, other in zip(finishes, others, strict=True) if other.free > 0),
        key=lambda each: each[:2],
    )
    finish = source.load.finish()
    if not targets or not running or finish < max(finishes):
        return []
    running = [each for each in running if each.prefix >= 2 * each.read_before]
    order = sorted(running, key=lambda each: (-_expected(each.curve), each.trajectory))
    loads = {name: other.load.copy() for _, name, other in targets[:_TARGETS]}
    left = source.load.copy()
    moves: list[Move] = []
    while len(moves) < at_most and order and loads:
        considered = order if len(order) <= _LONGEST + _SHORTEST else order[:_LONGEST] + order[-_SHORTEST:]
        best: tuple[float, Running, str] | None = None
        course = left.course()
        before = {name: finish_of_both(course, load.course()) for name, load in loads.items()}
        for each in considered:
            cost = read * each.prefix
            without = left.course_without(each.curve)
            for name, load in loads.items():
                gain = before[name] - finish_of_both(without, load.course_with(each.curve)) - cost
                if gain >= max(_COST_FACTOR * cost, _LEAST_GAIN * finish) and (best is None or gain > best[0]):
                    best = gain, each, name
        if best is None:
            break
        gain, chosen, name = best
        moves.append(Move(chosen.trajectory, name, gain))
        left.remove(chosen.curve)
        loads[name].add(chosen.curve)
        del loads[name]  # an engine gets at most one answer per decision; a later append decides again
        order.remove(chosen)
        finish = left.finish()
    return moves


def _expected(curve: Curve) -> float:
    """Return a sort key for the number of tokens that an answer is still expected to get.

    The key is the sum of the curve's probabilities, each with twice the weight of the preceding one.
    """
    return sum(p * 2.0**index for index, p in enumerate(curve[0]))
