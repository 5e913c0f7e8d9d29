"""The arms of benchmarks/ettr.py, which the trainer's faults hit alike: what each one turns on, as job.toml.

All arms run the quickstart's real roles, with two rollouts. Their pace is that of benchmarks/_pace.py: a training step,
and the generation of a batch beside it, take a fixed time, whatever these two cores need for them.
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
"""Default window of the budgets of restarts, and default time before the second restart, both in seconds."""
ANSWER_TOKENS = 5
"""Tokens of nearly every answer of the quickstart: four digits and the end."""
STEP_TRAJECTORIES = 256
GENERATION_SHARE = 0.9
"""Seconds that the rollouts take for a batch, divided by those that the trainer takes for a step. Generation runs
beside training (``ahead = 1``) and has to leave room for what is not padded: leases, scores, weights on their way."""


class Arm(Struct, frozen=True):
    """One way to answer failures."""

    name: str
    faults: bool
    policy: str = "role"
    trainer: str = ""
    """Keys of ``[roles.trainer]``."""
    checkpoint_at_end: bool = False
    """Whether the trainer writes one checkpoint only, after the last step."""
    rollout: str = ""
    """Keys of ``[roles.rollout]``. Programs of a job, such as the paced ones, are not preloaded unless it says so."""
    spares: int = 1
    full_restarts: int = 2


_PRELOADED = "preload = true\n"
_NO_PROTECTION = "warm = false\nsnapshots = false\n"
ARMS: Mapping[str, Arm] = {
    arm.name: arm
    for arm in (
        Arm("clean", faults=False, trainer=_NO_PROTECTION, checkpoint_at_end=True, spares=0),
        Arm("clean_ft", faults=False, rollout=_PRELOADED),
        Arm("role", faults=True, rollout=_PRELOADED),
        Arm("role_cold", faults=True, trainer=_NO_PROTECTION),
        Arm("job", faults=True, policy="job", full_restarts=1000),
    )
}
"""The arms that run on Slurm as whole runs of rrl, in the order in which each round runs them."""


def job(arm: Arm, cluster: str, steps: int, step_s: float, seed: int, record: Path) -> str:
    """Return job.toml of a run.

    Args:
        arm: What the run turns on.
        cluster: ``slurm`` or ``local``.
        steps: Number of training steps.
        step_s: Seconds that a training step takes at least.
        seed: Seed of the run: prompts, weights and samples.
        record: Folder in which the paced roles record the times of their work.
    """
    trainer = f"{arm.trainer}checkpoint_every = {steps}\n" if arm.checkpoint_at_end else arm.trainer
    generation_s = GENERATION_SHARE * step_s / ANSWER_TOKENS
    commands = {
        "trainer": ("--token-s", f"{step_s / (STEP_TRAJECTORIES * ANSWER_TOKENS):.8f}"),
        "rollout": ("--tau", f"{generation_s:.8f}", "0"),
    }
    program = [sys.executable, "-m", "rrl.benchmarks._pace"]
    settings = {
        role: f"command = {json.dumps([*program, role, '--record', str(record), *options])}\n"
        for role, options in commands.items()
    }
    changes = (
        ("steps = 300", f"steps = {steps}"),
        ("seed = 0", f"seed = {seed}"),
        ('kind = "local"', f'kind = "{cluster}"'),
        ("spares = 1", f"spares = {arm.spares}"),
        ("[roles.trainer]\n", f"[roles.trainer]\n{trainer}{settings['trainer']}"),
        ("[roles.rollout]\n", f"[roles.rollout]\n{arm.rollout}{settings['rollout']}"),
        ("[limits]\n", '[limits]\nheartbeat = "200ms"\n'),
    )
    return f"{quickstart_with(changes)}\n{budgets(arm, step_s)}"


def budgets(arm: Arm, step_s: float) -> str:
    """Return ``[recovery]``: the default budgets, whose seconds are shortened as the steps are."""
    scale = step_s / PAPER_STEP_S
    return f"""[recovery]
policy = "{arm.policy}"
window = "{1000 * WINDOW_S * scale:.0f}ms"
backoff = "{1000 * BACKOFF_S * scale:.0f}ms"
full_restarts = {arm.full_restarts}
"""
