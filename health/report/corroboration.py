"""How many users say that a node failed, and whether that is enough to accuse it. Pure.

A user can write any record, so that the records of one user alone accuse no node. It takes hardware evidence of the
same cause by two users, or evidence that the node's own record repeats: root's. Root's record is a history that belongs
to root, or a drain by the site's HealthCheckProgram, which ran ``rrl health check`` on the node.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import inf, prod

from msgspec import Struct

from ...core.types import Cause
from ..history.incidents import HARDWARE_CAUSES, RaisedFinding

MIN_WITNESSES = 2
"""users whose evidence accuses a node"""
MAX_SCORE_BY_ONE_USER = 0.5
"""of a lemon's score: below rates.LEMON (0.7), which two users with so much each exceed (0.75)"""


class Witnesses(Struct, frozen=True):
    """Who says that hardware of a node failed for one cause."""

    users: frozenset[str] = frozenset()
    trusted: bool = False
    """one of them is root"""


class Signal(Struct, frozen=True):
    """One occurrence of a sign of a lemon, and who says so."""

    weight: float
    witnesses: tuple[str, ...]
    trusted: bool
    """one of them is root"""
    confirmed: bool = False
    """with a hardware proof that the node's own record repeats"""


def witnesses_of(findings: Iterable[RaisedFinding]) -> dict[Cause, Witnesses]:
    """For each cause, whose hardware evidence against one node stands, as far as their runs have not taken it back.

    ``findings``: all against the node."""
    found: dict[Cause, Witnesses] = {}
    for one in findings:
        if one.critical and one.finding.cause in HARDWARE_CAUSES and one.until == inf:
            before = found.get(one.finding.cause, Witnesses())
            found[one.finding.cause] = Witnesses(before.users | {one.user}, before.trusted or one.trusted)
    return found


def accused_by(raised: RaisedFinding, witnesses: Mapping[Cause, Witnesses], by_check: bool) -> frozenset[str]:
    """Users whose evidence accuses the node of what ``one`` says; empty: not enough of them. ``by_check``: the site's
    own check of the node has drained it."""
    alike = witnesses.get(raised.finding.cause, Witnesses())
    users = alike.users | {raised.user}
    trusted = raised.trusted or alike.trusted or (by_check and raised.finding.proof)
    return users if trusted or len(users) >= MIN_WITNESSES else frozenset()


def confirmed(raised: RaisedFinding, witnesses: Mapping[Cause, Witnesses], by_check: bool) -> bool:
    """It has a hardware proof that the node's own record repeats."""
    repeated = by_check or witnesses.get(raised.finding.cause, Witnesses()).trusted
    return raised.finding.proof and raised.finding.cause in HARDWARE_CAUSES and repeated


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
