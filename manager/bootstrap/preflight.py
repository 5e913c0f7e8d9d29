"""Check before a submission whether Slurm would accept what a job spec requests, without starting anything.

``sbatch --test-only`` is not enough. It rejects correct jobs: if nodes are down or drained, it reports the same error
as for an impossible size (measured on 22.05: "Requested node configuration is not available"). It also accepts wrong
jobs: if EnforcePartLimits is NO, a job with a walltime beyond the partition's limit is accepted and then stays pending
forever. rrl therefore also compares the requested sizes with the partitions.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import msgspec
from msgspec import Struct

from ...cluster.base import AllocationRequest, Refused, Unanswered
from ...cluster.slurm import site
from ...cluster.slurm.commands import NoCluster
from ...cluster.slurm.parsing import estimated_start
from ...cluster.slurm.refusals import is_final
from ...cluster.slurm.requests import Partition, batch_script, eligible, required_resources, resources_text
from ...config.job.schema import Job
from ...core.run_spec import RunSpec
from ...core.units import duration_text
from . import manager_job
from .preview import requests_by_group

_RUN_ID = "trial"
_KEYS = (
    (r"unrecognized option '--([a-z-]+)", ""),
    (r"[Ii]nvalid --([a-z-]+) specification", ""),
    (r"account", "account"),
    (r"partition", "partition"),
    (r"qos", "qos"),
    (r"feature|constraint", "constraint"),
    (r"reservation", "reservation"),
    (r"license", "licenses"),
    (r"cluster", "clusters"),
    (r"gres|generic res", "gpus"),
    (r"time limit", "walltime"),
    (r"memory", "mem"),
    (r"node name", "nodelist"),
    (r"node configuration|node count|processors", "cpus"),
)
"""Patterns of Slurm's messages, each with the sbatch option or the key of job.toml that the message concerns. If a
pattern has an empty text instead, the pattern captures the name of the option."""
_UNAVAILABLE = re.compile(r"node configuration (is )?not available", re.IGNORECASE)
"""Message about a request that no node can meet. ``sbatch --test-only`` prints the same if nodes are down, drained or
reserved."""
_AFTER_RESERVATIONS = "now+800days"
"""Start (sbatch's ``begin``) after the end of every reservation: one without an end lasts a year (scontrol(1)). For
such a start, Slurm tests reserved nodes too, which it otherwise leaves out (measured on 22.05)."""


class Problem(Struct, frozen=True):
    """A problem of a job spec: the run cannot work, Slurm would not start the run, or a check was not possible."""

    key: tuple[str | int, ...]
    """Key of job.toml that has to change; empty if the problem concerns no key."""
    text: str
    certain: bool = True
    """True if the job spec must be changed; False if the job may work as it is, or could not be checked."""


class SlurmAnswer(Struct, frozen=True):
    """Slurm's answer to the test of a run's jobs."""

    problems: list[Problem]
    """Why Slurm would reject a job, or why that could not be determined."""
    starts: dict[str, str] = {}
    """Estimated start of each job as local time (ISO 8601), by node group or ``manager``. A job is absent if Slurm
    gives no estimate for it."""


async def check_with_slurm(job: Job, spec: RunSpec, foreground: bool = False) -> SlurmAnswer:
    """Return the problems for which Slurm would reject the job, and Slurm's estimates of the start.

    Args:
        job: The job spec, which is searched for the key that causes a problem.
        spec: The run spec of this job, from which the requests are built.
        foreground: True if the manager is not a Slurm job.

    Raises:
        ValueError: an sbatch option cannot be passed on.
    """
    problems: list[Problem] = []
    starts: dict[str, str] = {}
    try:
        partitions = await site.query_partitions()
        for request in requests_by_group(_RUN_ID, spec).values():
            too_large = [
                problem
                for component in (request, *request.further_components)
                for problem in _check_sizes(job, spec, component, partitions)
            ]
            problems += too_large
            if too_large:
                continue
            fits = _partition_fits(request, partitions)
            rejected, start = await _test_only(job, spec, request, (), batch_script(request), fits)
            problems += rejected
            if start is not None:
                starts[_subject(request)] = start
        if spec.manager.where == "job" and not foreground:
            script = "#!/bin/sh\nexec true\n"
            rejected, start = await _test_only(job, spec, None, _manager_options(spec), script, nodes_suffice=True)
            problems += rejected
            if start is not None:
                starts["manager"] = start
    except (Refused, Unanswered) as error:
        problems.append(_unreachable(error))
    first_of_each = {(problem.key or problem.text, problem.certain): problem for problem in reversed(problems)}
    return SlurmAnswer(list(first_of_each.values())[::-1], starts)


def _unreachable(error: Refused | Unanswered) -> Problem:
    if isinstance(error, NoCluster):
        text = "Slurm is installed on this machine, but no cluster is configured; use a login node"
        return Problem(("cluster", "kind"), text)
    return Problem((), f"cannot check the job with Slurm: {error}", certain=False)


def _check_sizes(job: Job, spec: RunSpec, request: AllocationRequest, partitions: Sequence[Partition]) -> list[Problem]:
    """Return the problems of a request that exceeds every partition, even when all nodes are up.

    The problems concern the number of nodes, their resources, or the walltime. Slurm would reject such a job, or leave
    it pending forever.
    """
    allowed = eligible(partitions, request.sbatch)
    if not allowed or not any(partition.shapes for partition in allowed):
        return []  # no such partition or no nodes: sbatch gives a better message
    node, nodes = required_resources(request), "nodes" if request.count > 1 else "node"
    best = max(allowed, key=lambda partition: partition.fitting(node))
    if request.count > (possible := best.fitting(node)):
        key = _key(job, spec, request, "replicas" if possible else best.missing_resource(node))
        requested = f"{request.count} {nodes} of {resources_text(node)} for {request.node_group}"
        return [Problem(key, f"{requested}: partition {best.name} has {best.description()}")]
    certain = "qos" not in request.sbatch  # a QOS may lift the limits of a partition
    problems = []
    if request.walltime > (max_walltime := max(partition.max_walltime_s for partition in allowed)):
        requested = f"{duration_text(request.walltime)} for {request.node_group}"
        text = f"{requested}: partition {best.name} allows at most {duration_text(max_walltime)}"
        problems.append(Problem(_key(job, spec, request, "walltime"), text, certain))
    if request.count > (max_nodes := max(partition.max_nodes for partition in allowed)):
        requested = f"{request.count} {nodes} for {request.node_group}"
        text = f"{requested}: partition {best.name} allows a job at most {max_nodes:g}"
        problems.append(Problem(_key(job, spec, request, "replicas"), text, certain))
    return problems


def _partition_fits(request: AllocationRequest, partitions: Sequence[Partition]) -> bool:
    """Return whether Slurm starts jobs on enough nodes for each component.

    If so, nodes that are down cannot be the reason for which Slurm rejects the request.
    """
    return all(
        any(
            partition.fitting(required_resources(component), usable=True) >= component.count
            for partition in eligible(partitions, component.sbatch)
        )
        for component in (request, *request.further_components)
    )


async def _test_only(
    job: Job, spec: RunSpec, request: AllocationRequest | None, options: Sequence[str], text: str, nodes_suffice: bool
) -> tuple[list[Problem], str | None]:
    """Return the problems that ``sbatch --test-only`` reports (one or none), and the estimated start or None.

    ``request`` is None for the manager's own job.

    ``nodes_suffice`` is True if enough nodes are up. In this case a rejection for their configuration is certain.
    """
    ended = await site.try_job(text, *options)
    if not ended.code:
        return [], estimated_start(ended.out + ended.err)
    message = "; ".join(dict.fromkeys(map(_without_prefixes, filter(_is_informative, ended.err.splitlines()))))
    name = next(
        (key or match[1] for pattern, key in _KEYS if (match := re.search(pattern, message, re.IGNORECASE))), ""
    )
    certain, note = is_final(ended.err), "for now; the job may be accepted later"
    if _UNAVAILABLE.search(message):
        if request is not None and await _accepts(request):
            return [], None  # it only waits for the end of a reservation
        certain, note = nodes_suffice, "fewer nodes are up at present; the job would wait for them"
        if request is not None and certain and request.sbatch:
            name = await _narrowing_option(request)
    key = _key(job, spec, request, name) if certain else ()
    subject = "the manager's job" if request is None else _subject(request)
    return [Problem(key, f"Slurm says for {subject}: {message}{'' if certain else f' ({note})'}", certain)], None


async def _narrowing_option(request: AllocationRequest) -> str:
    """Return the sbatch option without which Slurm would accept the request; empty if it is no single option."""
    for option in dict.fromkeys(o for component in (request, *request.further_components) for o in component.sbatch):
        if await _accepts(request, without=option):
            return option
    return ""


async def _accepts(request: AllocationRequest, without: str = "") -> bool:
    """Return whether Slurm would accept the request after all reservations, and without one of its sbatch options."""

    def changed(component: AllocationRequest) -> AllocationRequest:
        sbatch = {name: value for name, value in component.sbatch.items() if name != without}
        further = tuple(map(changed, component.further_components))
        return msgspec.structs.replace(
            component, sbatch=sbatch | {"begin": _AFTER_RESERVATIONS}, further_components=further
        )

    return not (await site.try_job(batch_script(changed(request)))).code


def _subject(request: AllocationRequest) -> str:
    return ", ".join(component.node_group for component in (request, *request.further_components))


def _is_informative(line: str) -> bool:
    return bool(line.strip()) and not line.startswith('Try "')


def _without_prefixes(line: str) -> str:
    for prefix in ("sbatch: ", "error: ", "allocation failure: "):
        line = line.removeprefix(prefix)
    return line.strip()


def _key(job: Job, spec: RunSpec, request: AllocationRequest | None, name: str) -> tuple[str, ...]:
    """Return the key of job.toml that sets ``name`` for this allocation; ``request`` is None for the manager's job.

    ``name`` is an sbatch option, ``cpus``, ``gpus``, ``mem``, ``walltime`` or ``replicas``.
    """
    if request is None:
        own = name in job.manager.slurm or name not in job.slurm
        return ("manager", "slurm", name) if own else ("slurm", name)
    if given := _option_key(job, spec, request, name):
        return given
    node_group = spec.node_group(request.node_group)
    role = job.every_role().get(node_group.name) if node_group.roles == (node_group.name,) else None
    table = job.table_of(node_group.name)
    if name in ("cpus", "gpus", "mem"):
        return (*table, name) if role else ("cluster", "node", name)
    if name == "walltime":
        key = "job_walltime" if job.cluster.job_walltime else name
        return (*table, name) if role and role.walltime else ("cluster", key)
    if name == "replicas":
        return (*table, name) if role else ("cluster", "spares") if spec.spares else ("cluster",)
    return ("slurm", name) if name else ("slurm",)


def _option_key(job: Job, spec: RunSpec, request: AllocationRequest, name: str) -> tuple[str, ...]:
    """Return the key under which the job spec sets the sbatch option ``name`` for this request; empty if unset."""
    for component in (request, *request.further_components):
        own = {role: job.every_role()[role].slurm for role in spec.node_group(component.node_group).roles}
        if owner := next((role for role, options in own.items() if name in options), ""):
            return (*job.table_of(owner), "slurm", name)
        if name in job.slurm:
            return ("slurm", name)
    return ()


def _manager_options(spec: RunSpec) -> list[str]:
    """Return the sbatch options of the manager's job, as submitit writes them into its script."""
    given = manager_job.parameters(_RUN_ID, spec)
    given |= given.pop("additional_parameters")
    return [f"--{name.replace('_', '-')}" + ("" if value is True else f"={value}") for name, value in given.items()]
