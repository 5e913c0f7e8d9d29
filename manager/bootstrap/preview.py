"""Describe what ``rrl submit`` would start, and compute the maximum number of jobs and steps of a run. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator

from msgspec import Struct
from msgspec.structs import replace

from ...cluster.base import AllocationRequest
from ...cluster.slurm.requests import batch_script
from ...cluster.traits import traits_of
from ...core.run_dir import runs_root
from ...core.run_spec import NodeGroup, RoleSpec, RunSpec
from ...core.text import plural
from ...core.units import duration_text
from ..planner.capacity.allocation_requests import initial_requests
from ..planner.recovery.node_exclusion import exclusions_allowed
from . import manager_job

HOUR_S = 3600.0


class WorstCase(Struct, frozen=True):
    """The maximum number of jobs and steps of a run. Each component of a heterogeneous job counts as a job."""

    jobs_to_start: int
    """Number of jobs that must be running before the run starts."""
    jobs: int
    """Maximum number of jobs at the same time: the manager, its successor, all allocations, and a replacement for each
    node, except for nodes of an elastic pool."""
    jobs_per_hour: int
    steps: int
    """Maximum number of steps at the same time: all ranks of all replicas, an agent on each node, and the standby
    processes."""
    steps_per_hour: int


class Demand(Struct, frozen=True):
    """The resources that a run requests from its cluster at most, without the manager's own small job."""

    nodes: int
    """Nodes of all node groups; an elastic pool counts with its most replicas."""
    spares: int
    """Number of ``nodes`` that are kept ready for a failure."""
    gpus: int
    """GPUs of all nodes, as requested."""
    cpus: int
    """Cores of all nodes, as requested."""
    gpu_hours: float
    """Maximum GPU-hours of the run's nodes. The time in which the run holds a failed node besides its replacement is
    not included."""
    core_hours: float
    """Maximum core-hours, counted like ``gpu_hours``."""
    jobs_to_start: int
    """Slurm jobs that must be running before the run starts; 0 on the local cluster."""
    jobs: int
    """Maximum number of Slurm jobs at the same time; 0 on the local cluster."""


def demand(spec: RunSpec) -> Demand:
    """Return the resources that a run requests."""
    worst, here = worst_case(spec), traits_of(spec.cluster).roles_run_here
    nodes = [(group.node, most_nodes(spec, group), _node_hours(spec, group)) for group in spec.node_groups]
    return Demand(
        nodes=sum(count for _, count, _ in nodes),
        spares=spec.spares,
        gpus=sum(count * node.gpus for node, count, _ in nodes),
        cpus=sum(count * node.cpus for node, count, _ in nodes),
        gpu_hours=sum(hours * node.gpus for node, _, hours in nodes),
        core_hours=sum(hours * node.cpus for node, _, hours in nodes),
        jobs_to_start=0 if here else worst.jobs_to_start,
        jobs=0 if here else worst.jobs,
    )


def most_nodes(spec: RunSpec, node_group: NodeGroup) -> int:
    """Return the largest number of nodes of a group, without replacements."""
    if not node_group.dedicated:
        return node_group.nodes
    return sum(spec.most_replicas(spec.role(name)) * spec.role(name).nodes for name in node_group.roles)


def budget_s(spec: RunSpec, node_group: NodeGroup) -> float | None:
    """Return the node seconds that an elastic pool may use; None for a group with a fixed number of nodes."""
    roles = [spec.role(name) for name in node_group.roles]
    return sum(role.node_seconds for role in roles) if any(role.is_elastic for role in roles) else None


def _node_hours(spec: RunSpec, node_group: NodeGroup) -> float:
    """Return the maximum number of hours for which nodes of the group are held, added up over the nodes.

    If an allocation ends before the run does, it overlaps with its successor while the replicas move.
    """
    successors = max(0, math.ceil(spec.walltime / node_group.walltime) - 1)
    overlap = min(spec.limits.rotate, node_group.walltime / 2)
    seconds, budget = most_nodes(spec, node_group) * (spec.walltime + successors * overlap), budget_s(spec, node_group)
    return (seconds if budget is None else min(seconds, budget)) / HOUR_S


def worst_case(spec: RunSpec, foreground: bool = False) -> WorstCase:
    """Return the maximum number of jobs and steps of a run.

    ``foreground`` means that the manager is not a Slurm job.
    """
    queued = traits_of(spec.cluster).manager_is_a_job and not foreground and spec.manager.where == "job"
    managers = 2 if queued else 0
    allocations = sum(_jobs(spec, node_group) for node_group in spec.node_groups)
    nodes = sum(most_nodes(spec, node_group) for node_group in spec.node_groups)
    start = sum(node_group.min_nodes if node_group.separate_jobs else 1 for node_group in spec.node_groups) + min(
        managers, 1
    )
    windows = HOUR_S / spec.recovery.window
    lost = math.ceil(windows * exclusions_allowed(spec.recovery.breaker, nodes))
    at_once = sum(spec.most_replicas(role) * role.ranks for role in spec.roles) + nodes + max_standbys(spec)
    restarts = math.ceil(windows * spec.recovery.per_replica)
    renewals = sum(_rotations(node_group, spec) for node_group in spec.node_groups)
    return WorstCase(
        jobs_to_start=start,
        jobs=managers + sum(most_jobs(spec, node_group) for node_group in spec.node_groups),
        jobs_per_hour=managers + allocations + lost + renewals,
        steps=at_once,
        steps_per_hour=at_once * (1 + restarts),
    )


def most_jobs(spec: RunSpec, node_group: NodeGroup) -> int:
    """Return the maximum number of jobs of a group at the same time; nodes of an elastic pool are not replaced."""
    replacements = 0 if budget_s(spec, node_group) is not None else node_group.nodes
    return _jobs(spec, node_group) + replacements


def max_standbys(spec: RunSpec) -> int:
    """Return the maximum number of standby processes that a run has at the same time."""
    return sum(max_standbys_of(spec, role) for role in spec.roles)


def max_standbys_of(spec: RunSpec, role: RoleSpec) -> int:
    """Return the maximum number of standby processes of a role.

    The trainer has one standby process beside each rank. A spare node and the node of a rollout have as many as a node
    of the trainer has ranks.
    """
    if not role.warm or spec.recovery.policy != "role":
        return 0
    return role.replicas * role.ranks + sum(standby_nodes(spec, role)) * min(role.ranks, role.per_node)


def standby_nodes(spec: RunSpec, role: RoleSpec) -> tuple[int, int]:
    """Return how many spare nodes and how many nodes of rollouts have standby processes of this ``warm`` role."""
    rollouts = sum(
        rollout.replicas
        for rollout in spec.roles
        if rollout.traits.may_be_displaced and not spec.node_group_of(rollout.name).dedicated
    )
    spares = min(spec.spares, role.nodes) if "train" in spec.tags.spare else 0
    return spares, min(role.nodes - spares, rollouts) if "train" in spec.tags.rollout else 0


def _jobs(spec: RunSpec, node_group: NodeGroup) -> int:
    return most_nodes(spec, node_group) if node_group.separate_jobs else 1


def _rotations(node_group: NodeGroup, spec: RunSpec) -> int:
    """Return how many requests per hour replace allocations of this group that end before the run does."""
    jobs = _jobs(spec, node_group)
    return math.ceil(HOUR_S / node_group.walltime) * jobs if node_group.walltime < spec.walltime else 0


def preview(spec: RunSpec) -> list[tuple[str, str]]:
    """Return (title, text) for the manager, for each allocation, and for the steps that would be started.

    Raises:
        ValueError: an sbatch option cannot be passed on.
    """
    steps = "\n".join([*(_steps(spec, role) for role in spec.roles), *_standby_lines(spec)])
    traits = traits_of(spec.cluster)
    if traits.takes_batch_scripts:
        return [*_manager(spec), *allocations(spec), ("steps", steps)]
    count = sum(most_nodes(spec, group) for group in spec.node_groups)
    nodes = f"{count} {'virtual nodes on this machine' if traits.roles_run_here else 'nodes'}"
    nodes = f"{nodes}, {spec.spares} of them spare; the manager as a process here"
    return [(f"{spec.cluster} cluster", nodes), ("steps", steps)]


def pool_lines(spec: RunSpec) -> Iterator[str]:
    """Yield a line for each further rollout pool: how many nodes it may have, where, and for how long."""
    here = traits_of(spec.cluster).roles_run_here
    for group in (one for one in spec.node_groups if one.dedicated):
        most, budget = most_nodes(spec, group), budget_s(spec, group)
        count = plural(most, "node") if group.nodes == most else f"{group.nodes} to {plural(most, 'node')}"
        where = f" of partition {group.sbatch['partition']}" if "partition" in group.sbatch else ""
        hours = "" if budget is None else f", at most {budget / HOUR_S:g} node hours"
        jobs = "" if here else f", each job at most {duration_text(group.walltime)}"
        yield f"{group.name}: {count}{where}{hours}{jobs}"


def _steps(spec: RunSpec, role: RoleSpec) -> str:
    """Return one line that describes the steps of a role."""
    own = ", a node of its own" if role.exclusive else ""
    most = spec.most_replicas(role)
    times = f"{role.replicas} x" if most == role.replicas else f"{role.replicas} to {most} x"
    if role.ranks > 1:
        times += f" {role.ranks} ranks, {role.per_node} on a node, each"
        own = f", {role.nodes} {'node' if role.nodes == 1 else 'nodes'} of their own" if role.exclusive else ""
    resources = f"{role.per_member.cpus} cpus, {role.per_member.gpus} gpus, {role.per_member.mem // 2**20} MiB{own}"
    return f"{role.name:13} {times} ({resources})  {' '.join(role.argv)}"


def _standby_lines(spec: RunSpec) -> Iterator[str]:
    """Yield a line for each role with standby processes, which says how many there are and on which nodes."""
    for role in spec.roles:
        if not (limit := max_standbys_of(spec, role)):
            continue
        spares, rollouts = standby_nodes(spec, role)
        places = {"spares": spares, "rollouts' nodes": rollouts}
        where = [f"beside the {role.name}", *(f"on {count} of the {place}" for place, count in places.items() if count)]
        yield f"warm standby  at most {limit}: {', '.join(where)}, after the first commit"


def _manager(spec: RunSpec) -> list[tuple[str, str]]:
    if spec.manager.where == "pool":
        return []
    job = manager_job.parameters(_example_run_id(spec), spec)
    text = "\n".join(f"{key} = {value}" for key, value in job.items())
    return [("manager (a small Slurm job, through submitit; a second one is pending until the first ends)", text)]


def allocations(spec: RunSpec) -> list[tuple[str, str]]:
    """Return (title, batch script) of each allocation; equal allocations are listed once."""
    run_id, texts = _example_run_id(spec), []
    for request in requests_by_group(run_id, spec).values():
        group = spec.node_group(request.node_group)
        script = batch_script(request)
        if spec.manager.where == "pool" and not group.dedicated:
            script = manager_job.pool_script(run_id, spec, str(runs_root() / run_id))
        most = _jobs(spec, group)
        few = f"{group.nodes} to " if group.dedicated and group.nodes < most else ""
        times = f"; {few}{most} of these" if most > 1 or few else ""
        texts.append((f"allocation (sbatch{times})", script))
    return texts


def requests_by_group(run_id: str, spec: RunSpec) -> dict[str, AllocationRequest]:
    """Return the first request of each node group; the further components of a hetjob are in the first one.

    For a further pool it is a request for one node, even if the pool begins without replicas.
    """
    own = tuple(group for group in spec.node_groups if not group.dedicated)
    first = initial_requests(run_id, replace(spec, node_groups=own))
    requests = {request.node_group: request for request in reversed(first)}
    requests = dict(reversed(requests.items()))
    for group in (one for one in spec.node_groups if one.dedicated):
        one_node = replace(spec, form="replica", node_groups=(replace(group, nodes=1, dedicated=False),))
        requests[group.name] = initial_requests(run_id, one_node)[0]
    return requests


def _example_run_id(spec: RunSpec) -> str:
    return f"{spec.name}-<time>"
