"""Uses the SlurmCluster of a run on a real Slurm, as a plain user; steps are small shell scripts."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Callable, Coroutine
from pathlib import Path

from rrl.cluster.base import AllocationRequest, AllocationState, ClusterSnapshot, Step
from rrl.cluster.slurm.cluster import SlurmCluster
from rrl.cluster.slurm.commands import SlurmLimits
from rrl.core.types import NodeName, Resources
from rrl.tests.support.slurm import processes as slurm_processes
from rrl.tests.support.slurm.lab import SlurmLab

FAST = SlurmLimits(
    read_timeout_s=20.0,
    write_timeout_s=20.0,
    immediate_timeout_s=2,
    immediate_timeout_het_s=20,
    min_poll_interval_s=0.05,
    reads_per_minute=100_000,
)
TIMEOUT_S = 30.0
_POLL_S = 0.2
"""Seconds between two observations, each of which starts several commands of Slurm."""
SCRIPT = """trap "echo TERM >> $1.signals; exit 0" TERM
echo $$ > $1.pid.new; mv $1.pid.new $1.pid
while :; do sleep 0.1; done"""
"""A step that writes its pid, and each SIGTERM that it receives; $1 is its launch file."""
SCRIPT_IGNORING_SIGTERM = SCRIPT.replace("; exit 0", "")


class Run:
    """One run in its own folder of the plain user's home; its id is the folder's name."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.id = folder.name
        self.pool = f"{self.id}.pool"

    def tag(self, name: str) -> str:
        return f"{self.id}.{name}"

    def cluster(self, limits: SlurmLimits = FAST, script: str = SCRIPT, hold: str | None = None) -> SlurmCluster:
        return SlurmCluster(self.id, sys.executable, limits, prefix=("/bin/sh", "-c", script, "sh"), allocate_with=hold)

    def allocation_request(self, count: int = 2, name: str = "pool", **sbatch: str) -> AllocationRequest:
        node = Resources(cpus=4, gpus=2, mem=4000 * 2**20)
        return AllocationRequest(self.tag(name), count, node, walltime=600.0, comment=f"rrl {self.id}", sbatch=sbatch)

    def step(self, name: str, node: str, cpus: int = 1, gpus: int = 0, mem: int = 100, agent: bool = False) -> Step:
        files = self.folder / f"{name}.launch", self.folder / f"{name}.log"
        return Step(self.tag(name), self.pool, NodeName(node), Resources(cpus, gpus, mem * 2**20), *files, agent, agent)

    async def hold(self, slurm: SlurmCluster, count: int) -> tuple[NodeName, ...]:
        """Allocate a pool of ``count`` nodes and return the nodes once the allocation runs."""
        await slurm.request(self.allocation_request(count))
        observed = await until(slurm, lambda snapshot: state(snapshot, self.pool) is AllocationState.RUNNING)
        assert observed.allocations is not None
        return observed.allocations[self.pool].nodes

    async def pid(self, name: str) -> int:
        """Return the pid of a step's process once it runs."""
        path = self.folder / f"{name}.launch.pid"
        await until_file(path)
        return int(path.read_text())


def as_user(lab: SlurmLab, scenario: Callable[[], Coroutine[None, None, None]]) -> None:
    lab.call_as_user(lambda: asyncio.run(scenario()), timeout_s=60.0)


async def until(slurm: SlurmCluster, condition: Callable[[ClusterSnapshot], object]) -> ClusterSnapshot:
    deadline = time.monotonic() + TIMEOUT_S
    while not condition(observed := await slurm.observe()):
        assert time.monotonic() < deadline, f"not observed within {TIMEOUT_S:.0f} s: {observed}"
        await asyncio.sleep(_POLL_S)
    return observed


async def until_file(path: Path) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while path.name not in os.listdir(path.parent):
        assert time.monotonic() < deadline, f"{path} did not appear; {os.listdir(path.parent)}"
        await asyncio.sleep(0.02)


def state(snapshot: ClusterSnapshot, tag: str) -> AllocationState | None:
    return snapshot.allocations[tag].state if snapshot.allocations and tag in snapshot.allocations else None


def is_alive(pid: int) -> bool:
    return slurm_processes.running_process(pid) is not None
