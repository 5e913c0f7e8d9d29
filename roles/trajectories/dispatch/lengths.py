"""Expected lengths of answers, learned from the answers of the run.

The length of an answer is modelled as log-normal, capped at ``max_new_tokens``. The mean of its logarithm depends on
the prompt. This mean is estimated from two sources, each weighted by the inverse of its variance. The variances are
learned too. The sources are:

- a prediction from the prompt's tokens (:mod:`.prompt_regression`), calibrated by a linear regression of earlier
  observations on their predictions. If the two do not correlate, the mean of all prompts replaces the prediction;
- the same prompt's earlier answers.

An answer that was cut by ``max_new_tokens``, or because its group was dropped, is *censored*: only a lower bound of its
length is known. The expected value of the logarithm above this bound replaces the unknown value. If all answers are
cut, each such value raises the mean and thereby the next value. Means and variances are therefore bounded.

:class:`Lengths` is a fold over durable facts in their order. Its state is one record with exact floats, so a fold that
continues from the record gives the same bits as a fold over all facts.
"""

from __future__ import annotations

import math
from array import array
from collections import deque
from collections.abc import Iterable, Sequence
from hashlib import blake2b

from msgspec import Struct

from .prompt_regression import PromptRegression, RegressionState

RETAINED_PROMPTS = 65_536
"""Number of most recent prompts whose earlier answers are remembered; each takes 24 bytes in a record."""
_HORIZON_GROUPS = 128
"""Number of groups over which statistics are averaged. The limit exists because lengths change with the policy."""
_FIRST_GROUPS = 16
"""Number of observed groups below which all prompts have the same expected length."""
_LONGEST_SHARE = 0.2
"""Share of the groups that count as the longest, for :attr:`Lengths.recall`, as in StreamRL."""
_HISTORY_DECAY = 0.5
"""Factor on the weight of a prompt's earlier answers when newer ones arrive."""
_FIRST_WITHIN = 0.6
"""Assumed variance of the logarithm of lengths within a group, until groups are observed."""
_FIRST_BETWEEN = 1.0
"""Assumed variance between the mean logarithms of prompts, until groups are observed."""
_CENSORED_ITERATIONS = 3
"""Number of iterations for a group with censored answers. Each iteration estimates the lengths of these answers from
the mean of the group, and then estimates the mean again."""
_FIRST_LOG_LENGTH = math.log(512.0)
"""Assumed mean logarithm of lengths, until groups are observed."""
_LEAST_EXPLAINED = 0.05
"""Share of the variance between groups that must be explained before groups are ordered by expected length."""
_MAX_SLOPE = 1.25
"""Largest slope of the calibration: large enough to correct predictions that vary too little, too small to amplify
noise."""
_MAX_BEYOND_LIMIT = 1.0
"""Largest excess of the mean logarithm over the logarithm of ``max_new_tokens``. A larger excess would change nothing,
because an answer that is expected to get e times as many tokens as allowed is cut anyway."""
_MAX_WITHIN = 4.0
"""Largest variance of the logarithm of lengths within a group. It is a standard deviation of 2, a factor of 7 in
length."""
_SMALLEST_VARIANCE = 1e-4
_SQRT2 = math.sqrt(2.0)
_SQRT_2PI = math.sqrt(2.0 * math.pi)


class Answer(Struct, frozen=True, array_like=True, gc=False):
    """The number of tokens that an answer has so far, and whether the answer ended by itself at this length."""

    tokens: int
    ended: bool


class GroupEstimate(Struct, frozen=True, array_like=True, gc=False):
    """The estimate of a group: a normal distribution of the mean logarithm of its answers' lengths."""

    mean: float
    variance: float
    within: float
    """Variance of the logarithm of one answer's length around the mean of the group."""


class LengthState(Struct, array_like=True):
    """All that :class:`Lengths` has learned.

    ``prompts`` has an 8-byte key for each remembered prompt. ``means`` and ``counts`` have the prompt's mean logarithm
    and the effective number of answers in it. They and ``moments`` are float64 in the machine's byte order.
    """

    limit: int
    regression: RegressionState
    moments: bytes
    prompts: bytes
    means: bytes
    counts: bytes
    newest: bytes = b""
    """For each of the newest groups, the mean logarithm of its answers' lengths: (expected, observed)."""


class Lengths:
    """The expected lengths of the run's answers, learned from its groups.

    Args:
        limit: Number of tokens at which answers are cut (``max_new_tokens``).
        state: State to continue from.
    """

    def __init__(self, limit: int, state: LengthState | None = None) -> None:
        self.limit = limit
        self._regression = PromptRegression(state.regression if state else None)
        self._moments = _Moments(state.moments if state else None)
        self._newest: deque[tuple[float, float]] = deque(maxlen=_HORIZON_GROUPS)
        """For each of the newest groups, the mean logarithm of its answers' lengths: (value that was expected before
        the answers began, observed value)."""
        self._history: dict[bytes, tuple[float, float]] = {}
        """For each prompt, (mean logarithm, effective number of answers in this mean). The most recent prompt is the
        last."""
        if state:
            self.limit = state.limit
            keys = [state.prompts[i : i + 8] for i in range(0, len(state.prompts), 8)]
            pairs = zip(array("d", state.means), array("d", state.counts), strict=True)
            self._history = dict(zip(keys, pairs, strict=True))
            newest = array("d", state.newest)
            self._newest.extend(zip(newest[::2], newest[1::2], strict=True))

    def state(self) -> LengthState:
        """Return the state as a record."""
        means = array("d", [mean for mean, _ in self._history.values()])
        counts = array("d", [count for _, count in self._history.values()])
        return LengthState(
            self.limit,
            self._regression.state(),
            self._moments.tobytes(),
            b"".join(self._history),
            means.tobytes(),
            counts.tobytes(),
            array("d", [value for pair in self._newest for value in pair]).tobytes(),
        )

    # ── learning ───────────────────────────────────────────────────────────────────────────────────────────────────
    def observe(self, prompt: Sequence[int], answers: Iterable[Answer]) -> None:
        """Learn the lengths of a group, whose answers are all complete, or were cut when the group was dropped."""
        answers = [answer for answer in answers if answer.tokens > 0]
        if not answers:
            return
        moments = self._moments
        key = _key(prompt)
        predicted = self._regression.predict(prompt)
        prior = self._prior(predicted, self._history.get(key))
        mean, squares = _fit(answers, prior, self.limit)
        noise = prior.within / len(answers)
        if (before := self._history.pop(key, None)) is not None:
            moments.add_drift(mean - before[0], noise + prior.within / before[1])
        self._regression.learn(prompt, mean)
        moments.add_group(predicted, prior.mean, mean, noise)
        self._newest.append((prior.mean, mean))
        if len(answers) > 1 and not all(_is_censored(answer, self.limit) for answer in answers):
            moments.add_within(squares / (len(answers) - 1))
        old_mean, old_count = before or (0.0, 0.0)
        old_count *= _HISTORY_DECAY
        count = old_count + len(answers)
        self._history[key] = (old_mean * old_count + mean * len(answers)) / count, count
        if len(self._history) > RETAINED_PROMPTS:
            del self._history[next(iter(self._history))]

    # ── estimating ─────────────────────────────────────────────────────────────────────────────────────────────────
    def expect(self, prompt: Sequence[int]) -> GroupEstimate:
        """Return the estimate of a prompt's next group before any of its answers has begun."""
        return self._prior(self._regression.predict(prompt), self._history.get(_key(prompt)))

    def _prior(self, predicted: float, history: tuple[float, float] | None) -> GroupEstimate:
        moments = self._moments
        mean, variance = moments.calibrated(predicted)
        if history is not None:
            before = history[0] + moments.drift_mean
            uncertain = max(_SMALLEST_VARIANCE, moments.drift_variance) + moments.within / history[1]
            mean = (mean * uncertain + before * variance) / (uncertain + variance)
            variance = variance * uncertain / (uncertain + variance)
        return GroupEstimate(_bounded(mean, self.limit), variance, moments.within)

    @property
    def typical(self) -> GroupEstimate:
        """The estimate of a group if nothing is known about its prompt."""
        mean, variance = self._moments.typical
        return GroupEstimate(_bounded(mean, self.limit), variance, self._moments.within)

    @property
    def recall(self) -> float | None:
        """Share of the longest fifth of the newest groups that was also in the fifth with the longest expected lengths.

        In a random order the share is 0.2. None while fewer than :data:`_FIRST_GROUPS` groups were observed.
        """
        count, longest = len(self._newest), math.ceil(_LONGEST_SHARE * len(self._newest))
        if count < _FIRST_GROUPS:
            return None
        expected, observed = (
            set(sorted(range(count), key=lambda each: (-self._newest[each][column], each))[:longest])
            for column in (0, 1)
        )
        return len(expected & observed) / longest

    @property
    def separates(self) -> bool:
        """True if the lengths that were expected of the last groups in advance correlate with the observed ones."""
        return self._moments.separates


def _fit(answers: Sequence[Answer], prior: GroupEstimate, limit: int) -> tuple[float, float]:
    """Return the mean logarithm of the answers' lengths, and the sum of the squared deviations.

    For a censored answer, both use an estimate of the logarithm.
    """
    logs = [math.log(answer.tokens) for answer in answers]
    censored = [_is_censored(answer, limit) for answer in answers]
    if not any(censored):
        mean = sum(logs) / len(logs)
        return mean, sum([(log - mean) ** 2 for log in logs])
    mean = _posterior(answers, prior, limit)
    deviation = math.sqrt(prior.within)
    squares = 0.0
    values: list[float] = []
    for log, cut in zip(logs, censored, strict=True):
        value, variance = _above(mean, deviation, log) if cut else (log, 0.0)
        values.append(value)
        squares += (value - mean) ** 2 + variance
    return _bounded(sum(values) / len(values), limit), squares


def _posterior(answers: Sequence[Answer], prior: GroupEstimate, limit: int) -> float:
    """Return the mean logarithm given prior and answers."""
    precision = prior.within / max(_SMALLEST_VARIANCE, prior.variance)
    deviation = math.sqrt(prior.within)
    total, count = prior.mean * precision, 0.0
    bounds: list[float] = []
    for answer in answers:
        log = math.log(answer.tokens)
        if _is_censored(answer, limit):
            bounds.append(log)
        else:
            total, count = total + log, count + 1.0
    mean = total / (precision + count)
    for _ in range(_CENSORED_ITERATIONS if bounds else 0):
        value = sum([_above(mean, deviation, bound)[0] for bound in bounds])
        mean = _bounded((total + value) / (precision + count + len(bounds)), limit)
    return mean


def _is_censored(answer: Answer, limit: int) -> bool:
    """Return whether only a lower bound of the answer's length is known."""
    return not answer.ended or answer.tokens >= limit


def _bounded(mean: float, limit: int) -> float:
    """Return the mean logarithm, bounded for answers that are cut at ``limit`` tokens (:data:`_MAX_BEYOND_LIMIT`)."""
    return min(max(0.0, mean), math.log(limit) + _MAX_BEYOND_LIMIT)


def _above(mean: float, deviation: float, bound: float) -> tuple[float, float]:
    """Return mean and variance of the part of a normal distribution above a bound."""
    z = (bound - mean) / deviation
    if z > 6.0:
        return bound + deviation / z, (deviation / z) ** 2
    ratio = math.exp(-0.5 * z * z) / _SQRT_2PI / (0.5 * math.erfc(z / _SQRT2))
    return mean + deviation * ratio, deviation * deviation * max(0.0, 1.0 - ratio * (ratio - z))


def _key(prompt: Sequence[int]) -> bytes:
    return blake2b(array("i", prompt).tobytes(), digest_size=8).digest()


class _Pairs:
    """Means and covariances of pairs (what was expected, what was observed), with exponential weights."""

    SIZE = 6

    def __init__(self, values: Sequence[float] = (0.0,) * SIZE) -> None:
        self.count, self.x, self.y, self.xx, self.xy, self.yy = values

    def values(self) -> list[float]:
        return [self.count, self.x, self.y, self.xx, self.xy, self.yy]

    def add(self, x: float, y: float, horizon: int) -> None:
        self.count = min(self.count + 1.0, float(horizon))
        rate = 1.0 / self.count
        keep, dx, dy = 1.0 - rate, x - self.x, y - self.y
        self.x += rate * dx
        self.y += rate * dy
        self.xx = keep * (self.xx + rate * dx * dx)
        self.xy = keep * (self.xy + rate * dx * dy)
        self.yy = keep * (self.yy + rate * dy * dy)

    @property
    def correlated(self) -> bool:
        """True if the pairs are positively correlated beyond chance: r² of unrelated pairs is about 1 / count."""
        if self.count < _FIRST_GROUPS or self.xy <= 0.0 or self.xx <= 0.0 or self.yy <= 0.0:
            return False
        return self.xy * self.xy / (self.xx * self.yy) >= _LEAST_EXPLAINED + 4.0 / self.count


class _Moments:
    """Statistics from which lengths are estimated: averages over the last groups, with exponential weights."""

    def __init__(self, data: bytes | None) -> None:
        size = _Pairs.SIZE
        values = array("d", data) if data else array("d", [0.0] * (2 * size + 6))
        self._predicted, self._expected = _Pairs(values[:size]), _Pairs(values[size : 2 * size])
        (self._noise, self._within_count, self._within, self._drifts, self.drift_mean, self._drift_square) = values[
            2 * size :
        ]

    def tobytes(self) -> bytes:
        rest = [self._noise, self._within_count, self._within, self._drifts, self.drift_mean, self._drift_square]
        return array("d", [*self._predicted.values(), *self._expected.values(), *rest]).tobytes()

    def add_group(self, predicted: float, expected: float, observed: float, noise: float) -> None:
        """Add a group's observed mean logarithm.

        ``predicted`` is the prediction of the regression alone, ``expected`` the estimate from all sources together.
        ``noise`` is the sampling variance of ``observed``.
        """
        self._predicted.add(predicted, observed, _HORIZON_GROUPS)
        self._expected.add(expected, observed, _HORIZON_GROUPS // 2)
        self._noise += (noise - self._noise) / self._predicted.count

    def add_within(self, variance: float) -> None:
        self._within_count = min(self._within_count + 1.0, float(_HORIZON_GROUPS))
        self._within += (variance - self._within) / self._within_count

    def add_drift(self, change: float, noise: float) -> None:
        """Add a change of the mean logarithm of a prompt's answer lengths since the prompt's earlier answers.

        ``noise`` is the sampling variance of ``change``.
        """
        self._drifts = min(self._drifts + 1.0, float(_HORIZON_GROUPS))
        self.drift_mean += (change - self.drift_mean) / self._drifts
        self._drift_square += ((change - self.drift_mean) ** 2 - noise - self._drift_square) / self._drifts

    @property
    def within(self) -> float:
        """Variance of the logarithm of an answer's length around its prompt's mean."""
        weight = self._within_count / (self._within_count + 4.0)
        return min(_MAX_WITHIN, max(_SMALLEST_VARIANCE, _FIRST_WITHIN + weight * (self._within - _FIRST_WITHIN)))

    @property
    def drift_variance(self) -> float:
        """Variance of the change, between two successive groups of a prompt, of the mean logarithm of their lengths."""
        weight = self._drifts / (self._drifts + 8.0)
        return _FIRST_BETWEEN * (1.0 - weight) + weight * max(0.0, self._drift_square)

    @property
    def groups(self) -> float:
        """Number of groups on which the averages are based."""
        return self._predicted.count

    @property
    def separates(self) -> bool:
        return self._expected.correlated

    @property
    def typical(self) -> tuple[float, float]:
        """Estimate of the mean logarithm of a prompt's answer lengths, as (mean, variance), for an unknown prompt."""
        pairs = self._predicted
        if pairs.count < 2:
            return (pairs.y if pairs.count else _FIRST_LOG_LENGTH), _FIRST_BETWEEN
        return pairs.y, max(_SMALLEST_VARIANCE, pairs.yy - self._noise)

    def calibrated(self, predicted: float) -> tuple[float, float]:
        """Return an estimate of the mean logarithm of a prompt's answer lengths, as (mean, variance).

        ``predicted`` is the prediction of the regression for the prompt.
        """
        pairs = self._predicted
        if not pairs.correlated:
            return self.typical
        slope = min(_MAX_SLOPE, pairs.xy / pairs.xx)
        between = pairs.yy - 2 * slope * pairs.xy + slope * slope * pairs.xx - self._noise
        return pairs.y + slope * (predicted - pairs.x), max(_SMALLEST_VARIANCE, between)
