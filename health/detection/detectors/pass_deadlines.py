"""The deadline of a pass: how long a replica may stay in a phase without progress, and what extends this time.

The deadline depends on the known durations of the phase. Of these three cases, the first that applies decides:

1. The *usual duration* is known (the median of at least three passes other than first passes). The deadline is
   ``adaptive`` times the usual duration, and at least ``SLOWEST_FACTOR`` times the longest duration.
2. One or two passes are known, or only a first pass. The deadline is ``adaptive`` times the longest pass so far. A
   first pass includes compilation and warm-up, so it is an upper estimate of the usual duration. A replica that is not
   observed to be idle has ``EARLY_FACTOR`` times as long, because few passes do not show how much durations vary.
3. No pass is known. The deadline is ``longest`` of the phase. A replica that is observed to be idle has only a quarter
   of ``longest``.

The deadlines of cases 1 and 2 are limited to the range from ``shortest`` to ``longest`` of the phase. In the *first
pass* of an incarnation the deadline is extended by ``limits.first_pass``, except for an idle replica, which neither
compiles nor packs. So with the same evidence (idle, at work, or unknown) and passes of equal length, deadlines
never become longer from pass to pass. docs/detection.md has a table of the resulting times.

A replica that is observed at work has ``BUSY_DEADLINE_FACTOR`` times its deadline. A replica whose code may call a
service outside of the run has at least ``MIN_SERVICE_WAIT_S``, unless its CPU is observed at work. While storage stalls
on its node, a replica in a phase that uses storage has ``MAX_STORAGE_STALL_S``; after the stall its deadline starts
again.
"""

from __future__ import annotations

from math import inf

from msgspec import Struct

from ....core.phases import BETWEEN, PHASES
from ....core.run_spec import Limits
from ..records import MAX_LOAD_GAP_S, ReplicaView
from .base import SLOWEST_FACTOR, is_waiting
from .stack_samples import stands_at_one_line, stays_in_one_function, trains

EARLY_FACTOR = 2.0
"""If passes of a phase are known but no usual duration, the deadline that follows from these passes is multiplied by
this factor, unless the replica is observed to be idle. Our choice, because later passes may take longer: the first
checkpoint of a trainer has no optimizer state, and later checkpoints are three times as large."""
BUSY_DEADLINE_FACTOR = 6.0
"""A replica whose GPU (or CPU, without a GPU) works has this multiple of its deadline, because it is slow and not
hung."""
FIRST_IDLE_SHARE = 0.25
"""Share of ``longest`` (the upper limit of the phase) for which a replica may be idle in a phase of which no completed
pass is known: 15 min of 1 h. It does not apply to ``between``, whose limit says nothing about what the replica does."""
MIN_FIRST_IDLE_S = 900.0
"""Minimum time (s) for which a replica may be idle in a phase of which no completed pass is known. Our choice, since a
start reads many files, and the first checkpoint may create a whole folder tree on busy storage."""
MAX_BLIND_TRAINING_S = 7200.0
"""Deadline (s) of a training pass whose only sign of work is a busy GPU or CPU, because its tensor cores were never
observed at work. A hung collective looks the same; an evaluation or a compilation rarely takes longer."""
MIN_SERVICE_WAIT_S = 900.0
"""A replica whose phase calls services outside of the run may wait for this time (s) after its CPU last worked. The
time must cover waits that the replica does not report: judges with rate limits make their clients wait for up to 14 min
(observed)."""
_MIN_WORKING_LOADS = 5
"""Number of consecutive loads that must show a CPU at work before the replica counts as working. Fewer loads do not
suffice, because a replica that waits for a service also uses its CPU for a short time at each retry."""
MAX_SAME_STACK_S = 1800.0
"""Deadline (s) of a training pass in which all ranks stand at the same line while their GPUs are busy. Our choice:
three times the timeout of a collective in torch.distributed (600 s)."""
MAX_FIRST_SAME_STACK_S = 900.0
"""The same for a first pass, which stands in the first collective of the incarnation. Our choice: setting up the
connections of a large job takes up to 12 min (the slowest of our scenarios)."""
MAX_SPINNING_SAVE_S = 600.0
"""Deadline (s) of a checkpoint or publication in which all ranks stand at the same line while their GPUs run kernels
all the time: the timeout of a collective in torch.distributed. A rank that writes is at another line."""
MAX_ONE_FUNCTION_S = 1800.0
"""Deadline (s) of a training pass, other than a first pass, in which the CPU of a trainer of one process works within
one function while its GPU is idle. Our choice: an evaluation or the preparation of a batch changes functions."""
MAX_STORAGE_STALL_S = 3600.0
"""Time (s) for which a replica in a phase that uses storage may make no progress while storage stalls. Our choice:
the limit ``longest`` of the phase ``checkpoint``."""


class Deadline(Struct, frozen=True):
    """How long a replica may make no progress in its current pass of a phase."""

    seconds: float
    """Time (s) without progress that is allowed."""
    busy_seconds: float
    """Time (s) without progress that is allowed if the replica is observed at work at the end of ``seconds``."""
    source: str
    """Text that names the limit and the values from which the deadline was computed."""


def deadline(view: ReplicaView, limits: Limits) -> Deadline:
    """Return the deadline of the current pass of a replica that is not known to be idle."""
    declared = view.declared
    if declared.longest == inf:
        return Deadline(declared.shortest, declared.shortest, f"{declared.shortest:g} s")
    grace = first_pass_grace(view, limits)
    known = _from_known_passes(view, limits)
    standstill_s = max(_standstill_limit(view), declared.shortest)
    if known is None and _works_blindly(view):
        most = min(declared.longest + grace, max(MAX_BLIND_TRAINING_S, declared.shortest))
        why = "its tensor cores were never observed at work"
        if standstill_s < most:
            most, why = standstill_s, "all ranks stand at the same line"
        return Deadline(most, most, f"{most:.4g} s (no baseline yet; {why})")
    base, source = known or (declared.longest, "no baseline yet")
    seconds = base
    if known is not None and view.usual_duration is None:
        seconds, source = min(EARLY_FACTOR * base, declared.longest), f"{EARLY_FACTOR:g} x {source}"
    if grace and standstill_s < seconds + grace:
        known_s = 0.0 if known is None else seconds
        seconds, source = max(known_s, standstill_s), f"{source}; first pass, all ranks stand at the same line"
    elif grace:
        seconds, source = seconds + grace, f"{source}; first pass + {grace:g} s"
    most = min(declared.longest, MAX_BLIND_TRAINING_S) if _gpu_busy_without_tensor_signal(view) else declared.longest
    busy = min(BUSY_DEADLINE_FACTOR * (base + grace), most, standstill_s)
    return Deadline(seconds, max(seconds, busy), f"{seconds:.4g} s ({source})")


def _standstill_limit(view: ReplicaView) -> float:
    """Return how long (s) a pass may last whose stacks do not move although its loads look like work; inf if they do.

    Only :mod:`.stack_samples` knows of such stacks, and samples them only while the loads do not show the difference.
    """
    if stands_at_one_line(view):
        if not trains(view):
            return MAX_SPINNING_SAVE_S
        return MAX_FIRST_SAME_STACK_S if view.first_pass else MAX_SAME_STACK_S
    in_a_loop = trains(view) and view.loads.cpu_bound and not view.first_pass and stays_in_one_function(view)
    return MAX_ONE_FUNCTION_S if in_a_loop else inf


def idle_due(view: ReplicaView, limits: Limits, since: float) -> tuple[float, str] | None:
    """Return the time (s) from which a replica has been idle for too long, and a text with the limit.

    Return None if recent loads do not show an idle replica, or if idleness is no evidence in its phase. Idleness is no
    evidence while the replica waits, or in a phase that only the job declares.

    Args:
        view: The replica.
        limits: The job's deadlines.
        since: Time (s) of the last progress.
    """
    loads = view.loads
    if is_waiting(view) and not view.declared.own_work:
        return None
    if view.declared.name not in PHASES or view.declared.longest == inf:
        return None
    if loads.idle_since is None or not _has_recent_loads(view):
        return None
    known = None if view.declared.own_work else _from_known_passes(view, limits)
    if known is None:
        share = 0.0 if view.declared.name == BETWEEN else FIRST_IDLE_SHARE
        seconds = max(view.declared.shortest, share * view.declared.longest, MIN_FIRST_IDLE_S)
        known = seconds, "no baseline yet"
    seconds, source = known
    return max(since, loads.idle_since) + seconds, f"{seconds:.4g} s of idleness ({source})"


def service_wait_due(view: ReplicaView, since: float) -> tuple[float, str] | None:
    """Return the time (s) until which a replica may wait for a service outside of the run, and a text with the limit.

    Return None if the phase calls no such service, or if the replica's CPU is at work, so that it does not wait.

    Args:
        view: The replica.
        since: Time (s) of the last progress.
    """
    if not view.declared.calls_services or (
        view.loads.cpu_working_loads >= _MIN_WORKING_LOADS and _has_recent_loads(view)
    ):
        return None
    seconds = min(MIN_SERVICE_WAIT_S, view.declared.longest)
    return max(since, view.loads.idle_since or since) + seconds, f"{seconds:.4g} s, the limit of a wait for a service"


def first_pass_grace(view: ReplicaView, limits: Limits) -> float:
    """Return the extra time (s) that the replica has in a first pass: ``limits.first_pass``.

    It is 0 in later passes, and for a replica that only waits, since such a replica neither compiles nor warms up.
    """
    only_waits = is_waiting(view) and not view.declared.own_work
    return limits.first_pass if view.first_pass and not only_waits else 0.0


def extended_by_storage(view: ReplicaView, limits: Limits, since: float, due: float) -> float:
    """Return the deadline ``due`` (s), extended if the phase uses storage that stalls now or has stalled in this pass.

    ``since`` is the time (s) of the last progress.

    - While storage stalls, the time from ``since`` to the deadline is the longer of two times: ``MAX_STORAGE_STALL_S``,
      and ``longest`` of the phase plus the first-pass grace.
    - After the stall, the replica has the time between ``since`` and ``due`` again, counted from the end of the stall.
      But the deadline is not later than the deadline during a stall.

    The result is never earlier than ``due``.
    """
    if not is_delayed_by_storage(view, since):
        return due
    longest = 0.0 if view.declared.longest == inf else view.declared.longest + first_pass_grace(view, limits)
    most = since + max(longest, MAX_STORAGE_STALL_S)
    return max(due, most if view.storage_stall.stalled else min(view.storage_stall.ended_at + (due - since), most))


def is_delayed_by_storage(view: ReplicaView, since: float) -> bool:
    """Return whether the phase uses storage that stalls now, or that has stalled after ``since`` (s)."""
    return view.declared.uses_storage and (view.storage_stall.stalled or view.storage_stall.ended_at > since)


def _from_known_passes(view: ReplicaView, limits: Limits) -> tuple[float, str] | None:
    """Return the deadline (s) according to the passes so far, and a text with its source; None if no pass is known.

    Passes of a waiting phase count only once there is a usual duration, because the duration of a wait depends on the
    awaited replica.
    """
    declared, usual, slowest = view.declared, view.usual_duration, view.slowest_duration
    if usual is not None:
        wanted, source = limits.adaptive * usual, f"{limits.adaptive:g} x usual {usual:.3g} s"
        if SLOWEST_FACTOR * slowest > wanted:
            wanted, source = SLOWEST_FACTOR * slowest, f"{SLOWEST_FACTOR:g} x longest {slowest:.3g} s"
    elif view.longest_pass is not None and not is_waiting(view):
        wanted, source = limits.adaptive * view.longest_pass, f"{limits.adaptive:g} x {view.longest_pass:.3g} s so far"
    else:
        return None
    seconds = min(max(wanted, declared.shortest), declared.longest)
    return seconds, f"{source}, within {declared.shortest:g} to {declared.longest:g} s"


def _has_recent_loads(view: ReplicaView) -> bool:
    return view.loads.latest_at is not None and view.loads.latest_at >= view.last_message_at - MAX_LOAD_GAP_S


def _works_blindly(view: ReplicaView) -> bool:
    """Return whether a training replica's loads have never shown that its tensor cores work."""
    return trains(view) and not view.loads.uses_tensor_cores and _has_recent_loads(view)


def _gpu_busy_without_tensor_signal(view: ReplicaView) -> bool:
    """Return whether a training replica's running kernels are the only sign of its work."""
    return trains(view) and not view.loads.uses_tensor_cores and not view.loads.cpu_bound
