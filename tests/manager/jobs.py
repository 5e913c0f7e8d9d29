"""A small job as the manager's core sees it: a store and a reward role that share a node, a trainer, two rollouts."""

from __future__ import annotations

from collections.abc import Sequence

from rrl.spec.faults import Fault
from rrl.spec.jobview import JobView, Limits, Recovery, Resources, RoleView, pool_nodes
from rrl.spec.words import ReplicaId

RUN = "small-1"
STORE, REWARD, TRAINER = (ReplicaId(f"{role}/0") for role in ("trajectories", "reward", "trainer"))
ROLLOUTS = (ReplicaId("rollout/0"), ReplicaId("rollout/1"))
NODE = Resources(cpus=4, mem=4 * 2**30)
_EACH = Resources(cpus=1, mem=2**30)


def role(name: str, replicas: int = 1, min_replicas: int = 1, exclusive: bool = False) -> RoleView:
    return RoleView(name, name, replicas, min_replicas, _EACH, exclusive, ("run", name))


def job(
    *, rollouts: int = 2, min_rollouts: int = 1, spares: int = 1, steps: int = 3, limits: Limits | None = None,
    recovery: Recovery | None = None, faults: Sequence[Fault] = (), walltime: float = 86400.0,
) -> JobView:  # fmt: skip
    roles = (
        role("trajectories"), role("reward"), role("trainer", exclusive=True),
        role("rollout", rollouts, min_rollouts, exclusive=True),
    )  # fmt: skip
    return JobView(
        name="small", steps=steps, cluster="local", roles=roles, nodes=pool_nodes(roles, NODE) + spares,
        spares=spares, node=NODE, walltime=walltime, limits=limits or Limits(), recovery=recovery or Recovery(),
        faults=tuple(faults),
    )  # fmt: skip
