"""The arms of benchmarks/ettr.py that run as whole runs of rrl, and the job.toml of each arm.

All arms have the same faults of the trainer, and run the quickstart's real roles, with two rollouts. Their pace is that
of benchmarks/_pace.py: a training step, and the generation of a batch beside it, take a fixed time, which does not
depend on the speed of this machine's two cores.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path

from msgspec import Struct

from rrl.benchmarks._quickstart import quickstart_with

PAPER_STEP_S = 42.0
"""Seconds of a step in RobustRL's headline experiment, computed from its figures (docs/sources.md)."""
WINDOW_S, BACKOFF_S = 600.0, 1.0
"""Default window (s) of the restarts' budgets, and default time (s) before the second restart."""
ANSWER_TOKENS = 5
"""Number of tokens of nearly every answer of the quickstart: four digits and the end token."""
TAIL_MEAN_TOKENS = 14.5
"""Mean number of tokens of an answer of benchmarks/_stream_task.py: 9.5 points, four letters and the end token."""
TAIL_LONGEST_TOKENS = 80
"""Largest number of tokens of an answer with a long tail. In a batch of 256, one answer nearly always reaches it."""
STEP_TRAJECTORIES = 256
GENERATION_SHARE = 0.75
"""Seconds that the rollouts take for a batch, divided by those that the trainer takes for a step. Generation runs
beside training (``ahead = 1``), and leases, scores and the transfer of weights are added to it: 0.2 s with steps of 1 s
(docs/benchmarks.md). Generation must stay shorter than training. Otherwise the trainer catches up after each outage on
data that rollouts prepared during the outage, and the outage looks cheaper than it is."""


class Workload(Struct, frozen=True):
    """How the work of a step is divided. ``train`` and ``generate`` are fractions of the length of a step."""

    name: str
    train: float
    generate: float
    """Time that the rollouts take for a batch; with ``tail``, the time that they take for its longest answer."""
    tail: bool = False
    """Whether the lengths of answers have a long tail (benchmarks/_stream_task.py)."""


BALANCED = Workload("generation = training", train=1.0, generate=GENERATION_SHARE)
GENERATION_BOUND = Workload("generation = 3 x training", train=0.3, generate=GENERATION_SHARE)
HEAVY_TAIL = Workload("heavy tail", train=1.0, generate=GENERATION_SHARE, tail=True)


class Arm(Struct, frozen=True):
    """One way to answer failures."""

    name: str
    faults: bool
    policy: str = "role"
    protected: bool = True
    """Whether the trainer has a standby process and snapshots."""
    spares: int = 1
    full_restarts: int = 2
    checkpoint_every: int = 1


ARMS: Mapping[str, Arm] = {
    arm.name: arm
    for arm in (
        Arm("clean", faults=False, protected=False, spares=0, checkpoint_every=10**6),
        Arm("clean_ft", faults=False),
        Arm("role", faults=True),
        Arm("role_cold", faults=True, protected=False),
        Arm("job", faults=True, policy="job", full_restarts=1000),
    )
}
"""The arms that run on Slurm as whole runs of rrl, in the order in which each round runs them."""


def job(
    arm: Arm,
    cluster: str,
    steps: int,
    step_s: float,
    seed: int,
    record: Path,
    workload: Workload = BALANCED,
    model: Path | None = None,
) -> str:
    """Return job.toml of a run.

    Args:
        arm: What the run turns on.
        cluster: ``slurm`` or ``local``.
        steps: Number of training steps.
        step_s: Seconds that a step takes at least.
        seed: Seed of the run: prompts, weights and samples.
        record: Folder in which the paced roles record the times of their work.
        workload: How the work of a step is divided.
        model: Folder of the model of a workload with a long tail (``write_model`` of benchmarks/_stream_task.py).
    """
    mean, longest = (TAIL_MEAN_TOKENS, TAIL_LONGEST_TOKENS) if workload.tail else (ANSWER_TOKENS, ANSWER_TOKENS)
    commands = {
        "trainer": ("--token-s", f"{workload.train * step_s / (STEP_TRAJECTORIES * mean):.8f}"),
        "rollout": ("--tau", f"{workload.generate * step_s / longest:.8f}", "0"),
    }
    program = [sys.executable, "-m", "rrl.benchmarks._pace"]
    settings = {
        role: f"command = {json.dumps([*program, role, '--record', str(record), *options])}\n"
        for role, options in commands.items()
    }
    if not arm.protected:
        settings["trainer"] += "warm = false\nsnapshots = false\n"
    if arm.checkpoint_every > 1:
        settings["trainer"] += f"checkpoint_every = {min(arm.checkpoint_every, steps)}\n"
    changes = (
        ("steps = 300", f"steps = {steps}"),
        ("seed = 0", f"seed = {seed}"),
        ('kind = "local"', f'kind = "{cluster}"'),
        ("spares = 1", f"spares = {arm.spares}"),
        *(_long_tail(model) if workload.tail else ()),
        ("[roles.trainer]\n", f"[roles.trainer]\n{settings['trainer']}"),
        ("[roles.rollout]\n", f"[roles.rollout]\n{settings['rollout']}"),
        ("[limits]\n", '[limits]\nheartbeat = "200ms"\n'),
    )
    return f"{quickstart_with(changes)}\n{budgets(arm, step_s)}"


def _long_tail(model: Path | None) -> tuple[tuple[str, str], ...]:
    """Return the changes of the quickstart for a task whose answers have a long tail."""
    assert model is not None, "a workload with a long tail needs a model"
    return (
        ('dataset = "spiral_matrix"\n', 'function = "rrl.benchmarks._stream_task:make"\n'),
        ("args = { min_n = 2, max_n = 2 }\n", ""),
        ('prompt = "{metadata[matrix]}="\n', ""),
        ("partial_credit = 0.5 ", ""),
        ("hidden_size = 64\nlayers = 2\n", f'path = "{model}"\n'),
        ('tokenizer = { pieces = "0123456789=", join = " ", ignore = "[], " }\n', ""),
        ("max_new_tokens = 5\n", f"max_new_tokens = {TAIL_LONGEST_TOKENS}\n"),
        ("warm_start_steps = 30 ", "learning_rate = 0.001\nentropy = 0.02 "),
    )


def budgets(arm: Arm, step_s: float) -> str:
    """Return the table ``[recovery]``: the default budgets, with their seconds shortened in proportion to the steps."""
    scale = step_s / PAPER_STEP_S
    return f"""[recovery]
policy = "{arm.policy}"
window = "{1000 * WINDOW_S * scale:.0f}ms"
backoff = "{1000 * BACKOFF_S * scale:.0f}ms"
full_restarts = {arm.full_restarts}
"""
