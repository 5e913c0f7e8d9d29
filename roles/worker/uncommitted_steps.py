"""The steps that a trainer has received and not committed: the data that their commits need, computed part by part.

A step that was received as a whole batch is a step of one part.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterable, Mapping

from ...core.text import shortened
from ..trajectories.types import PackedPart, TrainedStep

BATCH_METRICS = frozenset(
    {
        "reward",
        "training_reward",
        "parts",
        "token_age_run_max",
        "token_age_p50",
        "token_age_max",
        "unscored_groups",
        "unscored_share",
        "stale_groups",
        "stale_share",
    }
)
"""Metrics of a step that are computed from its batch."""


class UncommittedSteps:
    """The uncommitted steps of which all parts were received, by number, with their metrics.

    The metrics are computed from the batch: ``reward`` and ``training_reward``, the number of ``parts``, and the ages
    of the tokens. If groups could not be scored, also their number and share. If the job limits staleness, also number
    and share of stale groups. A trainer's own metric of such a name is kept as ``trainer_<name>``. The thread that
    receives parts adds them; another thread may commit earlier steps meanwhile.

    Args:
        staleness: ``[sampling] staleness``.
    """

    def __init__(self, staleness: int | None) -> None:
        self._staleness = staleness
        self._begun = _BatchMetrics()
        self._complete: dict[int, TrainedStep] = {}

    def add(self, part: PackedPart) -> None:
        """Add a received part. Part 0 begins its step anew: earlier parts of an incomplete step are dropped."""
        if part.index == 0:
            self._begun = _BatchMetrics()
        self._begun.add(part)
        if part.last:
            metrics = self._begun.of_step(part, self._staleness)
            self._complete[part.number] = TrainedStep(part.number, part.digest, metrics)

    def get(self, number: int) -> TrainedStep:
        """Return the uncommitted step ``number``.

        Raises:
            ValueError: The step is committed, or not all of its parts were received.
        """
        step = self._complete.get(number) if type(number) is int else None  # True and 1.0 are equal to 1
        if step is None:
            raise ValueError(
                f"cannot commit step {number!r}: it has no uncommitted batch; "
                f"the uncommitted steps are {sorted(self._complete)}"
            )
        return step

    def trained(self, number: int, metrics: dict[str, float]) -> None:
        """Add metrics to a step that has no checkpoint of its own: the commit of a later step reports them.

        Raises:
            ValueError: The step is committed, or not all of its parts were received.
        """
        self._complete[number] = self.with_metrics(number, metrics)

    def with_metrics(self, number: int, metrics: Mapping[str, float]) -> TrainedStep:
        """Return the uncommitted step ``number`` with further metrics, none of which replaces one of the batch.

        Raises:
            TypeError: ``metrics`` is not a mapping of names to numbers.
            ValueError: The step is committed, or not all of its parts were received.
        """
        step = self.get(number)
        if not isinstance(metrics, Mapping):
            raise TypeError(f"metrics of step {number}: {shortened(metrics)} is not a dict of names and numbers")
        numbers = {name: _as_number(number, name, value) for name, value in metrics.items()}
        added = {f"trainer_{name}" if name in BATCH_METRICS else name: value for name, value in numbers.items()}
        return TrainedStep(number, step.digest, step.metrics | added)

    def before(self, number: int) -> tuple[TrainedStep, ...]:
        """Return the uncommitted steps before step ``number``, in order."""
        return tuple(one for step, one in sorted(self._complete.items()) if step < number)

    def restore(self, steps: Iterable[TrainedStep]) -> None:
        """Add steps that an earlier incarnation has trained, and whose state this incarnation continues from."""
        self._complete.update((one.number, one) for one in steps)

    def remove_through(self, number: int) -> None:
        """Remove the steps up to ``number``, which is committed."""
        for step in [step for step in list(self._complete) if step <= number]:
            self._complete.pop(step)


def _as_number(step: int, name: object, value: object) -> float:
    """Return a metric as a float. A request with anything else would be dropped by the store, and repeated forever."""
    if isinstance(name, str) and not isinstance(value, str | bytes):
        with contextlib.suppress(TypeError, ValueError, OverflowError, RuntimeError):  # a tensor may raise any of them
            return float(value)  # type: ignore[arg-type]
    raise TypeError(f"metrics of step {step}: {shortened(name)} = {shortened(value)} is not a name and a number")


class _BatchMetrics:
    """Sums over the received parts of one step, from which the step's metrics are computed.

    Ages are in training steps: 0 for a token that was sampled with the weights from which the step starts.
    """

    def __init__(self) -> None:
        self._reward, self._training, self._trajectories, self._groups, self._parts = 0.0, 0.0, 0, 0, 0
        self._tokens = Counter[int]()
        """Number of tokens by age."""

    def add(self, part: PackedPart) -> None:
        self._parts += 1
        self._groups += len(part.groups)
        trajectories = {trajectory.id: trajectory for trajectory in part.trajectories}  # an episode has many samples
        self._trajectories += len(trajectories)
        self._reward = sum((one.reward for one in trajectories.values()), self._reward)
        self._training = sum((one.training for one in trajectories.values()), self._training)
        for trajectory in part.trajectories:
            for count, step in trajectory.trained_runs:
                self._tokens[max(0, part.number - 1 - step)] += count

    def of_step(self, last: PackedPart, staleness: int | None) -> dict[str, float]:
        """Return the metrics of the step that the part ``last`` completes."""
        tokens = self._tokens
        metrics = {
            "reward": self._reward / max(1, self._trajectories),
            "training_reward": self._training / max(1, self._trajectories),
            "parts": float(self._parts),
            "token_age_run_max": float(last.max_age),
        }
        if tokens:
            metrics["token_age_p50"], metrics["token_age_max"] = float(_median(tokens)), float(max(tokens))
        if last.unscored:
            metrics["unscored_groups"] = float(last.unscored)
            metrics["unscored_share"] = last.unscored / (last.unscored + last.number * self._groups)
        if staleness is not None:
            metrics["stale_groups"] = float(last.stale)
            metrics["stale_share"] = last.stale / (last.stale + last.number * self._groups)
        return metrics


def _median(counts: Counter[int]) -> int:
    """Return the lower median of the keys, each weighted by its count."""
    before, half = 0, counts.total() / 2
    for value in sorted(counts):
        before += counts[value]
        if before >= half:
            return value
    raise ValueError("cannot compute the median: all counts are zero")
