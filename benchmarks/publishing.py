"""Measures what publishing in each step costs the training thread, with 100 million parameters in one process.

Each arm trains the same fixed batch and copies the state of each step to host memory, as the saver does, but writes no
files. benchmarks/checkpoint.py measures the writing. One arm then waits until the weights are published as bfloat16, as
if the training thread published them. One arm leaves the publishing to the publishing thread and continues. One arm
does not publish. The arms take turns within one run. There are three results: the share of a step for which the
training thread waits for publishing; how much longer whole steps take than without publishing; and how many steps pass
from the end of a step until rollouts can pull its version. Prints a table, and one JSON object as its last line. Needs
6 GB of memory.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import time
from collections.abc import Iterator
from typing import Any

import torch
from msgspec import Struct, field

from rrl.benchmarks._provenance import provenance
from rrl.benchmarks._requirements import check_requirements
from rrl.benchmarks._table import print_table
from rrl.benchmarks.checkpoint import fixed_batches, learner_of_100_million, train_step
from rrl.roles.trainer.host_buffers import Layout
from rrl.roles.trainer.learner import Learner
from rrl.roles.trainer.process_group import Gang
from rrl.roles.trainer.publisher import Publisher
from rrl.roles.trajectories.batches import Batch
from rrl.tests.support.roles.trainer.publishing import PublishingWorker

ROUNDS = 5
STEPS_PER_ROUND = 2
"""Number of steps of each arm in each round; the arms take turns."""
BUFFERS = 2
"""Host buffers that are used in turn, as many as an agent provides."""
NONE, IN_TRAINING_THREAD, BESIDE = "no publishing", "in the training thread", "beside the step"
MAX_BLOCKED_SHARE = 0.01
"""Largest share of a step for which the training thread may wait while the publishing thread publishes."""


class TimedWorker(PublishingWorker):
    """Records the time from which each version can be pulled."""

    def __init__(self) -> None:
        super().__init__()
        self.available_at: dict[int, float] = {}

    def publish_written(self, number: int, *words: Any) -> None:
        super().publish_written(number, *words)
        self.available_at[number] = time.perf_counter()


class Times(Struct):
    """The times of one arm in seconds: for each step, or for each round."""

    steps: list[float] = field(default_factory=list)
    """Mean time of a step, for each round."""
    blocked: list[float] = field(default_factory=list)
    """For each step, the time in which the training thread handed over the weights and waited for their publishing."""
    until_available: list[float] = field(default_factory=list)
    """Time from the end of each step whose version was published until the version could be pulled."""


class BenchmarkArm:
    """A way to publish; all arms share the learner and the host buffers."""

    def __init__(self, name: str, learner: Learner, buffers: list[memoryview]) -> None:
        self._name, self._learner, self._buffers = name, learner, buffers
        self._tensors = learner.tensors()
        self._layout = Layout(self._tensors)
        self._worker = TimedWorker()
        me: Any = self._worker
        self._publisher = Publisher(me, Gang(), learner, torch.bfloat16)
        self.times = Times()

    def run_steps(self, batches: Iterator[Batch], count: int) -> None:
        """Train ``count`` steps, and then wait for the publishing thread. The step times do not include this wait."""
        begun, ended_at = time.perf_counter(), dict[int, float]()
        for _ in range(count):
            train_step(self._learner, next(batches))
            ended_at[self._learner.number] = time.perf_counter()
            self._save()
        self.times.steps.append((time.perf_counter() - begun) / count)
        self._wait_until_published(self._learner.number)
        available = self._worker.available_at
        self.times.until_available += [available[step] - at for step, at in ended_at.items() if step in available]

    def _save(self) -> None:
        number, buffer = self._learner.number, self._buffers[self._learner.number % len(self._buffers)]
        begun = time.perf_counter()
        self._publisher.reserve(buffer)
        blocked = time.perf_counter() - begun
        self._layout.fill(buffer, self._tensors)
        if self._name != NONE:
            begun = time.perf_counter()
            self._publisher.offer(number, self._layout.views(buffer), buffer)
            if self._name == IN_TRAINING_THREAD:
                self._wait_until_published(number)
            blocked += time.perf_counter() - begun
        self.times.blocked.append(blocked)

    def _wait_until_published(self, number: int) -> None:
        if self._name != NONE:
            self._publisher._wait(lambda: self._publisher._published >= number)

    def close(self) -> None:
        self._publisher.finish()


def main() -> None:
    argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0]).parse_args()
    check_requirements("publishing")
    print(json.dumps(measure() | provenance()))


def measure() -> dict[str, Any]:
    """Run the benchmark and print the table; return the content of the last line."""
    torch.set_num_threads(1)
    learner, batches = learner_of_100_million(), fixed_batches()
    nbytes = Layout(learner.tensors()).nbytes
    buffers = [memoryview(bytearray(nbytes)) for _ in range(BUFFERS)]
    arms = {name: BenchmarkArm(name, learner, buffers) for name in (NONE, IN_TRAINING_THREAD, BESIDE)}
    for arm in arms.values():  # the first use of each piece of memory is slower
        arm.run_steps(batches, 2)
        arm.times = Times()
    for _ in range(ROUNDS):
        for arm in arms.values():
            arm.run_steps(batches, STEPS_PER_ROUND)
    for arm in arms.values():
        arm.close()
    return _report({name: arm.times for name, arm in arms.items()}, sum(t.numel() for t in learner.weights().values()))


def _report(times: dict[str, Times], parameters: int) -> dict[str, Any]:
    median = statistics.median
    plain = median(times[NONE].steps)
    blocked = {name: median(each.blocked) / median(each.steps) for name, each in times.items()}
    worst = {name: max(each.blocked) / median(each.steps) for name, each in times.items()}
    slower = {
        name: median(own / base for own, base in zip(each.steps, times[NONE].steps, strict=True))
        for name, each in times.items()
    }
    lag = {name: median(each.until_available) / plain for name, each in times.items() if each.until_available}
    rows = [
        [
            name,
            f"{median(each.steps):.2f}",
            f"{median(each.blocked) * 1e3:.1f}",
            f"{blocked[name]:.2%}",
            f"{worst[name]:.2%}",
            f"{slower[name]:.3f}",
            f"{lag[name]:.2f}" if name in lag else "",
        ]
        for name, each in times.items()
    ]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(
        f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, torch {torch.__version__}, 1 thread; "
        f"{parameters / 1e6:.0f} million parameters, published as bfloat16; peak {peak:.1f} GiB"
    )
    heads = ["", "step s", "blocked ms", "of a step", "at most", "step / without", "steps until it can be pulled"]
    print_table(heads, rows)
    return {
        "publish_blocked_share": round(blocked[BESIDE], 5),
        "publish_blocked_share_worst_step": round(worst[BESIDE], 5),
        "publish_blocked_share_in_training_thread": round(blocked[IN_TRAINING_THREAD], 5),
        "publish_slowdown": round(slower[BESIDE], 3),
        "publish_slowdown_in_training_thread": round(slower[IN_TRAINING_THREAD], 3),
        "weights_lag_steps": round(lag[BESIDE], 3),
        "weights_lag_steps_in_training_thread": round(lag[IN_TRAINING_THREAD], 3),
        "step_s": round(plain, 3),
        "within_bar": blocked[BESIDE] <= MAX_BLOCKED_SHARE,
        "ran_on": f"{os.cpu_count()} CPU cores, load {os.getloadavg()[0]:.1f}, torch {torch.__version__}",
    }


if __name__ == "__main__":
    main()
