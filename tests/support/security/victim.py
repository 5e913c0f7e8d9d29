"""A process with one kind of port: ``python -m rrl.tests.support.security.victim KIND KEYS``.

The process prints its address, and then serves members of the run until its standard input ends.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

from rrl.core.run_spec import ModelSpec
from rrl.roles.endpoint import http_server, preparation_processes
from rrl.roles.endpoint.application import Endpoint, ServedRun
from rrl.roles.endpoint.calls.call import Policy
from rrl.roles.endpoint.http_server import EndpointServer
from rrl.roles.models.chat import open_chat
from rrl.roles.models.conversation import ModelChat
from rrl.roles.models.tokenizer import EOS
from rrl.roles.trajectories.episodes.requests import TurnTokens
from rrl.roles.trajectories.types import NotReady, StepRequest
from rrl.tests.support.roles.endpoint import tool_folders
from rrl.tests.support.roles.endpoint.fake_turns import VERSION as VERSION_OF_WEIGHTS
from rrl.tests.support.roles.endpoint.fake_turns import FakeTurns
from rrl.tests.support.roles.endpoint.served import CHAT, RUN
from rrl.tests.support.roles.snapshots.servers import snapshot_server
from rrl.tests.support.weights.source import VERSION, content, described
from rrl.transport.control import sockets
from rrl.transport.control.endpoints import Listener
from rrl.transport.keys import RunKeys
from rrl.transport.messages import Admitted, ToManager
from rrl.transport.weights import ucx
from rrl.transport.weights.select import open_transport
from rrl.transport.weights.store import WeightStore

HANDSHAKE_MS = 2000
"""Handshake deadline (ms). It replaces the longer defaults of the control plane and of UCX's own ports, so that tests
are short."""
LONGEST, PREPARATION_S = 10**6, 5.0
"""Maximum length of the model with a folder, in tokens, and the seconds for which its calls are prepared."""
TOKENS = 64
"""Number of tokens that each piece of an endless answer has."""
SIZE = 2**20
"""Bytes of the version that the weight transports serve."""


async def _control(keys: RunKeys, up: Any, answer: Any, bounds: sockets.Bounds) -> None:
    sockets.HANDSHAKE_TIMEOUT_MS = HANDSHAKE_MS
    listener = await Listener.open(keys, up, bounds=bounds)
    print(listener.endpoint, flush=True)
    while True:
        incoming = await listener.receive()
        await listener.send(incoming.peer, answer, incoming.request_id)


async def _weights(keys: RunKeys, kind: str) -> None:
    ucx.SILENT_TIMEOUT_S = HANDSHAKE_MS / 1000
    store, flat = WeightStore(), content(SIZE)
    store.offer(described(VERSION, flat, keys.secret, SIZE), flat)
    pipe = open_transport(kind, keys.secret, trusted_network=True)
    try:
        print(await pipe.serve(store, "127.0.0.1"), flush=True)
        await asyncio.Event().wait()
    finally:
        await pipe.close()


async def _snapshots(keys: RunKeys) -> None:
    with snapshot_server(keys) as kept:
        print(kept.address, flush=True)
        await asyncio.Event().wait()


class _EndlessTurns(FakeTurns):
    """Turns of episodes. In episodes with an even number, answers never end; in other episodes they end at once."""

    async def follow(self, turn: int, offset: int, wait: float) -> TurnTokens:
        if episode_of(turn) % 2:
            return TurnTokens((2, EOS), (-0.5, -0.5), (VERSION_OF_WEIGHTS,) * 2, True)
        await asyncio.sleep(0)
        return TurnTokens((2,) * TOKENS, (-0.5,) * TOKENS, (VERSION_OF_WEIGHTS,) * TOKENS, False)

    async def open_turn(self, episode: int, *more: Any) -> int:
        """Store nothing, so that the memory of this process grows only because of the endpoint."""
        return 2 * 10**6 + episode


def episode_of(turn: int) -> int:
    return turn - 2 * 10**6


async def _endpoint(keys: RunKeys, chat: ModelChat = CHAT, longest: int = 10**9) -> None:
    http_server.HEAD_TIMEOUT_S = http_server.IDLE_S = HANDSHAKE_MS / 1000
    run = ServedRun(RUN, keys.secret, Policy(1.0), max_new=10**9, max_length=longest)
    server = EndpointServer(Endpoint(run, chat, _EndlessTurns()).application)
    server.start()
    try:
        print(server.base_url.removesuffix("/v1"), flush=True)
        await asyncio.Event().wait()
    finally:
        server.stop()


async def main() -> None:
    kind, keys = sys.argv[1], RunKeys.load(Path(sys.argv[2]))
    if kind == "manager":
        serving = _control(keys, ToManager, Admitted("answered", True), sockets.MANAGER_BOUNDS)
    elif kind == "store":
        serving = _control(keys, StepRequest, NotReady(), sockets.STORE_BOUNDS)
    elif kind == "snapshots":
        serving = _snapshots(keys)
    elif kind == "endpoint":
        serving = _endpoint(keys)
    elif kind == "endpoint-folder":  # a model whose tokenizer takes long for a large body
        preparation_processes.TIMEOUT_S = PREPARATION_S
        model = ModelSpec(str(tool_folders.make(Path(sys.argv[2]).parent)), chat=True, max_length=LONGEST)
        serving = _endpoint(keys, open_chat(model), LONGEST)
    else:
        serving = _weights(keys, kind)
    task = asyncio.create_task(serving)
    await asyncio.to_thread(sys.stdin.read)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


if __name__ == "__main__":
    asyncio.run(main())
