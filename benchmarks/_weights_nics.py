"""Reads the counters of the nodes' NICs while a version is transferred. The first node is the source of the version."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from rrl.tests.support.slurm import netns
from rrl.tests.support.weights.members import TIMEOUT_S

_HALF_COPY = 0.5
_TRICKLE_FRACTION = 0.005
"""Share of a source's bytes that may still be unsent when it counts as free. The unsent bytes are requests to other
nodes, acknowledgements, and the end of the source's last chunk."""
_SAMPLE_INTERVAL_S = 0.005
"""Seconds between two readings of the counters."""


class NicMonitor:
    """Samples the counters of the NICs until :meth:`finish`."""

    def __init__(self, network: netns.Network, nodes: Sequence[str], nbytes: int) -> None:
        self._network, self._nodes, self._nbytes = network, nodes, nbytes
        self._source = nodes[0]
        self._start = {node: netns.passed(network, node) for node in nodes}
        self._samples: list[tuple[float, int]] = []
        self._task = asyncio.create_task(self._sample())

    async def _sample(self) -> None:
        while True:
            self._samples.append((time.monotonic(), self._sent_so_far()))
            await asyncio.sleep(_SAMPLE_INTERVAL_S)

    def _sent_so_far(self) -> int:
        return netns.passed(self._network, self._source)[0] - self._start[self._source][0]

    async def wait_for_half_copies(self, receivers: tuple[int, ...], least: int = 2) -> None:
        """Wait until at least ``least`` of these receivers have half of a copy. Raises TimeoutError."""
        async with asyncio.timeout(TIMEOUT_S):
            while True:
                nodes = [self._nodes[place + 1] for place in receivers]
                received = [netns.passed(self._network, node)[1] - self._start[node][1] for node in nodes]
                if sum(each >= _HALF_COPY * self._nbytes for each in received) >= least:
                    return
                await asyncio.sleep(_SAMPLE_INTERVAL_S)

    def finish(self, began: float) -> tuple[float, float]:
        """Return the time (s after ``began``) at which the source had sent its bytes, and how many copies it sent."""
        self._task.cancel()
        sent = self._sent_so_far()
        samples = [*self._samples, (time.monotonic(), sent)]
        free = next(at for at, sent_by_then in samples if sent_by_then >= (1 - _TRICKLE_FRACTION) * sent)
        return free - began, sent / self._nbytes
