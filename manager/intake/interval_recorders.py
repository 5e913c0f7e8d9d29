"""Record the workers' clocks, the weights of rollouts and the nodes' GPU use at intervals: no decision needs them."""

from __future__ import annotations

from math import inf

from ...core.phases import MAX_CLOCK_ENTRIES, ClockReading, PhaseTime
from ...core.text import escaped
from ...core.types import AGENT, STANDBY_ROLE, GpuUse, Incarnation, NodeName, Version, WeightTraffic, role_of
from ..context import RunContext
from ..model.events import ClocksRecorded, GpuUseRecorded, WeightsRecorded

CLOCK_RECORD_INTERVAL_S = 60.0
"""Seconds after which the readings are recorded even if no step was committed."""
COMMIT_RECORD_INTERVAL_S = 5.0
"""Minimum seconds between two records that are made at commits. Workers report their clocks at this interval."""
RECORD_INTERVAL_PER_REPLICA_S = 0.05
"""After a record of n readings, the next record at a commit is made at least n times this many seconds later. A reading
with ten entries takes 280 bytes, so these records take less than 6 kB/s for any number of replicas."""
MAX_NAME_CHARS = 40
"""Maximum number of characters kept of the name of a phase or of an idle cause."""
GPU_USE_RECORD_INTERVAL_S = 20.0
"""Minimum seconds between two records of GPU use. So people who look again after half a minute see new figures."""
WEIGHTS_RECORD_INTERVAL_S = 1.0
"""Minimum seconds between two records of weight versions: the usual interval of heartbeats."""
RECORD_INTERVAL_PER_ROLLOUT_S = 0.01
"""Seconds by which each rollout in a record delays this record. A version takes 70 bytes, so that records take less
than 7 kB/s for any number of rollouts."""
MAX_TRAFFIC = 2**53
"""Largest value kept of a counter of received weights, which JSON and Prometheus represent exactly: 9 PB."""
RECORD_INTERVAL_PER_NODE_S = 0.02
"""Seconds by which each node in a record delays the next record. A node takes 40 bytes, so that records take less than
2 kB/s for any number of nodes."""


class ClockRecorder:
    """Keeps the clock readings that one manager receives from the workers, and records them at long intervals.

    Each record contains the newest reading of every process that has reported since the previous record. A record is
    written with a commit if the previous record is at least :data:`COMMIT_RECORD_INTERVAL_S` old, and once a minute if
    there are no commits. If the manager dies, readings after its last record are lost, but the next reading of a
    running process contains them, since readings are totals.
    """

    def __init__(self, context: RunContext) -> None:
        self._context = context
        self._unrecorded: dict[tuple[Incarnation, int], ClockReading] = {}
        """Newest readings since the last record, by incarnation and process."""
        self._recorded_at = -inf
        self._recorded = 0
        """Number of readings in the last record."""

    def on_report(self, incarnation: Incarnation, clock: ClockReading) -> None:
        """Keep a reading of a role's process or a guest's, and record all unrecorded readings if a record is due."""
        if role_of(incarnation.replica) in (AGENT, STANDBY_ROLE):
            return
        now = self._context.now()
        if self._recorded_at == -inf:
            self._recorded_at = now
        self._unrecorded[incarnation, clock.began] = _limited(clock)
        if now - self._recorded_at >= CLOCK_RECORD_INTERVAL_S:
            self.record()

    def on_commit(self) -> None:
        """Record the unrecorded readings when a step is committed, unless the last record is too recent."""
        pause = max(COMMIT_RECORD_INTERVAL_S, self._recorded * RECORD_INTERVAL_PER_REPLICA_S)
        if self._context.now() - self._recorded_at >= pause:
            self.record()

    def record(self) -> None:
        """Record all readings that are not recorded yet."""
        if not self._unrecorded:
            return
        readings = tuple((incarnation, clock) for (incarnation, _), clock in self._unrecorded.items())
        self._unrecorded.clear()
        self._context.record(ClocksRecorded(readings))
        self._recorded_at, self._recorded = self._context.now(), len(readings)


def _limited(clock: ClockReading) -> ClockReading:
    """Return a reading of bounded size, without control characters and negative times."""
    times = tuple(
        PhaseTime(escaped(time.phase[:MAX_NAME_CHARS]), escaped(time.idle_cause[:MAX_NAME_CHARS]), max(0, time.ns))
        for time in clock.times[:MAX_CLOCK_ENTRIES]
    )
    return ClockReading(clock.began, max(0, clock.done), times)


class WeightsRecorder:
    """Keeps the weight versions that rollouts report to one manager, and records those that have changed together.

    What a rollout has received is recorded with its versions, and once for its first version, which it reports itself.
    """

    def __init__(self, context: RunContext) -> None:
        self._context = context
        self._unrecorded: dict[Incarnation, tuple[Version, WeightTraffic]] = {}
        self._recorded_at = -inf

    def on_report(self, incarnation: Incarnation, version: Version, traffic: WeightTraffic) -> None:
        """Keep the version that an incarnation holds, and record all changed versions if a record is due."""
        replica = self._context.state().replica(incarnation.replica)
        if version != replica.weight_version or (traffic.nbytes > 0 and replica.traffic.nbytes == 0):
            counters = (traffic.received, traffic.nbytes, traffic.fallbacks)
            limited = WeightTraffic(*(min(max(0, one), MAX_TRAFFIC) for one in counters))
            self._unrecorded[incarnation] = version, limited
        pause = max(WEIGHTS_RECORD_INTERVAL_S, len(self._unrecorded) * RECORD_INTERVAL_PER_ROLLOUT_S)
        if self._unrecorded and self._context.now() - self._recorded_at >= pause:
            versions = tuple((one, version) for one, (version, _) in self._unrecorded.items())
            self._context.record(WeightsRecorded(versions, tuple(one for _, one in self._unrecorded.values())))
            self._recorded_at = self._context.now()
            self._unrecorded = {}


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
        if now - self._recorded_at >= max(GPU_USE_RECORD_INTERVAL_S, self._recorded * RECORD_INTERVAL_PER_NODE_S):
            self._context.record(GpuUseRecorded(self._unrecorded))
            self._recorded_at, self._recorded = now, len(self._unrecorded)
            self._unrecorded = {}
