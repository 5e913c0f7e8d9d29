"""Processes of the role ``agents``, with a manager that only listens and a real store."""

from __future__ import annotations

import os
import signal

import msgspec
import pytest

from rrl.config.job.resolve import resolve
from rrl.config.job.schema import Job
from rrl.core.run_dir import write_atomically
from rrl.roles.worker.api import LOOPBACK, _bypass_proxies
from rrl.tests.support.listening_manager import Lab, eventually
from rrl.tests.support.roles.trajectories.agents import AGENTS, CREW, open_agents_store, sample
from rrl.tests.support.roles.trajectories.crew import ROLLOUT, incarnation_of, lease
from rrl.tests.support.roles.worker_scene import Scene

pytest.importorskip("openai")

SUCCESSOR = incarnation_of("agents/0", 2)
AGENT = """
import os
from pathlib import Path
import openai

class Task:
    def __init__(self, seed):
        pass

    def prompt(self, i):
        return str(Path(__file__).with_name("notes"))

    def answer(self, i):
        return ""

    def score(self, i, text):
        return 0.0, 0.0

async def run(notes, base_url, api_key):
    def note(text):
        with open(notes, "a") as file:
            file.write(f"{os.getpid()} {text}\\n")

    note("asks")
    note(os.environ.get("no_proxy"))
    client = openai.AsyncOpenAI(base_url=base_url, api_key=api_key)
    try:
        reply = await client.chat.completions.create(model="policy", messages=[{"role": "user", "content": "?"}])
    except Exception as error:
        note(type(error).__name__)
        raise
    note(reply.choices[0].message.content)
    return 1.0
"""
JOB = resolve(
    Job.model_validate(
        {
            "run": {"name": "test", "steps": 1},
            "task": {"function": "noting_agent:Task"},
            "model": {"tokenizer": {"pieces": "0123456789?", "chat": {"user": "{content}"}}},
            "sampling": {"max_new_tokens": 4},
            "roles": {"agents": {"function": "noting_agent:run", "concurrency": 1}},
            "transport": {"weights": "tcp"},
        }
    ),
    "python",
)


async def test_thawed_process_that_was_replaced_gets_403_and_ends(at: Lab) -> None:
    scene, notes = Scene(at), at.run.path / "notes"
    write_atomically(at.run.run_spec, msgspec.json.encode(JOB))
    (at.run.path / "noting_agent.py").write_text(AGENT)

    def noted() -> list[list[str]]:
        return [line.split() for line in notes.read_text().splitlines()] if notes.exists() else []

    store = open_agents_store(at.run.store)
    async with scene.manager_and(store):
        frozen = at.start(scene.launch(AGENTS), "agents.main")
        (turn,) = await eventually(lambda: lease(store, ROLLOUT), "a turn of the first process")
        os.kill(frozen.pid, signal.SIGSTOP)
        store.update_membership([SUCCESSOR if member == AGENTS else member for member in CREW])
        successor = at.start(scene.launch(SUCCESSOR), "agents.main")
        await eventually(lambda: [str(successor.pid), "asks"] in noted(), "the next attempt")
        os.kill(frozen.pid, signal.SIGCONT)
        await eventually(lambda: [str(frozen.pid), "PermissionDeniedError"] in noted(), "the refusal")
        assert await at.end_of(frozen) != 0
        sample(store, turn.trajectory, [5, 1])  # the next attempt has taken over the turn of the first one
        await eventually(lambda: [str(successor.pid), "3"] in noted(), "the answer")
        assert [line[1] for line in noted() if line[0] == str(frozen.pid)] == [
            "asks",
            LOOPBACK,
            "PermissionDeniedError",
        ]


async def test_agents_reach_their_endpoint_although_the_environment_names_a_proxy(at: Lab) -> None:
    proxied = "import os; os.environ.update(http_proxy='http://127.0.0.1:9', NO_PROXY='corp.example, 10.0.0.0/8')"
    scene, notes = Scene(at), at.run.path / "notes"
    write_atomically(at.run.run_spec, msgspec.json.encode(JOB))
    (at.run.path / "noting_agent.py").write_text(AGENT)

    store = open_agents_store(at.run.store)
    async with scene.manager_and(store):
        process = at.start(scene.launch(AGENTS), "agents.main", proxied)
        (turn,) = await eventually(lambda: lease(store, ROLLOUT), "the turn of a call")
        sample(store, turn.trajectory, [5, 1])
        answered = f"{process.pid} 3\n"
        await eventually(lambda: answered in notes.read_text(), "the answer")
        assert f"{process.pid} corp.example,10.0.0.0/8,{LOOPBACK}\n" in notes.read_text()


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, LOOPBACK),
        ({"no_proxy": "*"}, "*"),
        ({"NO_PROXY": "a, *"}, "*"),
        ({"no_proxy": "a", "NO_PROXY": "b,a"}, f"a,b,{LOOPBACK}"),
        ({"no_proxy": f"{LOOPBACK},a"}, f"{LOOPBACK},a"),
    ],
)
def test_hosts_without_a_proxy_are_kept_in_both_spellings(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, str], expected: str
) -> None:
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.setenv(name, given.get(name, ""))
    _bypass_proxies(LOOPBACK)
    assert (os.environ["no_proxy"], os.environ["NO_PROXY"]) == (expected, expected)
