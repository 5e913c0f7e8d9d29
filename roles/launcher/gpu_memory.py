"""Wait until the memory of a role's GPUs is free, before the role starts.

The memory of an earlier process may be released only some time after the process has ended. A role that starts before
the release cannot allocate memory. If the driver does not answer, the role starts at once.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time

from ...core.command_runner import run_async
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
    if not launch.gpus or launch.standby:  # a standby shares its node with the processes that use the GPUs
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
    while occupied := [
        f"{gpu.memory_used // 2**20} MiB of GPU {name} are still in use{_occupants_text(gpu)}"
        for name, gpu in zip(names, gpus.read(names), strict=False)
        if gpu.memory_used is not None and gpu.memory_used > MAX_USED_BYTES
    ]:
        if time.monotonic() >= deadline:
            sys.stdout.write("; ".join(occupied))  # wait_until_free reads it
            return
        time.sleep(POLL_INTERVAL_S)


def _occupants_text(gpu: Accelerator) -> str:
    if gpu.processes is None:
        return ""
    pids = sorted(process.pid for process in gpu.processes)
    return f" by {', '.join(f'process {pid}' for pid in pids[:4])}" if pids else "; the driver lists no process on it"
