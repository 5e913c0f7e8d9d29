"""Agents outside of a run play its episodes with their real client, even if its endpoint dies."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import openai
import pytest

from rrl.cli import main
from rrl.core.types import ReplicaId
from rrl.roles.endpoint.addresses import read_addresses
from rrl.roles.endpoint.key import run_key
from rrl.tests.support.agents_example import submit_agents_example
from rrl.tests.support.runs import WITHOUT_MODEL, TestRun, all_work, check_sound
from rrl.transport.keys import RunKeys

ENDPOINT = ReplicaId("endpoint/0")
TIMEOUT_S = 240.0
AGENTS_AT_ONCE = 16
STEPS, PROMPTS, GROUP = 6, 2, 8
BEFORE_DEATH = STEPS * PROMPTS * GROUP // 2
"""Episodes after which agents wait for the endpoint's death; the run cannot end with these and ``AGENTS_AT_ONCE``."""


def submit(folder: Path, port: int, *changes: tuple[str, str]) -> TestRun:
    """Submit the example of agents with an endpoint instead of the role ``agents`` and with ``changes`` of job.toml."""
    endpoint = (
        ("[roles.agents]\n", f"[roles.endpoint]\nport = {port}\n"),
        ('function = "guess_task:run"\n', ""),
        ("concurrency = 48 ", "retries = 0 "),
    )
    return submit_agents_example(folder, STEPS, PROMPTS, *endpoint, *changes)


class Player:
    """Agents that play episodes until the run has no more episodes.

    Their clients repeat a failed call up to ``retries`` times.
    """

    def __init__(self, base_url: str, key: str, retries: int) -> None:
        self._root, self._key = base_url.removesuffix("/v1"), key
        self._client = openai.AsyncOpenAI(api_key=key, max_retries=retries, timeout=TIMEOUT_S)
        self.errors: list[Exception] = []
        """Connections that broke or were refused."""
        self.finished: set[int] = set()
        """Episodes that were finished."""
        self.killed, self.ended = asyncio.Event(), asyncio.Event()

    async def play(self) -> None:
        await asyncio.gather(*(self._agent(number) for number in range(AGENTS_AT_ONCE)))

    async def _agent(self, number: int) -> None:
        played = 0
        while not self.ended.is_set():
            if len(self.finished) >= BEFORE_DEATH:
                await self.killed.wait()
            opened = await self._post("", self._key, None, name=f"{number} {played}")
            if opened is not None:
                await self._episode(opened)
                played += 1

    async def _episode(self, opened: Any) -> None:
        client = self._client.with_options(base_url=opened["base_url"], api_key=opened["api_key"])
        messages: list[Any] = [{"role": "user", "content": "?"}]
        for _ in range(random.randrange(1, 3)):
            reply = await client.chat.completions.create(model="policy", messages=messages)
            answer: Any = reply.choices[0].message
            if not answer.content.isdigit() or reply.choices[0].finish_reason != "stop":
                break
            messages += [answer, {"role": "user", "content": "<"}]
        if await self._post("/finish", opened["api_key"], {"reward": random.random()}) is not None:
            self.finished.add(opened["episode"])

    async def _post(self, path: str, key: str, body: Any, name: str = "") -> Any:
        """Repeat a POST request until the endpoint answers; return None if the run has ended, or has no episode."""
        headers = {"authorization": f"Bearer {key}", "content-type": "application/json", "idempotency-key": name}
        request = urllib.request.Request(f"{self._root}/rrl/v1/episodes{path}", json.dumps(body).encode(), headers)
        while not self.ended.is_set():
            try:
                return await asyncio.to_thread(_send, request)
            except urllib.error.HTTPError as error:
                if error.code == 410:  # the relay answers with this status once the run has ended
                    break
                if error.code != 503:
                    raise
            except (OSError, http.client.HTTPException) as error:  # the latter for a reply that was cut
                self.errors.append(error)
                await asyncio.sleep(0.2)
        return None


def _send(request: urllib.request.Request) -> Any:
    with urllib.request.urlopen(request, timeout=TIMEOUT_S) as reply:
        return json.loads(reply.read())


async def play(run: TestRun, base_url: str, retries: int) -> Player:
    """Play until the run has ended, and kill the endpoint in the middle."""
    player = Player(base_url, run_key(run.run.id, RunKeys.load(run.run.keys).secret), retries)
    playing = asyncio.create_task(player.play())
    deadline = time.monotonic() + TIMEOUT_S
    while (state := run.state()).outcome is None:
        assert time.monotonic() < deadline, state.why
        if not player.killed.is_set() and len(player.finished) >= BEFORE_DEATH:
            pid = state.replica(ENDPOINT).pid
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            player.killed.set()
        if playing.done():
            playing.result()
        await asyncio.sleep(0.1)
    player.ended.set()
    playing.cancel()
    with suppress(asyncio.CancelledError, openai.APIError):
        await playing
    return player


@contextmanager
def relay_of(run: TestRun) -> Iterator[str]:
    """Start ``rrl relay`` and yield its base URL."""
    program = ("-c", "from rrl.cli.main import main; main()")
    command = [sys.executable, *program, "relay", str(run.run.path), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().split("base URL ")[1].split(";")[0]
        finally:
            process.terminate()


def check_trained(run: TestRun, player: Player) -> None:
    """Check that the run trained only on the player's episodes, and that its endpoint was restarted once."""
    state = run.state()
    assert (state.outcome, state.step) == ("completed", STEPS), state.why
    assert state.replica(ENDPOINT).incarnation_number == 2
    run.wait_gone()
    check_sound(run.run)
    audit = json.loads((run.run.store / "audit.json").read_text())
    assert audit["trained"] == STEPS * PROMPTS * GROUP <= len(player.finished)
    assert set(audit["dropped"]) <= {"the run is complete"}, "an attempt has failed"


@pytest.mark.torch
@pytest.mark.long  # the light run below loses its endpoint, too; tests/engine/test_agents.py trains the model by agents
def test_agents_outside_of_the_run_train_the_model_and_outlive_the_endpoint(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]  # a fixed port, which a restarted endpoint uses again
    run = submit(tmp_path, port, ("replicas = 2\n", ""))  # each rollout loads torch: 4 s of CPU
    run.wait(lambda state: all_work(state) and bool(read_addresses(run.run)), TIMEOUT_S)
    check_trained(run, asyncio.run(play(run, read_addresses(run.run)[0], retries=20)))


def test_agents_behind_a_relay_get_no_error_when_the_endpoint_moves(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = submit(tmp_path, 0, *WITHOUT_MODEL)
    run.wait(lambda state: all_work(state) and bool(read_addresses(run.run)), TIMEOUT_S)
    before = read_addresses(run.run)
    with relay_of(run) as base_url:
        player = asyncio.run(play(run, base_url, retries=0))
    assert player.errors == []
    check_trained(run, player)
    assert read_addresses(run.run) != before

    name = str(run.run.path)
    assert main.run(["status", name]) == 0
    assert re.search(r"^agents +[\d,]+ finished .* turns [\d,]+ .* branch(es)? each$", capsys.readouterr().out, re.M)
    summary = json.loads(run.run.summary.read_text())
    assert summary["episodes"]["finished"] >= STEPS * PROMPTS * GROUP
    assert summary["branches"] >= summary["episodes"]["finished"]
    assert (summary["token_drift"], summary["untrained_turns"]) == (0, 0)
    assert main.run(["episodes", name, "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    trained = next(one for one in listed if one["state"] == "trained")
    assert trained["outside"]
    assert trained["trained"] == trained["sampled"]
    assert main.run(["endpoint", name]) == 1
    assert "has ended (completed), so its endpoint no longer answers" in capsys.readouterr().err
