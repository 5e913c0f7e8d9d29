"""Delay at one false-alarm rate: each detector's bounds are multiplied by factors, and ours is compared with RobustRL's
where it is wrong as often."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec import Struct

from rrl.tests.support.scenarios.play import Played
from rrl.tests.support.scenarios.score import hang_delays, quantile, ratio, score

FACTORS = {"ours": (0.5, 0.7, 1.0, 2.0), "fixed_timeout": (0.5, 1.0, 2.0, 4.0),
           "robustrl": (0.5, 1.0, 2.0, 4.0, 8.0)}  # fmt: skip
"""of the bounds in time of each method"""


class Point(Struct, frozen=True):
    method: str
    factor: float
    precision: float
    recall: float
    false_per_run: float
    """false alarms per run"""
    delay: float | None
    """median s of the hangs that it found"""


class MatchedDelay(Struct, frozen=True):
    """Where ours is wrong as often as theirs with its published bounds, or as near below as our factors come."""

    ratio: float | None
    """our median delay of hangs over theirs, of hangs that both find"""
    factor: float
    """ours there"""
    reached: bool
    """ours is wrong no more often than theirs there"""


def point(method: str, factor: float, plays: Sequence[Played]) -> Point:
    counted, found = score(plays), list(hang_delays(plays).values())
    delay = quantile(found, 0.5) if found else None
    return Point(method, factor, counted.precision, counted.recall, counted.false / max(1, counted.runs), delay)


def match_delay(own_points: Mapping[float, Sequence[Played]], baseline: Sequence[Played]) -> MatchedDelay:
    """Theirs stays as published: loosened, it hardly gets quieter, for much of what it takes for a failure looks alike
    for ever. Ours is multiplied until it raises false alarms as often: sharper where it is the quieter one, else
    looser. Between two factors the ratio is interpolated."""
    aim = _false(baseline)
    points = {factor: (_false(each), ratio(each, baseline)) for factor, each in own_points.items()}
    quiet = points[1.0][0] <= aim
    way = sorted((factor for factor in points if (factor <= 1.0 if quiet else factor >= 1.0)), reverse=quiet)
    at, (false, delay) = 1.0, points[1.0]
    for factor in way[1:]:
        next_false, next_delay = points[factor]
        if (false <= aim) != (next_false <= aim) and delay is not None and next_delay is not None:
            share = (aim - false) / (next_false - false)
            return MatchedDelay(delay + share * (next_delay - delay), at + share * (factor - at), True)
        at, false, delay = factor, next_false, next_delay
    return MatchedDelay(delay, at, false <= aim)


def _false(plays: Sequence[Played]) -> float:
    return score(plays).false / max(1, len(plays))
