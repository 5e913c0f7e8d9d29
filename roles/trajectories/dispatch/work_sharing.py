"""Decides which rollout gets which answers.

Rollouts pull work. A rollout that requests work gets the first waiting answers. They are ordered by the last step that
may train them, then by expected length (:func:`length_class`, the longest first), then by creation. If other engines
have free places too, the waiting answers are dealt out in this order, each to the engine that makes tokens fastest with
it. The rollout gets its share, and the rest is left to the other engines. A rollout that runs nothing gets at least one
answer if any waits.

Where lengths are not known to differ (:attr:`.lengths.Lengths.separates`), the caller leases one answer after another
in the order of creation.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from heapq import heapify, heappop, heapreplace

from msgspec import Struct

_CLASSES_PER_OCTAVE = 2
"""Number of classes of expected length per factor 2. Smaller classes would be noise, because the logarithm has an error
of 0.3 to 0.6."""
CONSIDERED = 256
"""Number of waiting answers, from the first one on, among which one decision chooses. The limit bounds the time of the
decision."""


class EngineView(Struct, frozen=True):
    """The values of an engine on which decisions depend."""

    times: Sequence[float]
    """Seconds for one token of each answer while 0, 1, 2, … answers are running. The last entry stands for any larger
    number of answers."""
    running: int
    """Number of answers that the engine runs."""
    free: int
    """Number of further answers that the engine can take now."""

    def token_time(self, further: int) -> float:
        """Return the seconds for a token of each answer while the engine runs this number of further answers, too."""
        return self.times[min(self.running + further, len(self.times) - 1)]


def length_class(expected: float) -> int:
    """Return the class of an expected number of tokens; answers of one class count as equally long."""
    return math.floor(_CLASSES_PER_OCTAVE * math.log2(max(1.0, expected)))


def share(waiting: Sequence[int], rollout: EngineView, others: Sequence[EngineView]) -> list[int]:
    """Return which of the waiting answers a rollout gets, at most ``rollout.free``.

    A rollout that runs nothing gets at least one answer. A rollout that has work may get none, if engines with free
    places make tokens faster.

    Args:
        waiting: The first answers that this rollout may get, in the order of leases; :data:`CONSIDERED` suffice.
        rollout: The engine that requests work.
        others: The other engines that have free places.
    """
    engines = [rollout, *others]
    fastest = [(engine.token_time(1), index) for index, engine in enumerate(engines)]
    heapify(fastest)
    dealt, given = [0] * len(engines), list[int]()
    for each in waiting:
        if len(given) == rollout.free or not fastest:
            break
        index = fastest[0][1]
        if not index:
            given.append(each)
        dealt[index] += 1
        if dealt[index] < engines[index].free:
            heapreplace(fastest, (engines[index].token_time(dealt[index] + 1), index))
        else:
            heappop(fastest)
    return given or ([] if rollout.running else list(waiting[:1]))
