"""The quickstart with small steps of a given duration, so that its real roles mostly wait and use little CPU."""

from __future__ import annotations

from pathlib import Path

from rrl.tests.support.runs import QUICKSTART

_SLOW_TASK = """
import time
from rrl.roles.models.tasks import DatasetTask

class SlowTask(DatasetTask):
    def score(self, i, answer):
        time.sleep({score_s})
        return super().score(i, answer)

def make(seed, **dataset):
    return SlowTask(seed=seed, split=str.split, **dataset)
"""
"""The task of the quickstart with a slow scorer, for which trainer and rollouts wait."""
_DATASET = (
    'dataset = "spiral_matrix"\nargs = { min_n = 2, max_n = 2 }\nprompt = "{metadata[matrix]}="\npartial_credit = 0.5 ',
    'function = "slow_task:make"\nargs = { dataset = "spiral_matrix", args = { min_n = 2, max_n = 2 }, prompt ='
    ' "{metadata[matrix]}=", size = 500, partial_credit = 0.5 } ',
)


def slow_quickstart(folder: Path, prompts: int, step_s: float) -> str:
    """Write the task into ``folder``, and return a job.toml of the quickstart with this task for the same folder.

    The run has no spare node and no standby process of the trainer, because each process that loads torch takes 4 s of
    CPU.

    Args:
        prompts: Number of prompts of a step, each with 16 answers.
        step_s: Time (s) that the answers of a step take to score.
    """
    (folder / "slow_task.py").write_text(_SLOW_TASK.format(score_s=step_s / (prompts * 16)))
    toml = QUICKSTART.read_text()
    for shipped, tested in (
        _DATASET,
        ("spares = 1", "spares = 0"),
        ("warm_start_steps = 30", "warm = false\nwarm_start_steps = 30"),
        ("prompts_per_step = 16", f"prompts_per_step = {prompts}"),
        ("lease = 128", f"lease = {prompts * 8}"),
    ):
        assert toml.count(shipped) == 1, shipped
        toml = toml.replace(shipped, tested)
    return toml
