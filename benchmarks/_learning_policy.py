"""Runs that show whether the defaults keep a good policy good, and whether the examples learn."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

from rrl.benchmarks._quickstart import QUICKSTART, quickstart_with
from rrl.benchmarks._requirements import Need, missing
from rrl.tests.support.runs import TestRun, submit_here

EXAMPLES = QUICKSTART.parent
SEEDS = (0, 1, 2)
ROWS = 80
"""Rows of the prompt file of the good policy."""
STEPS = 40
EVALUATED_EVERY = 10
TIMEOUT_S = 3600.0
_GOOD = """
[run]
name = "good"
steps = {steps}
seed = {seed}
[cluster]
kind = "local"
node = {{ cpus = 2, mem = "3GiB" }}
[task]
file = "rows.jsonl"
[eval]
every = {every}
samples = 16                    # 1,600 answers: their mean is off by less than 0.01
temperature = 1.0
task = {{ file = "all.jsonl" }}
[model]
{model}
[sampling]
max_new_tokens = 3
[roles.trainer]
{trainer}
[roles.rollout]
replicas = 1
lease = 256
"""
_BUILT = """hidden_size = 64
layers = 2
tokenizer = { pieces = "0123456789+=" }"""


def measure(folder: Path) -> tuple[dict[str, float], dict[str, list[float]]]:
    changes = [good_stays_good(folder / f"good-{seed}", seed) for seed in SEEDS]
    quickstart = quickstart_reward(folder / "quickstart")
    return {"good_stays_good": min(changes), "quickstart_reward": quickstart}, {"good_stays_good": changes}


def measure_path(folder: Path) -> tuple[dict[str, float], dict[str, list[float]]]:
    if why := missing(Need.VLLM) or missing(Need.SMOLLM2):
        print(f"path_learns is left out: {why}", flush=True)
        return {}, {}
    return {"path_learns": path_learns(folder)}, {}


def good_stays_good(folder: Path, seed: int) -> float:
    """Make a policy that answers most sums right, train it with all defaults, and return the worst change."""
    rows = [
        row for name in ("train", "held_out") for row in (EXAMPLES / "sums" / f"{name}.jsonl").read_text().splitlines()
    ]
    model = folder / "model"
    made = _good_run(folder / "before", rows, seed, 1, _BUILT, "warm_start_steps = 400")
    exported = made.call("export", made.run.id, str(model), stdout=subprocess.DEVNULL)
    assert exported.wait(TIMEOUT_S) == 0
    run = _good_run(folder / "after", rows, seed, STEPS, f"path = {json.dumps(str(model))}", "")
    before, *after = _evaluated(run)
    print(f"good_stays_good, seed {seed}: {before:.3f}, then {', '.join(f'{each:.3f}' for each in after)}", flush=True)
    assert len(after) == STEPS // EVALUATED_EVERY
    assert before > 0.8, "the policy is not good"
    return min(after) - before


def _good_run(folder: Path, rows: list[str], seed: int, steps: int, model: str, trainer: str) -> TestRun:
    folder.mkdir(parents=True)
    (folder / "rows.jsonl").write_text("\n".join(rows[:ROWS]) + "\n")
    (folder / "all.jsonl").write_text("\n".join(rows) + "\n")
    every = min(steps, EVALUATED_EVERY)
    return _complete(folder, _GOOD.format(steps=steps, seed=seed, every=every, model=model, trainer=trainer))


def quickstart_reward(folder: Path) -> float:
    """Return the mean reward of the quickstart's last ten steps."""
    folder.mkdir(parents=True)
    return float(_complete(folder, quickstart_with([])).summary()["reward_last10"])


def path_learns(folder: Path) -> float:
    """Return what the run of docs/first-run.md changes in its evaluation."""
    shutil.copytree(EXAMPLES / "first_run", folder / "first_run")
    run = _complete(folder, (EXAMPLES / "first_run.toml").read_text())
    before, after = _evaluated(run)
    print(f"path_learns: {before:.3f}, then {after:.3f} after {run.summary()['run_seconds']:.0f} s", flush=True)
    return after - before


def _complete(folder: Path, toml: str) -> TestRun:
    run = submit_here(folder, toml)
    state = run.wait_end(TIMEOUT_S)
    assert state.outcome == "completed", state.why
    run.wait_gone()
    return run


def _evaluated(run: TestRun) -> list[float]:
    """Return the mean reward of each evaluation, the one before the first step included."""
    return [each["metrics"]["reward"] for each in run.summary()["evaluations"]]
