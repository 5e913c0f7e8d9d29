"""A share of something that the ranks of a gang divide among themselves."""

from __future__ import annotations

import heapq
from collections.abc import Mapping

MAX_WORLD = 65_536
"""Maximum number of shares. The store keeps a list for each, so a mistaken world must not take all of its memory."""


def checked_share(share: tuple[int, int]) -> tuple[int, int]:
    """Return ``share``, (rank, world), unchanged.

    Raises:
        ValueError: It is no pair of integers with 0 <= rank < world <= MAX_WORLD.
    """
    match share:
        case (rank, world) if type(rank) is int is type(world) and 0 <= rank < world <= MAX_WORLD:
            return rank, world
    raise ValueError(
        f"share={share!r}: expected (rank, world) with 0 <= rank < world <= {MAX_WORLD}, such as (me.rank, me.world)"
    )


def owners(sizes: Mapping[str, int], world: int) -> dict[str, int]:
    """Return the rank that has each name, so that all ranks have about the same size: the largest first.

    Every rank computes the same, in whatever order the names are.
    """
    loads = [(0, rank) for rank in range(world)]
    found = {}
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        load, found[name] = loads[0]
        heapq.heapreplace(loads, (load + max(1, sizes[name]), found[name]))
    return found
