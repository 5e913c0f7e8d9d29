"""All detectors, in ladders: tuples of detectors, best evidence first.

For one replica or node only the first finding of a ladder counts. :mod:`rrl.health.detection.detectors.base` defines
the type of a detector.
"""

from __future__ import annotations

from .base import Detector, NodeDetector, Result, is_waiting
from .idleness import computes_nothing, load_stalled
from .liveness import (
    agent_silence,
    exit_record,
    never_joined,
    promotion_overdue,
    step_gone,
    stop_overdue,
    worker_silence,
)
from .node_liveness import node_down, node_flaps, node_lost
from .probing import engine_dead, no_answer, suspected
from .progress import idle, no_progress, phase_overdue, straggler, wait_long, wait_overdue

__all__ = [
    "NODE_DETECTORS",
    "PRESENCE_DETECTORS",
    "PROGRESS_DETECTORS",
    "Detector",
    "NodeDetector",
    "Result",
    "is_waiting",
]

PRESENCE_DETECTORS: tuple[Detector, ...] = (
    exit_record,
    step_gone,
    stop_overdue,
    promotion_overdue,
    never_joined,
    worker_silence,
    agent_silence,
)
"""Detectors that use only messages and the ends of processes. They judge all replicas, agents included."""
PROGRESS_DETECTORS: tuple[Detector, ...] = (
    *PRESENCE_DETECTORS,
    engine_dead,
    no_answer,
    no_progress,
    phase_overdue,
    computes_nothing,
    load_stalled,
    wait_overdue,
    wait_long,
    idle,
    suspected,
    straggler,
)
"""Detectors of all replicas except agents."""
NODE_DETECTORS: tuple[NodeDetector, ...] = (node_down, node_lost, node_flaps)
"""Detectors of nodes."""
