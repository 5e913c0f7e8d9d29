"""Ages of the tokens that the newest committed steps trained on, and a warning if they grow.

The age of a token is counted in training steps. Step n starts from the weights of step n - 1, so a token of step n that
was sampled with the weights of step v has the age n - 1 - v. The ages are part of the metrics of each step.
:class:`rrl.Worker` computes them, so a user's own trainer reports them too.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct

from ....core.run_spec import SamplingSpec
from ....core.types import Cause, Evidence, Finding, Remedy, Verdict

WINDOW_STEPS = 10
"""Number of newest steps whose ages are kept and averaged for the warning. A single median is too noisy: it jumps by
one whenever weights arrive a little late."""
EXTRA_AGE = 2.0
"""Training steps by which the median age of tokens may exceed ``[sampling] ahead``. A growing median above
``ahead + EXTRA_AGE`` leads to a warning. Tokens are up to about ``ahead + 2`` steps old. On a busy machine half of the
tokens reach this age (measured: medians of 2 or 3 in the quickstart, with ``ahead = 1`` on two busy cores). A higher
median means that new weights reach the rollouts late or not at all."""
P50_METRIC, MAX_METRIC, RUN_MAX_METRIC = "token_age_p50", "token_age_max", "token_age_run_max"
"""Metrics of a committed step: median and maximum age of its own tokens, and the maximum of all steps so far."""


class StepAge(Struct, frozen=True, array_like=True):
    """Median and maximum age of the tokens of one step, in training steps."""

    step: int
    p50: float
    max: float


class TokenAges(Struct, frozen=True):
    """Token ages of the newest steps, and the step at which the warning about token ages began.

    The medians of the newer half of the steps are compared with those of the older half, by their means. The warning
    begins when the mean of the newer half is above both the usual age (``ahead + EXTRA_AGE``) and the mean of the older
    half. It ends when the mean of the newer half is at or below the usual age. ``warned`` is the step at which it
    began, with the manager's time (s) of the step's commit; None without a warning.
    """

    steps: tuple[StepAge, ...] = ()
    """Newest steps, in order."""
    warned: tuple[StepAge, float] | None = None

    @property
    def p50(self) -> float:
        """Return the mean of the steps' medians."""
        return _mean(self.steps)

    @property
    def max(self) -> float:
        """Return the maximum age over the steps."""
        return max((entry.max for entry in self.steps), default=0.0)


def with_step(ages: TokenAges, step: int, metrics: Mapping[str, float], at: float, ahead: int) -> TokenAges:
    """Return the ages with one more committed step; ``ahead`` is ``[sampling] ahead``.

    The steps may come in any order. A step without ages, or a step that is already included, is ignored.
    """
    if P50_METRIC not in metrics or any(entry.step == step for entry in ages.steps):
        return ages
    new = StepAge(step, metrics[P50_METRIC], metrics.get(MAX_METRIC, metrics[P50_METRIC]))
    steps = tuple(sorted((*ages.steps, new), key=lambda entry: entry.step))[-WINDOW_STEPS:]
    older, newer = steps[: len(steps) // 2], steps[len(steps) // 2 :]
    young = _mean(newer) <= ahead + EXTRA_AGE
    grows = len(steps) == WINDOW_STEPS and _mean(newer) > max(ahead + EXTRA_AGE, _mean(older))
    warned = None if young else ages.warned or ((steps[-1], at) if grows else None)
    return TokenAges(steps, warned)


def token_age_finding(ages: TokenAges, sampling: SamplingSpec) -> Finding | None:
    """Return the standing warning about token ages; None if there is none. The text of a warning never changes."""
    if ages.warned is None:
        return None
    step, at = ages.warned
    bound = "without a limit" if sampling.staleness is None else f"limit {sampling.staleness}"
    text = (
        f"the median age of trained tokens has passed {sampling.ahead + EXTRA_AGE:g} training steps and grows"
        f" ({step.p50:g} at step {step.step}, {bound}): new weights reach the rollouts late, or rollouts work far ahead"
    )
    return Finding("token_age", Verdict.WARN, Cause.SOFTWARE, Remedy.NONE, at, (Evidence("trainer", text, at),))


def _mean(steps: tuple[StepAge, ...]) -> float:
    return sum(entry.p50 for entry in steps) / len(steps) if steps else 0.0
