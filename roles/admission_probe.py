"""What an agent finds out before it says that its node is there: can roles run here at all?"""

from __future__ import annotations

import asyncio
import os
import resource
import shlex

from rrl.roles.environment import on_this_node, rdma_devices
from rrl.roles.first import FirstProcess
from rrl.roles.processes import command_env, end_descendants
from rrl.roles.setting_up import SetUp
from rrl.spec.last_words import last_lines
from rrl.transport.address import NoAddress

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
