"""How many users say that a node failed, and whether that is enough to accuse it. Pure.

A user can write any record, so that the records of one user alone accuse no node. It takes hardware evidence of the
same cause by two users, or evidence that the node's own record repeats: root's. Root's record is a history that belongs
to root, or a drain by the site's HealthCheckProgram, which ran ``rrl health check`` on the node.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import inf, prod

from msgspec import Struct

from rrl.health.incidents import HARDWARE, Raised
from rrl.spec.words import Cause

MIN_WITNESSES = 2
"""users whose evidence accuses a node"""
MAX_SCORE_BY_ONE_USER = 0.5
"""of a lemon's score: below lemons.LEMON (0.7), which two users with so much each exceed (0.75)"""


class Signal(Struct, frozen=True):
    """One occurrence of a sign of a lemon, and who says so."""

    weight: float
    witnesses: tuple[str, ...]
    trusted: bool
    """one of them is root"""
    confirmed: bool = False
    """with a hardware proof that the node's own record repeats"""


def accused_by(one: Raised, findings: Iterable[Raised], by_check: bool) -> frozenset[str]:
    """Users whose evidence accuses the node of what ``one`` says; empty: not enough of them.

    ``findings``: all against the node. ``by_check``: the site's own check of the node has drained it."""
    alike = [other for other in findings if _alike(other, one.found.cause)]
    users = frozenset(other.user for other in alike) | {one.user}
    trusted = one.trusted or any(other.trusted for other in alike) or (by_check and one.found.proof)
    return users if trusted or len(users) >= MIN_WITNESSES else frozenset()


def confirmed(one: Raised, findings: Iterable[Raised], by_check: bool) -> bool:
    """It has a hardware proof that the node's own record repeats."""
    repeated = by_check or any(other.trusted and _alike(other, one.found.cause) for other in findings)
    return one.found.proof and one.found.cause in HARDWARE and repeated


def score_by_users(signals: Iterable[Signal]) -> float:
    """A lemon's score, of which each user's signals make at most MAX_SCORE_BY_ONE_USER, root's and confirmed ones any.
    Between 0 and 1."""
    free, by_user = 1.0, dict[str, float]()
    for signal in signals:
        if signal.trusted or signal.confirmed:
            free *= 1 - signal.weight
            continue
        for user in signal.witnesses:
            by_user[user] = by_user.get(user, 1.0) * (1 - signal.weight)
    return 1 - free * prod(max(1 - MAX_SCORE_BY_ONE_USER, trust) for trust in by_user.values())


def _alike(other: Raised, cause: Cause) -> bool:
    """Hardware evidence of this cause that its run has never taken back."""
    return other.critical and other.found.cause is cause and cause in HARDWARE and other.until == inf
