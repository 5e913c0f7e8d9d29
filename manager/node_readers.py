"""Where a node's health is read, and whether roles wait for that: one answer for who launches agents and who places
roles."""

from __future__ import annotations

from rrl.health.readings import READERS
from rrl.spec.jobview import JobView


def readers_on(job: JobView, gpus: int) -> tuple[str, ...]:
    """Names of the readers beside the agent of a node with so many GPUs.

    Virtual nodes of the local cluster are one machine, and there is no other to go to: what would condemn all of them
    is not looked for, nor by several agents at once. Where roles there have GPUs, how these do is worth knowing."""
    if job.cluster != "local":
        return READERS
    return ("nvml",) if gpus else ()


def admits(job: JobView, gpus: int) -> bool:
    """No role is placed on such a node before its agent has said what it finds there."""
    return job.health.admission and bool(readers_on(job, gpus))
