"""Compares the detection delays of rrl and RobustRL at limits with which both raise equally many false alarms.

With rrl's default limits, the numbers of false alarms differ. So the time limits of each method are multiplied by
several factors. The delays are compared at the factor at which rrl raises as many false alarms as RobustRL does with
its published limits and 30 s for an answer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec import Struct

from rrl.benchmarks.scenarios.play import Played
from rrl.benchmarks.scenarios.score import hang_delays, quantile, ratio, score

MATCHED = "robustrl_30s"
"""The method whose number of false alarms rrl has to match."""
FACTORS = {"ours": (0.5, 0.7, 1.0, 2.0), "fixed_timeout": (0.5, 1.0, 2.0, 4.0), MATCHED: (0.5, 1.0, 2.0, 4.0, 8.0)}
"""Factors by which the time limits of each method are multiplied."""


class Point(Struct, frozen=True):
    method: str
    factor: float
    precision: float
    recall: float
    false_per_run: float
    """False alarms per run."""
    delay: float | None
    """Median time (s) until the method found a hang; None if it found no hang."""


class MatchedDelay(Struct, frozen=True):
    """The comparison at the factor at which rrl raises as many false alarms as RobustRL with its published limits.

    If no factor leads to that rate, the comparison is made at the last factor that was tried.
    """

    ratio: float | None
    """Median delay of rrl divided by RobustRL's median delay, for the hangs that both find; None if both find none."""
    factor: float
    """Factor of rrl's limits at which the comparison is made."""
    reached: bool
    """Whether rrl raises at most as many false alarms at this factor as RobustRL does."""


def point(method: str, factor: float, plays: Sequence[Played]) -> Point:
    counted, found = score(plays), list(hang_delays(plays).values())
    delay = quantile(found, 0.5) if found else None
    return Point(method, factor, counted.precision, counted.recall, counted.false / max(1, counted.runs), delay)


def match_delay(own_points: Mapping[float, Sequence[Played]], baseline: Sequence[Played]) -> MatchedDelay:
    """Compare rrl (``own_points``, by factor) with RobustRL (``baseline``) at an equal rate of false alarms.

    RobustRL's limits stay as published: longer limits hardly reduce its false alarms, because much of what RobustRL
    mistakes for a failure never ends. rrl's limits are shortened if it raises fewer false alarms than RobustRL, else
    they are lengthened. If rrl's rate passes RobustRL's rate between two factors, the factor and the ratio of the
    delays are interpolated between these two.
    """
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
