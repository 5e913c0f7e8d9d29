"""Decide from samples of a gang's stacks whether it stands still although its loads look like work.

A hung collective keeps every GPU busy, and an endless loop keeps the CPU busy. In a pass that works, the main threads
of the ranks change their lines within minutes, and the functions in which they are within half an hour. Stacks are
therefore sampled during long passes in which loads do not show the difference:

- training passes whose only sign of work is a busy GPU, because no tensor cores were ever observed at work
- training passes of a trainer of one process whose CPU works while its GPU is idle
- checkpoints and publications in which kernels run all the time
"""

from __future__ import annotations

from math import inf

from ....core.run_spec import Limits
from ....core.types import Incarnation, rank_of
from ..health_monitor import HealthMonitor
from ..records import ReplicaView
from .base import is_waiting, is_working

FIRST_SAMPLE_S = 300.0
"""Time (s) from the beginning of a pass to the first sample."""
SAMPLE_INTERVAL_S = 60.0
"""Time (s) between two samples. For a sample, py-spy reads each rank for some ms without pausing it."""
STANDSTILL_S = 240.0
"""Time (s) over which all samples must be equal (five samples). Two samples of a rank that works may be equal by
chance, because it spends most of a step at a few lines."""


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


def trains(view: ReplicaView) -> bool:
    """Return whether the replica is in a phase that computes without counting its progress."""
    return view.declared.computes and not view.declared.progresses


def _saves(view: ReplicaView) -> bool:
    """Return whether the replica is in a phase that writes the result of its work: a checkpoint or a publication."""
    return view.declared.uses_storage and view.declared.useful and view.declared.longest != inf


def stands_still(view: ReplicaView) -> bool:
    """Return whether no rank of the gang has moved in the samples of the last ``STANDSTILL_S``."""
    return _holds(view, view.stacks.still_since)


def stands_at_one_line(view: ReplicaView) -> bool:
    """Return whether the gang stands still, and all its ranks are at the same line."""
    return stands_still(view) and view.stacks.sample is not None and view.stacks.sample.alike


def stays_in_one_function(view: ReplicaView) -> bool:
    """Return whether every rank has stayed within one function in the samples of the last ``STANDSTILL_S``."""
    return _holds(view, view.stacks.same_functions_since)


def _holds(view: ReplicaView, since: float) -> bool:
    fresh = view.last_message_at - view.stacks.latest_at < 2 * SAMPLE_INTERVAL_S
    return fresh and view.last_change_at <= since <= view.stacks.latest_at - STANDSTILL_S


def _next_sample_at(view: ReplicaView) -> float:
    """Return the time (s) of the next sample of the stacks of a replica's gang; inf if no sample is needed."""
    loads = view.loads
    if trains(view):
        blind = not loads.uses_tensor_cores and loads.kernel_active
        unclear = blind or (loads.cpu_bound and not view.in_gang)
    else:
        unclear = _saves(view) and loads.gpu_full
    if not unclear or not is_working(view) or is_waiting(view):
        return inf
    return max(view.last_change_at + FIRST_SAMPLE_S, view.stacks.latest_at + SAMPLE_INTERVAL_S)
