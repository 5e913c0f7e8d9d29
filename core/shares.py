"""A share of something that the ranks of a gang divide among themselves."""

from __future__ import annotations


def checked_share(share: tuple[int, int]) -> tuple[int, int]:
    """Return ``share``, (rank, world), unchanged.

    Raises:
        ValueError: It is no pair of integers with 0 <= rank < world.
    """
    match share:
        case (int(rank), int(world)) if 0 <= rank < world:
            return rank, world
    raise ValueError(f"share={share!r}: expected (rank, world) with 0 <= rank < world, such as (me.rank, me.world)")
