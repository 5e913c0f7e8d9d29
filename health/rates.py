"""Failure rates with their intervals, and how long nodes were held. Pure; times in s.

A count ``k`` of failures over an exposure ``T`` is taken for Poisson's. The interval of its rate is the exact one
(Garwood 1936), from quantiles of the gamma distribution: ``q(α/2; k) / T`` to ``q(1 - α/2; k + 1) / T``; that of the
mean time between failures is its inverse. It contains the truth at least as often as it says, also for few failures.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from msgspec import Struct

CONFIDENCE = 0.95
DAY = 86400.0
_STEPS = 200
"""halvings; each gives a binary digit"""


class Rate(Struct, frozen=True):
    """Failures per unit of exposure, and the interval of ``confidence``. ``high`` None: no bound, nothing was seen."""

    failures: int
    exposure: float
    value: float | None
    low: float | None
    high: float | None
    confidence: float = CONFIDENCE


def per(failures: int, exposure: float, unit: float = 1.0, confidence: float = CONFIDENCE) -> Rate:
    """Failures per ``unit`` of exposure."""
    if exposure <= 0:
        return Rate(failures, 0.0, None, None, None, confidence)
    low, high = poisson_interval(failures, confidence)
    scale = unit / exposure
    return Rate(failures, exposure, failures * scale, low * scale, high * scale, confidence)


def between(failures: int, exposure: float, confidence: float = CONFIDENCE) -> Rate:
    """Mean exposure between two failures; without any, only a lower bound is known."""
    if exposure <= 0:
        return Rate(failures, 0.0, None, None, None, confidence)
    low, high = poisson_interval(failures, confidence)
    mean = exposure / failures if failures else None
    return Rate(failures, exposure, mean, exposure / high, exposure / low if low else None, confidence)


def poisson_interval(count: int, confidence: float = CONFIDENCE) -> tuple[float, float]:
    """Exact interval of a Poisson mean of which ``count`` was seen."""
    tail = (1 - confidence) / 2
    return (gamma_quantile(tail, count) if count else 0.0), gamma_quantile(1 - tail, count + 1)


def poisson_at_least(count: int, mean: float) -> float:
    """Probability of so many or more where ``mean`` is expected."""
    return 1.0 if count <= 0 else gamma_share(mean, count)


def gamma_quantile(share: float, shape: int) -> float:
    """Of the gamma distribution with scale 1: ``x`` below which so much of it lies."""
    low, high = 0.0, float(shape)
    while gamma_share(high, shape) < share:
        high *= 2
    for _ in range(_STEPS):
        middle = (low + high) / 2
        if middle in (low, high):
            break
        low, high = (middle, high) if gamma_share(middle, shape) < share else (low, middle)
    return (low + high) / 2


def gamma_share(x: float, shape: int) -> float:
    """What of it lies below ``x``: the regularized lower incomplete gamma function, by its series or, beyond the mean,
    by one minus the Poisson sum."""
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


def union(spans: Iterable[Span]) -> list[Span]:
    """What any of them covers: a node that two runs share is there once."""
    merged: list[Span] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], end)
        elif end > start:
            merged.append((start, end))
    return merged


def within(spans: Iterable[Span], since: float, until: float) -> list[Span]:
    return [(max(start, since), min(end, until)) for start, end in spans if end > since and start < until]


def length(spans: Iterable[Span]) -> float:
    return math.fsum(end - start for start, end in spans)
