"""``rrl relay`` as a process, in front of the real endpoint in a process that is killed, with a real store.

The agent is OpenAI's real client. The test samples the answers piece by piece, so that the endpoint dies in the middle
of an answer.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest

from rrl.core.run_dir import RUNS_ENV, RunDir
from rrl.roles.models.tokenizer import EOS
from rrl.tests.support.cli.agent_runs import endpoint_job
from rrl.tests.support.cli.story import Story
from rrl.tests.support.listening_manager import eventually
from rrl.tests.support.roles.endpoint.endpoint_process import MAX_NEW, EndpointProcess
from rrl.tests.support.roles.endpoint.outside_site import DEADLINE_S, DIGITS, Site
from rrl.tests.support.roles.trajectories.crew import ALL, ROLLOUT
from rrl.tests.support.roles.trajectories.store_process import StoreProcess, open_clients

OUTAGE_S = 8.0
"""Time without an endpoint (s), longer than the client waits."""
USER: list[Any] = [{"role": "user", "content": "7"}]


@asynccontextmanager
async def relay_of(run: RunDir) -> AsyncIterator[str]:
    """Start ``rrl relay`` and yield its base URL."""
    program = ("-c", "from rrl.cli.main import main; main()")
    process = await asyncio.create_subprocess_exec(
        sys.executable, *program, "relay", str(run.path), "--port", "0", stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    try:
        line = (await process.stdout.readline()).decode()
        assert line.startswith(f"the relay of {run.id} listens: base URL http://127.0.0.1:")
        yield line.split("base URL ")[1].split(";")[0]
        process.terminate()
        assert await process.wait() == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


@asynccontextmanager
async def site(folder: Path) -> AsyncIterator[Site]:
    run = Story("small-7", endpoint_job()).written(folder)
    store = StoreProcess(run.path, agents=True, max_new_tokens=MAX_NEW)
    endpoint = EndpointProcess(run)
    try:
        store.start(ALL)
        async with open_clients(DEADLINE_S, store, ROLLOUT) as (rollout,), relay_of(run) as base_url:
            made = Site(run, rollout, endpoint, store)
            await made.start_endpoint()
            await made.open_episode(base_url)
            yield made
    finally:
        endpoint.kill()
        store.kill()


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(RUNS_ENV, str(tmp_path))
    return tmp_path


async def dies_and_returns(made: Site) -> None:
    """Kill the endpoint, continue to sample without it, and start it again on another port."""
    before = made.address
    made.endpoint.kill()
    await made.sample(*DIGITS[3:5])
    await asyncio.sleep(OUTAGE_S)
    await made.start_endpoint()
    assert made.address != before


@pytest.mark.parametrize("form", ["chat", "responses", "messages"])
def test_stream_continues_at_its_token_after_the_endpoint_is_killed(runs: Path, form: str) -> None:
    async def play() -> None:
        async with site(runs) as made:
            tokens: list[int] = []
            text = ""

            async def read() -> None:
                nonlocal text
                more = {"return_token_ids": True}
                stream = await made.agent.chat.completions.create(
                    model="m", messages=USER, stream=True, extra_body=more
                )
                async for chunk in stream:
                    tokens.extend(chunk.choices[0].token_ids or [])
                    text += chunk.choices[0].delta.content or ""

            async def read_message() -> None:
                nonlocal text
                key, body = made.agent.api_key, {"model": "m", "max_tokens": MAX_NEW, "stream": True, "messages": USER}
                url, events = f"{made.agent.base_url}messages", []
                async with (
                    httpx2.AsyncClient(timeout=DEADLINE_S) as http,
                    http.stream("POST", url, json=body, headers={"x-api-key": key}) as reply,
                ):
                    assert reply.status_code == 200
                    async for line in reply.aiter_lines():
                        if line.startswith("data: "):
                            events.append(json.loads(line.removeprefix("data: ")))
                            if events[-1]["type"] == "content_block_delta":
                                text += events[-1]["delta"]["text"]
                assert events[0]["message"]["id"] == f"msg_{made.turn:x}"
                kinds = [event["type"] for event in events if event["type"] not in ("ping", "content_block_delta")]
                assert kinds == [
                    "message_start",
                    "content_block_start",
                    "content_block_stop",
                    "message_delta",
                    "message_stop",
                ]
                tokens.extend([*DIGITS, EOS][: events[-2]["usage"]["output_tokens"]])

            async def read_response() -> None:
                nonlocal text
                async with made.agent.responses.stream(model="m", input="7") as stream:
                    async for event in stream:
                        text += event.delta if event.type == "response.output_text.delta" else ""
                    response = await stream.get_final_response()
                assert (response.output_text, response.id) == (text, f"resp_{made.turn:x}")
                tokens.extend([*DIGITS, EOS][: response.usage.output_tokens])

            readers = {"chat": read, "responses": read_response, "messages": read_message}
            reading = asyncio.create_task(readers[form]())
            await made.leased()
            await made.sample(*DIGITS[:2])
            await made.sample(DIGITS[2])
            await eventually(lambda: text == "012")
            await dies_and_returns(made)
            await eventually(lambda: text == "01234")
            await made.sample(*DIGITS[5:], EOS, finished=True)
            await reading
            assert tokens == [*DIGITS, EOS]
            assert text == "0123456789"
            assert await made.rollout.lease(1) == (), "the repeated call has opened a second turn"

    asyncio.run(asyncio.wait_for(play(), DEADLINE_S))
