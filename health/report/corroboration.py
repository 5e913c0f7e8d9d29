"""Decide whether a node is accused of a fault, which needs evidence from enough users.

A user can write any record, so the records of one user alone do not accuse a node. An accusation needs hardware
evidence of the same cause from two users, or from one user and the node's own record. Only root writes the node's own
record: a history that belongs to root, or a drain by the site's HealthCheckProgram after ``rrl health check``. The
module is pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import inf, prod

from msgspec import Struct

from ...core.types import Cause
from ..history.incidents import HARDWARE_CAUSES, RaisedFinding

MIN_WITNESSES = 2
"""Minimum number of users whose evidence accuses a node."""
MAX_SCORE_BY_ONE_USER = 0.5
"""Maximum lemon score from one user's signals. It is below `rates.LEMON_SCORE` (0.7). The signals of two users can give
a score of 0.75."""


class Witnesses(Struct, frozen=True):
    """Users who report that a node's hardware failed, all for the same cause."""

    users: frozenset[str] = frozenset()
    trusted: bool = False
    """Whether root is among the users."""


class Signal(Struct, frozen=True):
    """One occurrence of a signal that a node is a lemon (fails again and again), with the users who report it."""

    weight: float
    witnesses: tuple[str, ...]
    trusted: bool
    """Whether root is among the witnesses."""
    confirmed: bool = False
    """Whether the signal is proof of failed hardware, and the node's own record confirms it (:func:`confirmed`)."""


def witnesses_of(findings: Iterable[RaisedFinding]) -> dict[Cause, Witnesses]:
    """Return, for each cause, the users whose runs have uncleared hardware evidence against the node.

    ``findings`` are all findings against the node.
    """
    found: dict[Cause, Witnesses] = {}
    for raised in findings:
        cause = raised.finding.cause
        if raised.critical and cause in HARDWARE_CAUSES and raised.until == inf:
            before = found.get(cause, Witnesses())
            found[cause] = Witnesses(before.users | {raised.user}, before.trusted or raised.trusted)
    return found


def accused_by(raised: RaisedFinding, witnesses: Mapping[Cause, Witnesses], by_check: bool) -> frozenset[str]:
    """Return the users whose evidence accuses the node of the reported fault; empty if the evidence does not suffice.

    The evidence of two users suffices. The evidence of one user suffices if root has recorded evidence of the same
    cause, or if the finding is proof and the site's own check has drained the node (``by_check``).
    """
    same_cause = witnesses.get(raised.finding.cause, Witnesses())
    users = same_cause.users | {raised.user}
    trusted = raised.trusted or same_cause.trusted or (by_check and raised.finding.proof)
    return users if trusted or len(users) >= MIN_WITNESSES else frozenset()


def confirmed(raised: RaisedFinding, witnesses: Mapping[Cause, Witnesses], by_check: bool) -> bool:
    """Return whether the finding is proof of failed hardware, and the node's own record confirms it.

    The node's own record confirms the finding if root has recorded evidence of the same cause, or if the site's own
    check has drained the node (``by_check``).
    """
    repeated = by_check or witnesses.get(raised.finding.cause, Witnesses()).trusted
    return raised.finding.proof and raised.finding.cause in HARDWARE_CAUSES and repeated


def score_by_users(signals: Iterable[Signal]) -> float:
    """Return the lemon score, between 0 and 1.

    All signals of one user together count for at most MAX_SCORE_BY_ONE_USER. Signals that root reports (``trusted``)
    and signals that are ``confirmed`` are not limited.
    """
    free, by_user = 1.0, dict[str, float]()
    for signal in signals:
        if signal.trusted or signal.confirmed:
            free *= 1 - signal.weight
            continue
        for user in signal.witnesses:
            by_user[user] = by_user.get(user, 1.0) * (1 - signal.weight)
    return 1 - free * prod(max(1 - MAX_SCORE_BY_ONE_USER, trust) for trust in by_user.values())
