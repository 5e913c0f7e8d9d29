"""Render the options and the batch script of an allocation of any form: #SBATCH lines and one exec line.

An allocation is a ``--no-kill`` job over nodes with the same resources, or several such components of a heterogeneous
job. It is never requeued, since the requeued job would start about two minutes later, without any steps. Nodes are
requested by the resources that each node must provide, with one task per node. ``--exclusive`` is not set, so that a
small job, such as the manager's own, may share a larger node. A user who wants whole nodes adds the sbatch option
``exclusive``.
"""

from __future__ import annotations

import functools
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ClusterShell.NodeSet import NodeSet

from ..core.types import Resources
from ..core.units import slurm_mem, slurm_time

if TYPE_CHECKING:
    import jinja2

RESERVED_OPTIONS = frozenset(
    {
        "job-name",
        "comment",
        "nodes",
        "ntasks",
        "ntasks-per-node",
        "cpus-per-task",
        "time",
        "no-kill",
        "requeue",
        "no-requeue",
        "export-file",
        "get-user-env",
        "array",
        "wrap",
        "wait",
        "parsable",
        "test-only",
        "no-shell",
        "overcommit",
        "job",
        "jobid",
    }
)
"""sbatch options that a user cannot set, because rrl sets them, finds its jobs by them, or does not support them."""

_BATCH_SCRIPT_OPTIONS = ("--no-requeue", "--chdir=/", "--output=/dev/null")
"""Options that rrl adds to the first component of a batch script; further components of a heterogeneous job get only
``--no-requeue``. ``--export`` is not among these options, because its default passes the environment on. With
``--export=NONE`` sbatch would start a login shell to create an environment (sbatch(1)), and ``--export=NIL`` does not
exist in Slurm 22.05."""
_HOLD_COMMENT = (
    "This script only holds the nodes. The manager, outside of this job, starts every step in it.",
    "Where Slurm's InactiveLimit is 0, `salloc --no-shell` holds them instead, with the options above.",
)
_MANAGER_COMMENT = ("The manager runs on the first of these nodes, and starts every step in this job.",)


def allocation_options(
    *,
    tag: str,
    comment: str,
    nodes: int,
    node: Resources,
    walltime: float,
    exclude: Sequence[str] = (),
    extra: Mapping[str, str] | None = None,
) -> tuple[str, ...]:
    """Return the options of one component of an allocation, in the long form that ``sbatch`` and ``salloc`` accept.

    Args:
        tag: Job name, by which rrl finds the job.
        comment: Comment of the job.
        nodes: Number of nodes.
        node: What each node must provide.
        walltime: Time limit (s).
        exclude: Nodes that must not be allocated.
        extra: The user's options, by name without dashes. They are placed after rrl's options. An empty value stands
            for an option without a value. A ``gres`` replaces rrl's option (for typed GPUs); nodes in the user's
            ``exclude`` are excluded too.

    Raises:
        ValueError: An option cannot be passed on, or a name or value does not fit into an ``#SBATCH`` line.
    """
    extra = dict(extra or {})
    for name, value in extra.items():
        if name in RESERVED_OPTIONS or (name == "mem" and node.mem):
            raise ValueError(f"sbatch option {name!r} is reserved: rrl sets it or does not support it; remove it")
        if not re.fullmatch(r"[a-z][a-z0-9-]+", name):
            raise ValueError(f"{name!r} is not the long name of an sbatch option; write for example 'partition'")
        if not value.isprintable():
            raise ValueError(f"the value of sbatch option {name!r} contains a non-printable character; remove it")
    options = [
        f"--job-name={tag}",
        f"--comment={comment}",
        f"--nodes={nodes}",
        "--ntasks-per-node=1",
        f"--cpus-per-task={node.cpus}",
    ]
    if node.mem:
        options.append(f"--mem={slurm_mem(node.mem)}")
    if node.gpus and "gres" not in extra:
        options.append(f"--gres=gpu:{node.gpus}")
    options += [f"--time={slurm_time(walltime)}", "--no-kill"]
    if excluded := NodeSet.fromlist([*exclude, extra.pop("exclude", "")]):
        options.append(f"--exclude={excluded}")
    return (*options, *(f"--{name}={value}" if value else f"--{name}" for name, value in sorted(extra.items())))


def allocation_script(*components: Sequence[str], command: Sequence[str] = ()) -> str:
    """Return the batch script of an allocation.

    Args:
        components: The options of each component.
        command: The command that manages the run inside the allocation; when it ends, the allocation ends. If it is
            empty, the script only holds the nodes.
    """
    given = {option.partition("=")[0] for option in components[0]}
    own_options = [option for option in _BATCH_SCRIPT_OPTIONS if option.partition("=")[0] not in given]
    lines = [[*components[0], *own_options], *([*component, "--no-requeue"] for component in components[1:])]
    return (
        _templates()
        .get_template("allocation.sbatch.j2")
        .render(
            components=lines,
            comment=_MANAGER_COMMENT if command else _HOLD_COMMENT,
            command=shlex.join(command) if command else "sleep infinity",
        )
    )


def _quoted(option: str) -> str:
    """Return an option as one word of an ``#SBATCH`` line.

    sbatch parses quotes and backslashes like a shell, and '#' as a comment.
    """
    if re.fullmatch(r"[\w@%+=:,./\[\]-]+", option, re.ASCII):
        return option
    name, equals, value = option.partition("=")
    escaped = re.sub(r'(["\\])', r"\\\1", value)
    return f'{name}{equals}"{escaped}"'


@functools.cache
def _templates() -> jinja2.Environment:
    import jinja2  # takes 60 ms, which a local run need not wait for

    templates = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )
    templates.filters["quoted"] = _quoted
    return templates
