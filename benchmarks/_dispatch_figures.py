"""Computes the figures of benchmarks/dispatch.py, with their standard errors.

A figure is computed from the steps of several seeds. Its standard error is computed by the jackknife: from the values
that the figure has when one seed is left out at a time. Each ratio compares equal work, because the same seed gives an
arm and its baseline "first come, first served" answers of the same lengths.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence

from msgspec import Struct, field

RANKERS = ("wrong", "unseen", "seen", "perfect")
LEARNED = ("unseen", "seen")
MAX_OVER_FIFO = 1.02
MIN_SHARE = 0.25
MIN_GAIN = 0.05
DECIDED = 3.0
"""A trace gets no more seeds when each of its figures is at least this many standard errors away from its bar
(:data:`MAX_OVER_FIFO` or :data:`MIN_SHARE`)."""

Seeds = Sequence[int]


class Estimate(Struct, frozen=True):
    """A figure and its standard error."""

    value: float
    error: float

    def __str__(self) -> str:
        return f"{self.value:.3f} ± {self.error:.3f}"


def kind(arm: str) -> str:
    """Return ``known`` if the arm's prompts are among those from which the rankers have learned, else ``new``."""
    return "known" if arm.endswith(("known", "wrong")) or arm in ("seen", "pools seen") else "new"


class Trace(Struct):
    """The seconds of a trace's steps: for each arm, one value per seed."""

    source: str
    tau: str
    engines: str
    seconds: dict[str, list[float]] = field(default_factory=dict)

    @property
    def seeds(self) -> range:
        """The seeds that were played."""
        return range(len(self.seconds["fifo new"]))

    def add(self, arm: str, seconds: float) -> None:
        """Add the seconds of the next seed's step."""
        self.seconds.setdefault(arm, []).append(seconds)

    def over_fifo(self, arm: str, seeds: Seeds | None = None) -> float:
        """Return an arm's seconds divided by the seconds that first come, first served takes for the same answers."""
        seeds = self.seeds if seeds is None else seeds
        return self._seconds(arm, seeds) / self._seconds(f"fifo {kind(arm)}", seeds)

    def oracle(self, prompts: str, seeds: Seeds | None = None) -> float:
        """Return the seconds of the oracle, which knows all lengths, divided by those of first come, first served.

        ``prompts`` is ``known`` or ``new`` (:func:`kind`).
        """
        best = self.over_fifo(f"clairvoyant {prompts}", seeds)
        return min(best, self.over_fifo("perfect", seeds)) if prompts == "new" else best

    def share(self, arm: str, seeds: Seeds | None = None) -> float:
        """Return an arm's gain divided by the oracle's gain; both gains are relative to "first come, first served"."""
        return (1 - self.over_fifo(arm, seeds)) / (1 - self.oracle(kind(arm), seeds))

    def share_of_attainable(self, arm: str, seeds: Seeds | None = None) -> float:
        """Return an arm's gain as a share of the gain of a ranker that knows the true mean length of each prompt."""
        return (1 - self.over_fifo(arm, seeds)) / (1 - self.over_fifo(f"true mean {kind(arm)}", seeds))

    def gainful(self, arm: str) -> bool:
        """Return whether the oracle's gain with an arm's prompts is large enough (:data:`MIN_GAIN`) to count."""
        return 1 - self.oracle(kind(arm)) >= MIN_GAIN

    def decided(self) -> bool:
        """Return whether each figure is at least :data:`DECIDED` standard errors away from its bar."""
        bars = [(self.estimate(self.over_fifo, arm), MAX_OVER_FIFO) for arm in RANKERS]
        bars += [(self.estimate(self.share, arm), MIN_SHARE) for arm in LEARNED if self.gainful(arm)]
        return all(abs(found.value - bar) >= DECIDED * found.error for found, bar in bars)

    def estimate(self, figure: Callable[[str, Seeds], float], arm: str) -> Estimate:
        """Return a figure of this trace, such as :meth:`share`, with its standard error."""
        count = len(self.seeds)
        without = [figure(arm, [seed for seed in self.seeds if seed != left_out]) for left_out in self.seeds]
        error = math.sqrt((count - 1) / count * sum((each - statistics.mean(without)) ** 2 for each in without))
        return Estimate(figure(arm, self.seeds), error)

    def _seconds(self, arm: str, seeds: Seeds) -> float:
        return sum(self.seconds[arm][seed] for seed in seeds)


def figures(traces: Sequence[Trace]) -> dict[str, float]:
    """Return the figures of all traces together."""
    ratios = [trace.estimate(trace.over_fifo, arm) for trace in traces for arm in RANKERS]
    pairs = [(trace, arm) for trace in traces for arm in LEARNED]
    gainful = [(trace, arm) for trace, arm in pairs if trace.gainful(arm)]
    shares = [trace.estimate(trace.share, arm) for trace, arm in gainful]
    attainable = [trace.share(f"true mean {kind(arm)}") for trace, arm in gainful]
    gained = sum(1 - trace.over_fifo(arm) for trace, arm in gainful)
    possible = sum(1 - trace.oracle(kind(arm)) for trace, arm in gainful)
    worst = max(ratios, key=lambda each: each.value)
    least = min(shares, key=lambda each: each.value, default=Estimate(math.nan, math.nan))
    singles = [
        own / fifo
        for trace in traces
        for arm in RANKERS
        for own, fifo in zip(trace.seconds[arm], trace.seconds[f"fifo {kind(arm)}"], strict=True)
    ]
    pools = [arm for arm in traces[0].seconds if arm.startswith("pools")]
    return {
        "worst_over_fifo": worst.value,
        "worst_over_fifo_error": worst.error,
        "worst_step_over_fifo": max(singles),
        "two_pools_worst_over_fifo": max(trace.over_fifo(arm) for trace in traces for arm in pools),
        "share_of_oracle": least.value,
        "share_of_oracle_error": least.error,
        "share_of_oracle_together": gained / possible if gainful else math.nan,
        "attainable_share_of_oracle": min(attainable, default=math.nan),
        "share_of_attainable": min((trace.share_of_attainable(arm) for trace, arm in gainful), default=math.nan),
        "oracle_over_fifo": statistics.mean(trace.oracle("new") for trace in traces),
        "learned_over_fifo": statistics.mean(trace.over_fifo(arm) for trace, arm in pairs),
        "even_over_fifo": statistics.mean(trace.over_fifo("even new") for trace in traces),
    }
