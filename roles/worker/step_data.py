"""The data that a trainer receives from the store: parts or whole batches of steps, in encoded form."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Coroutine
from contextlib import AbstractContextManager
from typing import Any, TypeVar

from ...core.run_spec import RunSpec, SamplingSpec
from ...core.types import is_trainer
from ..trajectories.batches import whole_part
from ..trajectories.types import GetBatch, GetCommitted, GetPart, PackedBatch, PackedPart
from .connection import ManagerConnection, Stopping
from .uncommitted_steps import UncommittedSteps

_WAIT_S = 1.0
"""Seconds that one request waits at the store before it is repeated, so that the worker notices a stop request."""
_Data = TypeVar("_Data")


class StepData:
    """The data of steps, requested one after the other; returned data counts as uncommitted.

    Args:
        connection: Connection to the store.
        sampling: ``[sampling]`` of the job.
        wait_data: Returns a context manager for the phase in which data are awaited.
    """

    def __init__(
        self,
        connection: ManagerConnection,
        sampling: SamplingSpec,
        wait_data: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._connection, self._stream, self._wait_data = connection, sampling.stream, wait_data
        self.uncommitted = UncommittedSteps(sampling.staleness)
        """The uncommitted steps whose data were returned."""

    def part(self, number: int, index: int) -> PackedPart | None:
        """Return one part of a step, or None when a stop is requested.

        If ``[sampling] stream`` is false, the whole step is one part.
        """
        if not self._stream:
            batch = self.batch(number)
            return None if batch is None else whole_part(batch)
        bound = self._wait(lambda: self._connection.store.ask(GetPart, number, index, _WAIT_S))
        if bound is None:
            return None
        self.uncommitted.add(bound.part)
        return bound.part

    def evaluated_at_end(self, job: RunSpec) -> bool:
        """Wait for the stop request that follows the last step's evaluation, and return True after this wait.

        Only a trainer that publishes weights and has committed the last step waits, because rollouts may need its last
        weights for the evaluation. Returns False at once in any other process, in a job without evaluations, and if a
        stop is already requested.
        """
        stopping = self._connection.stopping
        if job.eval is None or not is_trainer(self._connection.launch.incarnation.replica) or stopping.is_set():
            return False
        with self._wait_data(), contextlib.suppress(Stopping):
            if self._connection.call_store(self._connection.store.ask(GetCommitted)).number != job.steps:
                return False
            while not stopping.wait(_WAIT_S):
                self._connection.probes.answer()
        return True

    def batch(self, number: int) -> PackedBatch | None:
        """Return the batch of one step, or None when a stop is requested."""
        bound = self._wait(lambda: self._connection.store.ask(GetBatch, number, _WAIT_S))
        if bound is None:
            return None
        self.uncommitted.add(whole_part(bound.batch))
        return bound.batch

    def _wait(self, request: Callable[[], Coroutine[Any, Any, _Data | None]]) -> _Data | None:
        """Repeat a request to the store until it has a result, and return it; None when a stop is requested."""
        with self._wait_data():
            while not self._connection.stopping.is_set():
                try:
                    result = self._connection.call_store(request())
                except Stopping:  # no exception, because the caller may still have to commit finished steps
                    return None
                if result is not None:
                    return result
        return None
