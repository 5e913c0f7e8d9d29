"""Figures on parts, token ages and answer lengths, collected from the metrics of a run's committed steps. Pure.

The store computes most of these metrics and adds them to a step's metrics at the commit (docs/stream.md).
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct

TOKENS_AGED = "tokens_aged_"
"""Prefix of the names of metrics that count a step's tokens of one age: ``tokens_aged_<age in training steps>``."""
PARTS, LENGTH_BIAS, RECALL = "parts", "length_bias", "recall20"
LONG_GROUPS, LONGEST_EXPECTED = "long_groups", "longest_expected"
MAX_COUNT = 2**40
"""Largest count that a metric may report: sums over millions of steps then fit into the 64 bits of the journal."""
_AGE_DIGITS = 3
SHOWN_METRICS = (LENGTH_BIAS, RECALL, LONG_GROUPS, LONGEST_EXPECTED)
"""Metrics that views show in a separate row."""


class StreamFigures(Struct, frozen=True):
    """Sums over the committed steps, and the newest values."""

    steps: int = 0
    """Number of steps whose metrics contain ``parts``."""
    parts: int = 0
    """Total number of parts of these steps."""
    most_parts: int = 0
    ages: dict[int, int] = {}
    """Number of trained tokens by age in training steps."""
    length_bias: float | None = None
    recall20: float | None = None
    long_groups: int = 0
    longest_expected: int = 0


def with_step(figures: StreamFigures, metrics: Mapping[str, float]) -> StreamFigures:
    """Return the figures with one more committed step; if it lacks the two metrics of long groups, these become 0."""
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
    """Return a metric as an integer; 0 unless it is between 0 and ``MAX_COUNT``.

    The trainer may be the user's own program, which can report any number under any name. The manager, and every later
    manager that reads the journal, must not fail because of an infinite or huge number.
    """
    return int(metric) if 0.0 <= metric <= MAX_COUNT else 0
