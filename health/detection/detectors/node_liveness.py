"""Detectors of whether a node works: its state in the cluster, and the silence of its processes."""

from __future__ import annotations

from collections.abc import Collection
from math import inf

from ....core.run_spec import Limits
from ....core.types import Cause, Evidence, Finding, NodeName, Remedy, Verdict
from ..health_monitor import HealthMonitor
from ..records import FLAP_COUNT, FLAP_WINDOW_S, NodeView, ReplicaView
from .base import NO_FINDING, Result, expects_heartbeats, heartbeat_slack, silence_deadline, silence_limit

_SUSPEND_CHECK_TIMEOUT_S = 30.0
"""Time (s) within which the cluster must report whether a silent node is suspended. After this time the repair begins
without the answer."""


def node_down(view: NodeView, limits: Limits, now: float) -> Result:
    """Find a node that the cluster reports as down; this finding is proof."""
    if view.reported_down is None:
        return NO_FINDING
    since, detail = view.reported_down
    evidence = (Evidence("cluster", f"down: {detail}" if detail else "down", since),)
    return _node_finding(view, "node_down", Verdict.FAIL, Remedy.EXCLUDE, since, evidence, proof=True), inf


def node_lost(view: NodeView, limits: Limits, now: float) -> Result:
    """Find a node whose agent is silent: a FAIL if all witnesses among its replicas are silent too, else a WARN.

    A replica is a witness if it neither ended nor left before it fell silent. Replicas that never joined cannot fall
    silent, so they count only if no replica of the node joined, and only after their join deadline.
    """
    agent = view.agent or view.former_agent
    if agent is None or not _is_witness(agent, limits) or view.suspended_at is not None:
        return NO_FINDING
    agent_due = silence_deadline(agent, limits)
    witnesses = [
        replica for replica in (*view.residents.values(), *view.departed.values()) if _is_witness(replica, limits)
    ]
    joined = [replica for replica in witnesses if replica.status != "launched"]
    deadlines = [silence_deadline(replica, limits) for replica in witnesses]
    lost_at = max(silence_deadline(replica, limits) for replica in joined) if joined else min(deadlines, default=inf)
    lost_at = max(lost_at, agent_due)
    known = agent.status != "launched"
    text = f"agent {agent.incarnation} {'is silent' if known else 'never joined'}"
    evidence = [Evidence("manager", text, agent.last_message_at)]
    if now >= lost_at:
        silent = sorted(
            str(replica.incarnation) for replica in (joined or witnesses) if now >= silence_deadline(replica, limits)
        )
        since = view.silent_since
        evidence.append(Evidence("manager", f"silent too: {_few(silent)}", since))
        if (
            (view.suspension_checked_at is not None or agent.status == "awaited")
            and not view.suspension_checked(limits)
            and now < lost_at + _SUSPEND_CHECK_TIMEOUT_S
        ):
            evidence.append(
                Evidence("manager", "waiting for the cluster to report whether the node is suspended", lost_at)
            )
            return _node_finding(
                view, "node_lost", Verdict.WARN, Remedy.NONE, since, tuple(evidence)
            ), lost_at + _SUSPEND_CHECK_TIMEOUT_S
        return _node_finding(view, "node_lost", Verdict.FAIL, Remedy.EXCLUDE, since, tuple(evidence)), inf
    if now >= agent_due and known:
        since = agent.last_message_at
        return _node_finding(view, "node_lost", Verdict.WARN, Remedy.NONE, since, tuple(evidence)), lost_at
    return None, agent_due if now < agent_due else lost_at


def silent_nodes(
    findings: Collection[Finding], monitor: HealthMonitor, limits: Limits, now: float
) -> dict[NodeName, float]:
    """Return the time (s) of the last message of each node that misses heartbeats.

    The dict is empty if there is no ``node_lost`` finding.
    """
    if all(finding.detector != node_lost.__name__ for finding in findings):
        return {}
    return {
        node_view.node: node_view.last_message_at
        for node_view in monitor.nodes.values()
        if node_view.agent is not None
        and node_view.agent.status == "joined"
        and expects_heartbeats(node_view.agent)
        and node_view.last_message_at is not None
        and now >= node_view.last_message_at + heartbeat_slack(limits)
    }


def node_flaps(view: NodeView, limits: Limits, now: float) -> Result:
    """Find a node that repeatedly loses the state ``up`` in the cluster, even if it is up in between."""
    if len(view.flaps) < FLAP_COUNT or view.flaps[-1] - view.flaps[0] > FLAP_WINDOW_S:
        return NO_FINDING
    ends_at = view.flaps[-1] + FLAP_WINDOW_S
    if now >= ends_at:
        return NO_FINDING
    since = view.flaps[0]
    text = f'it lost the state "up" {len(view.flaps)} times within {view.flaps[-1] - since:.0f} s'
    evidence = (Evidence("cluster", text, view.flaps[-1]),)
    return _node_finding(view, "node_flaps", Verdict.FAIL, Remedy.EXCLUDE, since, evidence), ends_at


def is_silent_with_node(view: ReplicaView, limits: Limits, now: float) -> bool:
    """Return whether the messages of a replica, and of all other processes on its node, are overdue.

    A replica that has ended, left or been suspended is not silent, since it is not expected to send messages.
    """
    node_silent = now >= view.node_view.silent_since + silence_limit(limits)
    return expects_heartbeats(view) and node_silent and now >= silence_deadline(view, limits)


def _is_witness(view: ReplicaView, limits: Limits) -> bool:
    """Return whether the replica neither ended nor left before it fell silent, so that its silence is evidence.

    A replica whose step the cluster no longer lists (``unlisted_at``) remains a witness, because this is recorded only
    after the node has fallen silent.
    """
    ended = view.exit is not None or view.gone_witnessed_at is not None
    left = view.left_at is not None and view.left_at < silence_deadline(view, limits)
    return not ended and not left


def _few(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def _node_finding(
    view: NodeView,
    detector: str,
    verdict: Verdict,
    remedy: Remedy,
    since: float,
    evidence: tuple[Evidence, ...],
    proof: bool = False,
) -> Finding:
    return Finding(detector, verdict, Cause.NODE, remedy, since, evidence, node=view.node, proof=proof)
