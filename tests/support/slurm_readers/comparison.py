"""Read everything by a reader of Slurm, and compare the values of two readers."""

from __future__ import annotations

import msgspec
from msgspec import Struct

from rrl.cluster.slurm.parsing import Job
from rrl.cluster.slurm.readers.base import SlurmReader

CLOCK_DIFFERENCE_S = 5.0
"""Seconds by which the time left of a job may differ between two readers that read one after the other."""


async def look(reader: SlurmReader) -> dict[str, Struct]:
    """Return all values that a reader reads, by name: the configuration, and each job, step and node."""
    values: dict[str, Struct] = {"configuration": await reader.config()}
    values |= {f"job {job.id}": job for job in await reader.jobs()}
    values |= {f"step {step.id}": step for step in await reader.steps()}
    return values | {f"node {name}": status for name, status in (await reader.nodes(None)).items()}


def same_value(expected: Struct | None, found: Struct | None) -> bool:
    """Return whether two readers read the same value; a job's time left may differ by :data:`CLOCK_DIFFERENCE_S`."""
    if isinstance(expected, Job) and isinstance(found, Job):
        left, other = expected.time_left_s, found.time_left_s
        if left is not None and other is not None and abs(left - other) <= CLOCK_DIFFERENCE_S:
            found = msgspec.structs.replace(found, time_left_s=left)
    return expected == found
