"""The part ``unlike`` of benchmarks/elastic.py: a pool of slow rollouts, and answers whose lengths differ.

The store learns the time per token of each rollout and the lengths of the answers to each kind of prompt. As shipped it
leases long answers to fast rollouts. With ``staleness = 0`` a step ends with its last answer, so an answer that a slow
rollout was given too late is seen in the time of the step. The two runs of a seed work at the same time.
"""

from __future__ import annotations

import statistics
from itertools import pairwise
from pathlib import Path
from typing import Any

from rrl.benchmarks._elastic_runs import PLACES, RUN_TIMEOUT_S, TOKEN_S, commit_times, job, role_command
from rrl.benchmarks._table import print_table
from rrl.core.types import Outcome
from rrl.tests.support.runs import TestRun, check_sound, submit_here
from rrl.tests.support.supervisor import temporary_runs_folder

REPLICAS = 3
"""Number of rollouts of each pool."""
SLOWER = 3.0
TOKENS = 24.0
PROMPTS = 16
STEPS, FIRST_STEP = 16, 6
"""Number of steps, and the first step that counts. The store has learned the times and the lengths by then."""
ARMS = ("shipped", "first come")


def measure(seeds: int) -> tuple[dict[str, float | None], dict[str, Any]]:
    """Return the figure of this part, and its samples: the seconds of each step, by arm and seed."""
    kept: dict[str, list[list[float]]] = {arm: [] for arm in ARMS}
    with temporary_runs_folder() as folder:
        for seed in range(seeds):
            runs = {arm: _submit(arm, seed, folder) for arm in ARMS}
            for arm, run in runs.items():
                state = run.wait_end(RUN_TIMEOUT_S)
                assert state.outcome is Outcome.COMPLETED, f"{run.run.id}: {state.outcome} {state.why}"
                run.wait_gone(60.0)
                check_sound(run.run)
                times = commit_times(run.events())
                commits = [times[step] for step in range(FIRST_STEP - 1, STEPS + 1)]
                kept[arm].append([round(after - before, 3) for before, after in pairwise(commits)])
    means = {arm: statistics.mean(seconds for steps in kept[arm] for seconds in steps) for arm in ARMS}
    rows = [[arm, *(f"{statistics.mean(steps):.2f}" for steps in kept[arm])] for arm in ARMS]
    print_table(("leases", *(f"step s, seed {seed}" for seed in range(seeds))), rows)
    return {"step_ratio": means["first come"] / means["shipped"]}, kept


def _submit(arm: str, seed: int, folder: Path) -> TestRun:
    def rollout(token_s: float) -> str:
        return role_command("rollout", places=PLACES, token_s=token_s, tokens=TOKENS, chunk=8, by_prompt=True)

    slow = f"[rollouts.slow]\nreplicas = {REPLICAS}\ncommand = {rollout(SLOWER * TOKEN_S)}\n"
    toml = job(
        seed,
        steps=STEPS,
        prompts=PROMPTS,
        rollouts=REPLICAS,
        sampling="staleness = 0",
        trainer=f"warm = false\ncommand = {role_command('trainer', step_s=0.1)}",
        rollout=f"lease = {PLACES}\ncommand = {rollout(TOKEN_S)}",
        store=f"command = {role_command('trajectories')}" if arm == "first come" else "",
        extra=slow,
    )
    place = folder / f"{arm.replace(' ', '-')}-{seed}"
    place.mkdir()
    return submit_here(place, toml)
