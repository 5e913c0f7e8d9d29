"""What a run asks its cluster for at the start, in each form of allocations. Pure; ``rrl check`` shows the same."""

from __future__ import annotations

import msgspec

from rrl.manager.cluster import Ask
from rrl.spec.jobview import JobView, Part


def first_asks(run: str, job: JobView) -> tuple[Ask, ...]:
    """Form ``pool``: one. ``hetjob``: one, with the other components as its ``more``. ``replica``: one for each node of
    the parts that are separate, and one for the rest."""
    asks: list[Ask] = []
    for part in job.parts:
        names = [f"{part.name}-{index}" for index in range(part.nodes)] if part.separate else [part.name]
        asks += [_ask(run, f"{run}.{name}", part) for name in names]
    if job.form == "hetjob":
        return (msgspec.structs.replace(asks[0], more=tuple(asks[1:])),)
    return tuple(asks)


def _ask(run: str, tag: str, part: Part) -> Ask:
    nodes = 1 if part.separate else part.nodes
    return Ask(tag, nodes, part.node, part.walltime, sbatch=part.sbatch, comment=f"rrl {run}", part=part.name)
