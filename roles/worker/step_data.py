"""The data that a trainer receives from the store: parts or whole batches of steps."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager

from ...core.run_spec import RunSpec, SamplingSpec
from ...core.types import is_trainer
from ..trajectories.batches import Part, decode
from ..trajectories.types import GetCommitted, GetPart, Share
from .connection import ManagerConnection, Stopping
from .uncommitted_steps import UncommittedSteps

_WAIT_S = 1.0
"""Seconds that one request waits at the store before it is repeated, so that the worker notices a stop request."""


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
        self.uncommitted = UncommittedSteps()
        """The uncommitted steps whose data were returned; none in a member that cannot commit."""

    def part(self, number: int, index: int | None, share: Share | None) -> Part | None:
        """Return one part of a step, with the tokens of ``share`` only, or None when a stop is requested.

        If ``index`` is None or ``[sampling] stream`` is false, the whole batch of the step is one part. If ``share`` is
        None, all tokens are returned.
        """
        index = index if self._stream else None
        with self._wait_data():
            while not self._connection.stopping.is_set():
                request = self._connection.store.ask(GetPart, number, index, _WAIT_S, share)
                try:
                    bound = self._connection.call_store(request)
                except Stopping:  # no exception, because the caller may still have to commit finished steps
                    return None
                if bound is not None:
                    if (me := self._connection.launch.incarnation) == me.gang:  # only this member commits
                        self.uncommitted.add(bound.part)
                    return decode(bound.part, share)
        return None

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
