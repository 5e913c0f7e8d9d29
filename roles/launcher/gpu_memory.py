"""Wait until the memory of a role's GPUs is free, before the role starts.

The memory of an earlier process may be released only some time after the process has ended. A role that starts before
the release cannot allocate memory. If the driver does not answer, the role starts at once.

The memory of the run's guests does not count: even an idle guest keeps some GiB, and one that works gives its memory up
once the trainer asks for it, which it does after its start. A guest itself does not wait, as the trainer uses its GPUs.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Mapping
from functools import cache

from ...core.command_runner import run_async
from ...core.launch import LAUNCH_ENV, read_launch
from ...core.processes import processes
from ...core.run_dir import OwnPath
from ...health.readers.samples import Accelerator
from ...transport.address import NoAddress
from .environment import node_environment
from .first_process import StepSupervisor
from .gpus import NodeGpus, assigned_gpus
from .process_group import command_env

FREE_TIMEOUT_S = 50.0
"""Timeout (s) for the release of memory (NVRx: 50 s)."""
POLL_INTERVAL_S = 2.0
"""Seconds between two checks (NVRx: 2 s)."""
MAX_USED_BYTES = 512 * 2**20
"""Bytes of a GPU that may be in use when a role starts (NVRx: 512 MB). The driver's reserve does not count."""
DRIVER_TIMEOUT_S = 20.0
"""Timeout (s) of the driver's calls, in addition to :data:`FREE_TIMEOUT_S`. The agent's readers report a driver that
hangs."""

CHECK_SCRIPT = "from rrl.roles.launcher.gpu_memory import main; main()"


async def wait_until_free(supervisor: StepSupervisor) -> str:
    """Wait until the GPUs of this step are free; return why they are still occupied, or an empty text.

    The text is also empty if the driver does not answer, or if a stop is requested during the wait.
    """
    launch = supervisor.launch
    if not launch.gpus or launch.standby or launch.guest:  # they share their node with the processes that use the GPUs
        return ""
    try:
        env = {**os.environ, **node_environment(launch)}
    except NoAddress:
        return ""
    # the agent's sweeps find the process by these variables
    env = command_env(env, supervisor.launch_file, supervisor.process)
    argv = [sys.executable, "-P", "-c", CHECK_SCRIPT]  # a process of its own, since the driver may hang
    checking = asyncio.create_task(
        # with a grace, since a process inside the driver should not be killed immediately
        run_async(argv, FREE_TIMEOUT_S + DRIVER_TIMEOUT_S, env=env, term_grace_s=POLL_INTERVAL_S)
    )
    checking.add_done_callback(lambda _: supervisor.wakeup.set())
    await supervisor.wait_for(checking.done)
    checking.cancel()  # needed if a stop was requested; no effect if the check has ended
    await asyncio.wait([checking])
    try:
        result = checking.result()
    except (asyncio.CancelledError, OSError):  # a stop was requested, the driver hangs, or Python cannot start
        return ""
    return result.out.strip() if result.code == 0 else ""


def main() -> None:
    """Wait, in the checker process, until the memory of the step's GPUs is free; print why if it is not free in time.

    Nothing is printed if the memory is free, or if the driver fails.
    """
    gpus, names = NodeGpus(), assigned_gpus()
    deadline = time.monotonic() + FREE_TIMEOUT_S
    while occupied := _occupied(dict(zip(names, gpus.read(names), strict=False))):
        if time.monotonic() >= deadline:
            sys.stdout.write("; ".join(occupied))  # wait_until_free reads it
            return
        time.sleep(POLL_INTERVAL_S)


def _occupied(gpus: Mapping[str, Accelerator]) -> list[str]:
    """Return a text about each GPU whose memory is in use, by others than the guests of this run."""
    full = {name: gpu for name, gpu in gpus.items() if (gpu.memory_used or 0) > MAX_USED_BYTES}
    guests = _guests() if full else set()
    return [
        f"{used // 2**20} MiB of GPU {name} are still in use{_occupants_text(gpu)}"
        for name, gpu in full.items()
        if (used := _used_by_others(gpu, guests)) > MAX_USED_BYTES
    ]


def _guests() -> set[int]:
    """Return the pids of all processes of the run's guests on this node."""
    folder = os.path.dirname(os.environ.get(LAUNCH_ENV, ""))
    return {process.pid for process in processes(folder) if _is_guest(process.launch)} if folder else set()


@cache
def _is_guest(launch_file: str) -> bool:
    try:
        return read_launch(OwnPath(launch_file)).guest
    except (OSError, ValueError):  # the file is gone or damaged: nothing is known about its processes
        return False


def _used_by_others(gpu: Accelerator, guests: set[int]) -> int:
    """Return the bytes that are in use without those of the guests; 0 if this is unknown."""
    if gpu.memory_used is None or (gpu.processes is None and guests):
        return 0
    return gpu.memory_used - sum(one.memory or 0 for one in gpu.processes or () if one.pid in guests)


def _occupants_text(gpu: Accelerator) -> str:
    if gpu.processes is None:
        return ""
    pids = sorted(process.pid for process in gpu.processes)
    return f" by {', '.join(f'process {pid}' for pid in pids[:4])}" if pids else "; the driver lists no process on it"
