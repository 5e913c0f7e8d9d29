"""The most jobs and steps that a run can have, and make within an hour. Pure, from the job spec alone."""

from __future__ import annotations

import math

from msgspec import Struct

from rrl.manager.planner.brakes import exclusions_allowed
from rrl.spec.jobview import JobView, Part, RoleView

HOUR = 3600.0


class WorstCase(Struct, frozen=True):
    """Components of a heterogeneous job count as jobs, as they do for Slurm's limits."""

    jobs_to_start: int
    """with fewer the run does not start"""
    jobs: int
    """at once: the manager and its successor, every allocation, and a replacement or successor of each"""
    jobs_per_hour: int
    steps: int
    """at once: a step for each rank of each replica, an agent on each node, and a shadow for each rank that may go on
    somewhere"""
    steps_per_hour: int


def worst_case(view: JobView, foreground: bool = False) -> WorstCase:
    """``foreground``: the manager is no Slurm job."""
    managers = 0 if foreground or view.manager.where == "pool" else 2
    allocations = sum(_jobs(part) for part in view.parts)
    start = sum(part.needed if part.separate else 1 for part in view.parts) + min(managers, 1)
    windows = HOUR / view.recovery.window
    lost = math.ceil(windows * exclusions_allowed(view.recovery.breaker, view.nodes))
    at_once = sum(role.replicas * role.ranks for role in view.roles) + view.nodes + shadows(view)
    restarts = math.ceil(windows * view.recovery.per_replica)
    again = sum(_rotations(part, view) for part in view.parts)
    if view.recovery.policy == "requeue":  # each failure gives everything back
        again += restarts * allocations
    return WorstCase(
        jobs_to_start=start,
        jobs=managers + allocations + view.nodes,
        jobs_per_hour=managers + allocations + lost + again,
        steps=at_once,
        steps_per_hour=at_once * (1 + restarts),
    )


def shadows(view: JobView) -> int:
    """As many as there are at most."""
    return sum(shadows_for(view, role) for role in view.roles)


def shadows_for(view: JobView, role: RoleView) -> int:
    """Of the trainer one beside each rank, and on spares and rollouts' nodes as many as share a node; of rollouts as
    many on each spare as it carries."""
    if not role.warm or view.recovery.policy != "role":
        return 0
    if not role.beside:
        return sum(shadow_nodes(view, role)) * role.fitting(view.part_of(role.name).node)
    return role.replicas * role.ranks + sum(shadow_nodes(view, role)) * min(role.ranks, role.per_node)


def shadow_nodes(view: JobView, role: RoleView) -> tuple[int, int]:
    """On so many spares, and on so many rollouts' nodes, there are shadows of this role, which is kept warm."""
    if not role.beside:
        return min(view.spares, role.replicas), 0
    rollouts = sum(one.replicas for one in view.kind("rollout"))
    return min(view.spares, role.nodes), min(role.standbys, rollouts)


def _jobs(part: Part) -> int:
    return part.nodes if part.separate else 1


def _rotations(part: Part, view: JobView) -> int:
    """Requests within an hour because allocations end before the run does."""
    return math.ceil(HOUR / part.walltime) * _jobs(part) if part.walltime < view.walltime else 0
