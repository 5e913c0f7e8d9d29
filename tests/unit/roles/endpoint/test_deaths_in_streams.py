"""The store and the endpoint are killed in the middle of a streamed answer of each form, without a relay."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx2
import pytest

from rrl.core.run_dir import RUNS_ENV
from rrl.roles.endpoint.forms import FORMS
from rrl.roles.endpoint.key import run_key
from rrl.roles.models.tokenizer import EOS
from rrl.tests.support.cli.agent_runs import endpoint_job
from rrl.tests.support.cli.story import Story
from rrl.tests.support.listening_manager import eventually
from rrl.tests.support.roles.endpoint.endpoint_process import MAX_NEW, EndpointProcess
from rrl.tests.support.roles.endpoint.outside_site import DEADLINE_S, DIGITS, Site
from rrl.tests.support.roles.endpoint.served import BODIES
from rrl.tests.support.roles.trajectories.crew import ALL, ROLLOUT
from rrl.tests.support.roles.trajectories.store_process import StoreProcess, open_clients


class Streamed:
    """A streamed call, whose bytes are read as they arrive."""

    def __init__(self, site: Site, wire: str, key: str) -> None:
        self.body: dict[str, Any] = {"model": "m", "stream": True, **BODIES[wire]}
        self.body |= {"max_tokens": MAX_NEW} if wire == "messages" else {}
        self.url, self.headers = f"{site.address}{FORMS[wire].path}", {"authorization": f"Bearer {key}"}
        self.received = b""

    async def read(self) -> None:
        async with (
            httpx2.AsyncClient(timeout=DEADLINE_S) as client,
            client.stream("POST", self.url, json=self.body, headers=self.headers) as reply,
        ):
            assert reply.status_code == 200
            async for piece in reply.aiter_bytes():
                self.received += piece


@pytest.mark.parametrize("wire", FORMS)
def test_stream_survives_the_store_and_its_turn_the_endpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wire: str
) -> None:
    monkeypatch.setenv(RUNS_ENV, str(tmp_path))

    async def play() -> None:
        run = Story("small-7", endpoint_job()).written(tmp_path)
        store = StoreProcess(run.path, agents=True, max_new_tokens=MAX_NEW)
        endpoint = EndpointProcess(run)
        try:
            store.start(ALL)
            async with open_clients(DEADLINE_S, store, ROLLOUT) as (rollout,):
                made = Site(run, rollout, endpoint, store)
                await made.start_endpoint()
                async with httpx2.AsyncClient(timeout=DEADLINE_S) as client:
                    headers = {"authorization": f"Bearer {run_key(run.id, store.keys.secret)}"}
                    opening = f"{made.address.removesuffix('/v1')}/rrl/v1/episodes"
                    key = (await client.post(opening, headers=headers)).json()["api_key"]

                call = Streamed(made, wire, key)
                reading = asyncio.create_task(call.read())
                await made.leased()
                await made.sample(*DIGITS[:2])
                await eventually(lambda: b"data: " in call.received)

                store.kill()
                store.start([*ALL, endpoint.incarnation])
                await made.sample(*DIGITS[2:4])
                await eventually(lambda: b'"3"' in call.received or b'23"' in call.received)

                endpoint.kill()
                with pytest.raises(httpx2.RemoteProtocolError):
                    await reading
                assert not any(last in call.received for last in FORMS[wire].last)
                await made.start_endpoint()
                await made.sample(*DIGITS[4:], EOS, finished=True)
                async with httpx2.AsyncClient(timeout=DEADLINE_S) as client:
                    url, plain = f"{made.address}{FORMS[wire].path}", {**call.body, "stream": False}
                    repeated = await client.post(url, json=plain, headers=call.headers)
                assert "0123456789" in repeated.text
                assert await made.rollout.lease(1) == (), "the repeated call has opened a second turn"
        finally:
            endpoint.kill()
            store.kill()

    asyncio.run(asyncio.wait_for(play(), DEADLINE_S))
