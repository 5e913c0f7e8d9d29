"""Measures what a checkpoint in each step costs the trainer, with 100 million parameters in one process.

There are two results. One is the time that a step waits for the copy of the state, compared with a memcpy of the same
bytes. The other is how much longer whole steps with a fixed batch take with checkpoints than without. The state is
copied into memory of an agent (snapshots on, the default) or into the trainer's own memory (snapshots off), and is then
written as safetensors in the background, with fsync and digests, while the next step computes. A step
waits until the checkpoint of the previous step is committed (``uncommitted = 1``). The two ways to copy take turns.

With ``--every N``, only each Nth step gets a checkpoint (``[roles.trainer] checkpoint_every``). Other steps only copy
the state. The default is 1, as in a job.

The time of whole steps covers ten steps in a row. While each step (with ``--every N``: each Nth) is computed, the
checkpoint of the previous step is written. A write is already under way when the time begins, so the result is the
steady state: a step takes as long as its computation or as the write, whichever is longer. The write shares this
machine's cores with the step, where a real step would run on a GPU.

Prints a table. The last line is one JSON object (benchmarks/_provenance.py): ``checkpoint_slowdown`` is the mean time
of ten steps divided by the mean time of ten steps without checkpoints. Needs 7 GB of memory and 5 GB of $TMPDIR.
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
from msgspec import Struct, field
from msgspec.structs import asdict

from rrl.benchmarks._provenance import provenance, raw_samples, spread
from rrl.benchmarks._requirements import check_requirements
from rrl.benchmarks._table import print_table
from rrl.core.run_dir import RunDir
from rrl.core.run_spec import ModelSpec, TrainerSettings
from rrl.core.types import Incarnation, NodeName, ReplicaId, Version
from rrl.roles.checkpoints.folders import Digest, fresh_folder
from rrl.roles.checkpoints.retention import CheckpointCleaner, CommitStatus
from rrl.roles.models.policy import build_model
from rrl.roles.snapshots.client import SnapshotClient
from rrl.roles.snapshots.server import SnapshotServer
from rrl.roles.trainer.async_saver import AsyncSaver
from rrl.roles.trainer.checkpoint import Checkpoints
from rrl.roles.trainer.host_buffers import HostBuffers
from rrl.roles.trainer.learner import Learner
from rrl.roles.trainer.process_group import Gang
from rrl.roles.trajectories.batches import Batch
from rrl.roles.trajectories.types import Trajectory
from rrl.transport.keys import RunKeys

MODEL = ModelSpec(
    hidden_size=768,
    intermediate_size=2048,
    layers=12,
    heads=12,
    kv_heads=4,
    head_dim=64,
    max_length=128,
    initializer_range=0.02,
)
VOCABULARY = 16_000
TRAJECTORIES, GROUP_SIZE, PROMPT_TOKENS, ANSWER_TOKENS = 16, 4, 8, 16
"""Sizes of the fixed batch: number of all trajectories, trajectories in a group, tokens of a prompt, tokens of an
answer."""
ROUNDS = 3
STEPS_PER_ROUND = 10
"""Number of timed steps of each arm in each round."""
EVERY = (1, 2, 5)
"""Permitted values of ``--every``. All of them divide ``STEPS_PER_ROUND``, so each arm begins and ends with a
checkpoint."""
COPIES_PER_ROUND = 2
"""Number of copies of each arm in each round."""
COMMIT_TIMEOUT_S = 300.0
"""Time (s) within which a checkpoint must be committed."""
WITHOUT, OWN_MEMORY, AGENT_MEMORY = "without checkpoints", "own memory", "agent's memory"
ARMS = (AGENT_MEMORY, OWN_MEMORY)


class StandInWorker(SimpleNamespace):
    """The part of :class:`rrl.Worker` that a saver needs.

    As in a run, a commit leads to the deletion of old checkpoints. ``commits`` is a semaphore that each commit
    releases.
    """

    def idle(self, cause: str) -> AbstractContextManager[object]:
        return nullcontext()

    def checkpoint_dir(self, number: int) -> Path:
        return fresh_folder(self.run_dir.checkpoints, number, 1)

    def commit(self, number: int, files: Sequence[Path], metrics: Any, digests: dict[str, Digest]) -> None:
        self.bytes = sum(each["bytes"] for each in digests.values())
        self.cleaner.update(CommitStatus(number, 1, {number: files[0].parent.name}))
        self.commits.release()


class NoPublisher(SimpleNamespace):
    """Replaces the publisher and publishes nothing, because benchmarks/publishing.py measures what publishing costs."""

    def reserve(self, buffer: memoryview) -> None: ...

    def take_blocked_s(self) -> float:
        return 0.0

    def offer(self, number: int, tensors: Any, buffer: memoryview) -> None: ...


class BenchmarkArm:
    """A saver that copies into one kind of memory. All arms have the same learner.

    Args:
        me: The worker whose steps are saved.
        learner: The learner.
        buffers: The memory into which the state is copied.
        every: With the value N, each Nth step gets a checkpoint.
    """

    def __init__(self, me: StandInWorker, learner: Learner, buffers: HostBuffers, every: int) -> None:
        self._me, self._learner, self._buffers, self._every, self._uncommitted = me, learner, buffers, every, 0
        publisher: Any = NoPublisher()
        self.saver = AsyncSaver(
            me,  # type: ignore[arg-type]
            Gang(),
            learner,
            Checkpoints(me.run_dir),
            buffers,
            publisher,
            1,
            is_checkpoint_step=self._is_checkpoint_step,
        )

    def _is_checkpoint_step(self, number: int) -> bool:
        return number % self._every == 0

    def timed_save(self) -> float:
        """Save the learner's step; return the time (s) that a step waits for the save."""
        begun = time.perf_counter()
        self.saver.save("", {})
        seconds = time.perf_counter() - begun
        self._uncommitted += self._is_checkpoint_step(self._learner.number)
        return seconds

    def timed_settle(self) -> float:
        """Wait until every checkpoint is committed; return the time (s) that this takes."""
        begun = time.perf_counter()
        for _ in range(self._uncommitted):
            assert self._me.commits.acquire(timeout=COMMIT_TIMEOUT_S), "no commit"
        self._uncommitted = 0
        return time.perf_counter() - begun


class Samples(Struct):
    """Measured times (s) by arm, in the order of their measurement."""

    memcpy: list[float] = []
    blocks: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in ARMS})
    """Time (s) that a step waits for the copy of its state, for each copy."""
    writes: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in ARMS})
    """Times from the end of a copy until its checkpoint is committed, while no step is computed."""
    steps: dict[str, list[list[float]]] = field(default_factory=lambda: {name: [] for name in (WITHOUT, *ARMS)})
    """Times of the steps of each round."""

    def slowdowns(self, arm: str) -> list[float]:
        """Return for each round the mean time of a step divided by that of a step without checkpoints."""
        pairs = zip(self.steps[arm], self.steps[WITHOUT], strict=True)
        return [statistics.mean(steps) / statistics.mean(plain) for steps, plain in pairs]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--every", type=int, choices=EVERY, default=1, help="number of steps with one checkpoint")
    options = parser.parse_args()
    check_requirements("checkpoint")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="rrl-bench-") as folder:
        run = RunDir(Path(folder) / "run")
        run.create()
        keys = RunKeys.make()
        server = SnapshotServer(run.id, NodeName("n"), keys, "")
        server.start()
        incarnation = Incarnation(ReplicaId("trainer/0"), 1)
        client = SnapshotClient(run.id, NodeName("n"), keys, incarnation.replica, 0, 1)
        with CheckpointCleaner(run.checkpoints, keep_checkpoints=2) as cleaner:
            me = StandInWorker(
                run_dir=run,
                launch=SimpleNamespace(incarnation=incarnation),
                rank=0,
                world=1,
                stopping=threading.Event(),
                cleaner=cleaner,
                commits=threading.Semaphore(0),
            )
            learner = learner_of_100_million()
            try:
                arms = {
                    AGENT_MEMORY: BenchmarkArm(me, learner, HostBuffers(client), options.every),
                    OWN_MEMORY: BenchmarkArm(me, learner, HostBuffers(), options.every),
                }
                samples = measure(learner, arms, options.rounds, options.every)
            finally:
                client.close()
                server.close()
    report(samples, arms[OWN_MEMORY].saver.layout.nbytes, me.bytes, options.every)


def measure(learner: Learner, arms: dict[str, BenchmarkArm], rounds: int, every: int) -> Samples:
    """Measure copies, writes and whole steps; the arms take turns."""
    samples, batches = Samples(), fixed_batches()
    for _ in range(every):  # train up to a step with a checkpoint
        train_step(learner, next(batches))
    for arm in arms.values():  # the first use of each piece of memory is slower
        for _ in range(2):
            arm.timed_save()
            arm.timed_settle()
    source = torch.ones(arms[OWN_MEMORY].saver.layout.nbytes, dtype=torch.uint8)
    for _ in range(rounds * COPIES_PER_ROUND):
        samples.memcpy.append(_memcpy(arms[OWN_MEMORY], source))
        for name, arm in arms.items():
            samples.blocks[name].append(arm.timed_save())
            samples.writes[name].append(arm.timed_settle())
    del source
    for turn in range(rounds):
        samples.steps[WITHOUT].append([_step(learner, batches, None) for _ in range(STEPS_PER_ROUND)])
        for name, arm in arms.items():
            for _ in range(every):
                _step(learner, batches, arm)  # the write of the last step is under way when the timed steps begin
            samples.steps[name].append([_step(learner, batches, arm) for _ in range(STEPS_PER_ROUND)])
            arm.timed_settle()
        print(f"round {turn + 1} of {rounds}", flush=True)
    return samples


def _memcpy(own: BenchmarkArm, source: torch.Tensor) -> float:
    """Return the time (s) of a copy between two buffers of private memory whose pages have been touched before."""
    target = torch.frombuffer(own._buffers._own[0], dtype=torch.uint8)[: source.numel()]
    begun = time.perf_counter()
    target.copy_(source)
    return time.perf_counter() - begun


def _step(learner: Learner, batches: Iterator[Batch], arm: BenchmarkArm | None) -> float:
    """Return the time (s) of a step; with an arm, the step is also saved, after the commit of the previous step."""
    begun = time.perf_counter()
    train_step(learner, next(batches))
    if arm is not None:
        arm.timed_save()
    return time.perf_counter() - begun


def report(samples: Samples, nbytes: int, on_disk: int, every: int) -> None:
    """Print the table and the JSON line.

    Args:
        samples: The measured times.
        nbytes: Bytes of the state.
        on_disk: Bytes of a checkpoint.
        every: With the value N, each Nth step got a checkpoint.
    """
    median = statistics.median
    copied = median(samples.memcpy)
    plain = [step for steps in samples.steps[WITHOUT] for step in steps]
    rows = [["memcpy of the same bytes", f"{copied * 1e3:.0f}", "", "", "", ""]]
    for name in ARMS:
        block, slowdowns = median(samples.blocks[name]), samples.slowdowns(name)
        rows.append(
            [
                name,
                f"{block * 1e3:.0f}",
                f"{block / copied:.2f}",
                f"{median(samples.writes[name]):.2f}",
                f"{median(slowdowns):.2f}",
                f"{min(slowdowns):.2f} to {max(slowdowns):.2f}",
            ]
        )
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(
        f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, torch {torch.__version__}, 1 thread; "
        f"{nbytes / 1e9:.2f} GB of state, {on_disk / 1e9:.2f} GB on disk; "
        f"a step without checkpoints {median(plain):.2f} s; peak {peak:.1f} GiB"
    )
    print_table(["", "blocks ms", "/ memcpy", "commit s later", "step / without", "range"], rows)
    block = median(samples.blocks[AGENT_MEMORY])
    figures = {
        "checkpoint_block_over_memcpy": round(block / copied, 3),
        "checkpoint_slowdown": spread(samples.slowdowns(AGENT_MEMORY)),
        "block_s": spread(samples.blocks[AGENT_MEMORY]),
        "memcpy_s": spread(samples.memcpy),
        "commit_s": spread(samples.writes[AGENT_MEMORY]),
        "step_s": spread(plain),
        "within_bar": block <= 1.3 * copied + 0.02,
        "own_block_over_memcpy": round(median(samples.blocks[OWN_MEMORY]) / copied, 3),
        "own_slowdown": spread(samples.slowdowns(OWN_MEMORY)),
        "steps_per_round": STEPS_PER_ROUND,
        "checkpoint_every": every,
    }
    raw = raw_samples("checkpoint", asdict(samples))
    print(json.dumps(figures | provenance() | {"raw": str(raw)}))


def learner_of_100_million() -> Learner:
    """Return a learner of a model with 100 million parameters."""
    return Learner(build_model(MODEL, VOCABULARY, seed=0), TrainerSettings(), steps=10_000, temperature=1.0)


def train_step(learner: Learner, batch: Batch) -> None:
    learner.open(batch.number)
    learner.add(batch)
    learner.close()


def fixed_batches() -> Iterator[Batch]:
    """Yield a batch for each step; all batches have the same trajectories."""
    dice = random.Random(0)
    trajectories = tuple(
        Trajectory(
            id=number,
            group=number // GROUP_SIZE,
            prompt=tuple(dice.randrange(VOCABULARY) for _ in range(PROMPT_TOKENS)),
            tokens=tuple(dice.randrange(VOCABULARY) for _ in range(ANSWER_TOKENS)),
            logprobs=(-9.7,) * ANSWER_TOKENS,
            versions=(Version(0, 1),) * ANSWER_TOKENS,
            reward=dice.random(),
            training=dice.random(),
        )
        for number in range(TRAJECTORIES)
    )
    for number in itertools.count(1):
        yield Batch(number, (), "", trajectories)


if __name__ == "__main__":
    main()
