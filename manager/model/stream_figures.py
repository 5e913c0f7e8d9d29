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
MAX_COUNT = 2**40
"""Largest count that a metric may report: sums over millions of steps then fit into the 64 bits of the journal."""
_AGE_DIGITS = 3
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
    parts = as_count(metrics.get(PARTS, 0.0))
    ages = dict(figures.ages)
    for name, tokens in metrics.items():
        age = name.removeprefix(TOKENS_AGED) if name.startswith(TOKENS_AGED) else ""
        if age.isdecimal() and len(age) <= _AGE_DIGITS:
            ages[int(age)] = ages.get(int(age), 0) + as_count(tokens)
    return StreamFigures(
        figures.steps + (parts > 0), figures.parts + parts, max(figures.most_parts, parts), dict(sorted(ages.items())),
        metrics.get(LENGTH_BIAS, figures.length_bias), metrics.get(RECALL, figures.recall20),
        as_count(metrics.get(LONG_GROUPS, 0.0)), as_count(metrics.get(LONGEST_EXPECTED, 0.0)),
    )  # fmt: skip


def as_count(metric: float) -> int:
    """Return a metric as a count; 0 if it is none.

    The trainer may be the user's own program, which can report any number under any name. The manager, and each manager
    that follows it, reads the metric from its journal: it must not fail over an infinite or a huge one.
    """
    return int(metric) if 0.0 <= metric <= MAX_COUNT else 0
