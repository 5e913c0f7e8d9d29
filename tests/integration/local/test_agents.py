"""``[roles.agents]`` in whole runs: the shipped example with its real agent, roles and client of OpenAI."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from rrl.core.types import ReplicaId
from rrl.tests.support.runs import TestRun, all_work, check_sound, submit_here

EXAMPLES = Path(__file__).parents[3] / "examples"
AGENTS, ROLLOUT, STORE = ReplicaId("agents/0"), ReplicaId("rollout/1"), ReplicaId("trajectories/0")
TIMEOUT_S = 240.0
WATCHED = """
import guess_task
from guess_task import Digits

guess_task.CLIENT = guess_task.CLIENT.with_options(max_retries=0)  # no error is hidden

async def run(item, base_url, api_key):
    try:
        return await guess_task.run(item, base_url, api_key)
    except Exception as error:
        with open("errors.txt", "a") as file:
            file.write(f"{error!r}\\n")
        raise
"""
"""The agent of the example, which records every error that it sees."""

pytestmark = pytest.mark.torch


def submit(folder: Path, steps: int) -> TestRun:
    """Submit the example without its own fault."""
    toml = (EXAMPLES / "agents.toml").read_text()
    assert toml.count("steps = 200") == toml.count("guess_task:run") == toml.count("guess_task:Digits") == 1
    toml = toml.partition("[[faults.planned]]")[0].replace("steps = 200", f"steps = {steps}")
    toml = toml.replace("prompts_per_step = 8", "prompts_per_step = 4")
    (folder / "guess_task.py").write_text((EXAMPLES / "guess_task.py").read_text())
    (folder / "watched_task.py").write_text(WATCHED)
    return submit_here(folder, toml.replace("guess_task:", "watched_task:"))


def kill(run: TestRun, replica: ReplicaId) -> None:
    pid = run.state().replica(replica).pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    run.wait(lambda state: state.replica(replica).incarnation_number == 2 and all_work(state), TIMEOUT_S)


def wait_completed(run: TestRun, steps: int) -> None:
    state = run.wait_end(TIMEOUT_S)
    assert (state.outcome, state.step) == ("completed", steps), state.why
    run.wait_gone()
    check_sound(run.run)
    audit = json.loads((run.run.store / "audit.json").read_text())
    assert set(audit["dropped"]) <= {"the run is complete"}
    assert audit["trained"] == steps * 4 * 16


def test_an_agent_sees_no_error_while_a_rollout_and_the_store_die_and_every_episode_is_trained(tmp_path: Path) -> None:
    steps = 40  # more than are trained while both are away
    run = submit(tmp_path, steps)
    run.wait(lambda state: state.step >= 2, TIMEOUT_S)
    kill(run, ROLLOUT)
    kill(run, STORE)
    wait_completed(run, steps)
    assert not (tmp_path / "errors.txt").exists(), (tmp_path / "errors.txt").read_text()
    assert run.state().replica(AGENTS).incarnation_number == 1


def test_episodes_of_agents_that_die_begin_again(tmp_path: Path) -> None:
    steps = 8
    run = submit(tmp_path, steps)
    run.wait(lambda state: state.step >= 2, TIMEOUT_S)
    kill(run, AGENTS)
    wait_completed(run, steps)
