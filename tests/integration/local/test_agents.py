"""``[roles.agents]`` in whole runs: the shipped example with its real agent, roles and client of OpenAI."""

from __future__ import annotations

import json
import os
import re
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

WATCHED_AGENT = ("guess_task:run", "watched_task:run")
PAGE = Path(__file__).parents[3] / "docs" / "agents.md"

pytestmark = pytest.mark.torch


def submit(folder: Path, steps: int, *changes: tuple[str, str]) -> TestRun:
    """Submit the example without its own fault, with steps of 64 episodes, and with further changes of job.toml."""
    toml = (EXAMPLES / "agents.toml").read_text().partition("[[faults.planned]]")[0]
    for old, new in (("steps = 200", f"steps = {steps}"), ("prompts_per_step = 8", "prompts_per_step = 4"), *changes):
        assert toml.count(old) == 1, old
        toml = toml.replace(old, new)
    (folder / "guess_task.py").write_text((EXAMPLES / "guess_task.py").read_text())
    (folder / "watched_task.py").write_text(WATCHED)
    return submit_here(folder, toml)


def kill(run: TestRun, replica: ReplicaId) -> None:
    pid = run.state().replica(replica).pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    run.wait(lambda state: state.replica(replica).incarnation_number == 2 and all_work(state), TIMEOUT_S)


def program_of_the_page(name: str) -> str:
    found = re.search(rf"^`{re.escape(name)}`:\n```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert found is not None
    return found[1]


def wait_completed(run: TestRun, steps: int, episodes_per_step: int = 64) -> None:
    state = run.wait_end(TIMEOUT_S)
    assert (state.outcome, state.step) == ("completed", steps), state.why
    run.wait_gone()
    check_sound(run.run)
    audit = json.loads((run.run.store / "audit.json").read_text())
    assert set(audit["dropped"]) <= {"the run is complete"}
    assert audit["trained"] == steps * episodes_per_step


def test_an_agent_sees_no_error_while_a_rollout_and_the_store_die_and_every_episode_is_trained(tmp_path: Path) -> None:
    steps = 40  # more than are trained while both are away
    run = submit(tmp_path, steps, WATCHED_AGENT)
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


FEW = (("prompts_per_step = 4", "prompts_per_step = 1"), ("group_size = 16", "group_size = 4"))
"""steps of 4 episodes, each with a process of its own"""


def test_a_program_for_each_attempt_is_the_one_of_the_page(tmp_path: Path) -> None:
    (tmp_path / "guess.py").write_text(program_of_the_page("guess.py"))
    command = ('function = "guess_task:run"\nconcurrency = 64', 'command = ["python", "guess.py"]\nconcurrency = 4')
    run = submit(tmp_path, 3, *FEW, command)
    wait_completed(run, 3, 4)


def test_a_program_that_plays_many_episodes_is_the_one_of_the_page_and_goes_on_after_its_death(tmp_path: Path) -> None:
    steps = 8
    (tmp_path / "player.py").write_text(program_of_the_page("player.py"))
    run = submit(tmp_path, steps, ('function = "guess_task:run"', 'command = ["python", "player.py"]\nper = "replica"'))
    run.wait(lambda state: state.step >= 2, TIMEOUT_S)
    kill(run, AGENTS)
    wait_completed(run, steps)
