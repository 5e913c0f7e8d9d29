"""Would Slurm take what a job spec asks for? Asked beforehand, without starting anything (``sbatch --test-only``).

Not everything that it says no to is a mistake: nodes that are down or drained make it say what an impossible size does
(measured on 22.05: "Requested node configuration is not available"). And not every mistake is said no to: where
EnforcePartLimits is NO, a walltime beyond the partition's is taken and then waits for ever. So the sizes are compared
with what the partitions have, too.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence

from msgspec import Struct

from ...config.job.resolve import resolve
from ...config.job.schema import Job
from ...core.run_spec import RunSpec
from ...core.units import duration_text
from ..cluster.base import AllocationRequest, Refused, Unanswered
from ..cluster.slurm.commands import NoCluster, SlurmLimits, execute, failure, unanswered
from ..cluster.slurm.parsing import Unreadable, fields
from ..cluster.slurm.requests import (
    SHAPES_FORMAT,
    Partition,
    batch_script,
    eligible,
    read_partitions,
    required_resources,
    resources_text,
)
from ..planner.capacity.initial_request import initial_requests
from . import manager_job

_RUN_ID = "trial"
_SLURM_LIMITS = SlurmLimits()
_KEYS = (
    (r"unrecognized option '--([a-z-]+)", ""), (r"[Ii]nvalid --([a-z-]+) specification", ""),
    (r"account", "account"), (r"partition", "partition"), (r"qos", "qos"), (r"feature|constraint", "constraint"),
    (r"reservation", "reservation"), (r"license", "licenses"), (r"cluster", "clusters"), (r"gres|generic res", "gpus"),
    (r"time limit", "walltime"), (r"memory", "mem"), (r"node name", "nodelist"),
    (r"node configuration|node count|processors", "cpus"),
)  # fmt: skip
"""Words of Slurm's, and the key of job.toml that they are about: an sbatch option, or one of rrl's in its place."""
_PERHAPS_DOWN = re.compile(r"configuration (is )?not available|nodes are busy|node not available", re.IGNORECASE)
"""said of nodes that are down or drained, too"""


_NARROWING = ("gres", "constraint", "nodelist", "exclude")


class Problem(Struct, frozen=True):
    key: tuple[str, ...]
    """where job.toml is to be changed; empty: nowhere"""
    text: str
    certain: bool = True
    """it could never start so"""


async def check_with_slurm(job: Job, foreground: bool = False) -> list[Problem]:
    """What Slurm would not take, or did not say. Raises ValueError for an sbatch option that cannot be passed on.

    ``foreground``: the manager is no Slurm job."""
    spec = resolve(job, sys.executable)
    requests = {
        request.node_group: request for request in initial_requests(_RUN_ID, spec)
    }  # those of one part differ by their tags only
    try:
        partitions = await _partitions()
    except (Refused, Unanswered) as error:
        return [_unreachable(error)]
    found: list[Problem] = []
    for request in requests.values():
        too_large = [
            one
            for component in (request, *request.further_components)
            for one in _check_sizes(job, spec, component, partitions)
        ]
        found += too_large or await _test_only(
            job, spec, request, (), batch_script(request), _partition_fits(request, partitions)
        )
    if spec.manager.where == "job" and not foreground:
        found += await _test_only(job, spec, None, _manager_options(spec), "#!/bin/sh\nexec true\n", nodes_suffice=True)
    return list({(one.key or one.text, one.certain): one for one in reversed(found)}.values())[::-1]


def _unreachable(error: Refused | Unanswered) -> Problem:
    if isinstance(error, NoCluster):
        text = "Slurm is installed on this machine, but no cluster is configured; use a login node"
        return Problem(("cluster", "kind"), text)
    return Problem((), f"cannot check the job with Slurm: {error}", certain=False)


async def _partitions() -> list[Partition]:
    ended = await execute(("sinfo", "-e", "-h", "-o", fields(*SHAPES_FORMAT)), _SLURM_LIMITS.read_timeout_s)
    if ended.code:
        raise failure("sinfo", ended)
    try:
        return read_partitions(ended.out)
    except Unreadable as error:
        raise Unanswered(f"sinfo: {error}") from error


def _check_sizes(job: Job, spec: RunSpec, request: AllocationRequest, partitions: list[Partition]) -> list[Problem]:
    """More than the partition has, whatever its nodes' state: Slurm would refuse it, or let it wait for ever."""
    fit = eligible(partitions, request.sbatch)
    if not fit or not any(one.shapes for one in fit):
        return []  # sbatch has better words for it
    node, nodes = required_resources(request), "nodes" if request.count > 1 else "node"
    best = max(fit, key=lambda one: one.fitting(node))
    if request.count > (possible := best.fitting(node)):
        key = _key(job, spec, request, "replicas" if possible else best.missing_resource(node))
        requested = f"{request.count} {nodes} of {resources_text(node)} for {request.node_group}"
        return [Problem(key, f"{requested}: partition {best.name} has {best.description()}")]
    never = "qos" not in request.sbatch  # a QOS may lift the limits of a partition
    found = []
    if request.walltime > (max_walltime := max(one.max_walltime_s for one in fit)):
        text = f"{duration_text(request.walltime)} for {request.node_group}: partition {best.name} allows {duration_text(max_walltime)}"
        found.append(Problem(_key(job, spec, request, "walltime"), text, never))
    if request.count > (max_nodes := max(one.max_nodes for one in fit)):
        text = f"{request.count} {nodes} for {request.node_group}: partition {best.name} allows a job {max_nodes:g}"
        found.append(Problem(_key(job, spec, request, "replicas"), text, never))
    return found


def _partition_fits(request: AllocationRequest, partitions: list[Partition]) -> bool:
    """Enough nodes of each component's shape are up: then it is not for want of nodes that Slurm says no."""
    return all(
        any(
            one.fitting(required_resources(component), usable=True) >= component.count
            for one in eligible(partitions, component.sbatch)
        )
        for component in (request, *request.further_components)
    )


async def _test_only(
    job: Job, spec: RunSpec, request: AllocationRequest | None, options: Sequence[str], text: str, nodes_suffice: bool
) -> list[Problem]:
    """What ``sbatch --test-only`` says; ``request`` is None for the manager's own job."""
    whose = (
        "the manager's job"
        if request is None
        else ", ".join(one.node_group for one in (request, *request.further_components))
    )
    try:
        ended = await execute(("sbatch", "--test-only", *options), _SLURM_LIMITS.write_timeout_s, text)
    except (Refused, Unanswered) as error:
        return [_unreachable(error)]
    if not ended.code:
        return []
    meant = failure("sbatch", ended)
    if unanswered(ended.err) or (isinstance(meant, Unanswered) and "allocation failure" not in ended.err):
        return [_unreachable(meant)]
    message = "; ".join(dict.fromkeys(map(_without_prefixes, filter(_is_informative, ended.err.splitlines()))))
    certain = nodes_suffice or _PERHAPS_DOWN.search(message) is None
    name = next(
        (key or match[1] for pattern, key in _KEYS if (match := re.search(pattern, message, re.IGNORECASE))), ""
    )
    note = "" if certain else " (so many of its nodes are not up now; it would wait for them)"
    return [
        Problem(_key(job, spec, request, name) if certain else (), f"Slurm says for {whose}: {message}{note}", certain)
    ]


def _is_informative(line: str) -> bool:
    return bool(line.strip()) and not line.startswith('Try "')


def _without_prefixes(line: str) -> str:
    for prefix in ("sbatch: ", "error: ", "allocation failure: "):
        line = line.removeprefix(prefix)
    return line.strip()


def _key(job: Job, spec: RunSpec, request: AllocationRequest | None, name: str) -> tuple[str, ...]:
    """Where job.toml says ``name`` of this allocation: an sbatch option, ``cpus``, ``gpus``, ``mem``, ``walltime`` or
    ``replicas``; ``request`` is None for the manager's job."""
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
    """Of an sbatch option that is given, with the role that it is for; of nodes that are not to be had, of the first
    that narrows them down."""
    for one in (request, *request.further_components):
        own = {role: job.every_role()[role].slurm for role in spec.node_group(one.node_group).roles}
        for option in (name, *(_NARROWING if name == "cpus" else ())):
            if of := next((role for role, options in own.items() if option in options), ""):
                return (*job.table_of(of), "slurm", option)
            if option in job.slurm:
                return ("slurm", option)
    return ()


def _manager_options(spec: RunSpec) -> list[str]:
    """submitit writes the same into its script."""
    given = manager_job.parameters(_RUN_ID, spec)
    given |= given.pop("additional_parameters")
    return [f"--{name.replace('_', '-')}" + ("" if value is True else f"={value}") for name, value in given.items()]
