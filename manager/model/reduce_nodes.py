"""Reduce events about allocations and nodes into the state: cluster status, exclusions, drains and commands. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from ...cluster.base import AllocationRequest, AllocationState, AllocationStatus, NodeState, RejectReason
from ...core.types import NodeName, Resources, Verdict, is_support
from . import events as ev
from .actions import Drain, Exclude, ExternalAction, Launch, Readmit, Shrink, Undrain
from .pools import elastic_role, pool_state
from .queries import are_extras
from .reduce_replicas import RETRY_PAUSE_S, with_replica
from .state import Allocation, Node, RejectedRequest, ReleaseResult, State
from .table import put, without

CANCELLATION_WINDOW_S = 3600.0
"""Seconds within which a second cancellation of all allocations of a run counts as a cancellation of the run itself."""

EARLY_END_S = 60.0
"""An allocation that ends less than this many seconds after its start counts as a rejected request if no process on its
nodes ever reported. This limits how often the run repeats the request."""
END_TOLERANCE_S = 60.0
"""An allocation that ends at most this many seconds before its expected end has used up its walltime. The tolerance is
needed because the start is observed up to one poll late and Slurm counts whole minutes."""
MAX_REQUEST_PAUSE_S = 60.0
"""Upper limit (s) of the pause before a request that was refused for now is made again."""
DRAIN, UNDRAIN = "drain", "undrain"
"""Commands of users about a node."""


def on_request_intended(state: State, at: float, request: AllocationRequest) -> State:
    """Record an allocation request, with one allocation for each component.

    A request that is made again after a refusal keeps the time of its first attempt, from which its deadline counts.
    """
    requests_made, allocations = dict(state.requests_made), dict(state.allocations)
    for component in (request, *request.further_components):
        known = allocations.get(component.tag)
        requests_made[component.node_group] = requests_made.get(component.node_group, 0) + (known is None)
        allocations[component.tag] = Allocation(component.tag, component, at if known is None else known.requested_at)
    since = at if state.requested_since is None else state.requested_since
    return replace(state, allocations=allocations, requests_made=requests_made, requested_since=since)


def on_release_intended(state: State, at: float, tag: str) -> State:
    """Record the release of an allocation.

    A request that could never have been met counts as rejected, which limits how often it is repeated. So does one of
    an elastic pool that was refused for now.
    """
    allocation, elastic = state.allocations.get(tag), elastic_role(state.job)
    if allocation is not None and allocation.pending and allocation.status is not None:
        node_group, why = allocation.request.node_group, allocation.status.unsatisfiable_reason
        if not why and allocation.refused and elastic is not None and elastic.name == node_group:
            why = allocation.status.detail
        if why:
            state = _add_rejected_request(state, RejectedRequest(tag, at, f"{tag}: {why}", node_group=node_group))
    return _with_allocation(state, tag, releasing=True)


def on_release_rejected(state: State, tag: str, until: float) -> State:
    """Record that a release was refused and is not repeated before ``until`` (manager's time, s)."""
    return _with_allocation(state, tag, releasing=False, not_before=until)


def on_request_rejected(state: State, at: float, request: AllocationRequest, event: ev.IntentSettled) -> State:
    """Record a request that was certainly not granted.

    A request that was only refused for now keeps its allocations and is made again, after a pause that doubles. The
    allocations of any other request are removed.
    """
    tags = {component.tag for component in (request, *request.further_components)}
    if event.reason is RejectReason.REFUSED_FOR_NOW:
        refused = AllocationStatus(AllocationState.REFUSED, "", detail=f"refused for now: {event.detail}")
        for tag in tags & state.allocations.keys():
            waited = at - state.allocations[tag].requested_at
            again = at + min(MAX_REQUEST_PAUSE_S, max(RETRY_PAUSE_S, waited))
            state = _with_allocation(state, tag, status=refused, status_at=at, not_before=again)
        return state
    since = at if event.reason is RejectReason.NEVER_APPEARED else None
    for earlier in state.rejected_requests if since is not None else ():
        since = (earlier.unanswered_since or at) if earlier.node_group == request.node_group else since
    rejected = RejectedRequest(request.tag, at, event.detail, event.undelivered, request.node_group, since)
    return replace(_add_rejected_request(state, rejected), allocations=without(state.allocations, *tags))


def on_allocation_changed(state: State, at: float, event: ev.AllocationChanged) -> State:
    """Apply a changed status of an allocation, with the nodes that entered or left it.

    If the allocation has ended, its nodes, orphan steps and open launches are removed. A listed allocation that the
    state does not contain was given up earlier; it is recorded as an orphan.
    """
    allocation = state.allocations.get(event.tag)
    over = event.status is None or event.status.state is AllocationState.ENDED
    if allocation is None:
        return (
            state
            if over
            else replace(state, allocations=put(state.allocations, event.tag, _orphan_allocation(state, at, event)))
        )
    if event.status is None or over:
        state = _note_reclaimed(
            _note_external_cancellation(state, at, allocation, event.status), at, allocation, event.status
        )
        state = _note_spent(state, at, allocation)
        if not (allocation.releasing or allocation.orphan) and allocation.running_since is None:
            detail = (event.status.detail if event.status else "") or "no longer in the queue"
            state = _add_rejected_request(
                state, RejectedRequest(event.tag, at, f"{event.tag}: {detail}", True, allocation.request.node_group)
            )
        elif _allocation_failed_early(state, at, allocation):  # counts as a rejection
            detail = f"it ended {at - (allocation.running_since or at):.0f} s after it began" + _detail_suffix(
                event.status
            )
            state = _add_rejected_request(
                state, RejectedRequest(event.tag, at, f"{event.tag}: {detail}", True, allocation.request.node_group)
            )
        return replace(
            state,
            allocations=without(state.allocations, event.tag),
            nodes=without_departed(state.nodes, event.tag, ()),
            orphan_steps={tag: orphan for tag, orphan in state.orphan_steps.items() if orphan.allocation != event.tag},
            intents={
                tag: intent for tag, intent in state.intents.items() if not _launches_into(intent.action, event.tag)
            },
        )
    unsatisfiable_since = allocation.unsatisfiable_since if allocation.unsatisfiable_since is not None else at
    allocation = replace(
        allocation,
        status=event.status,
        status_at=at,
        unsatisfiable_since=unsatisfiable_since if event.status.unsatisfiable_reason else None,
    )
    since = allocation.running_since
    if allocation.running or allocation.pending:  # the walltime of a requeued allocation starts again
        since = (at if since is None else since) if allocation.running else None
    ending = (at if allocation.ending_since is None else allocation.ending_since) if allocation.ending else None
    allocation = replace(_with_suspension(allocation, at), running_since=since, ending_since=ending)
    if allocation.orphan:
        return replace(state, allocations=put(state.allocations, event.tag, allocation))
    nodes = without_departed(state.nodes, event.tag, event.status.nodes)
    state = _reset_helpers(state, at, {name for name in event.status.nodes if not _belongs_to(nodes, name, event.tag)})
    for name in event.status.nodes:
        node = nodes.get(name) or Node(name, event.tag)
        if node.allocation != event.tag:
            node = replace(node, allocation=event.tag, status=None, release_result=None)
        nodes[name] = replace(node, node_group=allocation.request.node_group)
    begins = state.running_since is None and allocation.running
    began = at if begins and not _is_dedicated(state, allocation) else state.running_since
    orphan_steps = {
        tag: orphan
        for tag, orphan in state.orphan_steps.items()
        if orphan.allocation != event.tag or orphan.node in event.status.nodes
    }
    return replace(
        state,
        allocations=put(state.allocations, event.tag, allocation),
        nodes=nodes,
        running_since=began,
        orphan_steps=orphan_steps,
    )


def _is_dedicated(state: State, allocation: Allocation) -> bool:
    """Return whether the allocation is of a further rollout pool, whose nodes the run does not need to begin."""
    return any(group.dedicated and group.name == allocation.request.node_group for group in state.job.node_groups)


def _with_suspension(allocation: Allocation, at: float) -> Allocation:
    """Return the allocation with the times of its suspensions as of its newest status."""
    since = allocation.suspended_since
    if allocation.suspended:
        return replace(allocation, suspended_since=at) if since is None else allocation
    if since is None:
        return allocation
    return replace(allocation, suspended_since=None, suspended_s=allocation.suspended_s + at - since)


def _note_spent(state: State, at: float, allocation: Allocation) -> State:
    """Add what an ended allocation has used to what its elastic pool has spent, even if the job lacks this pool now."""
    name, elastic = allocation.request.node_group, elastic_role(state.job)
    if name not in state.pools and (elastic is None or elastic.name != name):
        return state
    pool = pool_state(state, name)
    spent = pool.spent_node_s + allocation.used_s(at) * allocation.request.count
    return replace(state, pools={**state.pools, name: replace(pool, spent_node_s=spent)})


def _belongs_to(nodes: dict[NodeName, Node], name: NodeName, tag: str) -> bool:
    """Return whether the node is recorded as a node of this allocation."""
    return name in nodes and nodes[name].allocation == tag


def _reset_helpers(state: State, at: float, entered: set[NodeName]) -> State:
    """Remove earlier failures of the agents and standby processes of nodes that have just entered an allocation.

    Such a failure may only show that an earlier allocation was cancelled or ran out of time. If it still counted, the
    run would consider the node unusable and request another node before the node's agent reports.
    """
    for replica in state.replicas.values():
        if is_support(replica.id) and replica.node in entered and replica.failures:
            state = with_replica(state, replica.id, failures=(), not_before=at)
    return state


def _allocation_failed_early(state: State, at: float, allocation: Allocation) -> bool:
    """Return whether an allocation ended by itself soon after its start, before any process in it reported."""
    began = allocation.running_since
    ran = not (allocation.releasing or allocation.orphan) and began is not None and at - began < EARLY_END_S
    reported = any(
        replica.allocation == allocation.tag and replica.admitted_process is not None
        for replica in state.replicas.values()
    )
    return ran and not reported and allocation.tag not in state.reclaimed


def _note_reclaimed(state: State, at: float, allocation: Allocation, status: AllocationStatus | None) -> State:
    """Record the preemption, cancellation or expiry of an allocation: its replicas do not count as failed."""
    over = allocation.running and at >= allocation.ends_at - END_TOLERANCE_S
    reclaimed = allocation.reclaimed or (status is not None and (status.reclaimed or status.cancelled)) or over
    current_allocations = {replica.allocation for replica in state.replicas.values() if replica.is_current}
    remaining = {tag: detail for tag, detail in state.reclaimed.items() if tag in current_allocations}
    if reclaimed and not allocation.releasing:
        remaining[allocation.tag] = _detail_suffix(status).removeprefix(": ") or "its walltime is over"
    return replace(state, reclaimed=remaining)


def _detail_suffix(status: AllocationStatus | None) -> str:
    return f": {status.detail}" if status is not None and status.detail else ""


def _note_external_cancellation(
    state: State, at: float, allocation: Allocation, status: AllocationStatus | None
) -> State:
    """Record that somebody cancelled the last remaining allocation of the run, perhaps in order to end the run.

    The cluster reports the reason some time after the allocation's end. An allocation that was requested between the
    end and this report does not count as remaining. If several allocations ended together, one cancellation is
    recorded.
    """
    if allocation.releasing or allocation.orphan or status is None or not status.cancelled:
        return state
    ended_at = at if allocation.ending_since is None else allocation.ending_since
    others = [
        other
        for other in state.allocations.values()
        if other.tag != allocation.tag and not (other.releasing or other.orphan)
    ]
    if any(other.requested_at < ended_at and not other.ending for other in others) or allocation.requested_at < max(
        state.external_cancellations, default=0.0
    ):
        return state
    return replace(
        state,
        external_cancellations=(
            *(since for since in state.external_cancellations if at - since < CANCELLATION_WINDOW_S),
            ended_at,
        ),
    )


def _orphan_allocation(state: State, at: float, event: ev.AllocationChanged) -> Allocation:
    return Allocation(event.tag, AllocationRequest(event.tag, 0, Resources(), 0.0), at, event.status, orphan=True)


def _launches_into(action: ExternalAction, allocation: str) -> bool:
    return isinstance(action, Launch) and action.allocation == allocation


def without_departed(nodes: Mapping[NodeName, Node], tag: str, present: tuple[NodeName, ...]) -> dict[NodeName, Node]:
    """Return ``nodes`` without the nodes of allocation ``tag`` that are no longer ``present`` in it.

    An excluded node is kept, without an allocation, so that the next request does not bring it back.
    """
    remaining: dict[NodeName, Node] = {}
    for name, node in nodes.items():
        if node.allocation != tag or name in present:
            remaining[name] = node
        elif node.excluded is not None:
            remaining[name] = replace(node, allocation="", status=None)
    return remaining


def on_node_changed(state: State, at: float, event: ev.NodeChanged) -> State:
    """Record the changed status of a node. A drain that was refused while the node was not up may be tried again."""
    if (node := state.nodes.get(event.node)) is None:
        return state
    returned = event.status.state is NodeState.UP and (node.status is None or node.status.state is not NodeState.UP)
    return _with_node(state, event.node, status=event.status, drain_error="" if returned else node.drain_error)


def _add_rejected_request(state: State, rejected: RejectedRequest) -> State:
    recent = tuple(r for r in state.rejected_requests if rejected.at - r.at < state.job.recovery.window)
    return replace(state, rejected_requests=(*recent, rejected))


def _with_allocation(state: State, tag: str, **changes: Any) -> State:
    allocation = state.allocations.get(tag)
    if allocation is None:
        return state
    return replace(state, allocations=put(state.allocations, tag, replace(allocation, **changes)))


def on_node_command(state: State, at: float, event: ev.CommandReceived) -> State:
    """Record a user's command to drain or undrain a node; a command that changes nothing is settled at once."""
    name = NodeName(event.target)
    node, command = state.nodes.get(name), state.node_commands.get(name)
    if node is None or state.finish is not None:
        return state
    by = f"{event.by}: {event.reason}" if event.reason else event.by
    if event.command == UNDRAIN:
        if node.excluded is None and not node.drain_reason:
            return _with_node(_without_command(state, name), name, drain_requested_at=0.0) if command else state
        return replace(state, node_commands=put(state.node_commands, name, (UNDRAIN, by)))
    if node.excluded is not None:  # no replica is on it: drain it now, or try the drain again
        return _with_node(
            _without_command(state, name), name, drain_requested_by=by, drain_requested_at=at, drain_error=""
        )
    if not node.allocation or command is not None:
        return state
    return _with_node(
        replace(state, node_commands=put(state.node_commands, name, (DRAIN, by))), name, drain_requested_at=at
    )


def on_exclude(state: State, at: float, action: Exclude) -> State:
    """Record that a node is excluded, and the user who requested the exclusion, if a user did."""
    node = state.nodes.get(action.node) or Node(action.node, "")
    if not action.by:  # a pending command of a user takes precedence over a finding
        action = replace(action, by=state.node_commands.get(action.node, ("", ""))[1])
    why = "; ".join(action.why.evidence) or "excluded"
    here = [one for one in state.replicas.values() if one.node == node.name and one.is_current]
    spare = are_extras(state, (one for one in here if not is_support(one.id)))
    node = replace(
        node,
        excluded=why,
        excluded_at=at,
        exclusions=node.exclusions + 1,
        cause=action.cause,
        proved=action.proof,
        lost_spare=spare and not action.by,
        drain_requested_by=action.by,
        drain_error="",
        release_result=None,
    )
    return replace(_without_command(state, node.name), nodes=put(state.nodes, node.name, node))


def on_readmit(state: State, at: float, action: Readmit) -> State:
    """Remove the exclusion of a node. The node is used again once its new agent has reported that the node is fit.

    FAIL findings without proof about the node are dropped, since no process remains on the node that could clear them.
    If a user undrained the node, FAIL findings with proof are dropped too.
    """
    command, _ = state.node_commands.get(action.node, ("", ""))
    findings = {
        key: finding
        for key, finding in state.findings.items()
        if finding.node != action.node or finding.verdict is not Verdict.FAIL or (finding.proof and command != UNDRAIN)
    }
    state = replace(state, findings=findings)
    node = state.nodes.get(action.node)
    released = node is not None and node.release_result is ReleaseResult.RELEASED
    state = _with_node(
        state,
        action.node,
        excluded=None,
        cause=None,
        proved=False,
        lost_spare=False,
        drain_requested_by="",
        drain_requested_at=0.0,
        drain_error="",
        probe_error=None,
        release_result=ReleaseResult.RELEASED if released else None,
    )
    return state if node is not None and node.drain_reason else _without_command(state, action.node)


def on_node_action_settled(state: State, at: float, action: Drain | Undrain | Shrink, ok: bool, detail: str) -> State:
    """Apply the result of a drain, an undrain or the release of single nodes."""
    if isinstance(action, Drain):
        changes = {"drain_reason": action.reason} if ok else {"drain_error": detail or "refused"}
        return _with_node(state, action.node, **changes)
    if isinstance(action, Undrain):  # a refused undrain means that the drain is not this run's own
        return _with_node(_without_command(state, action.node), action.node, drain_reason="")
    result = ReleaseResult.RELEASED if ok else ReleaseResult.REFUSED
    for name in action.nodes:
        state = _with_node(state, name, release_result=result)
    return state


def _without_command(state: State, name: NodeName) -> State:
    return replace(state, node_commands=without(state.node_commands, name))


def _with_node(state: State, name: NodeName, **changes: Any) -> State:
    node = state.nodes.get(name)
    if node is None:
        return state
    return replace(state, nodes=put(state.nodes, name, replace(node, **changes)))
