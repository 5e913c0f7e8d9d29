"""What ``rrl submit`` would start, as text, and the most jobs and steps that a run can have. Pure."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator

from msgspec import Struct

from ...config.job.resolve import resolve
from ...config.job.schema import Job
from ...core.run_dir import runs_root
from ...core.run_spec import JobView, Part, RoleView
from ..cluster.slurm.requests import script
from ..planner.capacity.initial_request import first_asks
from ..planner.recovery.node_exclusion import exclusions_allowed
from . import manager_job

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


def preview(job: Job) -> list[tuple[str, str]]:
    """(title, text) of each thing. Raises ValueError for an sbatch option that cannot be passed on."""
    view = resolve(job, sys.executable)
    steps = "\n".join([*(_steps(role) for role in view.roles), *_warm(view)])
    if view.cluster == "slurm":
        return [*_manager(view), *allocations(view), ("steps", steps)]
    nodes = f"{view.nodes} virtual nodes on this machine, {view.spares} of them spare; the manager as a process here"
    return [("local cluster", nodes), ("steps", steps)]


def _steps(role: RoleView) -> str:
    """A role's steps in one line."""
    own = ", a node of its own" if role.exclusive else ""
    times = f"{role.replicas} x"
    if role.ranks > 1:
        times += f" {role.ranks} ranks, {role.per_node} on a node, each"
        own = f", {role.nodes} {'node' if role.nodes == 1 else 'nodes'} of their own" if role.exclusive else ""
    each = f"{role.each.cpus} cpus, {role.each.gpus} gpus, {role.each.mem // 2**20} MiB{own}"
    return f"{role.name:13} {times} ({each})  {' '.join(role.argv)}"


def _warm(view: JobView) -> Iterator[str]:
    """Shadows: how many, and where."""
    for role in view.roles:
        if not (most := shadows_for(view, role)):
            continue
        spares, rollouts = shadow_nodes(view, role)
        name, where = f"warm {role.name}", [f"on {spares} of the spares, its engine running"]
        if role.beside:
            places = {"spares": spares, "rollouts' nodes": rollouts}
            name, where = "warm standby", [f"beside the {role.name}"]
            where += [f"on {count} of the {place}" for place, count in places.items() if count]
        yield f"{name:13} at most {most}: {', '.join(where)}; once a step is committed"


def _manager(view: JobView) -> list[tuple[str, str]]:
    if view.manager.where == "pool":
        return []
    job = manager_job.parameters(_run(view), view)
    text = "\n".join(f"{key} = {value}" for key, value in job.items())
    return [("manager (submitit; this small Slurm job, and another one that waits until it ends)", text)]


def allocations(view: JobView) -> list[tuple[str, str]]:
    """The batch script of each allocation that differs by more than its number."""
    if view.manager.where == "pool":
        return [("allocation (sbatch)", manager_job.pool_script(_run(view), view, str(runs_root() / _run(view))))]
    asks = {ask.part: ask for ask in reversed(first_asks(_run(view), view))}  # of equal ones, the first
    counts = {part.name: part.nodes for part in view.parts if part.separate}
    texts = []
    for ask in reversed(asks.values()):
        times = f"; {counts[ask.part]} of these" if counts.get(ask.part, 1) > 1 else ""
        texts.append((f"allocation (sbatch{times})", script(ask)))
    return texts


def _run(view: JobView) -> str:
    return f"{view.name}-<time>"
