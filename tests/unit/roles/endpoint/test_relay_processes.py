"""``rrl relay`` as a process, in front of the real endpoint in a process that is killed, with a real store.

The agent is OpenAI's real client. The test samples the answers piece by piece, so that the endpoint dies in the middle
of an answer.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

from rrl.core.run_dir import RUNS_ENV, RunDir
from rrl.roles.endpoint.addresses import read_addresses
from rrl.roles.endpoint.key import run_key
from rrl.roles.models.tokenizer import EOS
from rrl.roles.trajectories.client import TrajectoryClient
from rrl.tests.support.cli.agent_runs import endpoint_job
from rrl.tests.support.cli.story import Story
from rrl.tests.support.listening_manager import eventually
from rrl.tests.support.roles.endpoint.endpoint_process import MAX_NEW, EndpointProcess
from rrl.tests.support.roles.endpoint.served import CHAT
from rrl.tests.support.roles.trajectories.crew import ALL, ROLLOUT, segment
from rrl.tests.support.roles.trajectories.store_process import StoreProcess, open_clients

DEADLINE_S = 240.0
"""Time limit in seconds, which only a broken build reaches."""
READ_TIMEOUT_S = 5.0
"""Time without a byte after which the agent's client gives up (s)."""
OUTAGE_S = 8.0
"""Time without an endpoint (s), longer than the client waits."""
DIGITS = tuple(CHAT.tokenizer.encode(digit)[0] for digit in "0123456789")
USER: list[Any] = [{"role": "user", "content": "7"}]


class Site:
    """The store and the endpoint of a run, a relay beside the agent, and an episode that the agent has opened."""

    def __init__(self, run: RunDir, rollout: TrajectoryClient, endpoint: EndpointProcess, store: StoreProcess) -> None:
        self.run, self.rollout, self.endpoint, self._store = run, rollout, endpoint, store
        self.agent: Any = None
        self.turn = 0
        self.sampled = 0

    @property
    def address(self) -> str:
        return read_addresses(self.run).get(0, "")

    async def start_endpoint(self) -> None:
        """Start the endpoint's next incarnation, and wait until it has written its address."""
        before = self.address
        self.endpoint.incarnations += 1
        self._store.set_membership([*ALL, self.endpoint.incarnation])
        self.endpoint.start()
        await eventually(lambda: self.address not in ("", before))

    async def open_episode(self, base_url: str) -> None:
        key = run_key(self.run.id, self._store.keys.secret)
        async with httpx2.AsyncClient(timeout=DEADLINE_S) as client:
            url = base_url.removesuffix("/v1") + "/rrl/v1/episodes"
            opened = (await client.post(url, headers={"authorization": f"Bearer {key}"})).json()
        assert opened["base_url"] == base_url
        timeout = httpx2.Timeout(DEADLINE_S, read=READ_TIMEOUT_S)
        self.agent = openai.AsyncOpenAI(
            base_url=opened["base_url"], api_key=opened["api_key"], timeout=timeout, max_retries=0
        )

    async def leased(self) -> None:
        """Wait until the agent's call has opened a turn."""
        while not (items := await self.rollout.lease(1)):
            await asyncio.sleep(0)
        self.turn = items[0].trajectory

    async def sample(self, *tokens: int, finished: bool = False) -> None:
        added = [segment(self.turn, self.sampled, tokens)]
        assert not await self.rollout.append(added, [self.turn] if finished else [])
        self.sampled += len(tokens)


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


@pytest.mark.parametrize("form", ["chat", "responses"])
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

            async def read_response() -> None:
                nonlocal text
                async with made.agent.responses.stream(model="m", input="7") as stream:
                    async for event in stream:
                        text += event.delta if event.type == "response.output_text.delta" else ""
                    response = await stream.get_final_response()
                assert (response.output_text, response.id) == (text, f"resp_{made.turn:x}")
                tokens.extend([*DIGITS, EOS][: response.usage.output_tokens])

            reading = asyncio.create_task(read() if form == "chat" else read_response())
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
