"""Scores of many plays: precision, recall, delays, and the causes that were reported for each true cause."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from statistics import fmean, median

from msgspec import Struct

from rrl.tests.support.scenarios.play import Outcome, Played

MISSED, NOBODY = "missed", "nothing wrong"


class Score(Struct, frozen=True):
    """Numbers of failures that were found in time, found ``late``, or ``missed``; ``false``: FAIL about what had not
    failed."""

    runs: int
    found: int
    late: int
    missed: int
    false: int

    @property
    def precision(self) -> float:
        """Return the share of right alarms; 1 without any alarm."""
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


def confusion(plays: Iterable[Played]) -> Counter[tuple[str, str]]:
    """Return (true cause, reported cause) → number of cases."""
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
    """Return (role or ``node``, cause) → seconds from the failure to its first alarm, for all failures that were
    found."""
    found: dict[tuple[str, str], list[float]] = {}
    for play in plays:
        for one in play.outcomes:
            if one.found_at is not None:
                found.setdefault((_kind(one), one.cause), []).append(one.found_at - one.since)
    return found


def hang_delays(plays: Iterable[Played]) -> dict[tuple[str, int, int], float]:
    """Return (scenario, seed, index) → delay (s) of each hang that was found, in time or late."""
    return {
        (play.scenario, play.seed, index): one.found_at - one.since
        for play in plays for index, one in enumerate(play.outcomes)
        if one.cause == "hang" and one.verdict == "FAIL" and one.found_at is not None
    }  # fmt: skip


def delays_of_both(ours: Iterable[Played], theirs: Iterable[Played]) -> dict[str, list[tuple[float, float]]]:
    """Role → (our delay, theirs) in s, of each hang that both find: delays of different hangs compare nothing."""
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
    """Return the median ratio of our delay to the other method's for the same hang; None if both found no common
    hang.

    A ratio of two medians would depend on the mix of roles: RobustRL waits 90 s for a rollout and 300 s for a
    trainer.
    """
    mine, other = hang_delays(ours), hang_delays(theirs)
    pairs = [mine[key] / other[key] for key in mine.keys() & other.keys() if other[key]]
    return median(pairs) if pairs else None


def compared(ours: Sequence[Played], theirs: Sequence[Played]) -> dict[str, float | int | None]:
    """Return the delays of hangs of rrl, divided by those of the other method.

    - ``each``: see :func:`ratio`.
    - ``median``, ``mean``: of the hangs that both find.
    - ``median_of_all``, ``mean_of_all``: of the hangs that at least one finds. For the other method such a hang
      counts as open until the end of the play, so that missing slow cases is no advantage.
    - ``both``, ``ours_alone``, ``robustrl_alone``: numbers of hangs.
    """
    mine, other = hang_delays(ours), hang_delays(theirs)
    both, either = mine.keys() & other.keys(), mine.keys() | other.keys()
    left = {**_left(ours), **_left(theirs)}
    each = ratio(ours, theirs)
    result: dict[str, float | int | None] = {
        "each": None if each is None else round(each, 4),
        "median": _over(median, [mine[key] for key in both], [other[key] for key in both]),
        "mean": _over(fmean, [mine[key] for key in both], [other[key] for key in both]),
    }
    every = [(mine.get(key, left[key]), other.get(key, left[key])) for key in either]
    result["median_of_all"] = _over(median, [one for one, _ in every], [one for _, one in every])
    result["mean_of_all"] = _over(fmean, [one for one, _ in every], [one for _, one in every])
    result |= {"both": len(both), "ours_alone": len(mine.keys() - both), "robustrl_alone": len(other.keys() - both)}
    return result


def _left(plays: Iterable[Played]) -> dict[tuple[str, int, int], float]:
    """Return the time (s) from each failure to the end of its play."""
    return {(play.scenario, play.seed, index): play.lasts - one.since
            for play in plays for index, one in enumerate(play.outcomes)}  # fmt: skip


def _over(middle: Callable[[list[float]], float], mine: list[float], other: list[float]) -> float | None:
    return round(middle(mine) / middle(other), 4) if other and middle(other) else None


def quantile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def _kind(one: Outcome) -> str:
    return one.who.partition("/")[0] if "/" in one.who and not one.who.startswith("@") else "node"
