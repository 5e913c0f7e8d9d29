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
from .environment import node_environment
from .first_process import StepSupervisor
from .gpus import assigned_gpus, handle
from .process_group import command_env

FREE_TIMEOUT_S = 50.0
"""s for memory that is given back (NVRx: 50 s)"""
POLL_INTERVAL_S = 2.0
"""s between two looks (NVRx: 2 s)"""
MAX_USED_BYTES = 512 * 2**20
"""bytes of a GPU that may be in use before a role starts (NVRx: 512 MB), without what the driver reserves"""
NVML_TIMEOUT_S = 20.0
"""s for NVML itself; a driver that hangs is the readers' to find"""

CHECK_SCRIPT = "from rrl.roles.launcher.gpu_memory import main; main()"


async def wait_until_free(supervisor: StepSupervisor) -> str:
    """Why the command of this step cannot be started on its GPUs, after some waiting; empty: it can, as far as is
    known. Returns early when there is a reason to leave."""
    launch = supervisor.launch
    if not launch.gpus or launch.standby:  # a shadow waits beside whoever works there
        return ""
    try:
        env = {**os.environ, **node_environment(launch)}
    except NoAddress:
        return ""
    env = command_env(
        env, supervisor.launch_file, supervisor.process
    )  # if this one is killed, its agent finds the asker
    try:
        checker = await asyncio.create_subprocess_exec(  # in a process of its own: NVML may hang
            sys.executable,
            "-P",
            "-c",
            CHECK_SCRIPT,
            env=env,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
        )
    except OSError:  # the command itself will meet it, and say it better
        return ""
    checking = asyncio.create_task(checker.communicate())
    checking.add_done_callback(lambda _: supervisor.wakeup.set())
    try:
        async with asyncio.timeout(FREE_TIMEOUT_S + NVML_TIMEOUT_S):
            await supervisor.wait_for(checking.done)
    except TimeoutError:
        pass
    if not checking.done():
        await _terminate(checker, checking)
        return ""
    return checking.result()[0].decode(errors="replace").strip() if checker.returncode == 0 else ""


async def _terminate(checker: asyncio.subprocess.Process, checking: asyncio.Task[Any]) -> None:
    """First asked: whoever holds the driver open is not killed at once."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            checker.send_signal(number)
        if (await asyncio.wait([checking], timeout=POLL_INTERVAL_S))[0]:
            return
    checking.cancel()


def main() -> None:
    """In the asker's process: wait for room, say why there is none. Silent where NVML says nothing."""
    try:
        import pynvml
    except ImportError:
        return
    try:
        pynvml.nvmlInit()
        gpus = {name: handle(pynvml, name) for name in assigned_gpus()}
    except pynvml.NVMLError:
        return
    deadline = time.monotonic() + FREE_TIMEOUT_S
    while full := _occupied_gpus(pynvml, gpus):
        if time.monotonic() >= deadline:
            sys.stdout.write("; ".join(full))  # the answer to the process that asked
            return
        time.sleep(POLL_INTERVAL_S)


def _occupied_gpus(pynvml: Any, gpus: dict[str, Any]) -> list[str]:
    found = []
    for name, gpu in gpus.items():
        try:
            used = pynvml.nvmlDeviceGetMemoryInfo(gpu, version=pynvml.nvmlMemory_v2).used
        except (pynvml.NVMLError, AttributeError):  # older drivers count what they reserve for themselves as used
            continue
        if used > MAX_USED_BYTES:
            found.append(f"{used // 2**20} MiB of GPU {name} are still in use{_occupants_text(pynvml, gpu)}")
    return found


def _occupants_text(pynvml: Any, gpu: Any) -> str:
    try:
        pids = sorted(one.pid for one in pynvml.nvmlDeviceGetComputeRunningProcesses(gpu))
    except pynvml.NVMLError:
        return ""
    return f" by {', '.join(f'process {pid}' for pid in pids[:4])}" if pids else " and no process of it is known"
