"""From what is asked for to what Slurm is told: the options of each component, and the batch script of them all."""

from __future__ import annotations

from collections.abc import Sequence

from rrl.manager.cluster import Ask
from rrl.slurm_templates.render import allocation_options, allocation_script


def request_options(ask: Ask) -> tuple[str, ...]:
    """Of one component, its ``more`` left aside. Raises ValueError for an option that cannot be passed on."""
    return allocation_options(
        tag=ask.tag, comment=f"{ask.comment} {ask.tag}".strip(), nodes=ask.count, node=ask.node,
        walltime=ask.walltime, exclude=ask.exclude, extra=ask.sbatch,
    )  # fmt: skip


def script(ask: Ask, command: Sequence[str] = (), output: str = "") -> str:
    """The batch script of an ask with all its components; ``command`` runs in it, and writes to ``output``, unless the
    job spec says where. Raises ValueError."""
    first, *more = (request_options(one) for one in (ask, *ask.more))
    if output and "output" not in ask.sbatch:
        first = (*first, f"--output={output}")
    return allocation_script(first, *more, command=command)
