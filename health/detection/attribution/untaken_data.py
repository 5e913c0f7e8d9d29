"""Find a trainer that hangs while it seems to wait for data: the store has data, but the trainer requests none.

A trainer in a phase that waits for data looks the same whether it waits or hangs. The run need not stall while the
trainer hangs, because its rollouts may work for as long as the job's staleness limit permits. But a trainer that waits
repeats its request to the store at once. If the store has data and receives no request
(:attr:`rrl.transport.messages.Heartbeat.data_untaken`), the trainer hangs.

The store reports untaken data only while its loop serves requests, so a store that is stuck in an fsync blames no
trainer. It does not report data that the staleness limit holds back, nor an incomplete step.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from ....core.phases import WAIT_DATA
from ....core.types import Cause, Evidence, Finding, Incarnation, Remedy, Verdict, gang_of, rank_of
from ..detectors.base import MIN_HEARTBEATS
from ..health_monitor import HealthMonitor
from ..records import ReplicaView

UNTAKEN_FACTOR = 3.0
"""Multiple of the limit ``shortest`` of phase ``wait_data``. A trainer with idle CPU and GPU may leave data at the
store for this time (180 s by default; our choice). A healthy trainer repeats its request every second; the rest of the
time is for network failures between trainer and store, about which the manager receives no report."""
_MIN_IDLE_LOADS = 5
"""Number of consecutive loads that must show an idle trainer before the trainer counts as idle."""


def blame_trainer_for_untaken_data(findings: Sequence[Finding], monitor: HealthMonitor) -> list[Finding]:
    """Replace the findings about waiting members of a trainer by one FAIL if the trainer leaves data at the store.

    The time after which the trainer fails depends on its CPU and GPU loads:

    - If the loads show that the trainer is idle, the time is ``UNTAKEN_FACTOR`` times ``shortest``, the lower limit of
      the phase.
    - If the loads show work, or if no loads are known, the time is ``longest``, the upper limit of the phase, because
      the trainer may be unpacking a batch.

    The time counts from the beginning of the wait or from the store's first report of the data, whichever is later. A
    member that waits for another member of its gang is not blamed, because the other member requests the data for all
    members, and may save a checkpoint first.
    """
    since = _untaken_since(monitor)
    if since is None:
        return list(findings)
    waits = {
        finding.incarnation: finding
        for finding in sorted(findings, key=_rank)
        if finding.incarnation is not None
        and finding.verdict is Verdict.UNKNOWN
        and monitor.replicas[finding.incarnation.replica].declared.name == WAIT_DATA
    }
    charged: dict[Incarnation, Finding] = {}
    for incarnation, finding in waits.items():
        view = monitor.replicas[incarnation.replica]
        waits_for_member = view.waits_for is not None and gang_of(view.waits_for) == incarnation.gang.replica
        lines = None if waits_for_member or incarnation.gang in charged else _evidence(view, *since)
        if lines is not None:
            charged[incarnation.gang] = replace(
                finding,
                detector="data_untaken",
                verdict=Verdict.FAIL,
                cause=Cause.HANG,
                remedy=Remedy.RESTART,
                evidence=(*finding.evidence, *lines),
            )
    replaced = {incarnation for incarnation in waits if incarnation.gang in charged}
    return [*(finding for finding in findings if finding.incarnation not in replaced), *charged.values()]


def _untaken_since(monitor: HealthMonitor) -> tuple[float, float] | None:
    """Return the time (s) since which a store reports untaken data, and the time of its newest heartbeat."""
    stores = [view for view in monitor.workers() if view.data_untaken_since is not None and view.left_at is None]
    if not stores:
        return None
    return max((view.data_untaken_since or 0.0, view.last_message_at) for view in stores)


def _rank(finding: Finding) -> int:
    return 0 if finding.incarnation is None else rank_of(finding.incarnation.replica)


def _evidence(view: ReplicaView, untaken_since: float, confirmed_at: float) -> list[Evidence] | None:
    """Return the evidence against a waiting trainer; None before its deadline."""
    since = max(untaken_since, view.last_change_at)
    idle_limit_s = UNTAKEN_FACTOR * view.declared.shortest
    idle = view.loads.idle_loads >= _MIN_IDLE_LOADS and view.loads.idle_for(since) >= idle_limit_s
    limit_s = idle_limit_s if idle else max(view.declared.longest, idle_limit_s)
    if confirmed_at - since < limit_s or view.heartbeats < MIN_HEARTBEATS:
        return None
    lines = [Evidence("agent", f"neither its CPU nor its GPU has worked for {limit_s:g} s", since)] if idle else []
    text = f"{view.incarnation.gang.replica} has not requested its data for {limit_s:g} s, although the data are ready"
    return [*lines, Evidence("store", text, since)]
