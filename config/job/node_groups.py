"""Build the node groups of a job: which roles share nodes, the numbers of nodes, and their sbatch options."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from ...core.run_spec import NodeGroup, RoleSpec
from ...core.types import Resources
from .roles import POOL, SHARED

if TYPE_CHECKING:
    from .schema import Job


def sbatch(options: Mapping[str, str | int | bool]) -> dict[str, str]:
    """Return sbatch options with their values as text: a flag has an empty value, a false option is left out."""
    return {key: "" if value is True else str(value) for key, value in options.items() if value is not False}


def build_node_groups(job: Job, roles: tuple[RoleSpec, ...]) -> tuple[NodeGroup, ...]:
    """Return the run's node groups, the largest first.

    With ``form = "pool"`` all roles share a single group. With another form, each exclusive role has a group of its
    own, and the other roles share a group.
    """
    cluster, common = job.cluster, sbatch(job.slurm)
    job_walltime = min(cluster.walltime, cluster.job_walltime or cluster.walltime)
    node = Resources(cpus=cluster.node.cpus, gpus=cluster.node.gpus, mem=cluster.node.mem)
    if cluster.form == POOL:
        nodes = pool_nodes(roles, node) + cluster.spares
        names = tuple(role.name for role in roles)
        return (NodeGroup(POOL, names, nodes, node, job_walltime, common, min_nodes=nodes),)
    separate, groups = cluster.form == "replica", []
    shared = tuple(role for role in roles if not role.exclusive)
    if shared:
        nodes, names = pool_nodes(shared, node), tuple(role.name for role in shared)
        groups.append(NodeGroup(SHARED, names, nodes, node, job_walltime, common, min_nodes=nodes))
    for role in roles:
        if role.exclusive:
            table = job.every_role()[role.name]
            options = sbatch({"exclusive": True, **job.slurm, **table.slurm})  # whole nodes, shared with no other job
            walltime = table.walltime or job_walltime
            min_replicas = role.min_replicas if separate else role.replicas
            nodes, min_nodes = role.replicas * role.nodes, min_replicas * role.nodes
            groups.append(
                NodeGroup(role.name, (role.name,), nodes, role.members_on_node, walltime, options, separate, min_nodes)
            )
    # the largest group first: Slurm tolerates failures of nodes best in a heterogeneous job's first component
    return tuple(sorted(groups, key=lambda group: -group.nodes))


def pool_nodes(roles: tuple[RoleSpec, ...], node: Resources) -> int:
    """Return the number of nodes that the roles need together.

    Each replica of an exclusive role has nodes of its own. The members of all other replicas share nodes, on which they
    are placed first fit.
    """
    exclusive = sum(role.replicas * role.nodes for role in roles if role.exclusive)
    shared: list[list[int]] = []
    for role in roles:
        if role.exclusive:
            continue
        for _ in range(role.replicas):
            members = [0] * len(shared)  # members of this gang on each node
            for _ in range(role.ranks):
                needs = (role.per_member.cpus, role.per_member.gpus, role.per_member.mem)
                candidates = (
                    index
                    for index, free in enumerate(shared)
                    if members[index] < role.per_node
                    and all(has >= needed for has, needed in zip(free, needs, strict=True))
                )
                target = next(candidates, len(shared))
                if target == len(shared):
                    shared.append([node.cpus, node.gpus, node.mem])
                    members.append(0)
                shared[target] = [has - needed for has, needed in zip(shared[target], needs, strict=True)]
                members[target] += 1
    return exclusive + len(shared)
