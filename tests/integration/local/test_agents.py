"""``[roles.agents]`` works in whole runs: the shipped example with its real agent and OpenAI's client.

The trainer and the rollouts are light, because the tests are about agents and the store. The example with its model is
played by ``make test-long``. ``make test-vllm`` trains a model by agents as well.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from pathlib import Path

import pytest

from rrl.core.samples_file import read_steps
from rrl.core.types import Incarnation, ReplicaId
from rrl.manager.model import events as ev
from rrl.roles.endpoint.key import decode_key
from rrl.roles.trajectories.durable.log import read_frames
from rrl.roles.trajectories.durable.records import SegmentsAppended, TurnCreated, decode, unpack
from rrl.tests.support.agents_example import submit_agents_example
from rrl.tests.support.runs import WITHOUT_MODEL, TestRun, all_work, check_sound
from rrl.transport.keys import RunKeys

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
"""The agent of the example, changed to record every exception that its client raises."""

WATCHED_AGENT = ("guess_task:run", "watched_task:run")
PAGE = Path(__file__).parents[3] / "docs" / "agents.md"
FEW = (("prompts_per_step = 8", "prompts_per_step = 1"), ("group_size = 8", "group_size = 4"))
"""Changes of job.toml that make steps of 4 episodes."""


def submit(folder: Path, steps: int, *changes: tuple[str, str]) -> TestRun:
    """Submit the example with steps of 64 episodes, and with further changes of job.toml."""
    (folder / "watched_task.py").write_text(WATCHED)
    return submit_agents_example(folder, steps, 8, *changes)


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


@pytest.fixture(
    scope="module", params=["light", pytest.param("with its model", marks=[pytest.mark.long, pytest.mark.torch])]
)
def killed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TestRun:
    """Play the example while a rollout and the store, and then the process of the agents, are killed.

    The run cannot end before the last kill: it has more steps than are trained while the rollout is away, and no step
    is trained without the store or the agents.
    """
    light = request.param == "light"
    steps, episodes = (40, 4) if light else (40, 64)
    changes: tuple[tuple[str, str], ...] = (*FEW, *WITHOUT_MODEL) if light else ()
    died = ("[roles.trainer]", 'on_death = "again"\n\n[roles.trainer]')
    run = submit(tmp_path_factory.mktemp("agents"), steps, WATCHED_AGENT, died, *changes)
    run.wait(lambda state: state.step >= 2, TIMEOUT_S)
    kill(run, ROLLOUT)
    kill(run, STORE)
    assert run.state().replica(AGENTS).incarnation_number == 1, (
        "the agents were restarted although only a rollout and the store were killed"
    )
    kill(run, AGENTS)
    wait_completed(run, steps, episodes)
    return run


def test_agents_get_no_error_although_a_rollout_and_the_store_die(killed: TestRun) -> None:
    errors = killed.run.path.parents[1] / "errors.txt"
    assert not errors.exists(), errors.read_text()
    ended = {event.event.incarnation for event in killed.events() if isinstance(event.event, ev.StepEnded)}
    assert {Incarnation(ROLLOUT, 1), Incarnation(STORE, 1)} <= ended


def test_episodes_of_agents_that_die_begin_again(killed: TestRun) -> None:
    records = [record.event for record in killed.events()]
    second = Incarnation(AGENTS, 2)
    joined = next(event for event in records if isinstance(event, ev.Joined) and event.incarnation == second)
    steps = [event.step for event in records[records.index(joined) :] if isinstance(event, ev.StepCommitted)]
    assert steps[-1:] == [killed.state().job.steps], "no step was trained after the agents had died"


REPLAYED = """
import asyncio, json, os, urllib.request

def complete(base_url, api_key, messages):
    body = json.dumps({"model": "policy", "messages": messages, "return_token_ids": True}).encode()
    headers = {"authorization": f"Bearer {api_key}", "content-type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(f"{base_url}/chat/completions", body, headers)) as reply:
        return json.load(reply)["choices"][0]

async def run(item, base_url, api_key):
    secret, messages, reward = int(item), [{"role": "user", "content": "?"}], 0.0
    for turn in range(3):
        choice = await asyncio.to_thread(complete, base_url, api_key, messages)
        with open("turns.jsonl", "a") as file:  # one write of a short line is not mixed with others
            file.write(json.dumps([api_key, turn, choice["token_ids"]]) + "\\n")
        answer = choice["message"]
        guess = int(answer["content"]) if answer["content"].isdigit() else -1
        if guess == secret:
            reward = 1.0 - 0.1 * turn
        messages += [answer, {"role": "user", "content": "<" if secret < guess else ">"}]
        while turn == 1 and not os.path.exists("go"):  # in the middle of its turns
            await asyncio.sleep(0.02)
    return reward

if __name__ == "__main__":
    print(asyncio.run(run(*(os.environ[name] for name in ("RRL_ITEM", "OPENAI_BASE_URL", "OPENAI_API_KEY")))))
"""
"""An agent that always has three turns, and waits after the second one until the test lets it continue.

It does not use OpenAI's client. With ``command``, each attempt is a process, which would take a second of CPU to import
the client.
"""


@pytest.mark.parametrize(
    "key", ['function = "replayed:run"', pytest.param('command = ["python", "replayed.py"]', marks=pytest.mark.long)]
)
def test_killed_agents_are_replayed_without_sampling_any_turn_twice(tmp_path: Path, key: str) -> None:
    steps, at_once = 3, 8
    (tmp_path / "replayed.py").write_text(REPLAYED)
    agent = ('function = "guess_task:run"\nconcurrency = 48', f"{key}\nconcurrency = {at_once}")
    run = submit(tmp_path, steps, *FEW, *WITHOUT_MODEL, agent)
    shown, go = tmp_path / "turns.jsonl", tmp_path / "go"
    run.wait(lambda _: shown.exists() and len(shown.read_text().splitlines()) >= 2 * at_once, TIMEOUT_S)
    kill(run, AGENTS)
    run.wait(lambda _: len(shown.read_text().splitlines()) >= 4 * at_once, TIMEOUT_S)
    go.touch()
    wait_completed(run, steps, 4)
    answers = shown_answers(run, shown)
    again = {episode for episode, attempt, _ in answers if attempt == 2}
    assert len(again) == at_once
    for episode in again:  # both attempts got the same tokens in the same order
        for turn in (0, 1):
            assert answers[episode, 1, turn] == answers[episode, 2, turn]
    sampled = sampled_turns(run)
    assert again <= sampled.keys()
    for episode, turns in sampled.items():
        assert len(turns) == len({request for request, _ in turns}), f"a turn of episode {episode} was sampled twice"
    for episode in again:
        shown_tokens = [answers[episode, 2, turn] for turn in range(3)]
        assert [tokens for _, tokens in sampled[episode]] == shown_tokens


def shown_answers(run: TestRun, path: Path) -> dict[tuple[int, int, int], list[int]]:
    """Return the tokens that the agents have written down, by episode, attempt and turn."""
    secret = RunKeys.load(run.run.keys).secret
    answers: dict[tuple[int, int, int], list[int]] = {}
    for line in path.read_text().splitlines():
        text, turn, tokens = json.loads(line)
        key = decode_key(text, run.run.id, secret)
        assert key is not None
        assert answers.setdefault((key.episode, key.attempt, turn), tokens) == tokens
    return answers


def sampled_turns(run: TestRun) -> dict[int, list[tuple[str, list[int]]]]:
    """Return (request, sampled tokens) of each turn in the store's log, in order, by episode."""
    turns: dict[int, TurnCreated] = {}
    tokens: dict[int, list[int]] = {}
    for payload in read_frames(max(run.run.store.glob("log.*"))):
        record = decode(payload)
        if isinstance(record, TurnCreated):
            turns[record.turn], tokens[record.turn] = record, []
        elif isinstance(record, SegmentsAppended):
            for packed in record.segments:
                segment = unpack(packed)
                if segment.trajectory in turns:
                    assert segment.offset == len(tokens[segment.trajectory]), "tokens were sampled twice"
                    tokens[segment.trajectory] += segment.tokens
    episodes: dict[int, list[tuple[str, list[int]]]] = {}
    for number, created in turns.items():
        episodes.setdefault(created.episode, []).append((created.request, tokens[number]))
    return episodes


def test_documented_program_that_plays_one_attempt_trains_a_run(tmp_path: Path) -> None:
    (tmp_path / "guess.py").write_text(program_of_the_page("guess.py"))
    command = ('function = "guess_task:run"\nconcurrency = 48', 'command = ["python", "guess.py"]\nconcurrency = 4')
    run = submit(tmp_path, 1, *FEW, *WITHOUT_MODEL, command)
    wait_completed(run, 1, 4)


def test_documented_program_that_plays_many_episodes_trains_a_run_and_restarts_after_its_death(tmp_path: Path) -> None:
    steps = 10
    (tmp_path / "player.py").write_text(program_of_the_page("player.py"))
    player = ('function = "guess_task:run"', 'command = ["python", "player.py"]\nper = "replica"')
    run = submit(tmp_path, steps, *FEW, *WITHOUT_MODEL, player)
    run.wait(lambda state: state.step >= 2, TIMEOUT_S)
    kill(run, AGENTS)
    wait_completed(run, steps, 4)


FATAL = """
import os
import guess_task

class Numbers(guess_task.Digits):
    def prompt(self, i):
        return str(i)

async def run(item, base_url, api_key):
    reward = await guess_task.run(item, base_url, api_key)
    if item == "2":
        os._exit(3)  # as a crash in a library of the agent
    return reward
"""


def test_item_whose_agent_ends_the_process_is_named_and_the_run_goes_on(tmp_path: Path) -> None:
    steps = 5
    (tmp_path / "fatal.py").write_text(FATAL)
    agent = ('function = "guess_task:run"\nconcurrency = 48', 'function = "fatal:run"\nretries = 0\nconcurrency = 4')
    task = ('function = "guess_task:Digits"', 'function = "fatal:Numbers"')
    run = submit(tmp_path, steps, *FEW, *WITHOUT_MODEL, agent, task)
    state = run.wait_end(TIMEOUT_S)
    assert (state.outcome, state.step) == ("completed", steps), state.why
    dropped = json.loads((run.run.store / "audit.json").read_text())["dropped"]
    blamed = {reason.partition(" (digest")[0]: count for reason, count in dropped.items() if "(digest" in reason}
    why = "agents/0 ended 2 times right after the same call of item"
    assert blamed[f"{why} 2"] == 4
    assert blamed.keys() <= {f"{why} 1", f"{why} 2", f"{why} 3"}, "the neighbours that were at work both times, at most"
    assert state.replica(AGENTS).incarnation_number == 3


NAMED = """
from guess_task import CLIENT

async def run(item, base_url, api_key):
    client, messages = CLIENT.with_options(base_url=base_url, api_key=api_key), []
    for agent in ("planner", "coder", "planner", "critic"):
        messages.append({"role": "user", "content": "?"})
        reply = await client.chat.completions.create(model=agent, messages=messages)
        messages.append(reply.choices[0].message)
    return {"planner": int(item), "coder": 1.0}
"""


def test_agents_of_an_episode_are_trained_with_their_own_rewards_although_the_store_dies(tmp_path: Path) -> None:
    steps = 10
    (tmp_path / "named.py").write_text(NAMED)
    run = submit(tmp_path, steps, *FEW, *WITHOUT_MODEL, ('function = "guess_task:run"', 'function = "named:run"'))
    run.wait(lambda state: state.step >= 2, TIMEOUT_S)
    kill(run, STORE)
    wait_completed(run, steps, 4)
    printed = run.call("metrics", run.run.id, stdout=subprocess.PIPE).communicate(timeout=60)[0]
    rows = [row["metrics"] for row in map(json.loads, printed.splitlines()) if row["step"]]
    assert len(rows) == steps
    for row in rows:
        assert (row["reward_coder"], row["token_drift"]) == (1.0, 0.0)
        assert row["reward"] == pytest.approx((1.0 + row["reward_planner"]) / 2)
    assert rows[-1]["untrained_turns"] == rows[-1]["episodes_finished"], "the turns of the critic are not context"
    for step in read_steps(run.run.samples, lambda kept: kept)[1]:
        for one in step.samples:
            assert [sum(run.trained for run in one.runs), one.agent] in ([2, "planner"], [1, "coder"])
            assert one.agent == "planner" or one.reward == 1.0


GIVES_UP = """
import guess_task
from guess_task import CLIENT

async def run(item, base_url, api_key):
    client = CLIENT.with_options(base_url=base_url, api_key=api_key)
    reply = await client.chat.completions.create(model="policy", messages=[{"role": "user", "content": item}])
    if int(item) % 2:
        raise ValueError("the answer is cut")  # as clients that cannot parse it
    return 1.0

class Numbers(guess_task.Digits):
    def prompt(self, i):
        return str(i % 10)
"""


def test_attempts_that_the_agents_code_ends_are_trained_with_the_failed_reward(tmp_path: Path) -> None:
    steps = 4
    (tmp_path / "gives_up.py").write_text(GIVES_UP)
    agent = ('function = "guess_task:run"', 'function = "gives_up:run"\nfailed_reward = -0.5\nretries = 0')
    task = ('function = "guess_task:Digits"', 'function = "gives_up:Numbers"')
    run = submit(tmp_path, steps, *FEW, *WITHOUT_MODEL, agent, task)
    wait_completed(run, steps, 4)
    rewards = {one.reward for step in read_steps(run.run.samples, lambda kept: kept)[1] for one in step.samples}
    assert rewards == {1.0, -0.5}
