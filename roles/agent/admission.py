"""Find out, before an agent reports its node, whether roles can run there, and have a first look at its health.

The readers' side and the checks are imported only where there is something to read, for they take memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import shlex
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING

from ...core.launch import read_launch
from ...core.processes import STEP_MODULE, processes
from ...core.text import last_lines
from ...transport.address import NoAddress
from ..launcher.environment import on_this_node, rdma_devices, readers_of
from ..launcher.first_process import FirstProcess
from ..launcher.process_group import command_env, end_descendants
from ..launcher.setup_command import SetUp

if TYPE_CHECKING:
    from .node_monitor import NodeHealth

_LEAVES_WITHIN = 5.0
"""s for what a probe started to end on SIGKILL"""
_READ = 4096
"""bytes of its output that are looked at"""


async def probe(first: FirstProcess) -> str:
    """What keeps roles from running here, on one line; empty: nothing does, or it was not asked for.

    Asked twice before it is believed, where time allows: shared storage stutters when every node imports at once, and a
    node that fails its probe is not used by this run."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    said = await _probed(first)
    if said and first.reason is None and loop.time() - began < first.launch.probe_within / 2:
        said = await _probed(first)
    return said


async def _probed(first: FirstProcess) -> str:
    """The probe runs behind the same prelude and in the same environment as roles do, in a process of its own: an agent
    that imports torch itself would keep gigabytes mapped. It leaves no process behind."""
    launch = first.launch
    try:
        env = on_this_node(launch)
    except NoAddress as error:
        return str(error)
    if not launch.probe:
        return ""
    said = os.memfd_create("rrl-probe", os.MFD_CLOEXEC)
    try:
        setup = SetUp(launch.setup, launch.probe, command_env(env, first.launch_file, first.me), launch.cwd, said)
        command = shlex.join(launch.probe)
        in_time = await _ended(first, setup, launch.probe_within)
        setup.group.kill()
        if not (await asyncio.wait([setup.group.ended], timeout=_LEAVES_WITHIN))[0]:
            return f"{command} hangs in the kernel: is there a file server that does not answer?"
        code, number = setup.group.reap()
        await asyncio.to_thread(end_descendants, first.me, _LEAVES_WITHIN)
        if not in_time:
            return f"{command} did not end within {launch.probe_within:g} s; a longer [limits] join gives it longer"
        if code == 0:
            return ""
        how = f"exit {code}" if number is None else f"signal {number}"
        size = os.fstat(said).st_size
        words = last_lines(os.pread(said, _READ, max(0, size - _READ)).decode(errors="replace").strip().split("\n")[-1])
        return setup.trouble() or f"{command} failed ({how}){': ' if words else ''}{words}"
    except OSError as error:
        return f"the probe cannot be started: {error}"
    finally:
        os.close(said)


async def _ended(first: FirstProcess, setup: SetUp, within: float) -> bool:
    """False when it is not over in time, or there is a reason to leave."""
    ended = setup.group.ended
    ended.add_done_callback(lambda _: first.news.set())
    try:
        async with asyncio.timeout(within):
            await first.until(ended.done)
    except TimeoutError:
        pass
    return ended.done()


def limits() -> tuple[int, int, tuple[str, ...]]:
    """(memlock, nofile, RDMA devices) that a role has here; -1 = no limit."""
    return (
        resource.getrlimit(resource.RLIMIT_MEMLOCK)[0], resource.getrlimit(resource.RLIMIT_NOFILE)[0], rdma_devices()
    )  # fmt: skip


@contextlib.asynccontextmanager
async def looked_after(first: FirstProcess) -> AsyncIterator[NodeHealth | None]:
    """Inside, the node's health can be watched; None where nothing is to be read, as on a virtual node."""
    if not readers_of(first.launch):
        yield None
        return
    from .node_monitor import NodeHealth

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
