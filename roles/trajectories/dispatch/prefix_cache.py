"""Decides which rollout gets which turns, so that a turn continues where its prefix is cached.

The rollout that sampled the parent of a turn has computed everything before the turn. As long as its weights have not
changed, it need not compute that again. So it gets the turn if it requests work now; no turn waits for a busy rollout.

Only as many turns are dealt out as there are places in all rollouts that request work now, the first ones in the order
of leases. Each of them is leased at once, so the preference makes no turn wait and lets none overtake another.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ....core.types import Incarnation


def deal(
    waiting: Sequence[tuple[int, Incarnation | None]], engine: Incarnation, places: int,
    others: Mapping[Incarnation, int],
) -> list[int]:  # fmt: skip
    """Return which of the waiting turns an engine gets.

    Args:
        waiting: Each turn, in the order of leases, with the engine that has its prefix; None if none has.
        engine: The engine that requests work.
        places: Its free places.
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
