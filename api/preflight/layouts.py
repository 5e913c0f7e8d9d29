"""What a job whose trainer lends its GPUs needs on a node of the trainer, for ``rrl check``."""

from __future__ import annotations

from ...cluster.traits import traits_of
from ...config.model_size import weight_count
from ...core.run_spec import RunSpec
from ...core.text import plural
from ...core.types import TRAINER, role_of
from ...core.units import size_text
from .local_machine import DTYPE_BYTES, TORCH_BYTES, gib
from .memory import rank_memory

_VERSIONS = 2
"""Versions of the weights in the memory of a guest while it receives one."""


def lending_text(spec: RunSpec) -> str:
    """Return the layout of a job that lends, and its memory on a node of the trainer; empty if it does not lend."""
    if not spec.guests:
        return ""
    rollouts = sum(role.replicas for role in spec.kind("rollout"))
    beside = f"multiplexed: {plural(rollouts, 'rollout')}, and" if rollouts else "colocated: no rollout of its own, but"
    nodes = spec.role(role_of(TRAINER)).nodes
    where = f"each of {nodes} nodes" if nodes > 1 else "the node"
    lines = [f"layout       {beside} {plural(spec.guests_on_node, 'guest')} on {where} of the trainer"]
    if (needed := _host_bytes(spec)) is None:
        lines.append("host memory  unknown: this machine does not have the model")
    else:
        trainer, guests = needed
        has = gib(spec.node_group_of(role_of(TRAINER)).node.mem)
        texts = f"about {gib(trainer)} for the trainer's processes, {gib(guests)} for the guests"
        lines.append(f"host memory  of a node of the trainer: {texts}; a node has {has}")
    if spec.role("rollout").per_member.gpus and spec.rollouts["rollout"].engine == "vllm":
        lines.append("GPU memory   a sleeping guest keeps 1 to 7 GiB of each GPU, by reports of others (docs/tags.md)")
    return "\n".join(lines)


def lending_doubt(spec: RunSpec) -> list[str]:
    """Return a warning if the memory of a trainer node is too small for trainer and guests.

    Virtual nodes do not limit memory; there ``size_problem`` compares the whole run with the machine.
    """
    if not spec.guests or traits_of(spec.cluster).roles_run_here or (needed := _host_bytes(spec)) is None:
        return []
    has = spec.node_group_of(role_of(TRAINER)).node.mem
    if sum(needed) <= has:
        return []
    text = f"trainer and guests of a node need about {gib(sum(needed))} of host memory together"
    return [f"cluster.node.mem = {size_text(has)}: {text}; raise it, or lend with fewer GPUs on a node"]


def _host_bytes(spec: RunSpec) -> tuple[int, int] | None:
    """Return the memory (bytes) of a node that the trainer's processes and the guests need; None without the model.

    Without GPUs it includes the model itself, of the trainer or of the guests, of which only one is there at a time.
    """
    trainer, weights = spec.role(role_of(TRAINER)), weight_count(spec.model)
    if (memory := rank_memory(spec)) is None:
        return None
    members, version = min(trainer.ranks, trainer.per_node), weights * DTYPE_BYTES[spec.model.dtype]
    frozen = version // trainer.ranks if spec.trainer.kl or spec.trainer.lora is not None else 0
    held = members * (sum(memory.host.values()) + frozen) + memory.published
    guests = spec.guests_on_node * (version * _VERSIONS + TORCH_BYTES)
    if not trainer.per_member.gpus:
        held += max(members * sum(memory.device.values()), spec.guests_on_node * version)
    return held, guests
