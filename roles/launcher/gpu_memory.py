"""Room in a role's GPUs before it starts there: what ended on them before may still be giving its memory back, and a
role that starts into memory that is held dies of it. Where NVML does not answer, nobody waits."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from typing import Any

from ...transport.address import NoAddress
from .environment import on_this_node
from .first_process import FirstProcess
from .gpus import handle, held_gpus
from .process_group import command_env

WAITS = 50.0
"""s for memory that is given back (NVRx: 50 s)"""
POLL = 2.0
"""s between two looks (NVRx: 2 s)"""
HELD = 512 * 2**20
"""bytes of a GPU that may be in use before a role starts (NVRx: 512 MB), without what the driver reserves"""
ANSWERS_WITHIN = 20.0
"""s for NVML itself; a driver that hangs is the readers' to find"""

ASK = "from rrl.roles.launcher.gpu_memory import main; main()"


async def no_room(first: FirstProcess) -> str:
    """Why the command of this step cannot be started on its GPUs, after some waiting; empty: it can, as far as is
    known. Returns early when there is a reason to leave."""
    launch = first.launch
    if not launch.gpus or launch.standby:  # a shadow waits beside whoever works there
        return ""
    try:
        env = {**os.environ, **on_this_node(launch)}
    except NoAddress:
        return ""
    env = command_env(env, first.launch_file, first.me)  # if this one is killed, its agent finds the asker
    try:
        asker = await asyncio.create_subprocess_exec(  # in a process of its own: NVML may hang
            sys.executable, "-P", "-c", ASK, env=env, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL
        )
    except OSError:  # the command itself will meet it, and say it better
        return ""
    asking = asyncio.create_task(asker.communicate())
    asking.add_done_callback(lambda _: first.news.set())
    try:
        async with asyncio.timeout(WAITS + ANSWERS_WITHIN):
            await first.until(asking.done)
    except TimeoutError:
        pass
    if not asking.done():
        await _ended(asker, asking)
        return ""
    return asking.result()[0].decode(errors="replace").strip() if asker.returncode == 0 else ""


async def _ended(asker: asyncio.subprocess.Process, asking: asyncio.Task[Any]) -> None:
    """First asked: whoever holds the driver open is not killed at once."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            asker.send_signal(number)
        if (await asyncio.wait([asking], timeout=POLL))[0]:
            return
    asking.cancel()


def main() -> None:
    """In the asker's process: wait for room, say why there is none. Silent where NVML says nothing."""
    try:
        import pynvml
    except ImportError:
        return
    try:
        pynvml.nvmlInit()
        gpus = {name: handle(pynvml, name) for name in held_gpus()}
    except pynvml.NVMLError:
        return
    deadline = time.monotonic() + WAITS
    while full := _full(pynvml, gpus):
        if time.monotonic() >= deadline:
            sys.stdout.write("; ".join(full))  # the answer to the process that asked
            return
        time.sleep(POLL)


def _full(pynvml: Any, gpus: dict[str, Any]) -> list[str]:
    found = []
    for name, gpu in gpus.items():
        try:
            used = pynvml.nvmlDeviceGetMemoryInfo(gpu, version=pynvml.nvmlMemory_v2).used
        except (pynvml.NVMLError, AttributeError):  # older drivers count what they reserve for themselves as used
            continue
        if used > HELD:
            found.append(f"{used // 2**20} MiB of GPU {name} are still in use{_by(pynvml, gpu)}")
    return found


def _by(pynvml: Any, gpu: Any) -> str:
    try:
        pids = sorted(one.pid for one in pynvml.nvmlDeviceGetComputeRunningProcesses(gpu))
    except pynvml.NVMLError:
        return ""
    return f" by {', '.join(f'process {pid}' for pid in pids[:4])}" if pids else " and no process of it is known"
