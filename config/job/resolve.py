"""From job.toml to what the manager's core needs of it (:class:`rrl.core.run_spec.JobView`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import msgspec

from ...core import run_spec
from ...core.run_spec import NodeGroup, Resources, RoleSpec
from .faults import plan_faults
from .roles import POOL, SHARED, CommandRole, Role, RolloutRole, TrainerRole
from .site import EnvTable

if TYPE_CHECKING:
    from .schema import Job

_BUILT_IN = {
    "trainer": "rrl.roles.trainer.main",
    "rollout": "rrl.roles.rollout.main",
    "trajectories": "rrl.roles.trajectories.server",
    "reward": "rrl.roles.reward",
}
_MANAGER_INHERITS = ("partition", "account", "qos", "reservation")
"""options of [slurm] that the manager's own job has too, unless [manager] slurm says otherwise"""


def resolve(job: Job, python: str) -> run_spec.RunSpec:
    """Return what the manager reads of a job.

    Args:
        job: What job.toml says.
        python: The interpreter that runs rrl on the nodes, unless [env] names one.
    """
    python = job.env.python or python
    roles = tuple(
        _role(
            name,
            role,
            python if role.launcher == "direct" else job.container.python,
            job.container.image,
            _donor_rollouts(job, role),
        )
        for name, role in job.every_role().items()
    )
    groups = _node_groups(job, roles)
    container = job.container
    own = sbatch(job.manager.slurm)
    inherited = {key: value for key, value in sbatch(job.slurm).items() if key in _MANAGER_INHERITS}
    return run_spec.RunSpec(
        name=job.run.name,
        steps=job.run.steps or 0,
        cluster=job.cluster.kind,
        roles=roles,
        node_groups=groups,
        walltime=job.cluster.walltime,
        spares=job.cluster.spares if job.cluster.form == POOL else 0,
        form=job.cluster.form,
        start_within=job.cluster.start_within,
        env=_env(job.env, python),
        container=run_spec.ContainerSpec(container.mounts, container.python),
        network=job.transport.network,
        weights=job.transport.weights,
        staleness=job.sampling.staleness if isinstance(job.sampling.staleness, int) else None,
        manager=run_spec.ManagerSpec(
            job.manager.where, {**inherited, **own}, job.cluster.job_walltime or 0.0, job.manager.log_level
        ),
        limits=msgspec.structs.replace(job.merged_limits(), stragglers=job.health.stragglers),
        recovery=msgspec.convert(job.recovery.model_dump(), run_spec.Recovery),
        health=msgspec.convert(job.health.model_dump(), run_spec.HealthSpec),
        faults=plan_faults(job.faults, {role.name: role.replicas for role in roles}, job.cluster.walltime),
        faults_allowed=job.faults.allow,
    )


def _env(env: EnvTable, python: str) -> run_spec.EnvSpec:
    prober = env.python or ("python" if env.venv or env.conda else python)
    return run_spec.EnvSpec(
        env.setup, env.modules, env.venv or "", env.conda or "", env.passed, env.probe, python, prober
    )


def sbatch(options: Mapping[str, str | int | bool]) -> dict[str, str]:
    """Options as their texts; a flag is empty, one that is false is left out."""
    return {key: "" if value is True else str(value) for key, value in options.items() if value is not False}


def _node_groups(job: Job, roles: tuple[RoleSpec, ...]) -> tuple[NodeGroup, ...]:
    """One for everything in a pool; else one for each role that takes whole nodes, and one for the others."""
    cluster, common = job.cluster, sbatch(job.slurm)
    term = min(cluster.walltime, cluster.job_walltime or cluster.walltime)
    node = Resources(cpus=cluster.node.cpus, gpus=cluster.node.gpus, mem=cluster.node.mem)
    if cluster.form == POOL:
        nodes = run_spec.pool_nodes(roles, node) + cluster.spares
        return (NodeGroup(POOL, tuple(role.name for role in roles), nodes, node, term, common, min_nodes=nodes),)
    separate, groups = cluster.form == "replica", []
    shared = tuple(role for role in roles if not role.exclusive)
    if shared:
        nodes, names = run_spec.pool_nodes(shared, node), tuple(role.name for role in shared)
        groups.append(NodeGroup(SHARED, names, nodes, node, term, common, min_nodes=nodes))
    for role in roles:
        if role.exclusive:
            table = job.every_role()[role.name]
            options = sbatch({"exclusive": True, **job.slurm, **table.slurm})  # a node of its own, beside no other job
            walltime = table.walltime or term
            needed = role.min_replicas if separate else role.replicas
            nodes, needed = role.replicas * role.nodes, needed * role.nodes
            groups.append(
                NodeGroup(role.name, (role.name,), nodes, role.members_on_node, walltime, options, separate, needed)
            )
    return tuple(sorted(groups, key=lambda part: -part.nodes))  # Slurm is kindest to the largest component as its first


def _donor_rollouts(job: Job, role: Role) -> int:
    """Rollouts whose nodes keep a shadow of the trainer."""
    if not isinstance(role, TrainerRole) or not role.warm:
        return 0
    if role.donor_rollouts != "auto":
        return role.donor_rollouts
    nodes = -(-role.ranks // role.ranks_per_node)
    return concurrent_failures(nodes, job.recovery.failure_rate) if job.recovery.failure_rate else nodes


def concurrent_failures(nodes: int, rate: float, quantile: float = 0.99) -> int:
    """How many of the nodes fail on a day, but for one day of a hundred: binomial (ByteRobust; docs/sources.md)."""
    chance = cumulated = (1 - rate) ** nodes
    failing = 0
    while cumulated < quantile and failing < nodes:
        chance *= (nodes - failing) / (failing + 1) * rate / (1 - rate)
        failing += 1
        cumulated += chance
    return max(1, failing)


def _role(name: str, role: Role, python: str, image: str | None, standbys: int) -> RoleSpec:
    floor = 1 if name == "rollout" else role.replicas
    own = isinstance(role, CommandRole)
    return RoleSpec(
        name=name,
        kind="command" if own else name,
        replicas=role.replicas,
        min_replicas=floor if role.min_replicas is None else role.min_replicas,
        per_member=Resources(cpus=role.cpus, gpus=role.gpus, mem=role.mem),
        exclusive=role.exclusive,
        argv=role.command or (python, "-m", _BUILT_IN[name]),
        env=role.env,
        launcher=role.launcher,
        image="" if role.launcher == "direct" else role.image or image or "",
        watch=role.watch if isinstance(role, CommandRole) else "api",
        service=role.service if isinstance(role, CommandRole) else True,
        ranks=role.ranks,
        per_node=role.ranks_per_node,
        warm=isinstance(role, TrainerRole | RolloutRole) and role.warm,
        donor_rollouts=standbys,
    )
