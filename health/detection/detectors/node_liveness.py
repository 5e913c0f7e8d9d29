"""Detectors of whether a node is there: what the cluster says of it, and the silence of everybody on it."""

from __future__ import annotations

from collections.abc import Collection
from math import inf

from ....core.run_spec import Limits
from ....core.types import Cause, Evidence, Finding, NodeName, Remedy, Verdict
from ..health_monitor import HealthMonitor
from ..records import FLAP_COUNT, FLAP_WINDOW_S, NodeView, ReplicaView
from .base import NO_FINDING, Result, expects_heartbeats, heartbeat_slack, silence_deadline

_SUSPEND_CHECK_TIMEOUT_S = 30.0
"""s that a cluster has to say whether a silent node is suspended; one that is away longer hinders no repair"""


def node_down(view: NodeView, limits: Limits, now: float) -> Result:
    """The cluster says that it is down: proof."""
    if view.reported_down is None:
        return NO_FINDING
    since, detail = view.reported_down
    evidence = (Evidence("cluster", f"down: {detail}" if detail else "down", since),)
    return _node_finding(view, "node_down", Verdict.FAIL, Remedy.EXCLUDE, since, evidence, proof=True), inf


def node_lost(view: NodeView, limits: Limits, now: float) -> Result:
    """Its agent is silent. That alone is a warning; a second witness, the silence of every replica there, condemns it.

    Replicas that never joined have not been heard and so cannot fall silent: they witness only where none joined, and
    once their join deadline has passed. Whoever ended, or left before it fell silent, is no witness.
    """
    agent = view.agent or view.former_agent
    if agent is None or not _is_witness(agent, limits) or view.suspended_at is not None:
        return NO_FINDING
    agent_due = silence_deadline(agent, limits)
    witnesses = [one for one in (*view.residents.values(), *view.departed.values()) if _is_witness(one, limits)]
    joined = [one for one in witnesses if one.status == "joined"]
    dues = [silence_deadline(one, limits) for one in witnesses]
    lost = max(silence_deadline(one, limits) for one in joined) if joined else min(dues, default=inf)
    lost = max(lost, agent_due)
    text = (
        f"agent {agent.incarnation} is silent"
        if agent.status == "joined"
        else f"agent {agent.incarnation} never joined"
    )
    evidence = [Evidence("manager", text, agent.last_message_at)]
    if now >= lost:
        silent = sorted(str(one.incarnation) for one in (joined or witnesses) if now >= silence_deadline(one, limits))
        since = agent.last_message_at if view.last_message_at is None else view.last_message_at
        evidence.append(Evidence("manager", f"silent too: {_few(silent)}", since))
        if (
            view.suspension_checked_at is not None
            and not view.suspension_checked(limits)
            and now < lost + _SUSPEND_CHECK_TIMEOUT_S
        ):
            evidence.append(Evidence("manager", "the cluster is asked first whether it is suspended", lost))
            return _node_finding(
                view, "node_lost", Verdict.WARN, Remedy.NONE, since, tuple(evidence)
            ), lost + _SUSPEND_CHECK_TIMEOUT_S
        return _node_finding(view, "node_lost", Verdict.FAIL, Remedy.EXCLUDE, since, tuple(evidence)), inf
    if now >= agent_due and agent.status == "joined":
        since = agent.last_message_at
        return _node_finding(view, "node_lost", Verdict.WARN, Remedy.NONE, since, tuple(evidence)), lost
    return None, agent_due if now < agent_due else lost


def silent_nodes(
    findings: Collection[Finding], monitor: HealthMonitor, limits: Limits, now: float
) -> dict[NodeName, float]:
    """Nodes of which nothing has been heard for some beats, and since when (s). Looked for only where one is lost."""
    if all(finding.detector != node_lost.__name__ for finding in findings):
        return {}
    return {node_view.node: node_view.last_message_at for node_view in monitor.nodes.values()
            if node_view.agent is not None and node_view.agent.status == "joined" and expects_heartbeats(node_view.agent)
            and node_view.last_message_at is not None and now >= node_view.last_message_at + heartbeat_slack(limits)}  # fmt: skip


def node_flaps(view: NodeView, limits: Limits, now: float) -> Result:
    """The cluster ceases to call it up again and again, however well it looks in between."""
    if len(view.flaps) < FLAP_COUNT or view.flaps[-1] - view.flaps[0] > FLAP_WINDOW_S:
        return NO_FINDING
    over = view.flaps[-1] + FLAP_WINDOW_S
    if now >= over:
        return NO_FINDING
    since = view.flaps[0]
    text = f"it ceased to be up {len(view.flaps)} times within {view.flaps[-1] - since:.0f} s"
    evidence = (Evidence("cluster", text, view.flaps[-1]),)
    return _node_finding(view, "node_flaps", Verdict.FAIL, Remedy.EXCLUDE, since, evidence), over


def _is_witness(view: ReplicaView, limits: Limits) -> bool:
    """Its silence says something: it did not end, and if it was to leave, it was overdue before that."""
    left = view.left_at is not None and view.left_at < silence_deadline(view, limits)
    return not view.ended and not left


def _few(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def _node_finding(
    view: NodeView, detector: str, verdict: Verdict, remedy: Remedy, since: float, evidence: tuple[Evidence, ...],
    proof: bool = False,
) -> Finding:  # fmt: skip
    return Finding(detector, verdict, Cause.NODE, remedy, since, evidence, node=view.node, proof=proof)
