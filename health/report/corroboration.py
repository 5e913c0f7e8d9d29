"""Decides whether a node is accused of a fault: whether the evidence of enough users is against it. Pure.

A user can write any record, so the records of one user alone do not accuse a node. An accusation needs hardware
evidence of the same cause from two users, or from one user and from the node's own record, which root writes: a history
that belongs to root, or a drain by the site's HealthCheckProgram, which ran ``rrl health check`` on the node.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import inf, prod

from msgspec import Struct

from ...core.types import Cause
from ..history.incidents import HARDWARE_CAUSES, RaisedFinding

MIN_WITNESSES = 2
"""Users whose evidence is needed to accuse a node."""
MAX_SCORE_BY_ONE_USER = 0.5
"""Highest lemon score from one user: below `rates.LEMON_SCORE` (0.7), which two users with that score exceed (0.75)."""


class Witnesses(Struct, frozen=True):
    """Users who report that a node's hardware failed for one cause."""

    users: frozenset[str] = frozenset()
    trusted: bool = False
    """Whether one of the users is root."""


class Signal(Struct, frozen=True):
    """One occurrence of a sign that a node is a lemon (fails again and again), with the users who report it."""

    weight: float
    witnesses: tuple[str, ...]
    trusted: bool
    """Whether one of the witnesses is root."""
    confirmed: bool = False
    """Whether the signal is proof of failed hardware, and the node's own record repeats it."""


def witnesses_of(findings: Iterable[RaisedFinding]) -> dict[Cause, Witnesses]:
    """Return, for each cause, the users whose runs have uncleared hardware evidence against the node.

    ``findings`` are all findings against that node.
    """
    found: dict[Cause, Witnesses] = {}
    for raised in findings:
        cause = raised.finding.cause
        if raised.critical and cause in HARDWARE_CAUSES and raised.until == inf:
            before = found.get(cause, Witnesses())
            found[cause] = Witnesses(before.users | {raised.user}, before.trusted or raised.trusted)
    return found


def accused_by(raised: RaisedFinding, witnesses: Mapping[Cause, Witnesses], by_check: bool) -> frozenset[str]:
    """Return the users whose evidence accuses the node of this finding; empty if they are not enough.

    ``by_check`` tells whether the site's own check of the node has drained it.
    """
    same_cause = witnesses.get(raised.finding.cause, Witnesses())
    users = same_cause.users | {raised.user}
    trusted = raised.trusted or same_cause.trusted or (by_check and raised.finding.proof)
    return users if trusted or len(users) >= MIN_WITNESSES else frozenset()


def confirmed(raised: RaisedFinding, witnesses: Mapping[Cause, Witnesses], by_check: bool) -> bool:
    """Return whether the finding is proof of failed hardware, and the node's own record repeats it."""
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
