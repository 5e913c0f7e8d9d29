"""Submits ``examples/agents.toml`` in a small form, without the tables that tests do not need."""

from __future__ import annotations

from pathlib import Path

from rrl.tests.support.runs import TestRun, submit_here

EXAMPLES = Path(__file__).parents[2] / "examples"
_CHANGES = (
    ("replicas = 2                    # an OpenAI client takes 3 ms of a core for each call\n", ""),
    ("spares = 1", "spares = 0"),
    ('cpus = 3, mem = "3GiB"', 'cpus = 8, mem = "8GiB"'),
    ("entropy = 0.01", "entropy = 0.01\nexclusive = false\nwarm = false"),
    ("lease = 64", "lease = 64\nexclusive = false"),
)


def submit_agents_example(folder: Path, steps: int, prompts: int, *changes: tuple[str, str]) -> TestRun:
    """Submit the example in a small form: one replica of the agents, and all roles on one node.

    The example's fault, its spare node and the trainer's standby process, which loads torch, are left out.

    Args:
        folder: Folder of the job and of its task.
        steps: Number of steps of the run.
        prompts: Number of prompts of a step; each has eight episodes.
        changes: Further pairs of an old and a new text of job.toml, each of which occurs once.
    """
    toml = (EXAMPLES / "agents.toml").read_text().partition("[[faults.planned]]")[0]
    sizes = ("steps = 120", f"steps = {steps}"), ("prompts_per_step = 12", f"prompts_per_step = {prompts}")
    for old, new in (*sizes, *_CHANGES, *changes):
        assert toml.count(old) == 1, old
        toml = toml.replace(old, new)
    (folder / "guess_task.py").write_text((EXAMPLES / "guess_task.py").read_text())
    return submit_here(folder, toml)
