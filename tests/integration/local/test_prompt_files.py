"""A run with several prompt files and several rewards reports both by name, whatever is killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

from rrl.core.types import ReplicaId
from rrl.tests.support.runs import TestRun, check_sound, light_job, submit_here

STEPS = 12
TABLES = """
[task]
[[task.files]]
path = "plain.jsonl"
name = "plain"
weight = 3
[[task.files]]
path = "odd.jsonl"
name = "odd"
[task.rewards.right]
function = "rewarding:right"
[task.rewards.level]
function = "rewarding:level"
weight = 0.5
[eval]
every = 6
count = 9
[[eval.task.files]]
path = "new.jsonl"
name = "new"
[[eval.task.files]]
path = "few.jsonl"
name = "few"
[eval.task.rewards.right]
function = "rewarding:right"
[eval.task.rewards.level]
function = "rewarding:level"
weight = -0.5
"""
REWARDS = """
def right(answer, row):
    return float(answer == row["answer"])

def level(answer, row):
    return row["level"]
"""
LEVELS = {"plain": 0.25, "odd": 0.75, "new": 0.5, "few": 1.0}


def _kill(run: TestRun, victim: ReplicaId) -> None:
    before = run.state().replica(victim)
    assert before.pid is not None
    os.kill(before.pid, signal.SIGKILL)
    run.wait(lambda state: state.replica(victim).incarnation_number > before.incarnation_number)


def test_rewards_and_evaluations_are_reported_by_file_and_by_reward_after_kills(tmp_path: Path) -> None:
    for name, level in LEVELS.items():
        numbers = range(3) if name == "few" else range(10)
        rows = [{"question": str(i), "answer": str(i) * 4, "level": level} for i in numbers]
        (tmp_path / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (tmp_path / "rewarding.py").write_text(REWARDS)
    toml = light_job("local", STEPS, rollouts=1, spares=0, warm=False, one_node=True)
    toml = toml.replace('[task]\nfunction = "light_task:make"\n', TABLES)
    run = submit_here(tmp_path, toml.replace("prompts_per_step = 2", "prompts_per_step = 4"))
    for step, victim in ((2, "trajectories/0"), (5, "reward/0")):
        run.wait_steps(step)
        _kill(run, ReplicaId(victim))
    state = run.wait_end()
    assert (state.outcome, state.step) == ("completed", STEPS), state.why
    run.wait_gone()
    check_sound(run.run)

    out = run.call("metrics", run.run.id, stdout=subprocess.PIPE).communicate(timeout=60)[0]
    lines: list[dict[str, Any]] = [json.loads(line) for line in out.splitlines()]
    of_step = {line["step"]: line for line in lines}
    for step in range(1, STEPS + 1):
        figures = {name: value for name, value in of_step[step]["metrics"].items() if name.startswith("reward")}
        assert figures == {
            "reward": 1 + 0.5 * (3 * 0.25 + 0.75) / 4,
            "reward_right": 1.0,
            "reward_level": (3 * 0.25 + 0.75) / 4,
            "reward_source_plain": 1.125,
            "reward_source_odd": 1.375,
            "reward_spread": 0.0,
        }
    for step in (0, 6, 12):
        figures = of_step[step]["evaluation"]
        assert figures["count"] == 9
        assert (figures["reward_source_new"], figures["reward_source_few"]) == (0.75, 0.5)
        assert abs(figures["reward_level"] - (6 * 0.5 + 3 * 1.0) / 9) < 1e-9
