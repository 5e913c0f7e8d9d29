"""Agents that stream responses and messages get whole answers although each process of their run dies in a stream."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from rrl.core.processes import read_process
from rrl.core.types import TRAINER, ReplicaId
from rrl.manager.model.state import State
from rrl.manager.storage.lease import holder
from rrl.tests.support.agents_example import submit_agents_example
from rrl.tests.support.runs import LIGHT, WITHOUT_MODEL, TestRun, all_work, check_sound

ROLLOUT, STORE, AGENTS = ReplicaId("rollout/0"), ReplicaId("trajectories/0"), ReplicaId("agents/0")
TIMEOUT_S = 240.0
STEPS = 20
STREAMED = """
import json
import httpx2
from openai import AsyncOpenAI

OPENAI = AsyncOpenAI(base_url="http://unset", api_key="unset", max_retries=0, timeout=240)
HTTP = httpx2.AsyncClient(timeout=240)

async def response(base_url, api_key, messages):
    client, text = OPENAI.with_options(base_url=base_url, api_key=api_key), ""
    async with client.responses.stream(model="policy", input=messages) as stream:
        async for event in stream:
            text += event.delta if event.type == "response.output_text.delta" else ""
        final = await stream.get_final_response()
    assert (final.status, final.output_text) == ("completed", text), final
    return text

async def message(base_url, api_key, messages):
    body, kinds, text = {"model": "policy", "max_tokens": 8, "stream": True, "messages": messages}, [], ""
    async with HTTP.stream("POST", f"{base_url}/messages", json=body, headers={"x-api-key": api_key}) as stream:
        assert stream.status_code == 200, await stream.aread()
        async for line in stream.aiter_lines():
            if line.startswith("data: "):
                event = json.loads(line[6:])
                kinds += [event["type"]]
                text += event["delta"]["text"] if event["type"] == "content_block_delta" else ""
    assert kinds[0] == "message_start" and kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"], kinds
    return text

async def run(item, base_url, api_key):
    ask, messages = (response, message)[int(item) % 2], [{"role": "user", "content": item}]
    try:
        for turn in range(3):
            answer = await ask(base_url, api_key, messages)
            assert answer == item * 4, answer
            messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": "?"}]
    except Exception as error:
        with open("errors.txt", "a") as file:
            file.write(f"{ask.__name__}: {error!r}\\n")
        raise
    return 1.0
"""
"""An agent without repeated calls. The light rollouts answer with four times the digit of the item, token by token."""


def submit(folder: Path) -> TestRun:
    (folder / "streamed.py").write_text(STREAMED)
    trainer, _ = WITHOUT_MODEL
    rollout = (
        f'[roles.rollout]\nreplicas = 1\ncommand = ["{sys.executable}", "{LIGHT}/light_rollout.py"]\nmem = "256MiB"\n'
    )
    return submit_agents_example(
        folder,
        STEPS,
        1,
        trainer,
        ("[roles.rollout]\nreplicas = 2\n", rollout),
        ('function = "guess_task:run"\nconcurrency = 48', 'function = "streamed:run"\nconcurrency = 8'),
        ("max_new_tokens = 2 ", "max_new_tokens = 5 "),
        ("group_size = 8", "group_size = 4"),
    )


def _works_again(victim: ReplicaId, state: State) -> bool:
    return state.replica(victim).incarnation_number == 2 and all_work(state)


@pytest.mark.timeout(600)
def test_streams_go_on_although_rollout_store_trainer_and_manager_die_in_the_middle(tmp_path: Path) -> None:
    run = submit(tmp_path)
    run.wait(lambda state: all_work(state) and state.step >= 1, TIMEOUT_S)
    for victim in (ROLLOUT, STORE, TRAINER):
        run.hold_in_the_middle(0)
        pid = run.state().replica(victim).pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        run.wait(partial(_works_again, victim))
        run.let_go(0)
    run.hold_in_the_middle(0)
    managing = holder(run.run)
    assert managing is not None
    os.kill(managing.pid, signal.SIGKILL)
    run.wait(lambda _: read_process(managing.pid) is None)
    with run.call("manage", run.run.id, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL):
        run.wait(all_work)
        run.let_go(0)
        state = run.wait_end(TIMEOUT_S)
    assert (state.outcome, state.step) == ("completed", STEPS), state.why
    run.wait_gone()
    check_sound(run.run)
    errors = tmp_path / "errors.txt"
    assert not errors.exists(), errors.read_text()
    assert state.replica(AGENTS).incarnation_number == 1
    assert run.summary()["token_drift"] == 0
