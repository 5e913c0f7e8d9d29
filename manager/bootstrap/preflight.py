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
from ...core.run_spec import JobView
from ...core.units import duration_text
from ..cluster.base import Ask, Refused, Unanswered
from ..cluster.slurm.commands import NO_CLUSTER, SlurmLimits, execute, failure, unanswered
from ..cluster.slurm.parsing import Unreadable, fields
from ..cluster.slurm.requests import SHAPES_FORMAT, Partition, chosen, read_partitions, script, shown, wanted
from ..planner.capacity.initial_request import first_asks
from . import manager_job

_RUN = "trial"
_WITHIN = SlurmLimits()
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


class Trouble(Struct, frozen=True):
    key: tuple[str, ...]
    """where job.toml is to be changed; empty: nowhere"""
    text: str
    certain: bool = True
    """it could never start so"""


async def troubles(job: Job, foreground: bool = False) -> list[Trouble]:
    """What Slurm would not take, or did not say. Raises ValueError for an sbatch option that cannot be passed on.

    ``foreground``: the manager is no Slurm job."""
    view = resolve(job, sys.executable)
    asks = {ask.part: ask for ask in first_asks(_RUN, view)}  # those of one part differ by their tags only
    try:
        partitions = await _partitions()
    except (Refused, Unanswered) as error:
        return [_unasked(error)]
    found: list[Trouble] = []
    for ask in asks.values():
        too_large = [one for part in (ask, *ask.more) for one in _sizes(job, view, part, partitions)]
        found += too_large or await _tested(job, view, ask, (), script(ask), _roomy(ask, partitions))
    if view.manager.where == "job" and not foreground:
        found += await _tested(job, view, None, _manager_options(view), "#!/bin/sh\nexec true\n", roomy=True)
    return list({(one.key or one.text, one.certain): one for one in reversed(found)}.values())[::-1]


def _unasked(error: Refused | Unanswered) -> Trouble:
    if NO_CLUSTER in str(error):
        return Trouble(("cluster", "kind"), "Slurm is installed here, and no cluster is configured; use a login node")
    return Trouble((), f"Slurm cannot be asked: {error}", certain=False)


async def _partitions() -> list[Partition]:
    ended = await execute(("sinfo", "-e", "-h", "-o", fields(*SHAPES_FORMAT)), _WITHIN.read)
    if ended.code:
        raise failure("sinfo", ended)
    try:
        return read_partitions(ended.out)
    except Unreadable as error:
        raise Unanswered(f"sinfo: {error}") from error


def _sizes(job: Job, view: JobView, ask: Ask, partitions: list[Partition]) -> list[Trouble]:
    """More than the partition has, whatever its nodes' state: Slurm would refuse it, or let it wait for ever."""
    fit = chosen(partitions, ask.sbatch)
    if not fit or not any(one.shapes for one in fit):
        return []  # sbatch has better words for it
    node, nodes = wanted(ask), "nodes" if ask.count > 1 else "node"
    best = max(fit, key=lambda one: one.fitting(node))
    if ask.count > (possible := best.fitting(node)):
        key = _key(job, view, ask, "replicas" if possible else best.lacks(node))
        asked = f"{ask.count} {nodes} of {shown(node)} for {ask.part}"
        return [Trouble(key, f"{asked}: partition {best.name} has {best.told()}")]
    never = "qos" not in ask.sbatch  # a QOS may lift the limits of a partition
    found = []
    if ask.walltime > (longest := max(one.longest for one in fit)):
        said = f"{duration_text(ask.walltime)} for {ask.part}: partition {best.name} allows {duration_text(longest)}"
        found.append(Trouble(_key(job, view, ask, "walltime"), said, never))
    if ask.count > (most := max(one.most for one in fit)):
        said = f"{ask.count} {nodes} for {ask.part}: partition {best.name} allows a job {most:g}"
        found.append(Trouble(_key(job, view, ask, "replicas"), said, never))
    return found


def _roomy(ask: Ask, partitions: list[Partition]) -> bool:
    """Enough nodes of each component's shape are up: then it is not for want of nodes that Slurm says no."""
    return all(
        any(one.fitting(wanted(part), usable=True) >= part.count for one in chosen(partitions, part.sbatch))
        for part in (ask, *ask.more)
    )


async def _tested(
    job: Job, view: JobView, ask: Ask | None, options: Sequence[str], text: str, roomy: bool
) -> list[Trouble]:
    """What ``sbatch --test-only`` says; ``ask`` is None for the manager's own job."""
    whose = "the manager's job" if ask is None else ", ".join(one.part for one in (ask, *ask.more))
    try:
        ended = await execute(("sbatch", "--test-only", *options), _WITHIN.write, text)
    except (Refused, Unanswered) as error:
        return [_unasked(error)]
    if not ended.code:
        return []
    meant = failure("sbatch", ended)
    if unanswered(ended.err) or (isinstance(meant, Unanswered) and "allocation failure" not in ended.err):
        return [_unasked(meant)]
    said = "; ".join(dict.fromkeys(map(_plain, filter(_telling, ended.err.splitlines()))))
    certain = roomy or _PERHAPS_DOWN.search(said) is None
    name = next((key or match[1] for words, key in _KEYS if (match := re.search(words, said, re.IGNORECASE))), "")
    note = "" if certain else " (so many of its nodes are not up now; it would wait for them)"
    return [Trouble(_key(job, view, ask, name) if certain else (), f"Slurm says for {whose}: {said}{note}", certain)]


def _telling(line: str) -> bool:
    return bool(line.strip()) and not line.startswith('Try "')


def _plain(line: str) -> str:
    for prefix in ("sbatch: ", "error: ", "allocation failure: "):
        line = line.removeprefix(prefix)
    return line.strip()


def _key(job: Job, view: JobView, ask: Ask | None, name: str) -> tuple[str, ...]:
    """Where job.toml says ``name`` of this allocation: an sbatch option, ``cpus``, ``gpus``, ``mem``, ``walltime`` or
    ``replicas``; ``ask`` is None for the manager's job."""
    if ask is None:
        own = name in job.manager.slurm or name not in job.slurm
        return ("manager", "slurm", name) if own else ("slurm", name)
    if given := _option_key(job, view, ask, name):
        return given
    part = view.part(ask.part)
    role = job.every_role().get(part.name) if part.roles == (part.name,) else None
    table = job.table_of(part.name)
    if name in ("cpus", "gpus", "mem"):
        return (*table, name) if role else ("cluster", "node", name)
    if name == "walltime":
        key = "job_walltime" if job.cluster.job_walltime else name
        return (*table, name) if role and role.walltime else ("cluster", key)
    if name == "replicas":
        return (*table, name) if role else ("cluster", "spares") if view.spares else ("cluster",)
    return ("slurm", name) if name else ("slurm",)


def _option_key(job: Job, view: JobView, ask: Ask, name: str) -> tuple[str, ...]:
    """Of an sbatch option that is given, with the role that it is for; of nodes that are not to be had, of the first
    that narrows them down."""
    for one in (ask, *ask.more):
        own = {role: job.every_role()[role].slurm for role in view.part(one.part).roles}
        for option in (name, *(_NARROWING if name == "cpus" else ())):
            if of := next((role for role, options in own.items() if option in options), ""):
                return (*job.table_of(of), "slurm", option)
            if option in job.slurm:
                return ("slurm", option)
    return ()


def _manager_options(view: JobView) -> list[str]:
    """submitit writes the same into its script."""
    given = manager_job.parameters(_RUN, view)
    given |= given.pop("additional_parameters")
    return [f"--{name.replace('_', '-')}" + ("" if value is True else f"={value}") for name, value in given.items()]
