"""Record the use of the nodes' GPUs at long intervals, since it is only displayed, and no decision depends on it."""

from __future__ import annotations

from math import inf

from ...core.types import GpuUse, NodeName
from ..context import RunContext
from ..model.events import GpuUseRecorded

RECORD_INTERVAL_S = 20.0
"""Minimum seconds between two records. So people who look again after half a minute see new figures."""
RECORD_INTERVAL_PER_NODE_S = 0.02
"""Seconds by which each node in a record delays the next record. A node takes 40 bytes, so that records take less than
2 kB/s for any number of nodes."""


class GpuUseRecorder:
    """Keeps the GPU use that the agents report to one manager, and records it at long intervals."""

    def __init__(self, context: RunContext) -> None:
        self._context = context
        self._unrecorded: dict[NodeName, GpuUse] = {}
        self._recorded_at = -inf
        self._recorded = 0
        """Number of nodes in the last record."""

    def on_report(self, node: NodeName, gpu_use: GpuUse) -> None:
        """Keep the newest report of a node, and record all reports if a record is due."""
        now = self._context.now()
        if self._recorded_at == -inf:  # the first record is due an interval later, with the reports of all agents
            self._recorded_at = now
        self._unrecorded[node] = gpu_use
        if now - self._recorded_at >= max(RECORD_INTERVAL_S, self._recorded * RECORD_INTERVAL_PER_NODE_S):
            self._context.record(GpuUseRecorded(self._unrecorded))
            self._recorded_at, self._recorded = now, len(self._unrecorded)
            self._unrecorded = {}
