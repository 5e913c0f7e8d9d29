"""Whether a node's health is looked after, and by which readers. Light: the readers' side and the checks are imported
only where there is something to read, for they take memory."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING

from rrl.roles.first import FirstProcess
from rrl.spec.launch import Launch, read_launch
from rrl.spec.processes import STEP_MODULE, processes

if TYPE_CHECKING:
    from rrl.roles.node_health import NodeHealth

READERS_ENV = "RRL_READERS"
"""names of the readers that run beside an agent, with commas, whatever its launch file says; ``none``: none"""


def readers_of(launch: Launch) -> tuple[str, ...]:
    """In the order in which they are named."""
    given = os.environ.get(READERS_ENV)
    return tuple(name for name in given.split(",") if name != "none") if given else launch.readers


@contextlib.asynccontextmanager
async def looked_after(first: FirstProcess) -> AsyncIterator[NodeHealth | None]:
    """Inside, the node's health can be watched; None where nothing is to be read, as on a virtual node."""
    if not readers_of(first.launch):
        yield None
        return
    from rrl.roles.node_health import NodeHealth

    health = NodeHealth(first.launch, first.launch_file, first.dialer.send)
    try:
        yield health
    finally:
        await health.close()


async def admit(first: FirstProcess, health: NodeHealth | None) -> None:
    """A first look at the node, before its agent says that it is there and roles are placed on it. Broken off when
    there is a reason to leave."""
    if health is None:
        return
    vacant = not await asyncio.to_thread(_occupied, first)
    looking = asyncio.create_task(health.start(first.launch.admission, vacant))
    looking.add_done_callback(lambda _: first.news.set())
    await first.until(looking.done)
    looking.cancel()


def _occupied(first: FirstProcess) -> bool:
    """A step of the run lives here: the agent is not the first one of its node."""
    for process in processes(first.steps):
        with contextlib.suppress(OSError, ValueError):
            if process.module == STEP_MODULE and read_launch(Path(process.launch)).node == first.launch.node:
                return True
    return False
