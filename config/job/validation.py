"""What no single key of job.toml can be wrong about: mistakes between several, each shown at the key to change."""

from __future__ import annotations

import difflib
import json
import math
from typing import TYPE_CHECKING

from ...core.faults import (
    FAULT_TRAITS,
    FaultKind,
    FaultProblem,
    InvalidFault,
    TargetKind,
    parse_trigger,
    validate_fault,
)
from ...core.phases import PHASES
from ...core.units import duration_text
from ..model_folder import BUILT_MAX_LENGTH, SHAPE_KEYS
from ..vllm_arguments import RESERVED_ARGUMENTS, TENSOR_PARALLEL_SIZE
from .base import mistake
from .faults import values_for_kind
from .resolve import resolve
from .roles import CommandRole, Role, TrainerRole, TrajectoriesRole

if TYPE_CHECKING:
    from .schema import Job, PhaseTable


MAX_BATCH_BYTES = 256 * 2**20
"""bytes of the one message that a batch is (:data:`rrl.transport.control.sockets.CONTROL`)"""
_PROMPTS_BYTES = 32 * 2**20
"""bytes of it that are kept for prompts, whose lengths nobody knows yet: one a group, 4 bytes a token"""
_TOKEN_BYTES = 8
"""bytes of a sampled token: itself and its log-probability"""
_TRAJECTORY_BYTES = 1024
"""bytes of a trajectory beside them: its score, and the versions that sampled it, 16 each"""


def check(job: Job) -> None:
    """Raises PydanticCustomError at the first mistake, with the key that it is shown at."""
    _work(job)
    _model(job)
    _late(job)
    _batch(job)
    _form(job)
    for name, phase in job.phases.items():
        _phase(job, name, phase)
    for name, role in job.every_role().items():
        _gang(job.table_of(name), role)
        _role(job, name, role)
    _donor_rollouts(job)
    _warm_rollouts(job)
    _one_gpu(job)
    _vllm(job)
    _faults(job)


def _work(job: Job) -> None:
    """There is something to do, and the built-in roles have what they need."""
    if job.task is None:
        if not job.commands:
            raise mistake(
                ("run",), "there is nothing to do: add a [task] for the trainer and the rollouts, or a [commands.NAME]"
            )
        given = [name for name in type(job.roles).model_fields if name in job.roles.model_fields_set]
        if given:
            raise mistake(("roles", given[0]), "needs a [task]; a role of your own goes under [commands.NAME]")
        if all(role.service for role in job.commands.values()):
            raise mistake(("commands",), "are all services: the run would never end; set service = false for one")
        if job.run.steps is not None:
            raise mistake(("run", "steps"), "counts the trainer's steps, and there is no [task]; remove it")
        return
    if job.run.steps is None:
        raise mistake(("run", "steps"), "missing; add steps = ... in [run] (optimizer steps of a complete run)")
    built_in = [name for name, role in job.roles.named().items() if role.command is None]
    if job.model is None and built_in:
        needs = f"the built-in role {built_in[0]} needs path in [model], or [model.tokenizer] with pieces"
        raise mistake(("model",), f"missing; {needs}; or give it a command")


def _model(job: Job) -> None:
    model = job.model
    if model is None:
        return
    if model.path is not None:
        given = [key for key in (*SHAPE_KEYS, "tokenizer") if key in model.model_fields_set]
        if given:
            source = "is that of the folder in path" if given[0] == "tokenizer" else "comes from config.json of path"
            raise mistake(("model", given[0]), f"{source}; remove it, or remove path")
    elif model.tokenizer is None:
        why = "missing; add a table [model.tokenizer] with pieces, or path in [model] to a Hugging Face folder"
        raise mistake(("model", "tokenizer"), why)
    elif model.chat:
        raise mistake(("model", "chat"), "needs path: a model that is built here has no chat template; remove it")
    if model.heads % model.kv_heads:
        raise mistake(("model", "kv_heads"), f"{model.kv_heads} does not divide heads = {model.heads}; take a divisor")
    longest = BUILT_MAX_LENGTH if model.max_length is None and model.path is None else model.max_length
    if longest is not None and job.sampling.max_new_tokens >= longest:
        raise mistake(
            ("sampling", "max_new_tokens"),
            f"{job.sampling.max_new_tokens} leaves no room for a prompt in [model] max_length ="
            f" {longest}; lower it or raise max_length",
        )


def _late(job: Job) -> None:
    """Without a limit no group is ever too late."""
    if job.sampling.staleness == "unlimited" and "late" in job.sampling.model_fields_set:
        raise mistake(
            ("sampling", "late"), 'needs a limit, and staleness = "unlimited"; remove it, or set staleness to a number'
        )


def _batch(job: Job) -> None:
    """A batch is one message from the store to the trainer: a larger one would never arrive."""
    if job.task is None:
        return
    sampling = job.sampling
    count = sampling.prompts_per_step * sampling.group_size
    max_bytes = count * (_TOKEN_BYTES * sampling.max_new_tokens + _TRAJECTORY_BYTES)
    if max_bytes > MAX_BATCH_BYTES - _PROMPTS_BYTES:
        raise mistake(
            ("sampling", "prompts_per_step"),
            f"{sampling.prompts_per_step} groups of {sampling.group_size} answers of {sampling.max_new_tokens} tokens are a batch"
            f" of up to {math.ceil(max_bytes / 2**20)} MiB; {(MAX_BATCH_BYTES - _PROMPTS_BYTES) >> 20} MiB is the most; lower"
            " prompts_per_step, group_size or max_new_tokens",
        )


def _form(job: Job) -> None:
    """Forms of allocations: what fits them."""
    cluster = job.cluster
    if cluster.job_walltime and cluster.job_walltime < cluster.walltime and job.manager.where == "pool":
        why = 'the manager in the pool ends with its first job; write where = "job" in [manager], or remove it'
        raise mistake(("cluster", "job_walltime"), why)
    if job.recovery.policy == "requeue" and job.manager.where == "pool":
        why = 'a manager in the pool cannot give it back and go on; write where = "job" in [manager], or remove it'
        raise mistake(("recovery", "policy"), why)
    if cluster.form == "pool":
        return
    if cluster.kind == "local":
        raise mistake(("cluster", "form"), f'"{cluster.form}" is for kind = "slurm"; remove it')
    if "spares" in cluster.model_fields_set and cluster.spares:
        why = f'form = "{cluster.form}" has no spares: what is lost is asked for anew; remove it'
        raise mistake(("cluster", "spares"), why)
    if job.manager.where == "pool":
        raise mistake(("manager", "where"), f'form = "{cluster.form}" has no pool; write where = "job"')
    if cluster.form == "hetjob" and not cluster.one_node_components:
        groups = resolve(job, "python").node_groups
        small = [part.name for part in groups if part.nodes == 1]
        if small and len(groups) > 1:
            raise mistake(
                ("cluster", "form"),
                f"the components {', '.join(small)} would have one node each: Slurm kills them when a node of another"
                ' component fails (measured); take form = "replica", or consent with one_node_components = true',
            )


def _gang(at: tuple[str, str], role: Role) -> None:
    """How many processes a replica is, and which roles can be several."""
    if isinstance(role, TrainerRole) and role.replicas > 1:
        raise mistake((*at, "replicas"), f"there is one trainer; for {role.replicas} processes of it write ranks ="
                      f" {role.replicas}")  # fmt: skip
    if role.ranks_per_node > role.ranks:
        why = f"{role.ranks_per_node} is more than ranks = {role.ranks}; lower it or raise ranks"
        raise mistake((*at, "ranks_per_node"), why)
    if role.ranks == 1:
        return
    if isinstance(role, TrajectoriesRole):
        raise mistake((*at, "ranks"), "the store is one process; remove it")
    if role.command is None and not isinstance(role, TrainerRole):
        why = f"the built-in {at[1]} is one process; write replicas = ..., or give it a command that knows of its ranks"
        raise mistake((*at, "ranks"), why)
    if isinstance(role, CommandRole) and role.watch != "api":
        why = 'only rrl.join() tells a process which rank it is; write watch = "api", or replicas = ...'
        raise mistake((*at, "ranks"), why)


def _donor_rollouts(job: Job) -> None:
    """Only what is asked for by number can be a mistake: ``auto`` takes what there is."""
    trainer, at = job.roles.trainer, ("roles", "trainer", "donor_rollouts")
    if trainer.donor_rollouts == "auto" or not trainer.donor_rollouts:
        return
    if not trainer.warm:
        raise mistake(at, "nothing is kept ready where warm = false; remove it, or write warm = true")
    if trainer.donor_rollouts > job.roles.rollout.replicas:
        raise mistake(at, f"{trainer.donor_rollouts} is more than the rollouts ([roles.rollout] replicas ="
                      f" {job.roles.rollout.replicas}), whose nodes would keep them; lower it")  # fmt: skip


def _warm_rollouts(job: Job) -> None:
    """It is only written by whoever wants it: where it would do nothing it is a mistake."""
    rollout, at = job.roles.rollout, ("roles", "rollout", "warm")
    if not rollout.warm:
        return
    if job.recovery.policy != "role":
        raise mistake(at, f'[recovery] policy = "{job.recovery.policy}" restarts every role cold; remove it, or write'
                      ' policy = "role"')  # fmt: skip
    if job.cluster.form != "pool":
        raise mistake(at, f'form = "{job.cluster.form}" has no spare nodes to keep one on; remove it, or write form ='
                      ' "pool"')  # fmt: skip
    if not job.cluster.spares:
        raise mistake(at, "there are no spare nodes to keep one on; remove it, or set [cluster] spares = 1 or more")
    if rollout.ranks > 1:
        raise mistake(at, f"only a rollout of one process is kept ready, and it has ranks = {rollout.ranks}; remove it")


def _one_gpu(job: Job) -> None:
    """What computes in torch does so on one GPU: further ones would be taken from others for nothing."""
    trainer, rollout = job.roles.trainer, job.roles.rollout
    if trainer.command is None and trainer.gpus > 1:
        raise mistake(("roles", "trainer", "gpus"), f"each rank of the built-in trainer computes on one GPU; write gpus"
                      f" = 1, and ranks = {trainer.ranks * trainer.gpus} for as many GPUs")  # fmt: skip
    if rollout.command is None and rollout.engine == "torch" and rollout.gpus > 1:
        raise mistake(("roles", "rollout", "gpus"), 'engine = "torch" computes on one GPU; write gpus = 1 and more'
                      ' replicas, or engine = "vllm"')  # fmt: skip


def _vllm(job: Job) -> None:
    """Arguments of vLLM that are ours to set, and those that would leave GPUs idle."""
    rollout, at = job.roles.rollout, ("roles", "rollout", "vllm")
    if rollout.command is not None:
        return
    if rollout.engine != "vllm":
        if rollout.vllm:
            raise mistake(at, f'are arguments of vLLM, and engine = "{rollout.engine}"; remove it, or write engine ='
                          ' "vllm"')  # fmt: skip
        return
    for name in rollout.vllm:
        if name in RESERVED_ARGUMENTS:
            raise mistake((*at, name), f"is not yours to set: {RESERVED_ARGUMENTS[name]}; remove it")
    degree = rollout.vllm.get(TENSOR_PARALLEL_SIZE, 1)
    if not isinstance(degree, int) or isinstance(degree, bool) or degree < 1:
        raise mistake((*at, TENSOR_PARALLEL_SIZE), "must be a whole number, 1 or more: how many GPUs share the model")
    if rollout.gpus and degree != rollout.gpus:
        key = (*at, TENSOR_PARALLEL_SIZE) if TENSOR_PARALLEL_SIZE in rollout.vllm else ("roles", "rollout", "gpus")
        raise mistake(key, f"vLLM would compute on {degree} of the GPUs of each replica, and [roles.rollout] gpus ="
                      f" {rollout.gpus}; make {TENSOR_PARALLEL_SIZE} and gpus the same number")  # fmt: skip


def _role(job: Job, name: str, role: Role) -> None:
    at, form = job.table_of(name), job.cluster.form
    if role.min_replicas is not None and role.min_replicas > role.replicas:
        raise mistake(
            (*at, "min_replicas"),
            f"{role.min_replicas} is more than replicas = {role.replicas}; lower it or raise replicas",
        )
    for key in ("slurm", "walltime"):
        if getattr(role, key) and form == "pool":
            raise mistake((*at, key), 'form = "pool" has one allocation for all roles; write it under [slurm] or'
                          ' [cluster], or set [cluster] form = "replica"')  # fmt: skip
        if getattr(role, key) and not role.exclusive:
            raise mistake((*at, key), "this role shares its node with others; set exclusive = true, or remove it")
    if role.walltime and role.walltime > job.cluster.walltime:
        raise mistake(
            (*at, "walltime"),
            f'"{duration_text(role.walltime)}" is more than the run has ([cluster] walltime ='
            f' "{duration_text(job.cluster.walltime)}"); lower it or raise the run\'s',
        )
    if role.launcher != "direct" and not (role.image or job.container.image):
        raise mistake((*at, "launcher"), f'"{role.launcher}" needs an image; set [container] image')
    if role.launcher == "pyxis" and job.cluster.kind == "local":
        raise mistake((*at, "launcher"), '"pyxis" is a plugin of Slurm; write "apptainer" or "direct" here')
    if form == "pool" or not role.exclusive:
        _fits_a_node(job, name, role)


def _fits_a_node(job: Job, name: str, role: Role) -> None:
    """Of a role that shares nodes each rank must fit; of one with nodes of its own all that are to be on one."""
    ranks = role.ranks_per_node if role.exclusive else 1
    for resource in ("cpus", "gpus", "mem"):
        wanted, has = ranks * getattr(role, resource), getattr(job.cluster.node, resource)
        if wanted > has:
            amount, lower = _amount(resource, wanted), "lower it"
            if ranks > 1:
                amount, lower = f"{ranks} ranks on a node take {amount}, which", "lower it, lower ranks_per_node"
            raise mistake(
                (*job.table_of(name), resource),
                f"{amount} is more than a node has ([cluster.node] {resource} = {_amount(resource, has)}); {lower} or raise"
                " the node's",
            )


def _faults(job: Job) -> None:
    replicas = {name: role.replicas for name, role in job.every_role().items()}
    ranks = {name: role.ranks for name, role in job.every_role().items()}
    for index, one in enumerate(job.faults.planned):
        if wrong := validate_fault(
            one.kind, one.target, one.seconds, one.amount, replicas, parse_trigger(one.at), ranks
        ):
            raise mistake(("faults", "planned", index, _key(wrong, "kind")), wrong.text)
        _check_needs_worker_api(job, one.kind, one.target, ("faults", "planned", index, "kind"))
    for index, some in enumerate(job.faults.random):
        for kind in some.kinds:
            if wrong := validate_fault(kind, some.target, *values_for_kind(kind, some), replicas, ranks=ranks):
                raise mistake(("faults", "random", index, _key(wrong, "kinds")), wrong.text)
            _check_needs_worker_api(job, kind, some.target, ("faults", "random", index, "kinds"))


def _key(wrong: InvalidFault, else_: str) -> str:
    return "target" if wrong.problem is FaultProblem.NO_SUCH_TARGET else else_


def _check_needs_worker_api(job: Job, kind: FaultKind, target: str, at: tuple[str | int, ...]) -> None:
    """What a role does to itself, it must be asked to through the worker API."""
    role = job.every_role().get(target.partition("/")[0])
    traits = FAULT_TRAITS[kind]
    if (
        traits.target_kind is TargetKind.REPLICA
        and not traits.by_signals
        and isinstance(role, CommandRole)
        and role.watch != "api"
    ):
        raise mistake(at, f'{kind} needs the worker API, and {target} is only watched (watch = "{role.watch}")')


def _phase(job: Job, name: str, table: PhaseTable) -> None:
    """A mistyped name must not pass for a phase of the user's own, hence what only such a phase needs."""
    at, declared = ("phases", name), PHASES.get(name)
    if declared is None and (table.progresses is None or table.longest is None):
        near = difflib.get_close_matches(name, PHASES, 1)
        meant = f"did you mean {json.dumps(near[0])}? " if near else ""
        raise mistake(at, f"is no phase of rrl's; {meant}a phase of your own needs progresses and longest")
    if declared is not None:
        for key in ("progresses", "waits_for"):
            if getattr(table, key) is not None:
                raise mistake((*at, key), "is fixed for a phase of rrl's; remove it, or name a phase of your own")
        if table.shortest is None and table.longest is None:
            raise mistake(at, "says nothing; set shortest, longest or both")
        if declared.longest == math.inf and table.longest is not None:
            raise mistake((*at, "longest"), "this phase may last for ever; remove it")
    if table.waits_for is not None and table.waits_for not in (roles := job.every_role()):
        raise mistake((*at, "waits_for"), f'no role "{table.waits_for}"; there are {", ".join(roles)}')
    if table.waits_for is not None and table.progresses:
        raise mistake((*at, "progresses"), "must be false where waits_for is set: who waits makes no progress")
    merged = job.merged_limits().phase(name)
    if merged.shortest > merged.longest:
        key = "shortest" if table.shortest is not None else "longest"
        raise mistake(
            (*at, key),
            f'shortest = "{duration_text(merged.shortest)}" is more than longest ='
            f' "{duration_text(merged.longest)}"; set both',
        )


def _amount(resource: str, value: int) -> str:
    return f'"{value / 2**20:g}MiB"' if resource == "mem" else str(value)
