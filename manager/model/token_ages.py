"""How old the tokens of the newest committed steps were when they were trained on, and whether that is worth a warning.

Ages are in weight versions: 0 for a token that was sampled with the newest weights when its batch was bound. They come
with the metrics of each step, which :class:`rrl.Worker` makes of the batch: a trainer of the user's own has them too.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct

from ...core.types import Cause, Evidence, Finding, Remedy, Verdict

WINDOW_STEPS = 10
"""newest steps of which the ages are kept, and over which a warning is judged: the median of one step jumps by one
whenever weights come a little late"""
WARN_MEDIAN_AGE = 2.0
"""weight versions. With the default ``ahead = 1`` tokens are up to about three versions old, and half of them younger
than two; a median beyond that says that new weights reach the rollouts late, or no more"""
P50_METRIC, MAX_METRIC, RUN_MAX_METRIC = "token_age_p50", "token_age_max", "token_age_run_max"
"""metrics of a committed step: of its own tokens the median and the oldest, and the oldest of all steps up to it"""


class StepAge(Struct, frozen=True, array_like=True):
    step: int
    p50: float
    max: float


class TokenAges(Struct, frozen=True):
    """``warned``: the step with which the median passed :data:`WARN_MEDIAN_AGE` and grew, and the manager's time (s) of
    its commit; None: it has not, or is at or below it again."""

    steps: tuple[StepAge, ...] = ()
    """the newest, in order"""
    warned: tuple[StepAge, float] | None = None

    @property
    def p50(self) -> float:
        """Mean over the steps of their medians."""
        return _mean(self.steps)

    @property
    def max(self) -> float:
        return max((one.max for one in self.steps), default=0.0)


def with_step(ages: TokenAges, step: int, metrics: Mapping[str, float], at: float) -> TokenAges:
    """Add a committed step, in whatever order steps are told; one without ages, or told before, changes nothing."""
    if P50_METRIC not in metrics or any(one.step == step for one in ages.steps):
        return ages
    new = StepAge(step, metrics[P50_METRIC], metrics.get(MAX_METRIC, metrics[P50_METRIC]))
    steps = tuple(sorted((*ages.steps, new), key=lambda one: one.step))[-WINDOW_STEPS:]
    older, newer = steps[: len(steps) // 2], steps[len(steps) // 2 :]
    young = _mean(newer) <= WARN_MEDIAN_AGE
    grows = len(steps) == WINDOW_STEPS and _mean(newer) > max(WARN_MEDIAN_AGE, _mean(older))
    warned = None if young else ages.warned or ((steps[-1], at) if grows else None)
    return TokenAges(steps, warned)


def token_age_finding(ages: TokenAges, limit: int | None) -> Finding | None:
    """The warning, if there is one; it stays the same while it holds. ``limit``: ``[sampling] staleness``."""
    if ages.warned is None:
        return None
    step, at = ages.warned
    bound = "without a limit" if limit is None else f"limit {limit}"
    text = (
        f"the median age of trained tokens has passed {WARN_MEDIAN_AGE:g} weight versions and grows ({step.p50:g} at"
        f" step {step.step}, {bound}): new weights reach the rollouts late, or rollouts work far ahead"
    )
    return Finding("token_age", Verdict.WARN, Cause.SOFTWARE, Remedy.NONE, at, (Evidence("trainer", text, at),))


def _mean(steps: tuple[StepAge, ...]) -> float:
    return sum(one.p50 for one in steps) / len(steps) if steps else 0.0
