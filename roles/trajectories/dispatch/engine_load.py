"""The expected time in which an engine finishes its running answers.

An engine that runs b answers takes τ(b) seconds for one token of each answer. So n answers take Σ L_j (τ(j) - τ(j - 1))
seconds, where L_j is the number of tokens that the j-th longest answer still gets. If N(x) answers have more than x
tokens left, this sum is the integral of τ(N(x)) over x. Lengths are not known, but their distributions are. So let N(x)
be the expected number of answers with more than x tokens left, and P(x) the probability that there is at least one. If
there is one, N(x) / P(x) of them are expected. So the expected time is about the integral of P(x) τ(N(x) / P(x)). The
integral accounts for one long answer among many, although each answer alone is expected to be short.

The expected time until two engines are both done is longer than the larger of their expected times, because either
engine may have an unexpectedly long answer. So the *course* of an engine divides its time into parts, each with the
probability that the engine is then still at work. The expected time until both are done is computed from two courses
(:func:`finish_of_both`).

The integral is computed as a sum over ranges of x, each as long as all ranges before it together.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import pairwise

from .lengths import GroupEstimate, partial_means, survival

FIRST_CELL_TOKENS = 32
"""Tokens of the first range for which an engine's time is summed: half a segment. An answer with fewer tokens left ends
before a decision about it could take effect."""
_CERTAIN = 1e-6
"""Smallest probability that an answer ends within a range, so that logarithms are finite."""
_STEPS = 64
"""Resolution to which the arguments of a curve are rounded, so that similar answers share a curve. Mean and deviation
are rounded to multiples of 1 / 64. The progress is rounded down by at most 1 / 64 of itself, or of the tokens left to
the limit if these are fewer. The resulting errors of the curve are below 1 % for the mean, 1 % for the deviation and
2 % for the progress."""
_MAX_CURVES = 65_536
"""Maximum number of stored curves, 0.5 kB each. If it is reached, all curves are deleted before the next is stored."""

Curve = tuple[tuple[float, ...], tuple[float, ...]]
"""Two values for each range of tokens: the probability p that an answer is still running in the range, and log(1 - p).
The first tuple has all p, the second tuple has all log(1 - p)."""


Course = list[tuple[float, float]]
"""For each range of tokens: the seconds that an engine takes for it, and the probability that any answer reaches it."""


class CurveTable:
    """A cache of curves (:data:`Curve`): for each range of tokens, the probability that an answer is still running.

    Answers with a similar estimate and similar progress share one curve.

    Args:
        limit: Number of tokens at which answers are cut.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        edges = [0]
        while edges[-1] < limit:
            edges.append(min(limit, FIRST_CELL_TOKENS << (len(edges) - 1)))
        self._edges = edges
        self.widths = tuple(float(end - start) for start, end in pairwise(edges))
        self._curves: dict[tuple[int, int, int], Curve] = {}

    def curve(self, estimate: GroupEstimate, progress: int) -> Curve:
        """Return the curve of an answer with ``progress`` tokens."""
        step = max(1, min(progress, self._limit - progress) // _STEPS).bit_length() - 1
        key = (round(estimate.mean * _STEPS), max(1, round(estimate.deviation * _STEPS)), progress >> step << step)
        if (found := self._curves.get(key)) is None:
            if len(self._curves) >= _MAX_CURVES:
                self._curves.clear()
            found = self._curves[key] = self._compute(*key)
        return found

    def _compute(self, mean: int, deviations: int, progress: int) -> Curve:
        """Return the curve for rounded arguments; ``mean`` and ``deviations`` are in units of 1 / :data:`_STEPS`."""
        deviation = deviations / _STEPS
        estimate = GroupEstimate(mean / _STEPS, 0.0, deviation * deviation)
        alive = survival(estimate, progress)
        if alive < 1e-9:  # an answer far longer than expected may get as many tokens again
            estimate = GroupEstimate(math.log(2 * progress), 0.0, 0.25)
            alive = survival(estimate, progress)
        reached = [min(self._limit, progress + edge) for edge in self._edges]
        means = partial_means(estimate.mean, estimate.deviation, reached)
        goes_on = [
            min(1.0 - _CERTAIN, max(0.0, (until - before) / (alive * width)))
            for (before, until), width in zip(pairwise(means), self.widths, strict=True)
        ]
        return tuple(goes_on), tuple(math.log1p(-p) for p in goes_on)


class EngineLoad:
    """The running answers of an engine, as the sum of their curves; answers can be added and removed.

    Args:
        widths: Length of each range in tokens.
        token_times: Seconds for one token of each answer while 0, 1, 2, … answers are running. The last entry stands
            for any larger number of answers.
        curves: Curves of the answers that the engine runs.
    """

    def __init__(self, widths: Sequence[float], token_times: Sequence[float], curves: Iterable[Curve] = ()) -> None:
        self._widths = widths
        self._times = token_times
        self.count = 0
        """Number of answers."""
        self._expected = [0.0] * len(widths)
        self._none = [0.0] * len(widths)
        for curve in curves:
            self.add(curve)

    def add(self, curve: Curve) -> None:
        """Add an answer."""
        self._expected, self._none = self._with(curve)
        self.count += 1

    def remove(self, curve: Curve) -> None:
        """Remove one of the answers."""
        self._expected, self._none = self._without(curve)
        self.count -= 1

    def copy(self) -> EngineLoad:
        """Return a load that can be changed independently."""
        other = EngineLoad(self._widths, self._times)
        other._expected, other._none, other.count = self._expected, self._none, self.count
        return other

    def plus(self, curve: Curve) -> EngineLoad:
        """Return the load with one more answer."""
        other = EngineLoad(self._widths, self._times)
        other._expected, other._none = self._with(curve)
        other.count = self.count + 1
        return other

    def token_time(self, running: int) -> float:
        """Return the seconds for a token of each answer while this number of answers is running."""
        return self._times[min(running, len(self._times) - 1)]

    def finish(self) -> float:
        """Return the expected seconds until all answers are done."""
        return _finish(self._widths, self._times, self._expected, self._none)

    def course(self) -> Course:
        """Return for each range of tokens the seconds it takes, and the probability that any answer reaches it."""
        return _course(self._widths, self._times, self._expected, self._none)

    def course_with(self, curve: Curve) -> Course:
        """Return :meth:`course` as it would be with one more answer."""
        return _course(self._widths, self._times, *self._with(curve))

    def course_without(self, curve: Curve) -> Course:
        """Return :meth:`course` as it would be without one of the answers."""
        return _course(self._widths, self._times, *self._without(curve))

    def _with(self, curve: Curve) -> tuple[list[float], list[float]]:
        return (
            [a + b for a, b in zip(self._expected, curve[0], strict=True)],
            [a + b for a, b in zip(self._none, curve[1], strict=True)],
        )

    def _without(self, curve: Curve) -> tuple[list[float], list[float]]:
        return (
            [max(0.0, a - b) for a, b in zip(self._expected, curve[0], strict=True)],
            [min(0.0, a - b) for a, b in zip(self._none, curve[1], strict=True)],
        )


def finish_of_both(first: Course, second: Course) -> float:
    """Return the expected seconds until two engines are both done.

    This is the sum of their expected times, less the expected time in which both are at work.
    """
    total = sum(seconds * any_left for seconds, any_left in first)
    total += sum(seconds * any_left for seconds, any_left in second)
    i = j = 0
    rest, other_rest = (course[0][0] if course else 0.0 for course in (first, second))
    while i < len(first) and j < len(second):
        together = min(rest, other_rest)
        total -= together * first[i][1] * second[j][1]
        rest, other_rest = rest - together, other_rest - together
        if rest <= 0.0:
            i += 1
            rest = first[i][0] if i < len(first) else 0.0
        if other_rest <= 0.0:
            j += 1
            other_rest = second[j][0] if j < len(second) else 0.0
    return total


def _course(widths: Sequence[float], times: Sequence[float], expected: list[float], none: list[float]) -> Course:
    course, last = [], len(times) - 1
    for width, number, log_none in zip(widths, expected, none, strict=True):
        if number < 1e-9:
            break
        any_left = -math.expm1(log_none)
        running = min(number / any_left, last)
        whole = int(running)
        time = times[whole]
        if whole < last:
            time += (running - whole) * (times[whole + 1] - time)
        course.append((width * time, any_left))
    return course


def _finish(widths: Sequence[float], times: Sequence[float], expected: list[float], none: list[float]) -> float:
    # This runs for each candidate of a decision. If it shared code with _course, it would take 1.2 times as long.
    total, last, expm1 = 0.0, len(times) - 1, math.expm1
    for width, number, log_none in zip(widths, expected, none, strict=True):
        if number < 1e-9:
            break
        any_left = -expm1(log_none)
        running = number / any_left
        if running < last:
            whole = int(running)
            time = times[whole]
            total += width * any_left * (time + (running - whole) * (times[whole + 1] - time))
        else:
            total += width * any_left * times[last]
    return total
