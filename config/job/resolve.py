"""Make the run spec (:class:`rrl.core.run_spec.RunSpec`), which manager and roles read, from a job."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Mapping
from pathlib import Path

import msgspec

from ...core import run_spec, task_spec
from ...core.faults import Fault, FaultTrigger, parse_trigger, resolve_target
from ...core.role_environment import EnvSpec
from ...core.run_dir import HISTORY_ENV
from ...core.run_spec import NodeGroup, RoleSpec
from ...core.types import Resources
from ..import_paths import LOSSES
from ..model_folder import BUILT_MAX_LENGTH
from .faults import FaultsTable
from .roles import POOL, SHARED, CommandRole, EndpointRole, Role, RolloutPool, RolloutRole, TrainerRole
from .schema import Job, ModelTable, SamplingTable, TagsTable
from .site import EnvTable

MAX_RANDOM_FAULTS = 1000
"""Maximum number of faults from one entry of [[faults.random]]. run_spec.json and the journal store each fault in 80
bytes."""
_BUILT_IN = {
    "trainer": "rrl.roles.trainer.main",
    "rollout": "rrl.roles.rollout.main",
    "trajectories": "rrl.roles.trajectories.server",
    "reward": "rrl.roles.reward",
    "agents": "rrl.roles.agents.main",
    "endpoint": "rrl.roles.endpoint.main",
}
_PASS_TOKENS = 8192
"""Most tokens of one pass by default: with so many, matrix products take full advantage of a GPU."""
_TRAINED_MODEL = {
    "learning_rate": 1e-6,
    "entropy": 0.0,
    "warm_start_learning_rate": 1e-5,
    "warmup": 5,
    "activation_checkpointing": True,
    "micro_batch_tokens": _PASS_TOKENS,
}
"""Defaults of the trainer of a model in a folder (docs/sources.md, the learning)."""
_LORA_LEARNING_RATE = 1e-5
"""Default of the learning rate of low-rank adapters of such a model."""
_BUILT_MODEL = {key: getattr(run_spec.TrainerSettings(), key) for key in _TRAINED_MODEL}
_MANAGER_INHERITS = ("partition", "account", "qos", "reservation")
"""Options of [slurm] that also apply to the manager's own job, unless [manager] slurm sets them."""


def resolve(job: Job, python: str) -> run_spec.RunSpec:
    """Return the run spec of a job.

    Args:
        job: The validated job.toml.
        python: The interpreter that runs rrl on the nodes, unless [env] names another interpreter.
    """
    job = with_dependent_defaults(job)
    python = job.env.python or python
    roles = _roles(job, python)
    groups = build_node_groups(job, roles)
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
        seed=job.run.seed,
        model=_model(job.model),
        task=task_spec.TaskSpec() if job.task is None else msgspec.convert(job.task.model_dump(), task_spec.TaskSpec),
        sampling=_sampling(job.sampling),
        eval=msgspec.convert(job.eval and job.eval.model_dump(), task_spec.EvalSpec | None),
        trainer=msgspec.convert(job.roles.trainer.model_dump(), run_spec.TrainerSettings),
        rollouts={
            name: msgspec.convert(role.model_dump(), run_spec.RolloutSettings)
            for name, role in job.rollout_roles().items()
        },
        tags=msgspec.convert(job.tags.model_dump(), run_spec.TagsSpec),
        reward=msgspec.convert(job.roles.reward.model_dump(), run_spec.RewardSettings),
        agents=msgspec.convert(job.roles.agents and job.roles.agents.model_dump(), run_spec.AgentsSettings | None),
        endpoint=_endpoint(job.roles.endpoint),
        transport=msgspec.convert(job.transport.model_dump(), run_spec.TransportSpec),
        manager=run_spec.ManagerSpec(
            job.manager.where,
            {**inherited, **own},
            job.cluster.job_walltime or 0.0,
            job.manager.log_level,
            job.cluster.reader,
        ),
        limits=msgspec.structs.replace(job.merged_limits(), stragglers=job.health.stragglers),
        recovery=msgspec.convert(job.recovery.model_dump(), run_spec.Recovery),
        health=msgspec.convert(job.health.model_dump(), run_spec.HealthSpec),
        track=msgspec.convert(job.track.model_dump(), run_spec.TrackSpec),
        samples=msgspec.convert(job.samples.model_dump(), run_spec.SamplesSpec),
        notify=tuple(dict.fromkeys(job.notify.on)) if job.notify is not None else (),
        faults=plan_faults(
            job.faults, {role.name: role.max_replicas or role.replicas for role in roles}, job.cluster.walltime
        ),
        faults_allowed=job.faults.allow,
    )


def resolve_for_submission(job: Job) -> run_spec.RunSpec:
    """Return the run spec of a job that is submitted from this process.

    Roles run with the interpreter of this process unless [env] names another interpreter. The history folder comes from
    [health], else from the environment variable :data:`HISTORY_ENV`, which a site may set.
    """
    spec = resolve(job, sys.executable)
    folder = spec.health.history or os.environ.get(HISTORY_ENV, "")
    history = str(Path(folder).expanduser().absolute()) if folder else ""
    return msgspec.structs.replace(spec, health=msgspec.structs.replace(spec.health, history=history))


def node_groups(job: Job) -> tuple[NodeGroup, ...]:
    """Return only the node groups of a job, so that their sizes can be checked before the rest of the job."""
    return build_node_groups(job, _roles(with_dependent_defaults(job), "python"))


def with_dependent_defaults(job: Job) -> Job:
    """Return the job with the defaults of its roles that depend on other keys filled in."""
    is_trained = job.model is not None and job.model.path is not None
    of_trainer = _TRAINED_MODEL if is_trained else _BUILT_MODEL
    if is_trained and job.roles.trainer.lora is not None:
        of_trainer = of_trainer | {"learning_rate": _LORA_LEARNING_RATE}
    filled: dict[str, dict[str, Role]] = {"roles": {}, "rollouts": {}, "commands": {}}
    for name, role in {**job.roles.named(), **job.every_role()}.items():
        may_shrink = run_spec.ROLE_TRAITS[_kind(name, role)].may_shrink
        fewest = 0 if isinstance(role, RolloutRole) and job.rollouts else 1 if may_shrink else role.fewest
        defaults: dict[str, float | str] = {"min_replicas": fewest}
        if isinstance(role, TrainerRole):
            row = LOSSES.get(role.loss)
            defaults |= of_trainer | {
                "normalise": run_spec.TrainerSettings().normalise if row is None else row.normalise
            }
        missing = {key: value for key, value in defaults.items() if getattr(role, key) is None}
        filled[job.table_of(name)[0]][name] = role.model_copy(update=missing)
    roles = job.roles.model_copy(update=filled["roles"])
    return job.model_copy(update={**filled, "roles": roles, "tags": _tags(job)})


def _model(model: ModelTable | None) -> run_spec.ModelSpec:
    if model is None:
        return run_spec.ModelSpec()
    given = model.model_dump()
    if model.tokenizer is not None:
        given["tokenizer"]["pieces"] = tuple(model.tokenizer.pieces)  # the characters of a string
    if model.path is None and model.max_length is None:
        given["max_length"] = BUILT_MAX_LENGTH
    return msgspec.convert(given, run_spec.ModelSpec)


def _sampling(sampling: SamplingTable) -> run_spec.SamplingSpec:
    staleness = None if sampling.staleness == "unlimited" else sampling.staleness
    ahead = 0 if staleness == 0 else sampling.ahead  # the default would sample tokens that are too old
    return msgspec.convert(sampling.model_dump() | {"staleness": staleness, "ahead": ahead}, run_spec.SamplingSpec)


def _endpoint(endpoint: EndpointRole | None) -> run_spec.EndpointSettings | None:
    if endpoint is None:
        return None
    given = {key: value for key, value in endpoint.model_dump().items() if value is not None}
    return msgspec.convert(given, run_spec.EndpointSettings)


def _env(env: EnvTable, python: str) -> EnvSpec:
    probe_python = env.python or ("python" if env.venv or env.conda else python)
    return EnvSpec(env.setup, env.modules, env.venv or "", env.conda or "", env.passed, env.probe, python, probe_python)


def _tags(job: Job) -> TagsTable:
    """Return the tags with their default: spares generate where each is a machine of its own."""
    if job.tags.spare is not None:
        return job.tags
    generate = job.cluster.form == POOL and not job.cluster.traits.roles_run_here
    return job.tags.model_copy(update={"spare": ("rollout", "train") if generate else ("train",)})


def _roles(job: Job, python: str) -> tuple[RoleSpec, ...]:
    return tuple(
        _role(name, role, python if role.launcher == "direct" else job.container.python, job.container.image)
        for name, role in job.every_role().items()
    )


def _kind(name: str, role: Role) -> run_spec.RoleKind:
    if isinstance(role, RolloutRole):
        return "rollout"
    return "command" if isinstance(role, CommandRole) else msgspec.convert(name, run_spec.RoleKind)


def _role(name: str, role: Role, python: str, image: str | None) -> RoleSpec:
    return RoleSpec(
        name=name,
        kind=_kind(name, role),
        replicas=role.fewest,
        min_replicas=role.min_replicas or 0,
        per_member=Resources(cpus=role.cpus, gpus=role.gpus, mem=role.mem),
        exclusive=role.exclusive,
        argv=role.program or (python, "-P", "-m", _BUILT_IN[_kind(name, role)]),
        env=role.env,
        launcher=role.launcher,
        image="" if role.launcher == "direct" else role.image or image or "",
        watch=role.watch if isinstance(role, CommandRole) else "api",
        service=role.service if isinstance(role, CommandRole) else True,
        ranks=role.ranks,
        per_node=role.ranks_per_node,
        warm=isinstance(role, TrainerRole) and role.warm,
        max_replicas=role.most if isinstance(role, RolloutPool) and role.is_elastic else None,
        node_seconds=3600.0 * (role.node_hours or 0.0) if isinstance(role, RolloutPool) else 0.0,
        built_in=role.program is None,
        options=role.options if isinstance(role, CommandRole) else {},
    )


# ── node groups ──────────────────────────────────────────────────────────────────────────────────────────────────────
def sbatch(options: Mapping[str, str | int | bool]) -> dict[str, str]:
    """Return sbatch options with their values as text: a flag has an empty value, a false option is left out."""
    return {key: "" if value is True else str(value) for key, value in options.items() if value is not False}


def build_node_groups(job: Job, roles: tuple[RoleSpec, ...]) -> tuple[NodeGroup, ...]:
    """Return the run's node groups, the largest first.

    With ``form = "pool"`` all roles share a single group. With another form, each exclusive role has a group of its
    own, and the other roles share a group. Each further rollout pool has a group of its own in every form; these
    groups come last.
    """
    cluster, common = job.cluster, sbatch(job.slurm)
    job_walltime = min(cluster.walltime, cluster.job_walltime or cluster.walltime)
    node = Resources(cpus=cluster.node.cpus, gpus=cluster.node.gpus, mem=cluster.node.mem)
    tables = job.every_role()

    def own_group(role: RoleSpec, separate: bool, min_nodes: int = 0, dedicated: bool = False) -> NodeGroup:
        table, nodes = tables[role.name], role.replicas * role.nodes
        options = sbatch({"exclusive": True, **job.slurm, **table.slurm})  # whole nodes, shared with no other job
        walltime, size = table.walltime or job_walltime, role.members_on_node
        return NodeGroup(role.name, (role.name,), nodes, size, walltime, options, separate, min_nodes, dedicated)

    further = [own_group(role, True, dedicated=True) for role in roles if role.name in job.rollouts]
    roles = tuple(role for role in roles if role.name not in job.rollouts)
    if cluster.form == POOL:
        nodes = pool_nodes(roles, node) + cluster.spares
        names = tuple(role.name for role in roles)
        return (NodeGroup(POOL, names, nodes, node, job_walltime, common, min_nodes=nodes), *further)
    separate, groups = cluster.form == "replica", []
    shared = tuple(role for role in roles if not role.exclusive)
    if shared:
        nodes, names = pool_nodes(shared, node), tuple(role.name for role in shared)
        groups.append(NodeGroup(SHARED, names, nodes, node, job_walltime, common, min_nodes=nodes))
    for role in roles:
        if role.exclusive:
            min_replicas = role.min_replicas if separate else role.replicas
            groups.append(own_group(role, separate, min_replicas * role.nodes))
    # the largest group first: Slurm tolerates failures of nodes best in a heterogeneous job's first component
    return (*sorted(groups, key=lambda group: -group.nodes), *further)


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


# ── planned faults ───────────────────────────────────────────────────────────────────────────────────────────────────
def plan_faults(table: FaultsTable, replicas: Mapping[str, int], horizon: float) -> tuple[Fault, ...]:
    """Return every fault of the run, with all random choices made.

    Args:
        table: The ``[faults]`` table.
        replicas: Number of replicas of each role.
        horizon: Longest duration of the run (s); later faults are not planned.
    """
    draw = random.Random(table.seed)
    planned = [
        Fault(
            f"f{index}",
            entry.kind,
            resolve_target(entry.target, entry.kind, replicas, draw),
            parse_trigger(entry.at),
            entry.seconds,
            entry.amount,
        )
        for index, entry in enumerate(table.planned)
    ]
    for index, random_entry in enumerate(table.random):
        at = 0.0
        for count in range(MAX_RANDOM_FAULTS):
            at += draw.expovariate(1.0 / random_entry.every)
            if at > horizon:
                break
            kind = draw.choice(random_entry.kinds)
            target = resolve_target(random_entry.target, kind, replicas, draw)
            trigger = FaultTrigger(time=round(at, 1))
            planned.append(Fault(f"r{index}.{count}", kind, target, trigger, *random_entry.values_for(kind)))
    return tuple(planned)
