"""Agents behind a plain round-robin proxy over two of vLLM's own servers, one of which is killed."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

import openai
from msgspec import Struct

from rrl.benchmarks._agents_watched import CallLog, read_calls, watched_call
from rrl.benchmarks._vllm_servers import VllmServer, round_robin, serving
from rrl.examples.smollm2 import make_model
from rrl.roles.endpoint.http_server import EndpointServer

AT_ONCE = 32
TURNS = 3
TURN_TOKENS = 64
MAX_LENGTH = 512


class Proxied(Struct, frozen=True):
    """The failures that the agents have observed."""

    calls: int
    client_errors: int
    """Number of failed calls: broken streams, which the client does not repeat, and calls that also failed when
    repeated."""
    lost_tokens: int
    """Number of tokens that the failed calls (:attr:`client_errors`) had received before they failed."""
    errors: list[str]
    load: tuple[float, float]


def measure(folder: Path) -> Proxied:
    """Let the agents work to the end, and kill a server when each agent has received its first answer."""
    folder.mkdir(parents=True)
    load = os.getloadavg()[0]
    with serving(make_model.FOLDER.expanduser(), folder, MAX_LENGTH, AT_ONCE, count=2) as servers:
        proxy = EndpointServer(round_robin([server.base_url for server in servers]))
        proxy.start()
        try:
            asyncio.run(_work(proxy.base_url, folder, servers[1]))
        finally:
            proxy.stop()
    calls = read_calls(folder)
    failed = [call for call in calls if call.error]
    return Proxied(
        len(calls),
        len(failed),
        sum(len(call.tokens) for call in failed),
        sorted({call.error[:80] for call in failed}),
        (round(load, 1), round(os.getloadavg()[0], 1)),
    )


async def _work(base_url: str, folder: Path, victim: VllmServer) -> None:
    log, answered, all_work = CallLog(folder / "calls-proxied.jsonl"), 0, asyncio.Event()

    async def kill() -> None:
        await all_work.wait()
        await asyncio.to_thread(victim.kill)

    def count() -> None:
        nonlocal answered
        answered += 1
        if answered >= AT_ONCE:  # then the server is killed while the agents receive their second answers
            all_work.set()

    await asyncio.gather(kill(), *(_agent(base_url, index, log, count) for index in range(AT_ONCE)))


async def _agent(base_url: str, index: int, log: CallLog, count: Callable[[], None]) -> None:
    """Hold a conversation whose answers are all streamed; end at the first failed call, as by an uncaught exception."""
    client = openai.AsyncOpenAI(base_url=base_url, api_key="none")
    messages = [{"role": "user", "content": f"Write a long story about the number {index}."}]
    try:
        for turn in range(TURNS):
            text, _ = await watched_call(client, messages, turn, log, stream=True, max_tokens=TURN_TOKENS)
            count()
            messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "Go on."}]
    except openai.OpenAIError:
        count()
    finally:
        await client.close()
