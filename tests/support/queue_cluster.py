"""The local cluster with a queue, as of a busy Slurm: it grants nodes late or never, and takes them back.

Run as a program with the path of a run directory, this module is a manager of that run. :func:`submit_to` submits a run
with such managers. What the queue does stands in a file of the run directory, so it outlives a manager.
"""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from math import inf
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from rrl.cluster import traits
from rrl.cluster.base import AllocationRequest, AllocationState, AllocationStatus, Cluster, ClusterSnapshot
from rrl.cluster.local import LocalCluster
from rrl.config.job.document import JobDocument
from rrl.config.job.load import job_from
from rrl.config.job.resolve import resolve_for_submission
from rrl.core.processes import sweep
from rrl.core.run_dir import RUNS_ENV, RunDir, write_atomically
from rrl.core.run_spec import RunSpec
from rrl.manager.bootstrap import start
from rrl.tests.support.local_cluster import processes_on
from rrl.tests.support.runs import RRL, TestRun, write_job
from rrl.tests.support.supervisor import end_runs_with_caller

KILL_TIMEOUT_S = 20.0


class Queue(Struct, frozen=True):
    """What the queue does with the allocations of one node group; those of all others are granted at once."""

    pool: str
    wait_s: float = 0.0
    """Seconds between a request and its grant; :data:`NEVER` if nothing is granted."""
    lifetime_s: float = 0.0
    """Mean of the exponential distribution of the seconds after which an allocation is preempted; 0 for never."""
    grace_s: float = 3.0
    """Seconds between the announcement of a preemption and SIGKILL (GraceTime of Slurm)."""
    seed: int = 0


NEVER = 1e9
"""A wait (s) that no run outlives."""


class _Queued(Struct, frozen=True):
    request: AllocationRequest
    granted_at: float
    """Wall-clock time (s) from which the request is granted."""
    ends_at: float | None
    """Wall-clock time (s) at which the allocation ends; None if it lasts as long as its run."""
    preempts: bool = True
    """Whether it ends by a preemption, which is announced late, or at its walltime, which is always known."""


class QueueCluster(LocalCluster):
    """The local cluster of a run with this queue."""

    def __init__(self, run: RunDir, queue: Queue, python: str = sys.executable) -> None:
        super().__init__(run, python=python)
        self._queue = queue
        self._folder = run.path / "queue"
        self._folder.mkdir(exist_ok=True)

    async def request(self, request: AllocationRequest) -> None:
        if request.node_group != self._queue.pool:
            await super().request(request)
        elif not _record(self._run, request.tag).exists():
            granted_at = time.time() + self._queue.wait_s
            drawn = random.Random(f"{self._queue.seed} {request.tag.partition('.')[2]}").expovariate(1.0)
            held_s = self._queue.grace_s + drawn * self._queue.lifetime_s
            queued = _Queued(request, granted_at, granted_at + held_s if self._queue.lifetime_s else None)
            write_atomically(_record(self._run, request.tag), msgspec.json.encode(queued))
            await self._advance(queued)

    async def release(self, tag: str) -> None:
        _record(self._run, tag).unlink(missing_ok=True)
        await super().release(tag)

    async def observe(self) -> ClusterSnapshot:
        for queued in self._all_queued():
            await self._advance(queued)
        snapshot = await super().observe()
        if snapshot.allocations is None:
            return snapshot
        allocations = dict(snapshot.allocations)
        for queued in self._all_queued():
            tag, now = queued.request.tag, time.time()
            status = allocations.get(tag, AllocationStatus(AllocationState.PENDING, tag, detail="(Priority)"))
            left = inf if queued.ends_at is None else queued.ends_at - now
            if status.state is AllocationState.RUNNING and (left <= self._queue.grace_s or not queued.preempts):
                status = replace(status, time_left_s=max(0.0, left), reclaimed=queued.preempts)
            allocations[tag] = status
        return replace(snapshot, allocations=allocations)

    async def _advance(self, queued: _Queued) -> None:
        """Grant a request whose wait is over; end an allocation whose time is over."""
        now = time.time()
        if now >= (queued.ends_at or inf):
            tag = queued.request.tag
            granted = self._allocations().get(tag)
            for node in granted.nodes if granted is not None else ():
                await asyncio.to_thread(sweep, partial(processes_on, self._run, node), KILL_TIMEOUT_S)
            self._remove_record(self._allocation_file(tag))
            _record(self._run, tag).unlink(missing_ok=True)
        elif now >= queued.granted_at:
            await super().request(queued.request)

    def _all_queued(self) -> list[_Queued]:
        return [msgspec.json.decode(path.read_bytes(), type=_Queued) for path in sorted(self._folder.glob("*.json"))]


def open_cluster(run: RunDir, spec: RunSpec, own_tag: str) -> Cluster:
    """Return the cluster of a run (:class:`rrl.cluster.traits.ClusterTraits`)."""
    queue = msgspec.json.decode(_settings(run).read_bytes(), type=Queue)
    return QueueCluster(run, queue, spec.env.python or sys.executable)


def submit_to(queue: Queue, folder: Path, toml: str) -> TestRun:
    """Submit a job whose cluster has this queue; the run ends at the latest when the calling process ends."""
    file = write_job(folder, toml)
    end_runs_with_caller(folder / "runs")
    job = job_from(JobDocument([file]), folder)
    spec = resolve_for_submission(job)
    with mock.patch.dict(os.environ, {RUNS_ENV: str(folder / "runs")}):
        run = start.create(job, spec, file)
    _settings(run).write_bytes(msgspec.json.encode(queue))
    with (run.submit / "manager.err").open("ab") as errors:
        subprocess.run(["setsid", "--fork", *_manager(run)], stdin=subprocess.DEVNULL, stdout=errors, stderr=errors)
    return TestRun(run, _caller(run))


def end_allocation(run: RunDir, tag: str, after_s: float, *, preempts: bool) -> None:
    """Let an allocation of the queue's node group end ``after_s`` seconds from now (:class:`_Queued`)."""
    queued = msgspec.json.decode(_record(run, tag).read_bytes(), type=_Queued)
    changed = replace(queued, ends_at=time.time() + after_s, preempts=preempts)
    write_atomically(_record(run, tag), msgspec.json.encode(changed))


def _record(run: RunDir, tag: str) -> Path:
    return run.path / "queue" / f"{tag}.json"


def _caller(run: RunDir) -> Callable[..., subprocess.Popen[str]]:
    """Return what calls rrl for a run; its ``manage`` is a manager whose cluster has a queue."""
    env = {**os.environ, RUNS_ENV: str(run.path.parent)}

    def call(*argv: str, **popen: Any) -> subprocess.Popen[str]:
        program = _manager(run) if argv[0] == "manage" else [RRL, *argv]
        return subprocess.Popen(program, env=env, text=True, **popen)

    return call


def _manager(run: RunDir) -> list[str]:
    return [sys.executable, "-m", "rrl.tests.support.queue_cluster", str(run.path)]


def _settings(run: RunDir) -> Path:
    return run.path / "queue.json"


def main() -> None:
    """Run a manager of the run whose directory is the only argument."""
    traits.CLUSTERS["local"] = replace(traits.CLUSTERS["local"], module="rrl.tests.support.queue_cluster")
    start.run_manager(RunDir(Path(sys.argv[1])))


if __name__ == "__main__":
    main()
