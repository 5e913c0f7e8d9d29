"""Compares leases by expected length with first come, first served, in whole runs with vLLM.

The rollouts' engines are vLLM with a small model, whose time per token rises steeply with the number of running answers
(benchmarks/_pace.py). Two engines have places for half of the answers of a step. The lengths of the answers have a long
tail that the prompts explain in part (benchmarks/_stream_task.py). Both arms run at the same time with the same
prompts. Steps are on-policy and trained as whole batches, and training is not slowed down to any pace. So the time of a
step is the time of its generation. The first steps, in which the store learns lengths, are left out.
"""

from __future__ import annotations

import statistics
from typing import Any

from msgspec.structs import replace

from rrl.benchmarks._pace import Tau
from rrl.benchmarks._stream_task import MODEL, write_model
from rrl.benchmarks._table import print_table
from rrl.benchmarks.stream import FIRST_STEP, Arm, run_together
from rrl.tests.support.supervisor import temporary_runs_folder

LEARNING_STEPS = 8
"""Number of first steps that do not count. After four of them the store has learned from 60 groups, which usually
suffice to lease answers by expected length."""
STEEP = Tau(20e-3, 4e-3)
"""Seconds per token, as on a CPU ("linear" in benchmarks/dispatch.py)."""
SHAPE = replace(MODEL, head_dim=32)
"""A model with the smallest head size for which vLLM has kernels for CPUs."""
BY_LENGTH = Arm(
    "by length", 16, 0, False, steps=28, learning_rate=1e-5, lease=16, tau=STEEP, token_s=0.0, engine="vllm"
)
ARMS = (replace(BY_LENGTH, name="first come", first_come=True), BY_LENGTH)


def measure(seeds: int) -> dict[str, Any]:
    """Run both arms and print a table; return the ratio of their seconds and the seconds of each step that counts."""
    seconds: dict[str, list[list[float]]] = {arm.name: [] for arm in ARMS}
    rows = []
    with temporary_runs_folder() as folder:
        write_model(folder / "model", SHAPE)
        for seed in range(seeds):
            for sample, _ in run_together(ARMS, seed, folder / "model", folder):
                seconds[sample.arm].append(sample.step_s[LEARNING_STEPS + 1 - FIRST_STEP :])
                rows.append(
                    [
                        sample.arm,
                        str(seed),
                        f"{statistics.mean(seconds[sample.arm][-1]):.2f}",
                        f"{sample.tokens:.0f}",
                        f"{sample.overrun['rollout']:.3f}",
                        f"{sample.load[0]:.0f} to {sample.load[1]:.0f}",
                    ]
                )
    print_table(("vLLM, paced", "seed", "step s", "tokens", "overrun", "load"), rows)
    first_come, by_length = (sum(map(sum, seconds[arm.name])) for arm in ARMS)
    return {"real_over_fifo": round(by_length / first_come, 4), "real_seconds": seconds}
