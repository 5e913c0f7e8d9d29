"""A replica of the endpoint without a manager, over a real store: run it with ``python -m``.

Its arguments are the run directory and the number of its incarnation. The run directory has the keys and the address
file of a :class:`~rrl.tests.support.roles.trajectories.store_process.StoreProcess`. The replica writes its own address
as the address of replica 0.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec

from rrl.core.run_dir import RunDir
from rrl.core.types import Incarnation
from rrl.roles.endpoint.addresses import write_address
from rrl.roles.endpoint.application import Endpoint, ServedRun
from rrl.roles.endpoint.calls.call import Policy
from rrl.roles.endpoint.episode_routes import EpisodeRoutes
from rrl.roles.endpoint.http_server import EndpointServer
from rrl.roles.trajectories.client import TrajectoryClient
from rrl.tests.support.roles.endpoint.served import CHAT
from rrl.tests.support.roles.trajectories.crew import incarnation_of
from rrl.transport.control.endpoints import Address
from rrl.transport.keys import RunKeys

MAX_NEW, MAX_LENGTH = 32, 200
_STORE_TIMEOUT_S = 600.0


class EndpointProcess:
    """Starts and kills the process of a replica of the endpoint, any number of times."""

    def __init__(self, run: RunDir) -> None:
        self._run = run
        self._process: subprocess.Popen[bytes] | None = None
        self.incarnations = 0

    @property
    def incarnation(self) -> Incarnation:
        return incarnation_of("endpoint/0", self.incarnations)

    def start(self) -> None:
        """Start the next incarnation, which must be in the membership of the store."""
        arguments = [str(self._run.path), str(self.incarnations)]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "rrl.tests.support.roles.endpoint.endpoint_process", *arguments]
        )

    def kill(self) -> None:
        """End the process by SIGKILL."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(60)
            self._process = None


async def _main(run: RunDir, number: int) -> None:
    keys = RunKeys.load(run.keys)

    def find_store() -> Address | None:
        try:
            return msgspec.json.decode((run.path / "store.json").read_bytes(), type=Address)
        except FileNotFoundError:
            return None

    client = TrajectoryClient(keys, incarnation_of("endpoint/0", number), find_store, timeout=_STORE_TIMEOUT_S)
    loop = asyncio.get_running_loop()

    async def ask(kind: Any, *arguments: Any, **named: Any) -> Any:
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(client.ask(kind, *arguments, **named), loop))

    routes = EpisodeRoutes(ask, run.id, keys.secret, lambda item, evaluation: str(item))
    served = ServedRun(run.id, keys.secret, Policy(1.0), MAX_NEW, MAX_LENGTH)
    server = EndpointServer(Endpoint(served, CHAT, ask, routes=routes.routes(), outlived=True).application)
    server.start()
    write_address(run, 0, server.base_url)
    await client.run()


if __name__ == "__main__":
    asyncio.run(_main(RunDir(Path(sys.argv[1])), int(sys.argv[2])))
