"""Decides which rollout gets which turns, so that a turn continues where its prefix is cached.

The rollout that sampled the parent of a turn has computed everything before the turn. While its weights stay the same,
this rollout need not compute these tokens again. So this rollout gets the turn if it requests work now. No turn waits
for a busy rollout.

Only the first turns in the order of leases are dealt out: as many as there are free places in all rollouts that request
work now. Each of these turns is leased at once. So the preference delays no turn, and no turn overtakes another.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ....core.types import Incarnation


def deal(
    waiting: Sequence[tuple[int, Incarnation | None]],
    engine: Incarnation,
    places: int,
    others: Mapping[Incarnation, int],
) -> list[int]:
    """Return which of the waiting turns an engine gets.

    Args:
        waiting: The turns in the order of leases, each with the engine that has its prefix, or None if no engine has
            it.
        engine: The engine that requests work.
        places: Free places of this engine.
        others: Free places of the other engines that request work now.
    """
    left = {**others, engine: places}
    dealt = waiting[: sum(left.values())]
    own: list[int] = []
    rest: list[int] = []
    for turn, cached in dealt:
        if cached is None or not left.get(cached):
            rest.append(turn)
            continue
        left[cached] -= 1
        if cached == engine:
            own.append(turn)
    return own + rest[: left[engine]]
