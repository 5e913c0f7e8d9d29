"""The share of one rank in work that the ranks of a gang divide among themselves."""

from __future__ import annotations


def checked_share(share: tuple[int, int]) -> tuple[int, int]:
    """Return ``share``, the pair (rank, world).

    Raises:
        ValueError: There is no such share.
    """
    rank, world = share
    if world < 1 or not 0 <= rank < world:
        raise ValueError(f"share = ({rank}, {world}) is (rank, world): world must be at least 1, rank 0 to world - 1")
    return share
