"""Measures what a checkpoint in each step costs the trainer, with 100 million parameters in one process.

The results are the time that a step waits, compared with a memcpy of the same bytes, and how much longer whole steps
take than without checkpoints, with a fixed batch. The state is copied into memory of an agent (snapshots on, the
default) or into the trainer's own memory (snapshots off), and is then written by torch.distributed.checkpoint in the
background, with fsync and digests. The arms take turns within one run. Prints a table, and one JSON object as its last
line. Needs 7 GB of memory and of $TMPDIR.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import resource
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from rrl.benchmarks._requirements import check_requirements
from rrl.benchmarks._table import print_table
from rrl.core.run_dir import RunDir
from rrl.core.run_spec import ModelSpec, TrainerSettings
from rrl.core.types import Incarnation, NodeName, ReplicaId, Version
from rrl.roles.checkpoints.folders import Digest, fresh_folder
from rrl.roles.models.policy import build_model
from rrl.roles.snapshots.client import SnapshotClient
from rrl.roles.snapshots.server import SnapshotServer
from rrl.roles.trainer.async_saver import AsyncSaver
from rrl.roles.trainer.checkpoint import Checkpoints
from rrl.roles.trainer.host_buffers import HostBuffers
from rrl.roles.trainer.learner import Learner
from rrl.roles.trainer.process_group import Gang
from rrl.roles.trajectories.types import Batch, Trajectory
from rrl.transport.keys import RunKeys

MODEL = ModelSpec(
    hidden_size=768, intermediate_size=2048, layers=12, heads=12, kv_heads=4, head_dim=64, max_length=128,
    initializer_range=0.02,
)  # fmt: skip
VOCABULARY = 16_000
TRAJECTORIES, GROUP_SIZE, PROMPT_TOKENS, ANSWER_TOKENS = 16, 4, 8, 16
"""Sizes of the fixed batch: number of trajectories and of those in a group, then lengths in tokens."""
ROUNDS = 5
STEPS_PER_ROUND = 2
"""Number of steps of each arm in each round of whole steps."""
OWN_MEMORY, AGENT_MEMORY = "own memory", "agent's memory"


class StandInWorker(SimpleNamespace):
    """The part of :class:`rrl.Worker` that a saver needs. A commit only records the size of the checkpoint."""

    def idle(self, cause: str) -> AbstractContextManager[object]:
        return nullcontext()

    def checkpoint_dir(self, number: int) -> Path:
        return fresh_folder(self.run_dir.checkpoints, number, 1)

    def commit(self, number: int, files: Sequence[Path], metrics: Any, digests: dict[str, Digest]) -> None:
        self.bytes = sum(each["bytes"] for each in digests.values())


class NoPublisher(SimpleNamespace):
    """In place of the publisher: this benchmark measures what saving costs (benchmarks/publishing.py: publishing)."""

    def reserve(self, buffer: memoryview) -> None: ...

    def take_blocked_s(self) -> float:
        return 0.0

    def offer(self, number: int, tensors: Any, buffer: memoryview) -> None: ...


class BenchmarkArm:
    """A saver that copies into one kind of memory. All arms have the same learner."""

    def __init__(self, me: StandInWorker, learner: Learner, buffers: HostBuffers) -> None:
        self._buffers = buffers
        publisher: Any = NoPublisher()
        self.saver = AsyncSaver(me, Gang(), learner, Checkpoints(me.run_dir), buffers, publisher, 1)  # type: ignore[arg-type]

    def timed_save(self) -> float:
        """Save a checkpoint; return the time (s) that a step waits for that."""
        begun = time.perf_counter()
        self.saver.save("", {})
        return time.perf_counter() - begun

    def timed_settle(self) -> float:
        """Wait until the checkpoint is committed; return the time (s) that this takes."""
        begun = time.perf_counter()
        self.saver._wait(0)
        return time.perf_counter() - begun


def main() -> None:
    argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0]).parse_args()
    check_requirements("checkpoint")
    print(json.dumps(measure()))


def measure() -> dict[str, Any]:
    """Run the benchmark and print the table; return the content of the last line."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="rrl-bench-") as folder:
        run = RunDir(Path(folder) / "run")
        run.create()
        keys = RunKeys.make()
        server = SnapshotServer(run.id, NodeName("n"), keys, "")
        server.start()
        incarnation = Incarnation(ReplicaId("trainer/0"), 1)
        client = SnapshotClient(run.id, NodeName("n"), keys, incarnation.replica, 0, 1)
        me = StandInWorker(
            run_dir=run, launch=SimpleNamespace(incarnation=incarnation), rank=0, world=1, stopping=threading.Event()
        )
        learner = learner_of_100_million()
        try:
            arms = {
                AGENT_MEMORY: BenchmarkArm(me, learner, HostBuffers(client)),
                OWN_MEMORY: BenchmarkArm(me, learner, HostBuffers()),
            }
            return _measure(me, learner, arms)
        finally:
            client.close()
            server.close()


def _measure(me: StandInWorker, learner: Learner, arms: dict[str, BenchmarkArm]) -> dict[str, Any]:
    batches = fixed_batches()
    learner.step(next(batches))
    for arm in arms.values():  # the first use of each piece of memory is another matter
        for _ in range(2):
            arm.timed_save()
            arm.timed_settle()
    nbytes = arms[OWN_MEMORY].saver.layout.nbytes
    source = torch.ones(nbytes, dtype=torch.uint8)
    memcpy, blocks, writes = [], {name: [] for name in arms}, {name: [] for name in arms}  # type: ignore[var-annotated]
    for _ in range(ROUNDS):
        memcpy.append(_memcpy(arms[OWN_MEMORY], source))
        for name, arm in arms.items():
            blocks[name].append(arm.timed_save())
            writes[name].append(arm.timed_settle())
    del source
    plain_steps: list[float] = []
    steps: dict[str, list[float]] = {name: [] for name in arms}
    for _ in range(ROUNDS):
        plain_steps.append(_steps(learner, batches, None))
        for name, arm in arms.items():
            steps[name].append(_steps(learner, batches, arm))
            arm.timed_settle()
    return _report(me, nbytes, memcpy, blocks, writes, plain_steps, steps)


def _memcpy(own: BenchmarkArm, source: torch.Tensor) -> float:
    """Return the time (s) of a copy between two buffers of private memory whose pages have been touched before."""
    target = torch.frombuffer(own._buffers._own[0], dtype=torch.uint8)[: source.numel()]
    begun = time.perf_counter()
    target.copy_(source)
    return time.perf_counter() - begun


def _steps(learner: Learner, batches: Iterator[Batch], arm: BenchmarkArm | None) -> float:
    """Return the time (s) per step; with an arm, each step is saved and waits for the commit of the step before."""
    begun = time.perf_counter()
    for _ in range(STEPS_PER_ROUND):
        learner.step(next(batches))
        if arm is not None:
            arm.timed_save()
    return (time.perf_counter() - begun) / STEPS_PER_ROUND


def _report(
    me: StandInWorker, nbytes: int, memcpy: list[float], blocks: dict[str, list[float]], writes: dict[str, list[float]],
    plain_steps: list[float], steps: dict[str, list[float]],
) -> dict[str, Any]:  # fmt: skip
    median = statistics.median
    copied, plain = median(memcpy), median(plain_steps)
    rows = [["memcpy of the same bytes", f"{copied * 1e3:.0f}", "", "", "", ""]]
    for name in blocks:
        block = median(blocks[name])
        rows.append([
            name, f"{block * 1e3:.0f}", f"{block / copied:.2f}", f"{(block - 0.02) / copied:.2f}",
            f"{median(writes[name]):.2f}", f"{median(steps[name]) / plain:.2f}",
        ])  # fmt: skip
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, torch {torch.__version__}, 1 thread; "
          f"{nbytes / 1e9:.2f} GB of state, {me.bytes / 1e9:.2f} GB on disk; "
          f"a step without checkpoints {plain:.2f} s; peak {peak:.1f} GiB")  # fmt: skip
    print_table(["", "blocks ms", "/ memcpy", "less 20 ms", "commit s later", "step / without"], rows)
    block = median(blocks[AGENT_MEMORY])
    return {
        "checkpoint_block_over_memcpy": round(block / copied, 3),
        "checkpoint_slowdown": round(median(steps[AGENT_MEMORY]) / plain, 3),
        "block_s": round(block, 4), "memcpy_s": round(copied, 4), "step_s": round(plain, 3),
        "within_bar": block <= 1.3 * copied + 0.02,
        "own_block_over_memcpy": round(median(blocks[OWN_MEMORY]) / copied, 3),
        "own_slowdown": round(median(steps[OWN_MEMORY]) / plain, 3),
        "ran_on": f"{os.cpu_count()} CPU cores, load {os.getloadavg()[0]:.1f}, torch {torch.__version__}",
    }  # fmt: skip


def learner_of_100_million() -> Learner:
    """Return a learner of a model with 100 million parameters."""
    return Learner(build_model(MODEL, VOCABULARY, seed=0), TrainerSettings(), steps=10_000, temperature=1.0)


def fixed_batches() -> Iterator[Batch]:
    """Yield batches with the same trajectories, one for each step."""
    dice = random.Random(0)
    trajectories = tuple(
        Trajectory(
            id=number, group=number // GROUP_SIZE,
            prompt=tuple(dice.randrange(VOCABULARY) for _ in range(PROMPT_TOKENS)),
            tokens=tuple(dice.randrange(VOCABULARY) for _ in range(ANSWER_TOKENS)), logprobs=(-9.7,) * ANSWER_TOKENS,
            versions=(Version(0, 1),) * ANSWER_TOKENS, reward=dice.random(), training=dice.random(),
        )
        for number in range(TRAJECTORIES)
    )  # fmt: skip
    for number in itertools.count(1):
        yield Batch(number, (), "", trajectories)


if __name__ == "__main__":
    main()
