"""Build a run's first requests for allocations in each form (pool, hetjob, replica), and its later requests. Pure.

``rrl check`` shows the same requests.
"""

from __future__ import annotations

import msgspec

from ....cluster.base import AllocationRequest
from ....core.run_spec import NodeGroup, RunSpec
from ....core.types import NodeName, Outcome
from ...model.actions import Action, Finish, Request, Rung, Why, every_lower
from ...model.pools import MIN_WALLTIME_S, affordable, elastic_role
from ...model.state import Allocation, RejectedRequest, State
from ..deadlines import NEVER
from .node_fitness import barred_nodes, unfit_nodes
from .nodes import NodeInventory

MAX_REJECTIONS = 3
"""Number of failed requests (rejected or undelivered) within the recovery window after which none is repeated."""
REQUEST_BACKOFF_S = 10.0
"""Seconds before nodes are requested again after a rejection; doubles with each further rejection."""


def holds_nothing(state: State) -> bool:
    """Return whether the run has no nodes, no requests and nothing launched, as at its start."""
    if state.launched:
        return False
    pools = {group.name for group in own_groups(state.job, dedicated=True)}
    # nodes that left the run have no allocation
    has_nodes = any(node.allocation and node.node_group not in pools for node in state.nodes.values())
    has_allocations = any(not a.orphan and a.request.node_group not in pools for a in state.allocations.values())
    return not has_allocations and not has_nodes


def own_groups(job: RunSpec, dedicated: bool = False) -> list[NodeGroup]:
    """Return the node groups that the run needs to begin, or with ``dedicated`` those of further rollout pools."""
    return [group for group in job.node_groups if group.dedicated == dedicated]


def first_request(state: State, now: float) -> list[Action]:
    """Return the single request for the nodes that a run in form ``pool`` or ``hetjob`` needs to begin.

    If an earlier request failed and must not be repeated, return the decision to end the run.
    """
    node_groups = own_groups(state.job)
    if end := finish_if_rejected(state, node_groups[0], now):
        return [end]
    first, *more = (
        build_request(state, node_group, node_group.nodes, _next_tag(state, node_group), now)
        for node_group in node_groups
    )
    nodes = sum(node_group.nodes for node_group in node_groups)
    why = Why((f"{nodes} nodes wanted, none held",), expects="nodes as soon as the queue grants them")
    return [Request(msgspec.structs.replace(first, further_components=tuple(more)), why)]


def await_minimum(state: State, inventory: NodeInventory, now: float) -> tuple[list[Action], float]:
    """Request nodes in form ``replica`` until the run has the minimum with which it can start.

    Returns:
        (actions, wake): the requests, or the decision to end the run if the requests are rejected or take too long; and
        the next wake (manager's time, s).
    """
    node_groups = own_groups(state.job)
    if rejected := [end for node_group in node_groups if (end := finish_if_rejected(state, node_group, now))]:
        return [rejected[0]], NEVER
    deadline = NEVER if state.requested_since is None else state.requested_since + state.job.start_within
    if now >= deadline:
        return [_start_timeout(state, inventory)], NEVER
    actions: list[Action] = []
    for node_group in node_groups:
        missing = node_group.nodes - len(inventory.candidates(node_group.name)) - inventory.expected(node_group.name)
        why = Why(
            (f"{node_group.name}: {node_group.nodes} nodes wanted, {missing} missing",),
            expects="nodes in time, so that the run can start",
        )
        actions += [Request(request, why) for request in new_requests(state, node_group, missing, now)]
    return actions, deadline


def unsatisfiable(state: State, allocation: Allocation) -> Finish:
    """Return the decision to end a run whose first request can never be met, or was refused for now for too long."""
    text = allocation.status.unsatisfiable_reason or allocation.status.detail if allocation.status else ""
    evidence, advice = (f"{allocation.tag}: {text}",), "the run ends; correct the job spec and submit again"
    why = Why(evidence, Rung.GIVE_UP, advice, lower=every_lower("nodes that the cluster can grant"))
    return Finish(Outcome.FAILED if allocation.refused else Outcome.REJECTED, why)


def finish_if_rejected(state: State, node_group: NodeGroup, now: float) -> Finish | None:
    """Return the decision to end the run because requests of this node group failed; None if the run continues.

    A rejection by the cluster ends the run at once, since the same request would be rejected again. A request that
    failed without a rejection (``RejectedRequest.undelivered``) is repeated, if the cluster never answered until
    ``limits.allocation``, else :data:`MAX_REJECTIONS` times within the recovery window.
    """
    recent = rejections(state, node_group, now)
    answered = [rejected for rejected in recent if not rejected.undelivered]
    if not answered and now < exhausted_at(state, recent):
        return None
    evidence, advice = ((answered or recent)[-1].detail,), "the run ends; correct the job spec and submit again"
    why = Why(evidence, Rung.GIVE_UP, advice, lower=every_lower("a request that the cluster accepts"))
    return Finish(Outcome.REJECTED if answered else Outcome.FAILED, why)


def rejections(state: State, node_group: NodeGroup, now: float) -> list[RejectedRequest]:
    """Return the node group's requests within the recovery window that were rejected or undelivered."""
    window = state.job.recovery.window
    return [
        rejected
        for rejected in state.rejected_requests
        if rejected.node_group == node_group.name and now < rejected.at + window
    ]


def exhausted_at(state: State, recent: list[RejectedRequest]) -> float:
    """Return the time (manager's time, s) from which a request that failed like this recently is not repeated."""
    if recent and (since := recent[-1].unanswered_since) is not None:
        return since + state.job.limits.allocation
    return 0.0 if len(recent) >= MAX_REJECTIONS else NEVER


def retry_at(recent: list[RejectedRequest]) -> float:
    """Return the manager's time (s) at which nodes are requested again after these recent rejections, if at all."""
    return recent[-1].at + REQUEST_BACKOFF_S * 2 ** (len(recent) - 1) if recent else 0.0


def is_rejected(state: State, recent: list[RejectedRequest], now: float) -> bool:
    """Return whether the elastic pool makes no further request within the recovery window of these rejections.

    The cluster answered one of them, or too many were not delivered.
    """
    return any(not rejected.undelivered for rejected in recent) or now >= exhausted_at(state, recent)


def requests_due_again(state: State, now: float) -> tuple[list[Action], float]:
    """Return the requests that were refused for now and are made again, and the time of the next one."""
    further = {component.tag for a in state.allocations.values() for component in a.request.further_components}
    refused = [a for a in state.allocations.values() if a.refused and a.tag not in further]
    due: list[Action] = [
        Request(a.request, Why((f"{a.tag}: {a.status.detail if a.status else ''}",), expects="nodes, once accepted"))
        for a in refused
        if now >= a.not_before
    ]
    return due, min((a.not_before for a in refused if now < a.not_before), default=NEVER)


def new_requests(state: State, node_group: NodeGroup, count: int, now: float) -> list[AllocationRequest]:
    """Return requests for ``count`` more nodes of a group, each under a new tag."""
    if count <= 0:
        return []
    if not node_group.separate_jobs:
        return [build_request(state, node_group, count, _next_tag(state, node_group), now)]
    requests_made = state.requests_made.get(node_group.name, 0)
    return [
        build_request(state, node_group, 1, f"{state.run}.{node_group.name}-{requests_made + n}", now, count)
        for n in range(count)
    ]


def build_request(
    state: State, node_group: NodeGroup, count: int, tag: str, now: float, together: int = 1
) -> AllocationRequest:
    """Return a request whose walltime is the remaining time of the run, at most the group's walltime.

    Slurm is less likely to backfill a request for more time than needed. The walltime of an elastic pool's request is
    also limited to what its budget allows, if ``together`` requests are made at once.
    """
    walltime = min(state.ends_at - now, node_group.walltime)
    if role := elastic_role(state.job, node_group.name):
        walltime = min(walltime, affordable(state, role, now, together)[1]) // MIN_WALLTIME_S * MIN_WALLTIME_S
    return AllocationRequest(
        tag,
        count,
        node_group.node,
        max(MIN_WALLTIME_S, walltime),
        exclude=_excluded_nodes(state),
        sbatch=node_group.sbatch,
        comment=f"rrl {state.run}",
        node_group=node_group.name,
    )


def _next_tag(state: State, node_group: NodeGroup) -> str:
    """Return the tag of the next request of a node group.

    Tags are not reused, since an abandoned request may still be granted. The only exception is a run that is resumed
    from within its own pool: it uses the first tag again, because the pool carries this tag.
    """
    first = f"{state.run}.{node_group.name}"
    first_of_run = holds_nothing(state) and not state.rejected_requests and first not in state.allocations
    in_pool = state.job.manager.where == "pool" and first_of_run
    return f"{first}-{state.seq}" if state.requests_made.get(node_group.name) and not in_pool else first


def _excluded_nodes(state: State) -> tuple[NodeName, ...]:
    """Return the nodes that requests exclude: nodes that are excluded, barred, or cannot run the run's roles."""
    excluded = {name for name, node in state.nodes.items() if node.excluded is not None}
    return tuple(sorted(excluded | barred_nodes(state) | unfit_nodes(state).keys()))


def _start_timeout(state: State, inventory: NodeInventory) -> Finish:
    """Return the decision to end a run that did not get its minimum of nodes in time.

    The evidence says which node groups lack nodes.
    """
    evidence = []
    for node_group in state.job.node_groups:
        present = len(inventory.candidates(node_group.name))
        if present >= node_group.min_nodes:
            continue
        pending = [
            f"{a.tag}: {a.status.detail or a.status.state}"
            for a in state.allocations.values()
            if a.pending and a.request.node_group == node_group.name and a.status is not None
        ]
        suffix = f" ({'; '.join(pending)})" if pending else ""
        needed = f"{present} of the {node_group.min_nodes} nodes that the run needs to start"
        evidence.append(f"{node_group.name}: {needed}, after {state.job.start_within:g} s{suffix}")
    lower = every_lower("the nodes that the run needs to start, in time")
    return Finish(Outcome.FAILED, Why(tuple(evidence), Rung.GIVE_UP, "everything is released", lower=lower))


def initial_requests(run: str, job: RunSpec) -> tuple[AllocationRequest, ...]:
    """Return the first requests of a job.

    In form ``pool`` there is one request. In form ``hetjob`` there is one, with ``further_components``. In form
    ``replica`` there is one for each node of a group with separate jobs, and one for each other group. The requests of
    further rollout pools come last in every form; the run makes them once it has its own nodes.
    """
    own, further = (_initial_requests(run, own_groups(job, dedicated)) for dedicated in (False, True))
    if job.form == "hetjob":
        own = [msgspec.structs.replace(own[0], further_components=tuple(own[1:]))]
    return (*own, *further)


def _initial_requests(run: str, node_groups: list[NodeGroup]) -> list[AllocationRequest]:
    requests: list[AllocationRequest] = []
    for node_group in node_groups:
        names = (
            [f"{node_group.name}-{index}" for index in range(node_group.nodes)]
            if node_group.separate_jobs
            else [node_group.name]
        )
        requests += [_initial_request(run, f"{run}.{name}", node_group) for name in names]
    return requests


def _initial_request(run: str, tag: str, node_group: NodeGroup) -> AllocationRequest:
    """Return the first request of a node group under this tag, for one node if its jobs are separate."""
    nodes = 1 if node_group.separate_jobs else node_group.nodes
    return AllocationRequest(
        tag,
        nodes,
        node_group.node,
        node_group.walltime,
        sbatch=node_group.sbatch,
        comment=f"rrl {run}",
        node_group=node_group.name,
    )
