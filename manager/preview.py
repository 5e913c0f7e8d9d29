"""Exactly what ``rrl submit`` would start, as text. Touches nothing, and asks nobody."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from rrl.manager import own_job
from rrl.manager.asks import first_asks
from rrl.manager.cluster.slurm_ask import script
from rrl.manager.worst_case import shadow_nodes, shadows_for
from rrl.spec.job import Job
from rrl.spec.jobview import JobView, RoleView
from rrl.spec.rundir import runs_root


def preview(job: Job) -> list[tuple[str, str]]:
    """(title, text) of each thing. Raises ValueError for an sbatch option that cannot be passed on."""
    view = job.view(sys.executable)
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
    job = own_job.parameters(_run(view), view)
    text = "\n".join(f"{key} = {value}" for key, value in job.items())
    return [("manager (submitit; this small Slurm job, and another one that waits until it ends)", text)]


def allocations(view: JobView) -> list[tuple[str, str]]:
    """The batch script of each allocation that differs by more than its number."""
    if view.manager.where == "pool":
        return [("allocation (sbatch)", own_job.pool_script(_run(view), view, str(runs_root() / _run(view))))]
    asks = {ask.part: ask for ask in reversed(first_asks(_run(view), view))}  # of equal ones, the first
    counts = {part.name: part.nodes for part in view.parts if part.separate}
    texts = []
    for ask in reversed(asks.values()):
        times = f"; {counts[ask.part]} of these" if counts.get(ask.part, 1) > 1 else ""
        texts.append((f"allocation (sbatch{times})", script(ask)))
    return texts


def _run(view: JobView) -> str:
    return f"{view.name}-<time>"
