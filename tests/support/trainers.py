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

from rrl.core.types import TRAINER
from rrl.manager.model.queries import gang
from rrl.manager.model.state import State
from rrl.tests.support.runs import TestRun, all_work, submit_here

EXAMPLES = Path(__file__).parents[2] / "examples"
TIMEOUT_S = 300.0
"""Deadline (s) of one wait. The import of TRL takes 6 s of CPU time, and longer on a busy machine."""


def submit_example(name: str, folder: Path, changes: Iterable[tuple[str, str]]) -> TestRun:
    """Submit an example from a copy of its folder, with a model that its program makes, and without its planned faults.

    Raises AssertionError if a text that ``changes`` replaces is not in its job.toml.
    """
    shutil.copytree(EXAMPLES / name, folder, dirs_exist_ok=True)
    model = folder / "model"
    made = subprocess.run([sys.executable, folder / "make_model.py", model], capture_output=True, text=True)
    assert made.returncode == 0, made.stderr
    toml, *_ = (folder / "job.toml").read_text().partition("[[faults.planned]]")
    lines = [f'path = "{model}"' if line.startswith("path = ") else line for line in toml.splitlines()]
    toml = "\n".join(lines) + "\n"
    for old, new in changes:
        assert old in toml, f"the example does not contain {old!r}"
        toml = toml.replace(old, new)
    return submit_here(folder, toml)


def kill_rank(run: TestRun, rank: int, at_step: int, timeout_s: float = TIMEOUT_S) -> State:
    """Kill one rank of the trainer by SIGKILL once ``at_step`` is committed; return the state before the kill."""
    before = run.wait(lambda state: state.step >= at_step and all_work(state), timeout_s)
    pid = gang(before, TRAINER)[rank].pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    return before


def trained_groups(run: TestRun) -> list[int]:
    """Return the group ids of all steps, in the order of the steps; a group that two steps trained is in it twice."""
    steps = json.loads((run.run.store / "audit.json").read_text())["steps"]
    return [*chain.from_iterable(steps[number] for number in sorted(steps, key=int))]
