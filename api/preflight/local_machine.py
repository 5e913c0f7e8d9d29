"""Compare a job for the local cluster with this machine: its memory, its processes and its model.

Virtual nodes do not limit the resources of a role, so a job may request more cores than the machine has. A job is
refused only if it certainly cannot run here.
"""

from __future__ import annotations

import os

from msgspec import Struct

from ...config.job.schema import Job
from ...config.model_size import weight_count
from ...core.run_spec import RoleSpec, RunSpec
from ...core.units import size_text
from ...manager.bootstrap.preflight import Problem

_LAUNCHER_BYTES = 15 * 2**20
"""Private memory (bytes) of the launcher of each rank, and of the agent of each node (measured in the quickstart: 15
and 16 MiB)."""
_TORCH_BYTES = 250 * 2**20
"""Private memory (bytes) of a built-in trainer or rollout without its model (measured in the quickstart: 346 and 260
MiB, with a model of 0.4 MiB)."""
_FLOAT32_BYTES = 4
_OPTIMIZER_BYTES = 12
"""Bytes for each weight in a trainer: the float32 weight, and the two moments of AdamW."""
_DTYPE_BYTES = {"float32": 4, "bfloat16": 2}


class Machine(Struct, frozen=True):
    """The cores and the memory of a machine."""

    cores: int
    memory: int
    """Bytes of memory."""


def this_machine() -> Machine:
    """Return the cores that this process may use, and the memory of the machine."""
    return Machine(len(os.sched_getaffinity(0)), os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))


def size_problem(job: Job, spec: RunSpec, machine: Machine) -> Problem | None:
    """Return why a job for the local cluster is too large for a machine; None if it may fit."""
    has = f"this machine has {_gib(machine.memory)} and {machine.cores} cores"
    if job.cluster.node.mem > machine.memory:
        text = f"{size_text(job.cluster.node.mem)} is more than this machine has ({_gib(machine.memory)}); lower it"
        return Problem(("cluster", "node", "mem"), text)
    if (needed := _process_bytes(spec)) > machine.memory:
        role = max(spec.roles, key=lambda one: one.replicas * one.ranks)
        key, count = ("ranks", role.ranks) if role.ranks > role.replicas else ("replicas", role.replicas)
        text = f"{count}: the processes of the run need at least {_gib(needed)}, and {has}; lower it"
        return Problem((*job.table_of(role.name), key), text)
    if job.model is not None and (needed := _model_bytes(spec)) > machine.memory:
        weights = f"a model of {weight_count(spec.model):.3g} weights"
        return Problem(("model",), f"{weights} needs at least {_gib(needed)}, and {has}; use a smaller model")
    return None


def _process_bytes(spec: RunSpec) -> int:
    """Return the minimum memory (bytes) of all processes of the run, without the model."""
    ranks = sum(role.replicas * role.ranks for role in spec.roles)
    nodes = sum(group.nodes for group in spec.node_groups)
    with_torch = sum(role.replicas * role.ranks for role in spec.roles if _computes(role))
    return (ranks + nodes) * _LAUNCHER_BYTES + with_torch * _TORCH_BYTES


def _model_bytes(spec: RunSpec) -> int:
    """Return the minimum memory (bytes) of the model in all built-in trainers and rollouts.

    A trainer with GPUs builds the initial weights in the machine's memory; a rollout with GPUs needs none of this
    memory.
    """
    per_weight = 0
    for role in filter(_computes, spec.roles):
        if role.traits.trains:  # the ranks of the trainer share the weights and the optimizer's state
            per_weight += _FLOAT32_BYTES if role.per_member.gpus else _OPTIMIZER_BYTES
        elif not role.per_member.gpus:
            per_weight += role.replicas * _DTYPE_BYTES[spec.model.dtype]
    return per_weight * weight_count(spec.model) if per_weight else 0


def _computes(role: RoleSpec) -> bool:
    return role.built_in and role.traits.has_weights


def _gib(nbytes: int) -> str:
    return f"{nbytes / 2**30:,.1f} GiB"
