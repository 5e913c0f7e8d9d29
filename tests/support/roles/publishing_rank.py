"""A rank of a trainer that publishes one part of each version, in a process of its own.

``python -m rrl.tests.support.roles.publishing_rank`` joins the run, and then publishes for each line ``STEP`` of its
standard input its part of this step, whose number is its rank. It prints the step once the version is published.
"""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import rrl
from rrl.core.launch import HEARTBEAT_INTERVAL_ENV, LAUNCH_ENV
from rrl.core.types import TRAINER, Incarnation, Version, member_id
from rrl.tests.support.listening_manager import TIMEOUT_S
from rrl.tests.support.roles.worker_scene import HEARTBEAT_S, Manager, Scene
from rrl.tests.support.weights.source import content
from rrl.transport.messages import Heartbeat

SIZE = 3 * 2**20 + 17
"""Size of each tensor in bytes; two tensors of a part have several chunks."""


def part_of(rank: int, version: Version) -> dict[str, memoryview]:
    """Return the tensors of a rank's part; two versions or ranks have different contents."""
    return {f"w{rank}.{i}": content(SIZE, 64 * version.incarnation + 16 * version.step + 4 * rank + i) for i in (0, 1)}


def tensors_of(version: Version, world: int) -> dict[str, memoryview]:
    """Return the tensors of a version with a part of each rank."""
    return {name: data for rank in range(world) for name, data in part_of(rank, version).items()}


class Rank:
    """The process of a rank, as a test commands it."""

    def __init__(self, incarnation: Incarnation, process: asyncio.subprocess.Process) -> None:
        self.incarnation, self.process = incarnation, process

    def start_publishing(self, step: int) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(b"%d\n" % step)

    async def published(self) -> int:
        """Wait until a version is published, and return its step."""
        assert self.process.stdout is not None
        return int(await asyncio.wait_for(self.process.stdout.readline(), TIMEOUT_S))

    async def kill(self) -> None:
        """End the process, if it runs."""
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        await self.process.wait()

    async def waits(self, manager: Manager) -> None:
        """Wait until the rank has begun to publish."""
        await manager.wait_for(Heartbeat, lambda one: (one.incarnation, one.phase) == (self.incarnation, "publish"))


async def start(scene: Scene, incarnation: Incarnation, *program: str) -> Rank:
    """Start ``python -m program`` as an incarnation of the run."""
    launch = scene.launch(incarnation)
    env = {
        "PATH": "/usr/bin:/bin",
        HEARTBEAT_INTERVAL_ENV: str(HEARTBEAT_S),
        LAUNCH_ENV: str(scene.at.run.launch_file(launch.tag)),
    }
    argv = [sys.executable, "-P", "-m", *program]
    process = await asyncio.create_subprocess_exec(*argv, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    return Rank(incarnation, process)


@asynccontextmanager
async def gang(
    scene: Scene, manager: Manager, world: int, number: int = 1, program: Sequence[str] = (__spec__.name,)
) -> AsyncIterator[list[Rank]]:
    """Start the ranks of incarnation ``number`` of the trainer, and end their processes afterwards."""
    manager.world = world
    ranks: list[Rank] = []
    try:
        for rank in range(world):
            ranks.append(await start(scene, Incarnation(member_id(TRAINER, rank), number), *program))
        yield ranks
    finally:
        for each in ranks:
            await each.kill()


def _main() -> None:
    with rrl.join() as me:
        me.progress()
        for line in sys.stdin:
            part = part_of(me.rank, Version(int(line), me.launch.incarnation.number))
            tensors = [(name, "uint8", (data.nbytes,), data) for name, data in part.items()]
            me.publish_shard(int(line), tensors, part=me.rank, of=me.world)
            print(int(line), flush=True)


if __name__ == "__main__":
    _main()
