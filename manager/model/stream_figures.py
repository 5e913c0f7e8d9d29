"""Figures on how a run trains while answers are still being generated, from the metrics of its committed steps. Pure.

The store computes most of them and adds them to a step's metrics when the step is committed (docs/stream.md).
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct

TOKENS_AGED = "tokens_aged_"
"""Begin of the names of the metrics that count a step's tokens of one age; the age in training steps follows."""
PARTS, LENGTH_BIAS, RECALL = "parts", "length_bias", "recall20"
LONG_GROUPS, LONGEST_EXPECTED = "long_groups", "longest_expected"
SHOWN_METRICS = (LENGTH_BIAS, RECALL, LONG_GROUPS, LONGEST_EXPECTED)
"""Metrics that views show in a row of their own."""


class StreamFigures(Struct, frozen=True):
    """Sums over the committed steps, and the newest values."""

    steps: int = 0
    """Number of steps that reported in how many parts they came."""
    parts: int = 0
    """Number of their parts."""
    most_parts: int = 0
    ages: dict[int, int] = {}
    """Number of trained tokens by age in training steps."""
    length_bias: float | None = None
    recall20: float | None = None
    long_groups: int = 0
    longest_expected: int = 0


def with_step(figures: StreamFigures, metrics: Mapping[str, float]) -> StreamFigures:
    """Return the figures with one more committed step. Metrics that a step lacks change nothing."""
    parts = int(metrics.get(PARTS, 0))
    ages = dict(figures.ages)
    for name, tokens in metrics.items():
        if name.startswith(TOKENS_AGED) and (age := name.removeprefix(TOKENS_AGED)).isdecimal():
            ages[int(age)] = ages.get(int(age), 0) + int(tokens)
    return StreamFigures(
        figures.steps + (parts > 0), figures.parts + parts, max(figures.most_parts, parts), dict(sorted(ages.items())),
        metrics.get(LENGTH_BIAS, figures.length_bias), metrics.get(RECALL, figures.recall20),
        int(metrics.get(LONG_GROUPS, 0)), int(metrics.get(LONGEST_EXPECTED, 0)),
    )  # fmt: skip
