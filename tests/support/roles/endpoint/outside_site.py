"""The store and the endpoint of a run as processes, for agents outside of the run."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx2
import openai

from rrl.core.run_dir import RunDir
from rrl.roles.endpoint.addresses import read_addresses
from rrl.roles.endpoint.key import run_key
from rrl.roles.trajectories.client import TrajectoryClient
from rrl.tests.support.listening_manager import eventually
from rrl.tests.support.roles.endpoint.endpoint_process import EndpointProcess
from rrl.tests.support.roles.endpoint.served import CHAT
from rrl.tests.support.roles.trajectories.crew import ALL, segment
from rrl.tests.support.roles.trajectories.store_process import StoreProcess

DEADLINE_S = 240.0
"""Time limit in seconds, which only a broken build reaches."""
READ_TIMEOUT_S = 5.0
"""Time without a byte after which the agent's client gives up (s)."""
DIGITS = tuple(CHAT.tokenizer.encode(digit)[0] for digit in "0123456789")


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
