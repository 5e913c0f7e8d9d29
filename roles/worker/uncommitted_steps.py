"""The steps that a trainer has received and not committed: the data that their commits need."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping

from ...core.text import shortened
from ..trajectories.types import PackedPart, TrainedStep


class UncommittedSteps:
    """The uncommitted steps of which all parts were received, by number, with the metrics that the trainer has given.

    The thread that receives parts adds them; another thread may commit earlier steps meanwhile.
    """

    def __init__(self) -> None:
        self._complete: dict[int, TrainedStep] = {}

    def add(self, part: PackedPart) -> None:
        """Add a received part; the last one completes its step, even one whose parts are received again."""
        if part.last:
            self._complete[part.number] = TrainedStep(part.number, part.digest, {})

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
        """Return the uncommitted step ``number`` with further metrics.

        Raises:
            TypeError: ``metrics`` is not a mapping of names to numbers.
            ValueError: The step is committed, or not all of its parts were received.
        """
        step = self.get(number)
        if not isinstance(metrics, Mapping):
            raise TypeError(f"metrics of step {number}: {shortened(metrics)} is not a dict of names and numbers")
        numbers = {name: _as_number(number, name, value) for name, value in metrics.items()}
        return TrainedStep(number, step.digest, step.metrics | numbers)

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
