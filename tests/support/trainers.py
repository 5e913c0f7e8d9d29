"""Runs of the shipped examples whose trainers others have written, with a trainer that is killed on the way."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterable
from itertools import chain
from pathlib import Path
from statistics import fmean

from rrl.core.types import TRAINER
from rrl.manager.model import events as ev
from rrl.manager.model.queries import gang
from rrl.manager.model.state import State
from rrl.tests.support.runs import TestRun, all_work, submit_here

EXAMPLES = Path(__file__).parents[2] / "examples"
OPTIONS = {"trl": (), "moe": ("--experts", "8")}
"""Options of make_model.py for the model of each example."""
VLLM_RRL = EXAMPLES.parent / ".venv-vllm" / "bin" / "rrl"
"""The program rrl in the environment of the rollouts of examples/moe; their trainer has that of this process."""
TIMEOUT_S = 300.0
"""Deadline (s) of one wait. The import of TRL takes 6 s of CPU time, and longer on a busy machine."""


def submit_example(name: str, folder: Path, changes: Iterable[tuple[str, str]]) -> TestRun:
    """Submit the example "trl" or "moe" from a copy, with a model made for it, and without its planned faults.

    Raises AssertionError if a text that ``changes`` replaces is not in its job.toml.
    """
    for each in {name, "trl"}:
        shutil.copytree(EXAMPLES / each, folder / each)
    program, model = folder / "trl" / "make_model.py", folder / "model"
    made = subprocess.run([sys.executable, program, model, *OPTIONS[name]], capture_output=True, text=True)
    assert made.returncode == 0, made.stderr
    folder /= name
    toml, *_ = (folder / "job.toml").read_text().partition("[[faults.planned]]")
    lines = [f'path = "{model}"' if line.startswith("path = ") else line for line in toml.splitlines()]
    toml = "\n".join(lines) + "\n"
    for old, new in changes:
        assert old in toml, f"the example does not contain {old!r}"
        toml = toml.replace(old, new)
    if name == "moe":
        return submit_here(folder, f'{toml}[env]\nvenv = "{sys.prefix}"\n', str(VLLM_RRL))
    return submit_here(folder, toml)


def kill_rank(run: TestRun, rank: int, at_step: int, timeout_s: float = TIMEOUT_S) -> State:
    """Kill one rank of the trainer by SIGKILL once ``at_step`` is committed; return the state before the kill."""
    before = run.wait(lambda state: state.step >= at_step and all_work(state), timeout_s)
    pid = gang(before, TRAINER)[rank].pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    return before


def reward_gain(run: TestRun) -> float:
    """Return the mean reward of the last 20 steps minus that of the first 20."""
    commits = [stamped.event for stamped in run.events() if isinstance(stamped.event, ev.StepCommitted)]
    rewards = [each.metrics["reward"] for each in commits]
    return fmean(rewards[-20:]) - fmean(rewards[:20])


def trained_groups(run: TestRun) -> list[int]:
    """Return the group ids of all steps, in the order of the steps; a group that two steps trained is in it twice."""
    steps = json.loads((run.run.store / "audit.json").read_text())["steps"]
    return [*chain.from_iterable(steps[number] for number in sorted(steps, key=int))]
