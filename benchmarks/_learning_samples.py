"""Measures the share of the store's CPU time that samples of each step take.

Two real processes of the store, of which one keeps samples, serve the same steps in turn. There are two jobs: short
answers to few prompts, and long ones to many.
"""

from __future__ import annotations

import asyncio
import random
import statistics
from pathlib import Path
from typing import Any

from msgspec import Struct

from rrl.core.types import Version
from rrl.roles.trajectories.client import TrajectoryClient
from rrl.roles.trajectories.types import PostScores, Score, Segment
from rrl.tests.support.roles.trajectories import crew
from rrl.tests.support.roles.trajectories.store_process import StoreProcess, batch_of, lease_scoring, open_clients

SEEDS = (0, 1, 2)
GROUP, PER_LEASE = 8, 16
DEADLINE_S = 600.0


class Job(Struct, frozen=True):
    """The answers of a step, and the number of steps that are measured with samples, and as many without."""

    trajectories: int
    tokens: int
    segment: int
    steps: int


JOBS = {"short": Job(64, 16, 16, 60), "long": Job(256, 1024, 256, 24)}


def measure(folder: Path) -> tuple[dict[str, Any], dict[str, list[float]]]:
    """Return the figures, and the share of each job by seed."""
    samples: dict[str, list[float]] = {}
    for name, job in JOBS.items():
        shares = [asyncio.run(_share(folder / f"{name}-{seed}", job, seed)) for seed in SEEDS]
        samples[f"samples_store_cpu_share_{name}"] = shares
    medians = {name: statistics.median(shares) for name, shares in samples.items()}
    return {"samples_store_cpu_share": max(medians.values()), **medians}, samples


async def _share(folder: Path, job: Job, seed: int) -> float:
    """Return which share of its CPU time a store uses for samples, from the faster half of the steps of each arm.

    Other work of the machine makes the slower half slower by up to a half.
    """
    used: dict[bool, list[float]] = {True: [], False: []}
    stores = {arm: _Store(folder / str(arm), job, seed, samples=arm) for arm in used}
    try:
        for store in stores.values():
            await store.connect()
        for number in range(1, job.steps + 3):
            for arm, store in sorted(stores.items(), reverse=bool(number % 2)):
                used[arm].append(await store.step(number))
    finally:
        for store in stores.values():
            await store.close()
    without, with_samples = (statistics.fmean(sorted(used[arm][2:])[: job.steps // 2]) for arm in (False, True))
    return 1 - without / with_samples


class _Store:
    """A process of the store, and the clients that let it serve steps."""

    def __init__(self, folder: Path, job: Job, seed: int, *, samples: bool) -> None:
        folder.mkdir(parents=True)
        settings = {"group_size": GROUP, "groups_per_batch": job.trajectories // GROUP, "max_ahead_batches": 0}
        self._process = StoreProcess(folder, **settings, max_new_tokens=2 * job.tokens, samples=samples)
        self._job, self._draw = job, random.Random(seed)
        self._open = open_clients(DEADLINE_S, self._process, crew.ROLLOUT, crew.REWARD, crew.TRAINER)
        self._clients: list[TrajectoryClient] = []

    async def connect(self) -> None:
        self._process.start(crew.ALL)
        self._clients = await self._open.__aenter__()

    async def close(self) -> None:
        await self._open.__aexit__(None, None, None)
        self._process.kill()

    async def step(self, number: int) -> float:
        """Let the store serve a step; return the CPU time that it used."""
        before = self._process.cpu_s()
        rollout, reward, trainer = self._clients
        left = self._job.trajectories
        while left:
            items = await rollout.lease(min(PER_LEASE, left), 1.0, None)
            await self._generate(rollout, [item.trajectory for item in items], number - 1)
            left -= len(items)
        scored = 0
        while scored < self._job.trajectories:
            found = await lease_scoring(reward, PER_LEASE)
            scores = tuple(Score(item.trajectory, self._draw.random(), self._draw.random()) for item in found)
            await reward.ask(PostScores, scores)
            scored += len(scores)
        batch = await batch_of(trainer, number)
        assert batch is not None
        await trainer.commit(number, crew.manifest(number), batch.digest, {"loss": 0.0})
        return self._process.cpu_s() - before

    async def _generate(self, rollout: TrajectoryClient, trajectories: list[int], step: int) -> None:
        mean = self._job.tokens
        lengths = {each: self._draw.randint(mean // 2, 3 * mean // 2) for each in trajectories}
        for start in range(0, 3 * mean // 2, self._job.segment):
            ends = {each: min(start + self._job.segment, length) for each, length in lengths.items() if length > start}
            segments = [_segment(each, start, end, step) for each, end in ends.items()]
            await rollout.append(segments, [each for each in ends if ends[each] == lengths[each]])


def _segment(trajectory: int, start: int, end: int, step: int) -> Segment:
    tokens = tuple(range(start, end))
    return Segment(trajectory, start, tokens, (-0.5,) * len(tokens), Version(step, 1))
