"""Small jobs for tests of the manager: a store and a reward role that share a node, a trainer, and two rollouts."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from rrl.config.job.resolve import pool_nodes
from rrl.core.faults import Fault
from rrl.core.run_spec import Limits, NodeGroup, Recovery, RoleKind, RoleSpec, RolloutSettings, RunSpec, TagsSpec
from rrl.core.types import ReplicaId, Resources

RUN = "small-1"
STORE, REWARD, TRAINER = (ReplicaId(f"{role}/0") for role in ("trajectories", "reward", "trainer"))
ROLLOUTS = (ReplicaId("rollout/0"), ReplicaId("rollout/1"))
NODE = Resources(cpus=4, mem=4 * 2**30)
WIDE = Resources(cpus=8, gpus=1, mem=8 * 2**30)
_EACH = Resources(cpus=1, mem=2**30)


def role(name: RoleKind, replicas: int = 1, min_replicas: int = 1, exclusive: bool = False) -> RoleSpec:
    return RoleSpec(name, name, replicas, min_replicas, _EACH, exclusive, ("run", name))


def job(
    *,
    rollouts: int = 2,
    min_rollouts: int = 1,
    spares: int = 1,
    steps: int = 3,
    limits: Limits | None = None,
    recovery: Recovery | None = None,
    faults: Sequence[Fault] = (),
    walltime: float = 86400.0,
) -> RunSpec:
    roles = (
        role("trajectories"),
        role("reward"),
        role("trainer", exclusive=True),
        role("rollout", rollouts, min_rollouts, exclusive=True),
    )
    nodes = pool_nodes(roles, NODE) + spares
    pool = NodeGroup("pool", tuple(role.name for role in roles), nodes, NODE, walltime, min_nodes=nodes)
    return RunSpec(
        name="small",
        steps=steps,
        cluster="local",
        roles=roles,
        node_groups=(pool,),
        spares=spares,
        walltime=walltime,
        limits=limits or Limits(),
        recovery=recovery or Recovery(),
        faults=tuple(faults),
    )


def gang_job(
    ranks: int = 4,
    per_node: int = 2,
    *,
    donors: bool = False,
    warm: bool = True,
    rollouts: int = 3,
    min_rollouts: int = 1,
    spares: int = 1,
    steps: int = 9,
    limits: Limits | None = None,
    recovery: Recovery | None = None,
    faults: Sequence[Fault] = (),
    extras: bool = False,
) -> RunSpec:
    """Return the small job with a trainer of ``ranks`` ranks, which may take the nodes of spares.

    With ``donors`` it may also take nodes of rollouts; with ``extras`` spares generate.
    """
    small = job(
        rollouts=rollouts,
        min_rollouts=min_rollouts,
        spares=spares,
        steps=steps,
        limits=limits,
        recovery=recovery,
        faults=faults,
    )
    roles = tuple(
        msgspec.structs.replace(role, ranks=ranks, per_node=per_node, warm=warm) if role.name == "trainer" else role
        for role in small.roles
    )
    nodes = pool_nodes(roles, NODE) + spares
    return msgspec.structs.replace(
        small,
        roles=roles,
        node_groups=(msgspec.structs.replace(small.node_groups[0], nodes=nodes, min_nodes=nodes),),
        tags=TagsSpec(("rollout", "train") if extras else ("train",), ("train",) if donors else ()),
    )


def with_guests(spec: RunSpec, gpus: tuple[int, int] = (0, 0)) -> RunSpec:
    """Return the job with guests on the trainer's nodes; ``gpus`` has the GPUs of a trainer's rank and of a rollout."""
    given = dict(zip(("trainer", "rollout"), gpus, strict=True))
    roles = tuple(
        msgspec.structs.replace(one, per_member=msgspec.structs.replace(one.per_member, gpus=given.get(one.name, 0)))
        for one in spec.roles
    )
    node = msgspec.structs.replace(spec.node_groups[0].node, gpus=gpus[0] * spec.role("trainer").per_node)
    groups = (msgspec.structs.replace(spec.node_groups[0], node=node), *spec.node_groups[1:])
    tags = msgspec.structs.replace(spec.tags, trainer=("rollout",))
    return msgspec.structs.replace(spec, roles=roles, node_groups=groups, tags=tags)


def in_node_groups(
    form: str = "replica",
    *,
    rollouts: int = 2,
    min_rollouts: int = 1,
    steps: int = 3,
    walltime: float = 86400.0,
    limits: Limits | None = None,
    recovery: Recovery | None = None,
    terms: dict[str, float] | None = None,
    start_timeout_s: float = 3600.0,
    faults: Sequence[Fault] = (),
) -> RunSpec:
    """Return the small job in form ``replica`` or ``hetjob``; ``terms`` has the walltimes (s) of some node groups."""
    small = job(
        rollouts=rollouts,
        min_rollouts=min_rollouts,
        spares=0,
        steps=steps,
        limits=limits,
        recovery=recovery,
        faults=faults,
    )
    separate, terms = form == "replica", terms or {}
    parts = [NodeGroup("shared", ("trajectories", "reward"), 1, NODE, walltime, {"partition": "cpu"}, min_nodes=1)]
    for name, nodes, needed in (("trainer", 1, 1), ("rollout", rollouts, min_rollouts if separate else rollouts)):
        term = terms.get(name, walltime)
        parts.append(NodeGroup(name, (name,), nodes, WIDE, term, {"partition": name}, separate, needed))
    parts.sort(key=lambda part: -part.nodes)
    return msgspec.structs.replace(
        small, cluster="slurm", node_groups=tuple(parts), walltime=walltime, form=form, start_within=start_timeout_s
    )


def with_fast_rollouts(spec: RunSpec, replicas: int) -> RunSpec:
    """Return the job with a further role ``fast`` of the kind of the rollouts, which its node group has room for."""
    (rollout,) = spec.kind("rollout")
    fast = msgspec.structs.replace(rollout, name="fast", replicas=replicas, min_replicas=1)
    more = replicas if rollout.exclusive else 0
    groups = tuple(
        msgspec.structs.replace(
            group, roles=(*group.roles, "fast"), nodes=group.nodes + more, min_nodes=group.min_nodes + more
        )
        if "rollout" in group.roles
        else group
        for group in spec.node_groups
    )
    return msgspec.structs.replace(spec, roles=(*spec.roles, fast), node_groups=groups)


def with_pool(
    spec: RunSpec,
    low: int = 0,
    high: int | None = 8,
    *,
    node_hours: float = 1000.0,
    walltime: float = 86400.0,
    name: str = "burst",
    lease: int = 16,
) -> RunSpec:
    """Return the job with a further rollout pool: an elastic one, or one of ``low`` replicas if ``high`` is None."""
    seconds = 0.0 if high is None else 3600.0 * node_hours
    pool = RoleSpec(
        name, "rollout", low, 0, _EACH, True, ("run", name), max_replicas=high, node_seconds=seconds, built_in=True
    )
    group = NodeGroup(name, (name,), low, NODE, walltime, {"partition": name}, True, dedicated=True)
    roles = [msgspec.structs.replace(one, min_replicas=0) if one.kind == "rollout" else one for one in spec.roles]
    settings = {one.name: RolloutSettings(lease=lease) for one in (*roles, pool) if one.kind == "rollout"}
    return msgspec.structs.replace(
        spec, roles=(*roles, pool), node_groups=(*spec.node_groups, group), rollouts=settings
    )


def commands(
    *roles: RoleSpec,
    spares: int = 0,
    limits: Limits | None = None,
    recovery: Recovery | None = None,
    form: str = "pool",
) -> RunSpec:
    """Return a job without a trainer, with user-defined roles and with one node for each replica."""
    nodes = sum(role.replicas for role in roles)
    parts = [NodeGroup("pool", tuple(role.name for role in roles), nodes + spares, NODE, min_nodes=nodes + spares)]
    if form == "replica":
        parts = [
            NodeGroup(role.name, (role.name,), role.replicas, NODE, separate_jobs=True, min_nodes=role.replicas)
            for role in roles
        ]
    return RunSpec(
        name="small",
        steps=0,
        cluster="local",
        roles=roles,
        node_groups=tuple(parts),
        spares=spares,
        form=form,
        limits=limits or Limits(),
        recovery=recovery or Recovery(),
    )


def command(name: str, replicas: int = 1, least: int | None = None, service: bool = False) -> RoleSpec:
    minimum = replicas if least is None else least
    return RoleSpec(name, "command", replicas, minimum, Resources(cpus=1), True, (name,), service=service)
