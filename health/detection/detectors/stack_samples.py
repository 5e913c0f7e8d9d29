"""Decide from samples of a trainer's stacks whether all ranks have stood at the same line while their GPUs are busy.

A hung collective keeps every GPU busy, and looks like a long step if tensor cores cannot be observed. In a step that
computes, the main threads of the ranks are rarely at the same line, and change their lines within minutes. Stacks are
therefore sampled during long training passes whose only sign of work is a busy GPU.
"""

from __future__ import annotations

from math import inf

from ....core.run_spec import Limits
from ....core.types import Incarnation, rank_of
from ..health_monitor import HealthMonitor
from ..records import ReplicaView
from .base import is_waiting, is_working

SAMPLE_INTERVAL_S = 300.0
"""Time (s) from the beginning of a pass to the first sample, and between two samples. For a sample, py-spy reads each
rank for some ms without pausing it."""
MIN_EQUAL_SAMPLES = 3
"""Number of consecutive equal samples after which a gang counts as standing still."""


def due_stack_samples(monitor: HealthMonitor, limits: Limits, now: float) -> tuple[list[Incarnation], float]:
    """Return the gangs whose stacks are due for sampling, and the time (s) of the next sample (inf if none is due).

    The caller collects the stacks and reports each sample, even a failed one, by ``HealthMonitor.on_stacks``.
    """
    due: list[Incarnation] = []
    then = inf
    for view in monitor.workers():
        if (at := _next_sample_at(view)) == inf or rank_of(view.incarnation.replica):
            continue
        if at <= now:
            due.append(view.incarnation.gang)
        then = min(then, max(at, now + limits.heartbeat))
    return sorted(due), then


def stands_still(view: ReplicaView) -> bool:
    """Return whether all ranks have been at the same line in each of at least ``MIN_EQUAL_SAMPLES`` samples."""
    samples = view.stacks
    fresh = view.last_message_at - samples.latest_at < 2 * SAMPLE_INTERVAL_S
    return samples.count >= MIN_EQUAL_SAMPLES and samples.since >= view.last_change_at and fresh


def _next_sample_at(view: ReplicaView) -> float:
    """Return the time (s) of the next sample of the stacks of a replica's gang; inf if no sample is needed.

    Samples are needed only in a training pass whose only sign of work is a busy GPU: the newest load shows a running
    kernel, but no load has ever shown working tensor cores. While the replica waits for another replica, no sample is
    needed.
    """
    trains = view.declared.computes and not view.declared.progresses
    if not trains or not is_working(view) or is_waiting(view):
        return inf
    if view.loads.uses_tensor_cores or not view.loads.kernel_active:
        return inf
    return max(view.last_change_at, view.stacks.latest_at) + SAMPLE_INTERVAL_S
