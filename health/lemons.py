"""Lemons: nodes that fail again and again, each time for a reason that looks small. Pure.

Signals of the last 28 days, as Meta found them telling (docs/sources.md, "lemon nodes"). Each occurrence of a signal
``s`` leaves ``1 - weight(s)`` of the trust in a node:

    score = 1 - Π (1 - weight(s)) ** count(s)

so that it lies between 0 and 1, grows with each occurrence and never depends on an order; but what one user says takes
at most half of the trust (:mod:`rrl.health.corroboration`), so that nobody alone makes a node a lemon. A node is a
lemon only with two keys: a score of at least ``LEMON``, and signals on at least two days. The weights are ours; Meta
set thresholds of its own by hand.
"""

from __future__ import annotations

from msgspec import Struct

from rrl.health.rates import DAY, poisson_at_least

WINDOW = 28 * DAY
"""s (Meta: 28 days)"""
LEMON = 0.7
UNLIKELY = 0.01
"""probability of so many failures on a node like all others, below which it counts as a signal"""

WEIGHTS = {
    "node_failures_alone": 0.30,
    "failure_rate": 0.30,
    "out_of_service": 0.20,
    "hardware_findings": 0.15,
    "xids": 0.10,
    "excluded_by_users": 0.10,
    "node_failures_together": 0.05,
}
"""``node_failures_alone``: incidents of infrastructure that no other node shared; ``failure_rate``: 1 where it fails
significantly more often than the site's nodes do; ``out_of_service``: days on which it was drained, or a drain was
asked for; ``hardware_findings``: days on which a check failed, with proof or on no other node; ``xids``: findings of
Xids; ``excluded_by_users``: users whose runs left it (of the same user, once: the weakest of Meta's signals);
``node_failures_together``: incidents that others had at the same time, so that the fabric is as likely"""


class Signals(Struct, frozen=True):
    """Counts within the window; ``days``: different days with any of them."""

    node_failures_alone: int = 0
    node_failures_together: int = 0
    failure_rate: int = 0
    out_of_service: int = 0
    hardware_findings: int = 0
    xids: int = 0
    excluded_by_users: int = 0
    days: int = 0


class Lemon(Struct, frozen=True):
    score: float
    lemon: bool
    signals: Signals


def judged(signals: Signals, most: float = 1.0) -> Lemon:
    """``most``: what the score can be at most, by who says so."""
    trust = 1.0
    for name, weight in WEIGHTS.items():
        trust *= (1 - weight) ** getattr(signals, name)
    score = round(min(1 - trust, most), 3)
    return Lemon(score, score >= LEMON and signals.days >= 2, signals)


def fails_more(failures: int, held: float, site_failures: int, site_held: float) -> bool:
    """Whether so many failures of one node are too many for the rate of the others; ``held``: s."""
    others, rest = site_failures - failures, site_held - held
    if failures < 2 or rest <= 0:
        return False
    expected = max(others, 1) / rest * held  # with none elsewhere, as if there were one: never infinitely unlikely
    return poisson_at_least(failures, expected) < UNLIKELY
