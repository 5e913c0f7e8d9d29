"""A trajectory store without a manager: run it with ``python -m``.

Its arguments are folder, keys file, address file, epoch and the store's settings as JSON. The setting ``"agents":
true`` is for a job with agents, whose ``"reward_timeout"`` is in seconds. ``"samples": true`` keeps samples beside the
folder, as by default.

Each line on stdin is the membership that a manager would send (JSON list of current incarnations); the store begins
to serve after the first line.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec

from rrl.core.run_dir import write_atomically
from rrl.core.types import Incarnation
from rrl.roles.trajectories.client import TrajectoryClient
from rrl.roles.trajectories.episodes.requests import EpisodeItem, LeaseEpisodes, OpenTurn, StoreRequest
from rrl.roles.trajectories.episodes.rules import EpisodeSettings
from rrl.roles.trajectories.sample_writer import SampleWriter
from rrl.roles.trajectories.server import Server
from rrl.roles.trajectories.types import GetPart, LeaseScoring, PackedPart, ToScore
from rrl.tests.support.manager.jobs import job
from rrl.tests.support.roles.trajectories.agents import open_agents_store
from rrl.tests.support.roles.trajectories.crew import open_store
from rrl.transport.control.endpoints import Address, Listener
from rrl.transport.keys import RunKeys


class StoreProcess:
    """Starts and kills the process of a store, any number of times, and sends memberships to it."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self._settings = settings
        self.folder = folder / "trajectories"
        self.keys = RunKeys.make()
        self._keys_file = folder / "keys.json"
        self.keys.save(self._keys_file)
        self._address = folder / "store.json"
        self._epoch = 0
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, members: Iterable[Incarnation]) -> None:
        self._epoch += 1
        files = [str(self.folder), str(self._keys_file), str(self._address), str(self._epoch)]
        files.append(json.dumps(self._settings))
        command = [sys.executable, "-m", "rrl.tests.support.roles.trajectories.store_process", *files]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE)
        self.set_membership(members)

    def set_membership(self, members: Iterable[Incarnation]) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(msgspec.json.encode(list(members)) + b"\n")
        self._process.stdin.flush()

    def cpu_s(self) -> float:
        """Return the CPU time that the process has used."""
        assert self._process is not None
        return int(Path(f"/proc/{self._process.pid}/schedstat").read_text().split()[0]) / 1e9

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait(60)
            assert self._process.stdin is not None
            self._process.stdin.close()
            self._process = None

    def find(self) -> Address | None:
        try:
            return msgspec.json.decode(self._address.read_bytes(), type=Address)
        except FileNotFoundError:
            return None


@asynccontextmanager
async def open_clients(
    deadline_s: float, process: StoreProcess, *incarnations: Incarnation
) -> AsyncIterator[list[TrajectoryClient]]:
    """Connect a client for each incarnation; the block and each request must end within ``deadline_s`` seconds."""
    made = [TrajectoryClient(process.keys, each, process.find, timeout=deadline_s) for each in incarnations]
    running = [asyncio.create_task(client.run()) for client in made]
    try:
        async with asyncio.timeout(deadline_s):
            yield made
    finally:
        for client in made:
            await client.close()
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


async def lease_episodes(client: TrajectoryClient, *arguments: Any) -> tuple[EpisodeItem, ...]:
    leased = await client.ask(LeaseEpisodes, *arguments)
    return leased.items if leased is not None else ()


async def open_turn(client: TrajectoryClient, *arguments: Any, **named: Any) -> int:
    return (await client.ask(OpenTurn, *arguments, **named)).turn


async def lease_scoring(client: TrajectoryClient, *arguments: Any) -> tuple[ToScore, ...]:
    leased = await client.ask(LeaseScoring, *arguments)
    return leased.items if leased is not None else ()


async def batch_of(client: TrajectoryClient, number: int, wait: float = 5.0) -> PackedPart | None:
    bound = await client.ask(GetPart, number, None, wait)
    return bound.part if bound is not None else None


async def part_of(client: TrajectoryClient, *arguments: Any) -> PackedPart | None:
    bound = await client.ask(GetPart, *arguments)
    return bound.part if bound is not None else None


async def _main(folder: Path, keys: Path, address: Path, epoch: int, settings: dict[str, Any]) -> None:
    loop = asyncio.get_running_loop()
    lines = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    listener = await Listener.open(RunKeys.load(keys), StoreRequest, epoch=epoch)
    if settings.pop("samples", False):
        made = job()
        roles = tuple(msgspec.structs.replace(role, built_in=True) for role in made.roles)
        settings["samples"] = SampleWriter(folder.parent / "samples", msgspec.structs.replace(made, roles=roles))
    opened = open_agents_store if settings.pop("agents", False) else open_store
    if (reward_timeout := settings.pop("reward_timeout", None)) is not None:
        settings["episodes"] = EpisodeSettings(reward_timeout=reward_timeout)
    server = Server(opened(folder, (), **settings), listener)

    async def listen() -> None:
        while line := await lines.readline():
            server.update_membership(frozenset(msgspec.json.decode(line, type=list[Incarnation])))
            write_atomically(address, msgspec.json.encode(listener.address))
        server.stop()

    listening = asyncio.create_task(listen())
    await server.run()
    listening.cancel()
    await listener.close()


if __name__ == "__main__":
    asyncio.run(
        _main(Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4]), json.loads(sys.argv[5]))
    )
