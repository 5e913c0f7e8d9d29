"""Healthy runs in which everybody waits for a long time, in ten ways, with default limits: nobody is replaced."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import openai
import pytest

from rrl.core.types import is_support
from rrl.roles.endpoint.addresses import read_addresses
from rrl.roles.endpoint.key import run_key
from rrl.tests.support.agents_example import submit_agents_example
from rrl.tests.support.runs import LIGHT, WITHOUT_MODEL, TestRun, all_work, cancel, light_job, submit_here
from rrl.transport.keys import RunKeys

IDLE_S = 25 * 60.0
"""Seconds for which every run is watched: longer than the longest wait after which somebody would be charged (19
min)."""
LONG_S = 2 * IDLE_S
"""Seconds for which the runs would go on idling."""
JOIN_S = 600.0
PYTHON = sys.executable
ENDPOINT = (
    ("[roles.agents]\n", '[roles.endpoint]\nreward_timeout = "2h"\ntimeout = "2h"\n'),
    ('function = "guess_task:run"\n', ""),
    ("concurrency = 48 ", "retries = 0 "),
)
SMALL = (("group_size = 8", "group_size = 2"), ("ahead = 1", "ahead = 0"))
AGENT = "import asyncio\n\n\nasync def run(item, base_url, api_key):\n"
TOOL = f"{AGENT}    await asyncio.sleep({LONG_S})\n    return 1.0\n"
LATER = f"""import openai
{AGENT}    client = openai.AsyncOpenAI(base_url=base_url, api_key=api_key)
    await client.chat.completions.create(model="policy", messages=[{{"role": "user", "content": "?"}}])
"""
TASK = """import time

import rrl
from light_task import LightTask


class SlowTask(LightTask):
    def score(self, index, text):
        {score}
        return super().score(index, text)


def make(seed):
    return SlowTask()
"""


# ── runs ─────────────────────────────────────────────────────────────────────────────────────────────────────────────
def with_endpoint(folder: Path) -> TestRun:
    return submit_agents_example(folder, 3, 1, *WITHOUT_MODEL, *ENDPOINT, *SMALL)


def with_agents(folder: Path, code: str, keys: str) -> TestRun:
    (folder / "slow_agent.py").write_text(code)
    function = ('function = "guess_task:run"\n', f'function = "slow_agent:run"\n{keys}\n')
    return submit_agents_example(folder, 3, 1, *WITHOUT_MODEL, *SMALL, function)


def without_agents(folder: Path, *changes: tuple[str, str], score: str = "pass") -> TestRun:
    toml = light_job("local", 3, spares=0, warm=False, one_node=True).partition("[limits]")[0]
    (folder / "slow_task.py").write_text(TASK.format(score=score))
    for old, new in (("light_task:make", "slow_task:make"), *changes):
        assert toml.count(old) == 1, old
        toml = toml.replace(old, new)
    return submit_here(folder, toml)


def program(old: str, new: str) -> tuple[str, str]:
    """Return the change of a light role's command to another program with arguments."""
    name, *arguments = new.split()
    quoted = "".join(f', "{one}"' for one in arguments)
    return f'"{LIGHT}/{old}"', f'"{LIGHT}/{name}"{quoted}'


def waiting_scorer(folder: Path) -> TestRun:
    return without_agents(folder, score=f"with rrl.waiting('the judge'): time.sleep({LONG_S})")


OWN_PHASE = '[phases.simulate]\nprogresses = false\nlongest = "60min"\n[transport]\n'
RUNS: dict[str, tuple[Callable[[Path], TestRun], str]] = {
    "endpoint without clients": (with_endpoint, "for an outside agent to open an episode"),
    "outside agent in a tool": (with_endpoint, "of outside agents, opened"),
    "rewards by people": (with_endpoint, "for the reward of episode"),
    "agents in a tool": (lambda f: with_agents(f, TOOL, 'timeout = "60min"'), "which agents/0 hold"),
    "rewards of own agents by people": (lambda f: with_agents(f, LATER, 'reward_timeout = "2h"'), "for the reward of"),
    "scorer that thinks": (lambda f: without_agents(f, score=f"time.sleep({LONG_S})"), "which reward/0 hold"),
    "judge that is away": (waiting_scorer, "waits for the judge"),
    "evaluation by hand": (
        lambda f: without_agents(f, program("light_trainer.py", f"person_trainer.py {LONG_S}")),
        "waits for a person who evaluates",
    ),
    "rollouts in a phase of their own": (
        lambda f: without_agents(
            f, program("light_rollout.py", f"idle_rollout.py simulate {LONG_S}"), ("[transport]\n", OWN_PHASE)
        ),
        "which rollout/0 and rollout/1 hold",
    ),
    "rollouts in a tool": (
        lambda f: without_agents(f, program("light_rollout.py", f"idle_rollout.py tool {LONG_S}")),
        "which rollout/0 and rollout/1 hold",
    ),
}
"""For each way to idle: how to submit the run, and what its status then says."""


# ── agents outside of the run ────────────────────────────────────────────────────────────────────────────────────────
def post(run: TestRun, path: str, key: str, body: Any) -> Any:
    root = read_addresses(run.run)[0].removesuffix("/v1")
    headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
    request = urllib.request.Request(f"{root}/rrl/v1/episodes{path}", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as reply:
        return json.loads(reply.read())


def play_outside(run: TestRun, finish: bool) -> None:
    """Open the episodes of a step, make a call in each, and finish them without a reward, or be silent."""
    keys = RunKeys.load(run.run.keys)
    for _ in range(2):
        opened = post(run, "", run_key(run.run.id, keys.secret), None)
        client = openai.OpenAI(base_url=opened["base_url"], api_key=opened["api_key"], timeout=60)
        client.chat.completions.create(model="policy", messages=[{"role": "user", "content": "?"}])
        if finish:
            post(run, "/finish", opened["api_key"], {"later": True})


# ── the test ─────────────────────────────────────────────────────────────────────────────────────────────────────────
def status(run: TestRun) -> str:
    shown = run.call("status", run.run.id, stdout=subprocess.PIPE, stderr=subprocess.STDOUT).communicate(timeout=60)[0]
    return " ".join(shown.split())


@pytest.mark.long
def test_nobody_is_replaced_in_runs_that_idle_for_good_reasons_and_each_status_says_why(tmp_path: Path) -> None:
    with ExitStack() as stack:
        folders = {name: tmp_path / name.replace(" ", "-") for name in RUNS}
        for folder in folders.values():
            folder.mkdir()
        with ThreadPoolExecutor(2) as threads:
            runs = dict(zip(RUNS, threads.map(lambda name: RUNS[name][0](folders[name]), RUNS), strict=True))
        for run in runs.values():
            stack.callback(cancel, run)
        for run in runs.values():
            run.wait(all_work, JOIN_S)
        play_outside(runs["outside agent in a tool"], finish=False)
        play_outside(runs["rewards by people"], finish=True)
        before = {name: incarnations(run) for name, run in runs.items()}
        until = time.monotonic() + IDLE_S
        while time.monotonic() < until:
            time.sleep(10.0)
            for name, run in runs.items():
                state = run.state()
                assert state.outcome is None, (name, state.why)
                assert incarnations(run) == before[name], (name, status(run))
        for name, run in runs.items():
            assert run.state().step == 0, f"{name}: the run did not idle"
            assert RUNS[name][1] in status(run), (name, status(run))


def incarnations(run: TestRun) -> dict[str, int]:
    return {one.id: one.incarnation_number for one in run.state().replicas.values() if not is_support(one.id)}
