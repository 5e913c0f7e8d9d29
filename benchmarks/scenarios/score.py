"""Computes scores of many plays: precision, recall, delays, and the reported causes for each true cause."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from statistics import median

from msgspec import Struct

from rrl.benchmarks.scenarios.play import Outcome, Played

MISSED, NOBODY = "missed", "nothing wrong"


class Score(Struct, frozen=True):
    """Numbers of failures that were found in time, found ``late``, or ``missed``.

    ``false`` counts each FAIL about a replica or node that had not failed.
    """

    runs: int
    found: int
    late: int
    missed: int
    false: int

    @property
    def precision(self) -> float:
        """Return the share of right alarms among all alarms; 1 if there is no alarm."""
        return self.found / (self.found + self.false) if self.found + self.false else 1.0

    @property
    def recall(self) -> float:
        """Return the share of failures found in time; a late alarm does not count."""
        every = self.found + self.late + self.missed
        return self.found / every if every else 1.0


def score(plays: Sequence[Played]) -> Score:
    outcomes = [one for play in plays for one in play.outcomes]
    found = sum(one.in_time for one in outcomes)
    late = sum(one.found_at is not None and not one.in_time for one in outcomes)
    false = sum(len(play.false) for play in plays)
    return Score(len(plays), found, late, len(outcomes) - found - late, false)


class Warnings(Struct, frozen=True):
    """The number of warnings of many plays that a person has to read, and how many of them are unexplained."""

    hours: float
    """Virtual hours of the plays."""
    count: int
    unexplained: int
    """Number of warnings about a replica or node that had not failed."""
    standing_hours: float
    """Sum of the times (h) for which the unexplained warnings were reported."""

    def per_hour(self) -> dict[str, float]:
        """Return three numbers: warnings per hour, unexplained warnings per hour, and unexplained warnings at a time.

        The last number is an average over the time.
        """
        hours = self.hours or 1.0
        return {
            "warnings_per_hour": round(self.count / hours, 3),
            "unexplained_per_hour": round(self.unexplained / hours, 3),
            "unexplained_standing": round(self.standing_hours / hours, 3),
        }


def warnings_of(plays: Sequence[Played]) -> Warnings:
    standing = sum(min(one.until, play.lasts) - one.at for play in plays for one in play.unexplained)
    return Warnings(
        sum(play.lasts for play in plays) / 3600.0,
        sum(len(play.warnings) for play in plays),
        sum(len(play.unexplained) for play in plays),
        standing / 3600.0,
    )


def confusion(plays: Iterable[Played]) -> Counter[tuple[str, str]]:
    """Return the number of cases by (true cause, reported cause)."""
    counts: Counter[tuple[str, str]] = Counter()
    for play in plays:
        for one in play.outcomes:
            counts[one.cause, one.named if one.in_time else MISSED] += 1
        for alarm in play.false:
            counts[NOBODY, alarm.cause] += 1
        if not play.outcomes and not play.false:
            counts[NOBODY, NOBODY] += 1
    return counts


def delays(plays: Iterable[Played]) -> dict[tuple[str, str], list[float]]:
    """Return the seconds from each found failure to its first alarm, by (role or ``node``, cause)."""
    found: dict[tuple[str, str], list[float]] = {}
    for play in plays:
        for one in play.outcomes:
            if one.found_at is not None:
                found.setdefault((_kind(one), one.cause), []).append(one.found_at - one.since)
    return found


def hang_delays(plays: Iterable[Played]) -> dict[tuple[str, int, int], float]:
    """Return the delay (s) of each hang that was found, in time or late.

    The key is (scenario, seed, index of the expected finding).
    """
    return {
        (play.scenario, play.seed, index): one.found_at - one.since
        for play in plays
        for index, one in enumerate(play.outcomes)
        if one.cause == "hang" and one.verdict == "FAIL" and one.found_at is not None
    }


def hang_roles(plays: Iterable[Played]) -> dict[tuple[str, int, int], str]:
    """Return the role (or ``node``) of each hang in :func:`hang_delays`, by the keys of that function."""
    plays = list(plays)
    kinds = {(play.scenario, play.seed, index): _kind(one) for play in plays for index, one in enumerate(play.outcomes)}
    return {key: kinds[key] for key in hang_delays(plays)}


def delays_of_both(ours: Iterable[Played], theirs: Iterable[Played]) -> dict[str, list[tuple[float, float]]]:
    """Return (rrl's delay, the other method's delay) in s for each hang that both find, by role."""
    plays = list(ours)
    mine, other = hang_delays(plays), hang_delays(theirs)
    found: dict[str, list[tuple[float, float]]] = {}
    for play in plays:
        for index, one in enumerate(play.outcomes):
            key = play.scenario, play.seed, index
            if key in mine and key in other:
                found.setdefault(_kind(one), []).append((mine[key], other[key]))
    return found


def ratio(ours: Sequence[Played], theirs: Sequence[Played]) -> float | None:
    """Return the median of the ratios of rrl's delay to the other method's for one hang; None without a common hang.

    A ratio of two medians would depend on the mix of roles, because RobustRL finds hangs of rollouts and hangs of
    trainers after two different fixed times.
    """
    mine, other = hang_delays(ours), hang_delays(theirs)
    pairs = [mine[key] / other[key] for key in mine.keys() & other.keys() if other[key]]
    return median(pairs) if pairs else None


def quantile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def _kind(one: Outcome) -> str:
    return one.who.partition("/")[0] if "/" in one.who and not one.who.startswith("@") else "node"
