"""Agents are evaluated in whole runs: each due step has one result, whatever is killed, and trains on none of them."""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import threading
import urllib.request
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from rrl.core.types import ReplicaId
from rrl.manager.model import events as ev
from rrl.manager.storage.lease import holder
from rrl.roles.endpoint.addresses import read_addresses
from rrl.roles.endpoint.key import run_key
from rrl.roles.trajectories.durable.records import FIRST_EVALUATED
from rrl.tests.support.agents_example import submit_agents_example
from rrl.tests.support.runs import WITHOUT_MODEL, TestRun, all_work, check_sound
from rrl.transport.keys import RunKeys

STEPS, DUE = 6, [0, 2, 4, 6]
COUNT, SAMPLES = 6, 2
MANY = 10_000
TIMEOUT_S = 240.0
SMALL = (("group_size = 8", "group_size = 4"), *WITHOUT_MODEL)
EVALUATION = f"""
[eval]
every = 2
count = {COUNT}
samples = {SAMPLES}
temperature = 1.0
task = {{ function = "held_out:HeldOut" }}

[roles.trainer]"""
HELD_OUT = """
import asyncio, json, os, urllib.request

import guess_task

class HeldOut(guess_task.Digits):
    def prompt(self, i):
        return f"held-out {i}"

def ask(base_url, api_key):
    body = json.dumps({"model": "policy", "messages": [{"role": "user", "content": "?"}]}).encode()
    headers = {"authorization": f"Bearer {api_key}", "content-type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(f"{base_url}/chat/completions", body, headers)) as reply:
        json.load(reply)

async def run(item, base_url, api_key):
    await asyncio.to_thread(ask, base_url, api_key)
    if not item.startswith("held-out"):
        return 0.0
    await asyncio.sleep(0.5)
    await asyncio.to_thread(ask, base_url, api_key)
    return 1.0
"""
"""An agent whose reward is 1 for the items of the evaluation, which take over a second with the changes below."""


def submit(folder: Path, *changes: tuple[str, str]) -> TestRun:
    (folder / "held_out.py").write_text(HELD_OUT)
    return submit_agents_example(folder, STEPS, 1, *SMALL, *changes, ("\n[roles.trainer]", EVALUATION))


def kill(run: TestRun, replica: str) -> None:
    before = run.state().replica(ReplicaId(replica))
    assert before.pid is not None
    os.kill(before.pid, signal.SIGKILL)
    run.wait(lambda state: state.replica(ReplicaId(replica)).incarnation_number > before.incarnation_number, TIMEOUT_S)


def results(run: TestRun) -> dict[int, dict[str, float]]:
    recorded = [stamped.event for stamped in run.events() if isinstance(stamped.event, ev.Evaluated)]
    assert [event.step for event in recorded] == DUE
    return {event.step: event.metrics for event in recorded}


def check_completed(run: TestRun) -> None:
    state = run.state()
    assert (state.outcome, state.step) == ("completed", STEPS), state.why
    run.wait_gone()
    check_sound(run.run)
    for path in (run.run.path / "batches").glob("*.json"):
        assert all(one["id"] < FIRST_EVALUATED for one in json.loads(path.read_text()))
    assert json.loads((run.run.store / "audit.json").read_text())["trained"] == STEPS * 4


@pytest.mark.timeout(600)
def test_agents_of_the_run_are_evaluated_once_although_every_role_and_the_manager_die(tmp_path: Path) -> None:
    agents = ('function = "guess_task:run"\nconcurrency = 48', 'function = "held_out:run"\nconcurrency = 3')
    run = submit(tmp_path, agents)
    for step, victims in ((0, ["rollout/0"]), (2, ["trajectories/0", "agents/0"]), (4, ["trainer/0"])):
        _wait_evaluating(run, step)
        for victim in victims:
            kill(run, victim)
    _wait_evaluating(run, STEPS)
    managing = holder(run.run)
    assert managing is not None
    os.kill(managing.pid, signal.SIGKILL)
    with run.call("manage", run.run.id, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL):
        run.wait_end(TIMEOUT_S)
    check_completed(run)
    for metrics in results(run).values():
        lengths = metrics.pop("completion_len")
        assert 2 <= lengths <= 4
        assert metrics.pop("truncated") == 0.0
        assert metrics == {"count": COUNT * SAMPLES, "reward": 1.0, "pass@1": 1.0, "avg@2": 1.0, "pass@2": 1.0}
    shown = run.call("status", run.run.id, stdout=subprocess.PIPE).communicate(timeout=60)[0]
    assert f"step {STEPS} · pass@1 1.00 (1.00 at step 0)" in shown


def _wait_evaluating(run: TestRun, step: int) -> None:
    run.wait(lambda state: state.step >= step and state.evaluated < step and all_work(state), TIMEOUT_S)


class Player(threading.Thread):
    """An agent outside of the run, which plays episodes of a split.

    Args:
        run: The run.
        split: The split.
        episodes: Is acquired for each episode.
    """

    def __init__(self, run: TestRun, split: str, episodes: threading.Semaphore) -> None:
        super().__init__(daemon=True)
        self._run, self._split, self._episodes = run, split, episodes
        self._key = run_key(run.run.id, RunKeys.load(run.run.keys).secret)
        self.ended = threading.Event()
        self.finished: list[Any] = []
        """Episodes that were finished, as they were opened."""
        self.start()

    def run(self) -> None:
        self._episodes.acquire()
        while not self.ended.is_set():
            if (opened := self._post("/rrl/v1/episodes", self._key, {"split": self._split})) is None:
                continue
            body = {"model": "policy", "messages": [{"role": "user", "content": "?"}]}
            if self._post("/v1/chat/completions", opened["api_key"], body) is None:
                continue
            finish = {"reward": float(self._split == "eval")}
            if self._post("/rrl/v1/episodes/finish", opened["api_key"], finish) is not None:
                self.finished.append(opened)
                self._episodes.acquire()

    def _post(self, path: str, key: str, body: Any) -> Any:
        """Return the reply; None if the endpoint refuses the request, or if it breaks or there is no endpoint."""
        headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
        with suppress(OSError, ValueError, http.client.HTTPException):  # HTTPError is an OSError
            root = read_addresses(self._run.run)[0].removesuffix("/v1")
            request = urllib.request.Request(f"{root}{path}", json.dumps(body).encode(), headers)
            with urllib.request.urlopen(request, timeout=TIMEOUT_S) as reply:
                return json.load(reply)
        self.ended.wait(0.1)
        return None


@pytest.mark.timeout(600)
def test_agents_outside_of_the_run_are_evaluated_and_the_trainer_does_not_wait(tmp_path: Path) -> None:
    endpoint = (
        ("[roles.agents]\n", "[roles.endpoint]\n"),
        ('function = "guess_task:run"\n', ""),
        ("concurrency = 48 ", "retries = 2 "),
    )
    run = submit(tmp_path, *endpoint)
    run.wait(lambda state: all_work(state) and bool(read_addresses(run.run)), TIMEOUT_S)
    episodes = threading.Semaphore(2 * 4)
    training = [Player(run, "train", episodes) for _ in range(4)]
    run.wait(lambda state: state.step == 2, TIMEOUT_S)  # no evaluation has held it up
    evaluated = Player(run, "eval", threading.Semaphore(MANY))
    run.wait(lambda _: bool(evaluated.finished), TIMEOUT_S)
    for victim in ("endpoint/0", "trajectories/0", "rollout/0", "trainer/0"):
        kill(run, victim)
    run.wait(all_work, TIMEOUT_S)
    episodes.release(MANY)
    run.wait_end(TIMEOUT_S)
    for player in (*training, evaluated):
        player.ended.set()
    episodes.release(4)
    check_completed(run)
    found = results(run)
    assert (found[0], found[2]) == ({"count": 0.0}, {"count": 0.0})
    assert found[4]["count"] >= 1
    assert found[4]["count"] + found[6]["count"] <= len(evaluated.finished) + 1, "the reply of one may have been lost"
    for metrics in found.values():
        assert metrics.get("reward", 1.0) == metrics.get("pass@1", 1.0) == 1.0
    assert all(one["item"].startswith("held-out ") for one in evaluated.finished)
    assert not any(one["item"].startswith("held-out ") for player in training for one in player.finished)
