"""Figures on parts, token ages, answer lengths and episodes, collected from metrics of committed steps. Pure.

The store computes most of these metrics and adds them to a step's metrics at the commit (docs/stream.md,
docs/agents.md).
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct
from msgspec.structs import asdict

TOKENS_AGED = "tokens_aged_"
"""Prefix of the names of metrics that count a step's tokens of one age: ``tokens_aged_<age in training steps>``."""
PARTS, LENGTH_BIAS, RECALL = "parts", "length_bias", "recall20"
LONG_GROUPS, LONGEST_EXPECTED = "long_groups", "longest_expected"
MAX_COUNT = 2**40
"""Largest count that a metric may report. With this limit, sums over millions of steps fit into the journal's 64-bit
integers."""
_AGE_DIGITS = 3
SHOWN_METRICS = (LENGTH_BIAS, RECALL, LONG_GROUPS, LONGEST_EXPECTED)
"""Metrics that ``rrl status`` shows in a row of their own, apart from the other metrics."""


AT_WORK = "episodes_at_work"
_METRICS = {
    "finished": "episodes_finished",
    "retried": "episodes_retried",
    "replayed": "episodes_replayed",
    "dropped": "episodes_dropped",
    **{name: name for name in ("turns", "branches", "given_tokens", "untrained_turns", "token_drift")},
}
"""For each field of :class:`EpisodeFigures` except ``at_work``: the name of the metric that has its value."""
EPISODE_METRICS = (AT_WORK, *_METRICS.values())
"""Metrics of episodes, which ``rrl status`` shows in a row of their own."""


class StreamFigures(Struct, frozen=True):
    """Figures on parts, ages of tokens and lengths of answers: sums over the committed steps, and newest values."""

    steps: int = 0
    """Number of steps whose metrics contain ``parts``."""
    parts: int = 0
    """Total number of parts of the steps that ``steps`` counts."""
    most_parts: int = 0
    ages: dict[int, int] = {}
    """Number of trained tokens by age in training steps."""
    length_bias: float | None = None
    recall20: float | None = None
    long_groups: int = 0
    longest_expected: int = 0


def with_step(figures: StreamFigures, metrics: Mapping[str, float]) -> StreamFigures:
    """Return the figures with one more committed step.

    If the step lacks the metric ``long_groups`` or ``longest_expected``, that figure becomes 0.
    """
    parts = as_count(metrics.get(PARTS, 0.0))
    ages = dict(figures.ages)
    for name, tokens in metrics.items():
        age = name.removeprefix(TOKENS_AGED) if name.startswith(TOKENS_AGED) else ""
        if age.isdecimal() and len(age) <= _AGE_DIGITS:
            ages[int(age)] = ages.get(int(age), 0) + as_count(tokens)
    return StreamFigures(
        figures.steps + (parts > 0),
        figures.parts + parts,
        max(figures.most_parts, parts),
        dict(sorted(ages.items())),
        metrics.get(LENGTH_BIAS, figures.length_bias),
        metrics.get(RECALL, figures.recall20),
        as_count(metrics.get(LONG_GROUPS, 0.0)),
        as_count(metrics.get(LONGEST_EXPECTED, 0.0)),
    )


def trained_tokens(metrics: Mapping[str, float]) -> int | None:
    """Return how many tokens a step trained on; None if unknown.

    The trainer's own count takes precedence over the number of tokens with known age.
    """
    if "tokens" in metrics:
        return as_count(metrics["tokens"])
    aged = [as_count(count) for name, count in metrics.items() if name.startswith(TOKENS_AGED)]
    return sum(aged) if aged else None


class EpisodeFigures(Struct, frozen=True):
    """Counts over the run as of its newest step.

    ``turns`` and the fields below it are counted in finished episodes only.
    """

    at_work: int = 0
    """Episodes whose newest attempt was being made when the newest step was committed."""
    finished: int = 0
    retried: int = 0
    """Attempts that began an episode again from its beginning."""
    replayed: int = 0
    """Attempts that began with the turns of an earlier attempt whose process had died."""
    dropped: int = 0
    turns: int = 0
    branches: int = 0
    """Number of samples: paths of turns that are not the beginning of another path."""
    given_tokens: int = 0
    untrained_turns: int = 0
    """Turns that were sampled from another policy than the one that is trained, or whose answers were not used."""
    token_drift: int = 0
    """Trained tokens whose context, as the trainer read it, is not what the engine had. Always 0, unless rrl has a
    bug."""

    @property
    def branches_each(self) -> float:
        """Return the mean number of branches of a finished episode."""
        return self.branches / max(1, self.finished)


def with_episode_counts(figures: EpisodeFigures, metrics: Mapping[str, float]) -> EpisodeFigures:
    """Return the figures after one more committed step. The steps may come in any order, and counts never fall."""
    if not any(name in metrics for name in EPISODE_METRICS):
        return figures
    before = asdict(figures)
    counts = {field: max(before[field], as_count(metrics.get(name, 0.0))) for field, name in _METRICS.items()}
    return EpisodeFigures(as_count(metrics.get(AT_WORK, 0.0)), **counts)


def as_count(metric: float) -> int:
    """Return a metric as an integer; 0 unless it is between 0 and ``MAX_COUNT``.

    The trainer may be the user's own program, which can report any number under any name. The manager, and every later
    manager that reads the journal, must not fail because of an infinite or huge number.
    """
    return int(metric) if 0.0 <= metric <= MAX_COUNT else 0
