"""Computes the figures of benchmarks/detection.py with rrl's default limits: delays by role, and counts by suite.

A suite is a top folder of the scenarios: rrl ships the suites ``faults`` and ``no_fault``. The delays of two methods
are compared over the hangs that both find. Roles are compared separately, because each method's deadlines depend on the
role. Median, mean and 95th percentile are all given, so that no statistic is selected after the measurement.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from math import inf
from statistics import fmean, median
from typing import Any

from rrl.benchmarks.scenarios.methods import OURS, ROBUSTRL
from rrl.benchmarks.scenarios.play import Played
from rrl.benchmarks.scenarios.score import delays_of_both, hang_roles, quantile, score, warnings_of

STATISTICS: Mapping[str, Callable[[list[float]], float]] = {
    "median": median,
    "mean": fmean,
    "p95": lambda values: quantile(values, 0.95),
}


TAILS: Mapping[str, tuple[str, ...]] = {
    "checkpoint_spin_max_s": ("*/hang-checkpoint-spins", "*/hang-publish-spins-first"),
    "first_collective_max_s": ("*/hang-first-collective-blind", "*/early-trainer-train-first-blind"),
    "cpu_loop_max_s": ("*/hang-train-cpu-loop",),
    "between_idle_max_s": ("*/trainer-between-idle-hang-first",),
}
"""For each kind of hang that deadlines decide, the shipped scenarios of which :func:`hang_delays` gives the maximum."""


def hang_delays(plays: Sequence[Played]) -> dict[str, float]:
    """Return median and 95th percentile of the delays (s) of all hangs that were found, and the maxima of ``TAILS``.

    A maximum is inf if a hang was not found, and is missing if no such scenario was played.
    """
    hangs = [
        (play.scenario, inf if one.found_at is None else one.found_at - one.since)
        for play in plays
        for one in play.outcomes
        if one.cause == "hang" and one.verdict == "FAIL"
    ]
    found = [delay for _, delay in hangs if delay < inf]
    figures = {"hang_median_s": median(found), "hang_p95_s": quantile(found, 0.95)} if found else {}
    for name, patterns in TAILS.items():
        delays = [delay for scenario, delay in hangs if any(fnmatchcase(scenario, one) for one in patterns)]
        figures |= {name: max(delays)} if delays else {}
    return figures


def hang_delays_by_role(plays: Mapping[str, Sequence[Played]]) -> dict[str, dict[str, dict[str, Any]]]:
    """Compare the delays (s) of rrl and of RobustRL for the hangs that both find.

    Returns:
        Figures by role and by variant of RobustRL (:data:`ROBUSTRL`). The variants differ in the time that a suspected
            rollout has for its answer. The figures:

            - ``both``, ``ours_alone``, ``robustrl_alone``: numbers of hangs that both methods or only one of them
              found.
            - ``median``, ``mean``, ``p95``: the value of each method, and the ratio of the two values.
            - ``ranges``: the smallest and the largest delay of each method.
    """
    found: dict[str, dict[str, dict[str, Any]]] = {}
    own_roles = hang_roles(plays[OURS])
    for name in (each for each in ROBUSTRL if each in plays):
        pairs = delays_of_both(plays[OURS], plays[name])
        their_roles = hang_roles(plays[name])
        for role in sorted({*own_roles.values(), *their_roles.values()}):
            own = {key for key, each in own_roles.items() if each == role}
            theirs = {key for key, each in their_roles.items() if each == role}
            counts = {"both": len(own & theirs), "ours_alone": len(own - theirs), "robustrl_alone": len(theirs - own)}
            found.setdefault(role, {})[name] = counts | _statistics(pairs.get(role, []))
    return found


def _statistics(pairs: Sequence[tuple[float, float]]) -> dict[str, Any]:
    if not pairs:
        return {}
    own, theirs = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    figures: dict[str, Any] = {}
    for name, value in STATISTICS.items():
        mine, other = value(own), value(theirs)
        figures[name] = {
            "ours": round(mine, 1),
            "robustrl": round(other, 1),
            "ratio": round(mine / other, 3) if other else None,
        }
    ranges = {"ours": [min(own), max(own)], "robustrl": [min(theirs), max(theirs)]}
    return figures | {"ranges": {method: [round(end, 1) for end in ends] for method, ends in ranges.items()}}


def suites(plays: Mapping[str, Sequence[Played]]) -> dict[str, dict[str, dict[str, Any]]]:
    """Return the counts by suite and method; the last suite, ``all``, has all plays."""
    names = sorted({_suite(play) for each in plays.values() for play in each})
    return {
        **{
            name: {method: counts([play for play in each if _suite(play) == name]) for method, each in plays.items()}
            for name in names
        },
        "all": {method: counts(each) for method, each in plays.items()},
    }


def _suite(play: Played) -> str:
    return play.scenario.partition("/")[0] if "/" in play.scenario else "."


def counts(plays: Sequence[Played]) -> dict[str, Any]:
    """Return how many failures (by expected verdict) one method found and missed, its false alarms and its warnings."""
    counted = score(plays)
    expected = [one for play in plays for one in play.outcomes if one.verdict == "WARN"]
    return {
        "runs": counted.runs,
        "found": counted.found,
        "late": counted.late,
        "missed": counted.missed,
        "false": counted.false,
        "precision": round(counted.precision, 4),
        "recall": round(counted.recall, 4),
        "warn_truths": len(expected),
        "warn_truths_found": sum(one.in_time for one in expected),
        **warnings_of(plays).per_hour(),
    }


def samples(plays: Mapping[str, Sequence[Played]]) -> list[dict[str, Any]]:
    """Return each play of each method as JSON values: found failures with their times, false alarms, and warnings."""
    return [
        {
            "method": method,
            "scenario": play.scenario,
            "seed": play.seed,
            "seconds": play.lasts,
            "truths": [
                [one.who, one.cause, one.verdict, one.since, one.found_at, one.in_time] for one in play.outcomes
            ],
            "false": [[one.who, one.detector, one.at] for one in play.false],
            "warnings": len(play.warnings),
            "unexplained": len(play.unexplained),
        }
        for method, each in plays.items()
        for play in each
    ]
