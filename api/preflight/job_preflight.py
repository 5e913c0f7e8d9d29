"""Check a job before its run is created: compare it with this machine, and have Slurm test it. Nothing is started.

A job that cannot work raises UsageError with the key to change. A doubt is one line of text that says why the run may
fail or wait.
"""

from __future__ import annotations

import asyncio
import shutil
import sys
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from msgspec import Struct

from ...cluster.slurm.site import JobLimits, Limit, read_limits
from ...config.import_paths import ENGINES, EngineRow
from ...config.job.document import JobDocument, dotted_key
from ...config.job.resolve import resolve_for_submission
from ...config.job.roles import RolloutRole
from ...config.job.schema import Job
from ...config.job.validation import extras_of_step
from ...config.model_folder import max_length, validate
from ...config.model_size import adapted_shapes, weight_count, wrong_rank, wrong_target
from ...core.command_runner import run_coroutine
from ...core.run_spec import NodeGroup, RunSpec
from ...core.types import UsageError
from ...core.units import size_text
from ...manager.bootstrap.preflight import Problem, SlurmAnswer, check_with_slurm
from ...manager.bootstrap.preview import WorstCase, most_jobs, preview, worst_case
from ...transport.weights.base import PACKAGES, installed_package
from ...transport.weights.select import UntrustedNetwork, detect_capabilities, select_transport
from .job_folder import folder_doubts
from .layouts import lending_doubt
from .local_machine import (
    listens_on_loopback,
    metrics_problem,
    network_problem,
    size_problem,
    task_file_problems,
    this_machine,
)
from .memory import memory_doubt
from .notifications import notification_problems
from .role_commands import command_problems

_LORA_RATES = 10
"""How many times larger a learning rate of low-rank adapters may be than that of all weights (docs/sources.md, the
learning)."""
ENDPOINT_PACKAGES = ("starlette", "uvicorn")
"""Packages of the extra ``endpoint``, with which agents are served."""


class Preflight(Struct, frozen=True):
    """The result of comparing a valid job with this machine, and of Slurm's test."""

    doubts: list[str]
    """One line for each reason for which the run may fail or wait."""
    limits: str = ""
    """Peak numbers of jobs and steps of the run, and the limits of Slurm; empty without Slurm."""
    starts: dict[str, str] = {}
    """Slurm's estimates of when jobs would start, by node group, as local times (ISO 8601)."""


class CheckedJob(NamedTuple):
    """A job that could be submitted from this machine."""

    document: JobDocument
    job: Job
    spec: RunSpec
    plan: list[tuple[str, str]]
    """(title, text) of each part of the run that would be submitted."""
    preflight: Preflight


def checked(
    job: Job, document: JobDocument, *, foreground: bool = False, folder: Path | None = None, trust_folder: bool = False
) -> CheckedJob:
    """Resolve a valid job and check it; nothing is changed.

    Args:
        job: The job that ``document`` describes.
        document: The job spec, from which error messages take file and line.
        foreground: Whether the manager will run in this process. If so, Slurm is not asked to test a manager job.
        folder: The folder in which the roles work; default: that of the job spec.
        trust_folder: Whether the job may run although other users can write this folder.

    Raises:
        UsageError: The run cannot work, or an option cannot be passed on to Slurm.
    """
    folder = folder or document.source.absolute().parent
    doubts = folder_doubts(document, folder, trust_folder)
    spec = resolve_for_submission(job)
    try:
        plan = preview(spec)
    except ValueError as error:
        raise UsageError(f"{document.name}: slurm: {error}") from None
    return CheckedJob(document, job, spec, plan, _preflight(job, spec, document, folder, foreground, doubts))


def _preflight(
    job: Job, spec: RunSpec, document: JobDocument, folder: Path, foreground: bool, doubts: list[str]
) -> Preflight:
    """Compare the job with this machine, and have Slurm test it; add the result to ``doubts``.

    With ``foreground`` the manager will run in this process, so Slurm is not asked to test a manager job. Raises
    UsageError, with the key to change, if the job can never start.
    """
    doubts = [
        *doubts,
        *_missing_paths(job, document),
        *_python_mismatch(job),
        *_doubts(document, command_problems(job, spec, folder), " on this machine; the nodes need it"),
        *_doubts(document, notification_problems(job, folder), " on this machine; the machine of the manager needs it"),
        *_check_trusted_network(job, document),
        *_check_installed(job, document),
        *_check_engine_arguments(job, document),
        *_check_endpoint_route(job),
        *_check_trackers_installed(job),
        *_check_model(job, document),
        *_check_learning(job, spec),
        *_doubts(document, task_file_problems(job), "; the nodes need it"),
        *_check_stream(job),
        *_check_extras(job, spec),
        *_check_eval(job),
        *memory_doubt(spec),
        *lending_doubt(spec),
    ]
    if job.cluster.traits.roles_run_here and (problem := size_problem(job, spec, this_machine())):
        raise UsageError(with_location(document, problem))
    if not job.cluster.traits.manager_is_a_job or foreground:
        doubts += _check_manager_host(spec, document)
    if not job.cluster.traits.takes_batch_scripts:
        return Preflight(doubts)
    if shutil.which("sbatch") is None:
        raise UsageError(
            f'{document.name}: cluster.kind is "{job.cluster.kind}", and there is no sbatch on PATH; run rrl on a login'
            ' node of the cluster, or write kind = "local"'
        )
    worst = worst_case(spec, foreground)
    answer, observed = run_coroutine(_ask_slurm(job, spec, foreground))
    problems = [*answer.problems, *_exceeded_limits(spec, worst, observed)]
    if certain := [with_location(document, one) for one in problems if one.certain]:
        raise UsageError("\n".join(certain))
    doubts += [with_location(document, one) for one in problems]
    return Preflight(doubts, _limits_summary(worst, observed), answer.starts)


class GroupLimits(NamedTuple):
    """The limits for jobs with the same account, partition and QOS, and the node groups that have such jobs."""

    observed: JobLimits
    groups: list[NodeGroup]


async def _ask_slurm(job: Job, spec: RunSpec, foreground: bool) -> tuple[SlurmAnswer, list[GroupLimits]]:
    alike: dict[tuple[str | None, ...], list[NodeGroup]] = {}
    for group in spec.node_groups:
        alike.setdefault(tuple(map(group.sbatch.get, ("account", "partition", "qos"))), []).append(group)
    limits = (read_limits(groups[0].sbatch) for groups in alike.values())
    answer, observed = await asyncio.gather(check_with_slurm(job, spec, foreground), asyncio.gather(*limits))
    return answer, list(map(GroupLimits, observed, alike.values()))


def with_location(document: JobDocument, problem: Problem) -> str:
    """Return the problem's text with file, line and key, as in :class:`rrl.config.job.document.SpecError`."""
    return document.complaint(problem.key, problem.text) if problem.key else problem.text


def _doubts(document: JobDocument, problems: Sequence[Problem], note: str) -> list[str]:
    """Return the problems as warnings with a note. Raises UsageError, without the note, if some are certain."""
    if certain := [with_location(document, problem) for problem in problems if problem.certain]:
        raise UsageError("\n".join(certain))
    return [f"{dotted_key(problem.key)}: {problem.text}{note}" for problem in problems]


def _missing_paths(job: Job, document: JobDocument) -> list[str]:
    """Return a warning for each folder of [env] that this machine lacks, since the nodes may have it.

    Raises UsageError instead if the roles run on this machine.
    """
    given = {"python": job.env.python, "venv": job.env.venv, "conda": job.env.conda}
    missing = {
        key: where
        for key, where in given.items()
        if where and "/" in where and "$" not in where and not Path(where).expanduser().exists()
    }
    if job.cluster.traits.roles_run_here and missing:
        key, where = next(iter(missing.items()))
        raise UsageError(
            with_location(document, Problem(("env", key), f"{where!r} does not exist; name a path that exists"))
        )
    return [
        f"env.{key} = {where!r} does not exist on this machine; the nodes need it" for key, where in missing.items()
    ]


def _check_manager_host(spec: RunSpec, document: JobDocument) -> list[str]:
    """Return a warning if the metrics cannot be served on this machine, where the manager will run.

    Raises UsageError if this machine is not on the network that the job names.
    """
    if problem := network_problem(spec.transport.network):
        raise UsageError(with_location(document, Problem(("transport", "network"), problem)))
    if problem := metrics_problem(spec.health.metrics):
        return [f"metrics will not be served at {spec.health.metrics}: {problem}; the run goes on without them"]
    return []


def _python_mismatch(job: Job) -> list[str]:
    """Return a warning if [env] activates a Python that the built-in roles do not use."""
    active = "venv" if job.env.venv else "conda" if job.env.conda else ""
    built_in = any(role.program is None for role in job.every_role().values())
    if not active or job.env.python or not built_in:
        return []
    return [
        f"env.{active} applies only to commands of your own; the built-in roles run with {sys.executable}: set"
        " env.python to change that"
    ]


def _check_trusted_network(job: Job, document: JobDocument) -> list[str]:
    """Return a warning if weights would move by UCX over TCP on a network that the job does not declare trusted.

    Raises UsageError instead if the roles run on this machine. Otherwise a warning suffices: each node selects the
    transport for itself, and nodes may have RDMA ports that this machine does not have.
    """
    kind = job.transport.weights
    try:
        select_transport(kind, detect_capabilities(), job.transport.trusted_network)
    except UntrustedNetwork as error:
        if job.cluster.traits.roles_run_here:
            raise UsageError(with_location(document, Problem(("transport", "weights"), str(error)))) from None
        return [
            f'transport.weights = "{kind}": there is no active RDMA port on this machine; the nodes need one,'
            " or trusted_network = true (docs/sites.md)"
        ]
    return []


def _check_installed(job: Job, document: JobDocument) -> list[str]:
    """Return a warning for each package that is missing on this machine; the nodes may have it.

    Raises UsageError instead if what needs the package runs in this environment.
    """
    missing = list(_missing_packages(job))
    if certain := [problem for _, _, problem in missing if problem.certain]:
        raise UsageError(with_location(document, certain[0]))
    return [
        f"{one}: {package} is not installed on this machine; it must be on the nodes" for one, package, _ in missing
    ]


def _missing_packages(job: Job) -> Iterator[tuple[str, str, Problem]]:
    """Yield (what of the job needs a package, the package, why the job does not work without it)."""
    roles, kind = job.roles, job.transport.weights

    def missing(subject: str, key: tuple[str, ...], package: str, fix: str, direct: bool) -> tuple[str, str, Problem]:
        here = direct and job.cluster.traits.roles_run_here and not job.env.python
        return subject, package, Problem(key, f"{package} is not installed; {fix}", certain=here)

    if kind in PACKAGES and installed_package(kind) is None:
        direct = all(role.launcher == "direct" for role in job.every_role().values())
        direct, key = direct and not (job.env.venv or job.env.conda), ("transport", "weights")
        fix = f"pip install '.[{kind}]' in rrl's clone, or write \"auto\""
        yield missing(f'transport.weights = "{kind}"', key, PACKAGES[kind][0], fix, direct)
    for name, rollout in job.rollout_roles().items():
        if (row := _engine_row(rollout)) is not None and row.package and find_spec(row.package) is None:
            engine = (*job.table_of(name), "engine")
            subject, fix = f'{".".join(engine)} = "{rollout.engine}"', f'{row.install}, or write "torch"'
            yield missing(subject, engine, row.package, fix, rollout.launcher == "direct")
    trainer = roles.trainer
    if trainer.lora is not None and trainer.command is None and find_spec("peft") is None:
        fix = "pip install '.[lora]' in rrl's clone, or remove this table"
        yield missing("roles.trainer.lora", ("roles", "trainer", "lora"), "peft", fix, trainer.launcher == "direct")
    masks = ("llguidance",) if roles.endpoint is not None and roles.endpoint.constraints == "enforce" else ()
    absent = next((name for name in (*ENDPOINT_PACKAGES, *masks) if find_spec(name) is None), "")
    for name, role in roles.named().items():
        if absent and name in ("agents", "endpoint"):
            fix = "pip install '.[endpoint]' in rrl's clone"
            yield missing(f"roles.{name}", ("roles", name), absent, fix, role.launcher == "direct")


def _engine_row(rollout: RolloutRole) -> EngineRow | None:
    """Return the row of a pool's engine; None if its rollouts, or their engine, are a user's code."""
    return None if rollout.command is not None else ENGINES.get(rollout.engine)


def _check_engine_arguments(job: Job, document: JobDocument) -> list[str]:
    """Return a warning for each argument that the engine's package on this machine lacks.

    Raises UsageError instead if the rollouts run in this environment.
    """
    warnings = []
    for pool, rollout in job.rollout_roles().items():
        row, table = _engine_row(rollout), (*job.table_of(pool), "vllm")
        if row is None or not row.package or find_spec(row.package) is None:
            continue
        wrong = row.unknown_arguments(rollout.vllm)
        if wrong and job.cluster.traits.roles_run_here and not job.env.python and rollout.launcher == "direct":
            raise UsageError(with_location(document, Problem((*table, wrong[0][0]), wrong[0][1])))
        warnings += [
            f"{'.'.join(table)}.{name}: {text}; the {rollout.engine} of the nodes needs it" for name, text in wrong
        ]
    return warnings


def _check_endpoint_route(job: Job) -> list[str]:
    """Return a warning if the endpoint listens on a loopback address, which no other machine reaches.

    Whether other machines reach the address of a node is not known here.
    """
    network = job.transport.network
    if "endpoint" not in job.roles.named() or not listens_on_loopback(job.cluster.traits, network):
        return []
    without = f'kind = "{job.cluster.kind}" without [transport] network'
    reason = f'[transport] network = "{network}"' if network else without
    return [
        f"roles.endpoint: with {reason} the endpoint listens on a loopback address, which agents on other machines"
        " cannot reach; set `network` to an interface that they can reach"
    ]


def _check_trackers_installed(job: Job) -> list[str]:
    """Return a warning for each tracker whose package is missing here, since the manager may run elsewhere."""
    missing = [name for name in job.track.to if find_spec(name) is None]
    return [
        f"track.to: the package {name} is not installed on this machine, and the manager needs it:"
        f" pip install '.[{name}]' in rrl's clone, or send the steps later with rrl track"
        for name in missing
    ]


def _check_model(job: Job, document: JobDocument) -> list[str]:
    """Check the folder of [model] path. Raises UsageError for a model that cannot be used.

    Returns a warning if this machine does not have the model, which may be on the nodes' disks or in a container.
    """
    model = job.model
    if model is None or model.path is None:
        return []
    folder, rows = Path(model.path), map(_engine_row, job.rollout_roles().values())
    trains, lora = job.task is not None and job.roles.trainer.command is None, job.roles.trainer.lora
    computes = trains or any(row is not None and row.builds_model for row in rows)
    if not folder.exists():
        direct = all(role.launcher == "direct" for role in job.every_role().values())
        if not (direct and job.cluster.traits.roles_run_here):
            return [f"model.path = {model.path!r} does not exist on this machine; the nodes need it"]
        problem = Problem(
            ("model", "path"),
            f"{model.path!r} does not exist; name a folder with config.json (of a model on a hub: download it first)",
        )
    elif wrong_model := validate(folder, model.chat, model.max_length, computes=computes, trains=trains):
        problem = Problem(("model", wrong_model.key), wrong_model.text)
    elif job.sampling.max_new_tokens >= (longest := max_length(model.path, model.max_length)):
        text = f"{job.sampling.max_new_tokens} leaves no space for a prompt: the model takes {longest} tokens"
        problem = Problem(("sampling", "max_new_tokens"), f"{text} at most; lower it")
    elif trains and lora is not None and (text := wrong_target(adapted_shapes(folder), lora.targets)):
        problem = Problem(("roles", "trainer", "lora", "targets"), text)
    elif trains and lora is not None and (text := wrong_rank(adapted_shapes(folder, lora.targets), lora.rank)):
        problem = Problem(("roles", "trainer", "lora", "rank"), text)
    else:
        return []
    raise UsageError(with_location(document, problem))


def _check_learning(job: Job, spec: RunSpec) -> list[str]:
    """Return a warning for each setting with which the built-in trainer would learn nothing, or would forget."""
    trainer = spec.trainer
    if job.task is None or job.roles.trainer.command is not None:
        return []
    doubts = []
    if spec.sampling.group_size == 1:
        doubts.append(
            "sampling.group_size = 1: an answer learns from the comparison with others to its prompt, and there are"
            " none; write 2 or more"
        )
    if trainer.kl and spec.model.path is None and not trainer.warm_start_steps:
        doubts.append(
            f"roles.trainer.kl = {trainer.kl:g} pulls to the initial model, whose weights are random; write 0, name a"
            " model in [model] path, or set warm_start_steps"
        )
    if spec.model.path is None:
        return doubts
    weights = weight_count(spec.model)  # 0 if this machine does not have the folder
    limit, size = (1e-5, f" of {weights / 1e9:.1f}B weights") if weights >= 1e9 else (1e-4, "")
    limit *= _LORA_RATES if trainer.lora is not None else 1
    supervised = trainer.warm_start_learning_rate if trainer.warm_start_steps else 0.0
    return doubts + [
        f"roles.trainer.{key} = {rate:g} probably destroys what a model{size} has learned; write {limit:g} or less"
        for key, rate in (("learning_rate", trainer.learning_rate), ("warm_start_learning_rate", supervised))
        if rate > limit
    ]


def _check_stream(job: Job) -> list[str]:
    """Return a warning if the trainer is the user's own program, which may not support parts of batches."""
    if job.task is None or not job.sampling.stream or job.roles.trainer.command is None:
        return []
    return [
        "sampling.stream = true: a trainer of your own (roles.trainer.command) waits for whole batches unless it"
        " calls me.parts() (docs/bring-your-own.md)"
    ]


def _check_extras(job: Job, spec: RunSpec) -> list[str]:
    """Return a warning if nobody reads the extras, or if they do not fit into the memory of the store."""
    doubts = []
    if job.sampling.extras and job.roles.trainer.command is None:
        doubts.append("sampling.extras: the built-in trainer does not read extras; only a command of your own does")
    stored, memory = spec.steps_in_store * extras_of_step(job.sampling), job.roles.trajectories.mem
    if stored > memory:
        doubts.append(
            f"roles.trajectories.mem = {size_text(memory)}: the store may hold {stored / 2**30:.1f} GiB of extras in"
            " memory; raise it"
        )
    return doubts


def _check_eval(job: Job) -> list[str]:
    """Return a warning for each role that evaluations need and that runs a program of the user.

    Such a program may not support evaluations.
    """
    doubts = {
        "trainer": "must publish the weights of each step that is evaluated, before it requests the next batch",
        "rollout": "must sample as `item.sampling` says",
        "reward": "must score an item whose `evaluation` is true with the task of [eval]",
    }
    own = {name: role for name, role in job.every_role().items() if job.eval is not None and role.command is not None}
    return [
        f"eval: your own {name} ({'.'.join(job.table_of(name))}.command) {doubts[kind]} (docs/evaluation.md)"
        for name, role in own.items()
        if (kind := "rollout" if isinstance(role, RolloutRole) else name) in doubts
    ]


def _exceeded_limits(spec: RunSpec, worst: WorstCase, observed: Sequence[GroupLimits]) -> list[Problem]:
    """Return a problem for each limit that the run could reach; it is ``certain`` if the run could not even start."""
    managers = worst.jobs - sum(most_jobs(spec, group) for group in spec.node_groups)
    groups_of: dict[Limit, list[NodeGroup]] = {}
    for one in observed:
        for limit in one.observed.limits:
            groups_of.setdefault(limit, []).extend(one.groups)
    problems = []
    for limit, groups in groups_of.items():
        pools = {group.name: most_jobs(spec, group) for group in groups if group.dedicated}
        own = len(pools) < len(groups)
        jobs = sum(most_jobs(spec, group) for group in groups) + (managers if own else 0)
        if own and worst.jobs_to_start > limit.max_jobs:
            text = f"the run needs {worst.jobs_to_start} jobs to start, and {limit.name} is {limit.max_jobs}"
            problems.append(Problem((), text))
        elif jobs > limit.max_jobs:
            of_pools = "".join(f", {count} of them for {name}" for name, count in pools.items())
            text = f"the run can have {jobs} jobs at the same time{of_pools}, and {limit.name} is {limit.max_jobs}"
            key = ("rollouts", next(iter(pools)), "replicas") if pools else ()
            late = f"{' and '.join(pools)} may stay smaller" if pools else "replacements may have to wait"
            problems.append(Problem(key, f"{text}: {late}", certain=False))
    steps_per_job = observed[0].observed.steps_per_job
    if steps_per_job and worst.steps_per_hour > steps_per_job:
        text = f"the run can start {worst.steps_per_hour} steps an hour, but MaxStepCount is {steps_per_job}"
        problems.append(Problem((), text, certain=False))
    return problems


def _limits_summary(worst: WorstCase, observed: Sequence[GroupLimits]) -> str:
    """Return the peak numbers of jobs and steps of the run, and the limits of Slurm that could be read."""
    limits = dict.fromkeys(limit for one in observed for limit in one.observed.limits)
    lines = [
        f"jobs    {worst.jobs_to_start} to start; {worst.jobs} at the same time;"
        f" {worst.jobs_per_hour} submitted within an hour",
        f"steps   {worst.steps} at the same time; {worst.steps_per_hour} started within an hour",
        *(f"limit   {one.name} = {one.max_jobs}{'' if one.per_user else ', shared with others'}" for one in limits),
    ]
    if unknown := next((one.observed.unknown for one in observed if one.observed.unknown), ""):
        lines.append(f"limits  UNKNOWN: {unknown}")
    elif not limits:
        lines.append("limits  none for this user and these options")
    return "\n".join(lines)
