"""``[roles.agents]`` in a whole run: the shipped example with its real agent, roles and client of OpenAI.

First a rollout and the store are killed, then the process of the agents. The tests read the journal and the files of
that one run.
"""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from rrl.core.types import Incarnation, ReplicaId
from rrl.manager.model import events as ev
from rrl.tests.support.runs import TestRun, all_work, check_sound, submit_here

EXAMPLES = Path(__file__).parents[3] / "examples"
AGENTS, ROLLOUT, STORE = ReplicaId("agents/0"), ReplicaId("rollout/1"), ReplicaId("trajectories/0")
AGENTS_2 = Incarnation(AGENTS, 2)
STEPS = 40
"""More than are trained while the rollout is away; without the store or the agents no step is trained."""
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


def kill(run: TestRun, replica: ReplicaId) -> None:
    pid = run.state().replica(replica).pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    run.wait(lambda state: state.replica(replica).incarnation_number == 2 and all_work(state), TIMEOUT_S)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the job, in which the agents record their errors."""
    return tmp_path_factory.mktemp("agents")


@pytest.fixture(scope="module")
def run(folder: Path) -> TestRun:
    """Play the example without its own fault, with three kills, until it is complete."""
    toml = (EXAMPLES / "agents.toml").read_text().partition("[[faults.planned]]")[0]
    for old, new in (
        ("steps = 200", f"steps = {STEPS}"), ("prompts_per_step = 8", "prompts_per_step = 4"),
        ("guess_task:run", "watched_task:run"), ("guess_task:Digits", "watched_task:Digits"),
        # Each standby of the trainer loads torch, and none is needed.
        ("spares = 1", "spares = 0"), ("entropy = 0.01", "entropy = 0.01\ndonor_rollouts = 0"),
    ):  # fmt: skip
        assert toml.count(old) == 1
        toml = toml.replace(old, new)
    (folder / "guess_task.py").write_text((EXAMPLES / "guess_task.py").read_text())
    (folder / "watched_task.py").write_text(WATCHED)
    run = submit_here(folder, toml)

    run.wait(lambda state: state.step >= 2, TIMEOUT_S)
    kill(run, ROLLOUT)
    kill(run, STORE)
    assert run.state().replica(AGENTS).incarnation_number == 1, "the agents were restarted, too"
    kill(run, AGENTS)
    run.wait_end(TIMEOUT_S)
    run.wait_gone()
    check_sound(run.run)
    return run


def test_every_episode_is_trained_though_a_rollout_the_store_and_the_agents_die(run: TestRun) -> None:
    state = run.state()
    assert (state.outcome, state.step) == ("completed", STEPS), state.why
    audit = json.loads((run.run.store / "audit.json").read_text())
    assert set(audit["dropped"]) <= {"the run is complete"}
    assert audit["trained"] == STEPS * 4 * 16


def test_an_agent_sees_no_error_while_a_rollout_and_the_store_die(run: TestRun, folder: Path) -> None:
    errors = folder / "errors.txt"
    assert not errors.exists(), errors.read_text()
    ended = {event.event.incarnation for event in run.events() if isinstance(event.event, ev.StepEnded)}
    assert {Incarnation(ROLLOUT, 1), Incarnation(STORE, 1)} <= ended


def test_episodes_of_agents_that_die_begin_again(run: TestRun) -> None:
    records = [record.event for record in run.events()]
    back = records.index(next(one for one in records if isinstance(one, ev.Joined) and one.incarnation == AGENTS_2))
    steps = [one.step for one in records[back:] if isinstance(one, ev.StepCommitted)]
    assert steps[-1:] == [STEPS], "no step was trained after the agents had died"
