"""Compare a job with this machine: local roles, files of prompts, and the ports of a manager that runs here.

Virtual nodes do not limit the resources of a role, so a job may request more cores than the machine has. A job is
refused only if it certainly cannot run here.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
from pathlib import Path

import msgspec
from msgspec import Struct

from ...cluster.traits import ClusterTraits
from ...config.job.schema import Job, TaskTable
from ...config.job.task_rules import prompt_files
from ...config.model_size import weight_count
from ...config.prompt_file import PromptFileError, open_rows
from ...core.run_spec import RoleSpec, RunSpec
from ...core.task_spec import TaskSpec
from ...core.units import size_text
from ...manager.bootstrap.preflight import Problem
from ...manager.bootstrap.preview import most_nodes
from ...transport.address import NoAddress, interface_on, resolve

_LAUNCHER_BYTES = 15 * 2**20
"""Private memory (bytes) of the launcher of each rank, and of the agent of each node (measured in the quickstart: 15
and 16 MiB)."""
TORCH_BYTES = 250 * 2**20
"""Private memory (bytes) of a built-in trainer or rollout without its model (measured in the quickstart: 346 and 260
MiB, with a model of 0.4 MiB)."""
_FLOAT32_BYTES = 4
OPTIMIZER_BYTES = 12
"""Bytes for each weight in a trainer: the float32 weight, and the two moments of AdamW."""
DTYPE_BYTES = {"float32": 4, "bfloat16": 2}


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
        role = max(spec.roles, key=lambda one: spec.most_replicas(one) * one.ranks)
        most = spec.most_replicas(role)
        key, count = ("ranks", role.ranks) if role.ranks > most else ("replicas", most)
        text = f"{count}: the processes of the run need at least {_gib(needed)}, and {has}; lower it"
        return Problem((*job.table_of(role.name), key), text)
    if job.model is not None and (needed := _model_bytes(spec)) > machine.memory:
        weights = f"a model of {weight_count(spec.model):.3g} weights"
        return Problem(("model",), f"{weights} needs at least {_gib(needed)}, and {has}; use a smaller model")
    return None


def _process_bytes(spec: RunSpec) -> int:
    """Return the minimum memory (bytes) of all processes of the run, without the model."""
    ranks = {role.name: spec.most_replicas(role) * role.ranks for role in spec.roles}
    nodes = sum(most_nodes(spec, group) for group in spec.node_groups)
    with_torch = sum(ranks[role.name] for role in spec.roles if _computes(role))
    return (sum(ranks.values()) + nodes + spec.guests) * _LAUNCHER_BYTES + (with_torch + spec.guests) * TORCH_BYTES


def _model_bytes(spec: RunSpec) -> int:
    """Return the minimum memory (bytes) of the model in all built-in trainers and rollouts.

    A trainer with GPUs builds the initial weights in the machine's memory; a rollout with GPUs needs none of this
    memory.
    """
    per_weight = 0
    for role in filter(_computes, spec.roles):
        if role.traits.trains:  # the ranks of the trainer share the weights and the optimizer's state
            per_weight += _FLOAT32_BYTES if role.per_member.gpus else OPTIMIZER_BYTES
        elif not role.per_member.gpus:
            per_weight += spec.most_replicas(role) * DTYPE_BYTES[spec.model.dtype]
    return per_weight * weight_count(spec.model) if per_weight else 0


def _computes(role: RoleSpec) -> bool:
    return role.built_in and role.traits.has_weights


def _gib(nbytes: int) -> str:
    return f"{nbytes / 2**30:,.1f} GiB"


def task_file_problems(job: Job) -> list[Problem]:
    """Return a problem for each file of prompts that cannot be used. The files are read to their ends.

    A problem is certain if the file itself is wrong, or if the roles that read it run on this machine. Otherwise the
    nodes may have a file, or a package, that this machine lacks.
    """
    readers = (job.roles.trajectories, job.roles.reward)
    here = job.cluster.traits.roles_run_here and all(role.launcher == "direct" for role in readers)
    tasks = {("task",): job.task, ("eval", "task"): job.eval.task if job.eval is not None else None}
    found = (
        _task_file_problem((*table, *key), path, task, here)
        for table, task in tasks.items()
        if task is not None
        for key, path in prompt_files(task)
    )
    return [problem for problem in found if problem is not None]


def _task_file_problem(key: tuple[str | int, ...], path: str, task: TaskTable, here: bool) -> Problem | None:
    if not Path(path).exists():
        text = "does not exist" if here else "does not exist on this machine"
        return Problem(key, f"{path!r} {text}{'; name a file that does' if here else ''}", certain=here)
    spec = msgspec.convert(task.model_dump(), TaskSpec)
    named = (task.answer_column,) if "answer_column" in task.model_fields_set else spec.required_columns
    try:
        open_rows(Path(path), task.prompt, named)
    except PromptFileError as error:
        return Problem(key, str(error), certain=here or not error.missing_package)
    return None


LOOPBACK_INTERFACE = "lo"
"""Linux's name of the loopback interface, on every machine."""


def network_problem(network: str) -> str:
    """Return why this machine cannot listen on ``[transport] network``; empty if it can listen or none is named."""
    if not network:
        return ""
    try:
        interface_on(network)
    except NoAddress as error:
        return str(error)
    return ""


def listens_on_loopback(cluster: ClusterTraits, network: str) -> bool:
    """Return whether the processes of a run listen on loopback addresses, as far as this machine can tell.

    Args:
        cluster: Traits of the cluster.
        network: ``[transport] network``; if it is empty, roles on this machine stay on it.
    """
    if not network:
        return cluster.roles_run_here
    try:
        return ipaddress.ip_network(network, strict=False).is_loopback
    except ValueError:
        return network == LOOPBACK_INTERFACE


def metrics_problem(address: str) -> str:
    """Return why ``[health] metrics`` cannot be served on this machine; empty if they can be served.

    ``address`` is ``host:port``, or empty for no metrics. The port is bound for a moment, as the manager will bind it.
    """
    if not address or address.endswith(":0"):
        return ""
    try:
        listen = resolve(address)
        with socket.socket(listen.family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(listen.socket_address)
            probe.listen(1)  # with SO_REUSEADDR, bind() alone may succeed on a taken port
    except (OSError, ValueError) as error:  # ValueError: a label of the host name is too long
        taken = isinstance(error, OSError) and error.errno == errno.EADDRINUSE
        return "the port is taken" if taken else str(getattr(error, "strerror", None) or error)
    return ""
