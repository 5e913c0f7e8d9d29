"""Decide whether the run may use a node, according to its status, findings and the reports of its agent. Pure."""

from __future__ import annotations

from ....cluster.base import NodeState
from ....core.types import AGENT, Cause, Finding, NodeName, Remedy, Verdict, replica_id
from ...model.queries import requires_admission, restart_budget
from ...model.state import Node, ReleaseResult, Replica, State, Status

HARDWARE_CAUSES = frozenset({Cause.NODE, Cause.GPU, Cause.FABRIC, Cause.STORAGE})
"""Causes that make a node unusable for any job. Other causes concern a process and not its node."""
_NODE_STAYS_USABLE = frozenset({Remedy.NONE, Remedy.RESTART})
"""Remedies that do not require leaving the node."""
_NODE_LOST = "node_lost"
"""Detector that reports a node from which no message arrives."""
MAX_NAMED_NODES = 4
"""Maximum number of nodes named in a reason; the others are counted."""


def excludes_node(finding: Finding) -> bool:
    """Return whether the finding is a node's hardware failure whose remedy requires leaving the node."""
    of_node = finding.node is not None and finding.verdict is Verdict.FAIL
    return of_node and finding.cause in HARDWARE_CAUSES and finding.remedy not in _NODE_STAYS_USABLE


def barred_nodes(state: State) -> set[NodeName]:
    """Return the nodes on which no replica is placed, even if the circuit breaker keeps them in use.

    A finding proves a defect of such a node, or no message arrives from it, so that no replica on it could join.
    """
    return {
        finding.node
        for finding in state.findings.values()
        if finding.node is not None and excludes_node(finding) and (finding.proof or finding.detector == _NODE_LOST)
    }


def is_usable(state: State, node: Node, now: float) -> bool:
    """Return whether new processes may be started on the node: it is held and up."""
    fit = node.status is None or node.status.state in (NodeState.UP, NodeState.UNKNOWN)
    return fit and is_held(state, node, now)


def is_held(state: State, node: Node, now: float) -> bool:
    """Return whether the node is in a running allocation that does not end, and neither excluded nor released."""
    allocation = state.allocations.get(node.allocation)
    if allocation is None or not allocation.running or allocation.suspended or allocation.reclaimed:
        return False
    if now >= allocation.ends_at:  # the cluster may take the allocation back a little late
        return False
    return node.excluded is None and node.release_result is not ReleaseResult.RELEASED


def needs_probe(state: State, node: Node) -> bool:
    """Return whether the node's agent must report before roles are placed on the node.

    It must if the job has an ``[env] probe``, or if the agent makes health checks first (``[health] admission``).
    """
    allocation = state.allocations.get(node.allocation)
    return bool(state.job.env.probe) or (
        allocation is not None and requires_admission(state.job, allocation.request.node.gpus)
    )


def probe_pending(state: State, node: NodeName, now: float) -> bool:
    """Return whether the node's agent may still send the report that :func:`needs_probe` requires.

    The result is False once the agent has failed too often. The allowed number of failures is smaller than the number
    of failed joins that fit into the recovery window. Otherwise old failures would leave the window before the limit is
    reached, and a replica would wait forever for the agent of a node that is cut off.
    """
    agent, recovery = state.replica(replica_id(AGENT, node)), state.job.recovery
    limit = max(1, min(recovery.first_start, int(recovery.window / state.job.limits.join) - 1))
    may_report = not restarts_exhausted(state, agent, now) and len(agent.recent_failures(recovery.window, now)) < limit
    return may_report and not agent_never_started(state, node)


def agent_never_started(state: State, node: NodeName) -> bool:
    """Return whether the node's agent failed at each of its allowed starts, so that it never reports."""
    return state.replica(replica_id(AGENT, node)).failed_starts >= state.job.recovery.first_start


def agent_failed_last(state: State, node: NodeName) -> bool:
    """Return whether the node's agent failed and no later agent has joined yet, so that the node may have failed."""
    agent = state.replica(replica_id(AGENT, node))
    failed = agent.ever_joined and bool(agent.failures) and not agent.failures[-1].refused
    return failed and agent.status is not Status.JOINED


def unfit_nodes(state: State) -> dict[NodeName, str]:
    """Return the nodes on which no role can run, each with its reason.

    The reason is the error of ``[env] probe``, or why the agent of the node did not start.
    """
    reasons: dict[NodeName, str] = {}
    for name, node in state.nodes.items():
        if node.probe_error:
            reasons[name] = node.probe_error
        elif needs_probe(state, node) and agent_never_started(state, name):
            failures = state.replica(replica_id(AGENT, name)).failures
            reasons[name] = failures[-1].why if failures else "its agent never started"
    return reasons


def restarts_exhausted(state: State, helper: Replica, now: float) -> bool:
    """Return whether an agent, standby process or guest has failed too often to be started again now.

    It is started again once enough of its failures have left the recovery window. If it was retired only because its
    node left the run, the result is False, and it is started as soon as the node is back.
    """
    failures = helper.recent_failures(state.job.recovery.window, now)
    return helper.status is Status.RETIRED and len(failures) >= max(1, restart_budget(state, helper))
