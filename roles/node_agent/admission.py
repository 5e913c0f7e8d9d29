"""Test whether roles can run on a node, and run the first node checks, before the agent reports the node.

To save memory, the code of the readers and checks is imported only if readers are configured.
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
from ..launcher.environment import configured_readers, node_environment, rdma_devices
from ..launcher.first_process import StepSupervisor
from ..launcher.process_group import command_env, end_descendants
from ..launcher.setup_command import SetupCommand

if TYPE_CHECKING:
    from .node_monitor import NodeMonitor

_KILL_TIMEOUT_S = 5.0
"""Seconds to wait for the processes of a probe to end after SIGKILL."""
_OUTPUT_TAIL_BYTES = 4096
"""Number of bytes that are kept from the end of the probe's output, to find its last line."""


async def probe(supervisor: StepSupervisor) -> str:
    """Run the job's node probe; return why roles cannot run on this node (one line), or an empty text.

    A probe that fails within half of its timeout is repeated once. Shared storage may be slow while all nodes import at
    the same time, and a probe that fails costs the run this node.
    """
    loop = asyncio.get_running_loop()
    began = loop.time()
    failure = await _run_probe(supervisor)
    if failure and supervisor.stop_reason is None and loop.time() - began < supervisor.launch.probe_timeout / 2:
        failure = await _run_probe(supervisor)
    return failure


async def _run_probe(supervisor: StepSupervisor) -> str:
    """Run the probe once, with the shell prelude and the environment of the roles, and end all processes of the probe.

    Return why the probe failed, or an empty text. The probe runs in a process of its own, because an agent that
    imported torch would keep gigabytes mapped.
    """
    launch = supervisor.launch
    try:
        env = node_environment(launch)
    except NoAddress as error:
        return str(error)
    if not launch.probe:
        return ""
    output_fd = os.memfd_create("rrl-probe", os.MFD_CLOEXEC)
    try:
        setup = SetupCommand(
            launch.setup,
            launch.probe,
            command_env(env, supervisor.launch_file, supervisor.process),
            launch.cwd,
            output_fd,
        )
        command = shlex.join(launch.probe)
        in_time = await _wait_until_ended(supervisor, setup, launch.probe_timeout)
        setup.group.kill()
        if not (await asyncio.wait([setup.group.ended], timeout=_KILL_TIMEOUT_S))[0]:
            return f"{command} hangs in the kernel, perhaps on a file server that does not answer"
        code, number = setup.group.reap()
        await asyncio.to_thread(end_descendants, supervisor.process, _KILL_TIMEOUT_S)
        if not in_time:
            return f"{command} did not end within {launch.probe_timeout:g} s; for more time, raise `join` in [limits]"
        if code == 0:
            return ""
        how = f"exit {code}" if number is None else f"signal {number}"
        size = os.fstat(output_fd).st_size
        last_line = last_lines(
            os.pread(output_fd, _OUTPUT_TAIL_BYTES, max(0, size - _OUTPUT_TAIL_BYTES))
            .decode(errors="replace")
            .strip()
            .split("\n")[-1]
        )
        return setup.failure_reason() or f"{command} failed ({how}){': ' if last_line else ''}{last_line}"
    except OSError as error:
        return f"the probe of [env] cannot be started: {error}"
    finally:
        os.close(output_fd)


async def _wait_until_ended(supervisor: StepSupervisor, setup: SetupCommand, within: float) -> bool:
    """Wait up to ``within`` seconds, or until a stop is requested; return whether the command has ended."""
    ended = setup.group.ended
    ended.add_done_callback(lambda _: supervisor.wakeup.set())
    try:
        async with asyncio.timeout(within):
            await supervisor.wait_for(ended.done)
    except TimeoutError:
        pass
    return ended.done()


def resource_limits() -> tuple[int, int, tuple[str, ...]]:
    """Return a role's limits of locked memory (bytes) and open files (-1: no limit), and the node's RDMA devices."""
    return (
        resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        rdma_devices(),
    )


@contextlib.asynccontextmanager
async def node_monitor(supervisor: StepSupervisor) -> AsyncIterator[NodeMonitor | None]:
    """Yield the running monitor of this node's health, or None if no readers are configured."""
    if not configured_readers(supervisor.launch):
        yield None
        return
    from .node_monitor import NodeMonitor

    monitor = NodeMonitor(supervisor.launch, supervisor.launch_file, supervisor.dialer.send)
    try:
        yield monitor
    finally:
        await monitor.close()


async def run_admission_checks(supervisor: StepSupervisor, monitor: NodeMonitor | None) -> None:
    """Run the first round of node checks, before the agent reports the node and roles are placed on it.

    The round is cancelled when a stop is requested.
    """
    if monitor is None:
        return
    node_is_free = not await asyncio.to_thread(_has_running_step, supervisor)
    first_round = asyncio.create_task(monitor.start(supervisor.launch.admission_timeout, node_is_free))
    first_round.add_done_callback(lambda _: supervisor.wakeup.set())
    await supervisor.wait_for(first_round.done)
    first_round.cancel()


def _has_running_step(supervisor: StepSupervisor) -> bool:
    """Return whether a step of the run is already running on this node, because this agent replaces an earlier one."""
    for process in processes(supervisor.steps):
        with contextlib.suppress(OSError, ValueError):
            if process.module == STEP_MODULE and read_launch(Path(process.launch)).node == supervisor.launch.node:
                return True
    return False
