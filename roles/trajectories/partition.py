"""How the ranks of a gang divide the trajectories of a part, computed from lengths that every rank knows.

The functions are pure, so that the store and all ranks compute the same.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from ...core.types import Incarnation
from .types import By, Denied, PackedPart, Share


def partition(sizes: Sequence[int], world: int, first: int = 0) -> list[list[int]]:
    """Divide units of these sizes into ``world`` shares, each with the indices of its units in ascending order.

    The numbers of units of two shares differ by at most 1, and the sums of their sizes by at most the largest size.
    Among shares of equal size, ``first`` (modulo ``world``) gets the larger unit, then the shares after it.

    Units are given out in rounds, the largest first: in each round each share gets one unit, the smallest share the
    largest unit. So two sums never differ by more than before, or by more than two units of the round.
    """
    shares: list[list[int]] = [[] for _ in range(world)]
    sums = [0] * world
    order = [(first + rank) % world for rank in range(world)]
    units = sorted(range(len(sizes)), key=lambda unit: -sizes[unit])
    for start in range(0, len(units), world):
        order.sort(key=sums.__getitem__)
        for rank, unit in zip(order, units[start : start + world], strict=False):
            shares[rank].append(unit)
            sums[rank] += sizes[unit]
    return [sorted(share) for share in shares]


def shares_of(part: PackedPart, share: Share) -> list[list[int]]:
    """Return the indices of the trajectories in the share of each rank, as ``share.world`` and ``share.by`` say.

    The first part of a step begins with rank 0, the next one with rank 1, and so on: a part may have fewer groups than
    there are ranks.
    """
    sizes = [one.prompt_length + one.length for one in part.trajectories]
    if share.by == "sequence":
        return partition(sizes, share.world, part.index)
    groups: dict[int, list[int]] = {}
    for index, one in enumerate(part.trajectories):
        groups.setdefault(one.group, []).append(index)
    units = list(groups.values())
    divided = partition([sum(sizes[index] for index in unit) for unit in units], share.world, part.index)
    return [[index for unit in mine for index in units[unit]] for mine in divided]


def cut(part: PackedPart, share: Share | None) -> PackedPart:
    """Return a whole part with the tokens of ``share`` only; None stands for the whole part."""
    if share is None:
        return part
    mine = set(shares_of(part, share)[share.rank])
    trajectories = tuple(
        packed if index in mine else msgspec.structs.replace(packed, tokens=b"", logprobs=b"", prompt=b"", extras=())
        for index, packed in enumerate(part.trajectories)
    )
    groups = {part.trajectories[index].group for index in mine}
    prompts = tuple(prompt if group in groups else b"" for group, prompt in zip(part.groups, part.prompts, strict=True))
    return msgspec.structs.replace(part, prompts=prompts, trajectories=trajectories)


class Division:
    """How the ranks of the newest incarnation of the trainer divide parts. It is known in memory only."""

    def __init__(self) -> None:
        self._made: tuple[int, int, By] = -1, 0, "group"
        """The newest incarnation that has requested shares, and their ``world`` and ``by``."""

    def check(self, incarnation: Incarnation, share: Share | None) -> Denied | None:
        """Return why ``share`` cannot be served: with two divisions a group would be trained twice or never."""
        if share is None:
            return None
        before, division = self._made, (incarnation.number, share.world, share.by)
        if before[0] != incarnation.number:
            self._made = before = division
        if before == division:
            return None
        return Denied(
            f"{incarnation} asks for a share of {share.world} by {share.by}, but another rank has asked for a share of"
            f" {before[1]} by {before[2]}: all ranks must pass the same world and the same by",
            wrong_argument=True,
        )


def micro_batches(sizes: Sequence[int], shares: Sequence[Sequence[int]], rank: int, at_most: int) -> list[range]:
    """Divide the share of ``rank`` into micro-batches of consecutive units.

    The units of a micro-batch have together at most the size ``at_most``; a larger unit is alone. All ranks get the
    same number of micro-batches: those that a rank lacks are empty.

    Args:
        sizes: Size of each unit of all shares.
        shares: The units of each rank, as indices of ``sizes``.
        rank: The rank.
        at_most: Maximum size of a micro-batch.

    Returns:
        Positions in the share.
    """
    divided = [_divide([sizes[unit] for unit in share], at_most) for share in shares]
    mine = divided[rank]
    return mine + [range(0)] * (max(map(len, divided)) - len(mine))


def _divide(sizes: Sequence[int], at_most: int) -> list[range]:
    divided: list[range] = []
    start = size = 0
    for place, unit in enumerate(sizes):
        if place > start and size + unit > at_most:
            divided.append(range(start, place))
            start, size = place, 0
        size += unit
    return [*divided, range(start, len(sizes))] if sizes else []
