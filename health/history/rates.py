"""Failure rates with confidence intervals, and lemons: nodes that fail again and again.

A count ``k`` of failures over an exposure ``T`` is taken as Poisson, with times in s. The confidence interval of its
rate is exact (Garwood 1936), from quantiles of the gamma distribution: ``q(α/2; k) / T`` to ``q(1 - α/2; k + 1) / T``.
The interval of the mean time between failures is the inverse of this interval. The interval covers the true rate with
at least the stated confidence, even for few failures.

A lemon's score uses the signals of the last 28 days that Meta found significant (docs/sources.md, "lemon nodes"). Each
occurrence of a signal ``s`` multiplies the trust in a node by ``1 - weight(s)``:

    score = 1 - Π (1 - weight(s)) ** count(s)

The score is between 0 and 1, grows with each occurrence and does not depend on the order of occurrences. The signals of
one user take at most half of the trust (:mod:`rrl.health.report.corroboration`), so that no single user can make a node
a lemon. A lemon needs a score of at least ``LEMON_SCORE`` and signals on at least two days. The weights are our choice;
Meta set its thresholds by hand.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from msgspec import Struct

CONFIDENCE = 0.95
DAY_S = 86400.0
_MAX_BISECTIONS = 200
"""Maximum number of bisection steps; each step determines one binary digit."""


class Rate(Struct, frozen=True):
    """A failure rate (:func:`rate_per`) or mean exposure between failures (:func:`mtbf`), with its confidence interval.

    ``value``, ``low`` and ``high`` are None if there was no exposure. If there was no failure, ``value`` and ``high``
    of :func:`mtbf` are None, because only a lower bound of the mean is known.
    """

    failures: int
    exposure: float
    value: float | None
    low: float | None
    high: float | None
    confidence: float = CONFIDENCE


def rate_per(failures: int, exposure: float, unit: float = 1.0) -> Rate:
    """Return the failures per ``unit`` of exposure."""
    if exposure <= 0:
        return Rate(failures, 0.0, None, None, None)
    low, high = poisson_interval(failures)
    scale = unit / exposure
    return Rate(failures, exposure, failures * scale, low * scale, high * scale)


def mtbf(failures: int, exposure: float) -> Rate:
    """Return the mean exposure between two failures; without a failure, only its lower bound is known."""
    if exposure <= 0:
        return Rate(failures, 0.0, None, None, None)
    low, high = poisson_interval(failures)
    mean = exposure / failures if failures else None
    return Rate(failures, exposure, mean, exposure / high, exposure / low if low else None)


def poisson_interval(count: int) -> tuple[float, float]:
    """Return the exact confidence interval of the mean of a Poisson distribution, given one observed ``count``."""
    tail = (1 - CONFIDENCE) / 2
    return (gamma_quantile(tail, count) if count else 0.0), gamma_quantile(1 - tail, count + 1)


def poisson_at_least(count: int, mean: float) -> float:
    """Return the probability of ``count`` or more events if ``mean`` are expected."""
    return 1.0 if count <= 0 else gamma_share(mean, count)


def gamma_quantile(share: float, shape: int) -> float:
    """Return the quantile of the gamma distribution with scale 1."""
    low, high = 0.0, float(shape)
    while gamma_share(high, shape) < share:
        high *= 2
    for _ in range(_MAX_BISECTIONS):
        middle = (low + high) / 2
        if middle in (low, high):
            break
        low, high = (middle, high) if gamma_share(middle, shape) < share else (low, middle)
    return (low + high) / 2


def gamma_share(x: float, shape: int) -> float:
    """Return the regularized lower incomplete gamma function.

    The function is computed from its series or, for ``x`` above ``shape``, as one minus the Poisson sum.
    """
    if x <= 0:
        return 0.0
    if x > shape:
        terms = (math.exp(-x + i * math.log(x) - math.lgamma(i + 1)) for i in range(shape))
        return max(0.0, 1.0 - math.fsum(terms))
    term = math.exp(-x + shape * math.log(x) - math.lgamma(shape + 1))
    total, i = 0.0, shape
    while term > total * 1e-17:
        total += term
        i += 1
        term *= x / i
    return min(1.0, total)


# ── exposure ─────────────────────────────────────────────────────────────────────────────────────────────────────────
Span = tuple[float, float]


def merge_intervals(spans: Iterable[Span]) -> list[Span]:
    """Return the union of the intervals: a node that two runs share counts once."""
    merged: list[Span] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], end)
        elif end > start:
            merged.append((start, end))
    return merged


def clip(spans: Iterable[Span], since: float, until: float) -> list[Span]:
    """Return the parts of the intervals between ``since`` and ``until``."""
    return [(max(start, since), min(end, until)) for start, end in spans if end > since and start < until]


def total_length(spans: Iterable[Span]) -> float:
    """Return the sum of the lengths of the intervals."""
    return math.fsum(end - start for start, end in spans)


LEMON_WINDOW_S = 28 * DAY_S
"""Seconds of history that the lemon score uses (Meta: 28 days)."""
LEMON_SCORE = 0.7
UNLIKELY_PROBABILITY = 0.01
"""A node's failures are a signal if the probability of as many failures on an average node is below this value."""

WEIGHTS = {
    "node_failures_alone": 0.30,
    "failure_rate": 0.30,
    "out_of_service": 0.20,
    "hardware_findings": 0.15,
    "xids": 0.10,
    "excluded_by_users": 0.10,
    "node_failures_together": 0.05,
}
"""Weights of the signals. The weight of a signal counts once for each occurrence of the signal:

- ``node_failures_alone``: incident of infrastructure on this node only.
- ``failure_rate``: at most once, if the node fails significantly more often than the other nodes of the site.
- ``out_of_service``: day on which a run drained the node or requested a drain.
- ``hardware_findings``: day on which a hardware check failed with proof or on this node only.
- ``xids``: day on which the findings about Xids of one GPU began.
- ``excluded_by_users``: user whose runs excluded the node (the weakest of Meta's signals).
- ``node_failures_together``: incident that other nodes had at the same time, perhaps because of the fabric.
"""


class Signals(Struct, frozen=True):
    """Counts of the signals within the window; ``days`` is the number of days with at least one signal."""

    node_failures_alone: int = 0
    node_failures_together: int = 0
    failure_rate: int = 0
    out_of_service: int = 0
    hardware_findings: int = 0
    xids: int = 0
    excluded_by_users: int = 0
    days: int = 0


class Lemon(Struct, frozen=True):
    """A node's lemon score and the signals from which it is computed."""

    score: float
    lemon: bool
    signals: Signals


def score_lemon(signals: Signals, max_score: float = 1.0) -> Lemon:
    """Return the lemon score that follows from the signals, limited to ``max_score``."""
    trust = 1.0
    for name, weight in WEIGHTS.items():
        trust *= (1 - weight) ** getattr(signals, name)
    score = round(min(1 - trust, max_score), 3)
    return Lemon(score, score >= LEMON_SCORE and signals.days >= 2, signals)


def fails_more_often(failures: int, held_s: float, site_failures: int, site_held_s: float) -> bool:
    """Return whether a node has significantly more failures than the rate of the other nodes predicts."""
    others, rest = site_failures - failures, site_held_s - held_s
    if failures < 2 or rest <= 0:
        return False
    # if the other nodes have no failure, assume one, because the probability would be 0 otherwise
    expected = max(others, 1) / rest * held_s
    return poisson_at_least(failures, expected) < UNLIKELY_PROBABILITY
