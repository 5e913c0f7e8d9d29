"""Whom a receiver of a new version asks, in which order: derived by each for itself from who serves weights.

Receivers stand in chains, in the order of their names: each asks the one before it, which passes on what it has
verified while it still receives the rest. The heads of the first two chains ask the publisher, the head of a later one
asks the tail of an earlier one, at most two heads a tail. So the publisher sends a version twice at most, however many
receivers there are, and whoever comes late pulls from a neighbour.

Whoever has not got the version itself is only asked by those whose names come later: nobody ever waits for itself, not
even round about, and not even while they have heard different things of who is there.
"""

from __future__ import annotations

from collections.abc import Sequence

from rrl.spec.words import TRAINER, ReplicaId, Version, natural, role_of
from rrl.transport.messages import Holder

_HEADS_PER_TAIL = 2
"""chains that go on from the end of an earlier one; also those that begin at the publisher. Two make the way to the
last receiver grow with the logarithm of their number; more would share one NIC"""


def sources(
    me: ReplicaId, holders: Sequence[Holder], version: Version, chain: int, direct: bool = False
) -> tuple[Holder, ...]:
    """Whom ``me`` asks for ``version``: the one before it in its chain, whoever holds it complete (each receiver begins
    at another one), those further up its chain, the publisher. ``holders`` is everybody who serves weights; ``me`` need
    not be among them. ``direct``: the publisher first, which keeps a version while it is read."""
    publishers = [each for each in holders if _publishes(each)]
    others = {each.life.replica: each for each in holders if not _publishes(each) and each.life.replica != me}
    order = sorted({*others, me}, key=natural)
    mine = order.index(me)
    upstream = [others[order[place]] for place in _upstream(mine, chain)]
    having = [others[one] for one in order if one != me and _has(others[one], version)]
    turn = mine % max(1, len(having))
    chosen = [*upstream[:1], *having[turn:], *having[:turn], *upstream[1:], *publishers]
    if direct:
        chosen = [*publishers, *chosen]
    return tuple(dict.fromkeys(chosen))


def _publishes(holder: Holder) -> bool:
    return role_of(holder.life.replica) == role_of(TRAINER)


def _has(holder: Holder, version: Version) -> bool:
    """It tells only its newest one; the one before it is kept as long as none newer arrives."""
    return holder.holds is not None and holder.holds >= version


def _upstream(place: int, chain: int) -> list[int]:
    """The receivers between this one and the publisher, nearest first."""
    way: list[int] = []
    while (before := _before(place, chain)) is not None:
        way.append(before)
        place = before
    return way


def _before(place: int, chain: int) -> int | None:
    """Whom the receiver at ``place`` stands behind; None: the publisher."""
    if place % chain:
        return place - 1
    number = place // chain
    if number < _HEADS_PER_TAIL:
        return None
    return (number - _HEADS_PER_TAIL) // _HEADS_PER_TAIL * chain + chain - 1
