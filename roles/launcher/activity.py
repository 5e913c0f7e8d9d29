"""Report the activity of a command that does not use the worker API (``watch = "activity"`` in job.toml).

The launcher sends a Hello to the manager once the command has started. The reported phase has the name of the role. A
sample counts as one unit of progress if, since the previous sample, the command used the CPU or a GPU, or wrote
something. A command that waits in a busy loop seems to work; only a command that calls :func:`rrl.join` can report the
difference.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator, Iterable, Mapping
from pathlib import Path

from msgspec import Struct

from ...core.launch import HEARTBEAT_INTERVAL_ENV
from ...core.processes import descendants, stat_fields
from ...core.types import role_of
from ...transport.messages import FirstWorkDone, Heartbeat, Hello
from .environment import node_environment
from .first_process import StepSupervisor, log_failure
from .gpus import NodeGpus, assigned_gpus_with_timeout

BUSY_CORE_SHARE = 0.01
"""Share of one core above which a command counts as working; a sleeping interpreter uses less than 0.1 %."""
SAMPLE_INTERVAL_S = 2.0
"""Seconds between two samples. It is not shorter, because each sample reads all processes in /proc."""
GPU_QUERY_TIMEOUT_S = 5.0
"""Timeout (s) of a query to the driver. A driver that hangs is not queried again; from then on, only CPU time and
output count."""

ProcessKey = tuple[int, int]
"""Pid and start time of a process; the pid alone may be reused."""


class Usage(Struct, frozen=True):
    """The resources that a process has used since it started."""

    ticks: int
    """CPU time, user and system, in clock ticks."""
    written: int
    """Bytes written to any file, pipe or socket (proc(5), io: wchar)."""
    stopped: bool = False
    """Whether the process is stopped by a signal or a tracer (proc(5), stat: state T or t)."""


def usage(pids: Iterable[int]) -> dict[ProcessKey, Usage]:
    """Return the usage of each running process that this user may read."""
    used = {}
    for pid in pids:
        try:
            fields = stat_fields(pid)
            io = Path(f"/proc/{pid}/io").read_text()
        except OSError:
            continue
        written = next((int(line.split()[1]) for line in io.splitlines() if line.startswith("wchar:")), 0)
        stopped = fields[0] in (b"T", b"t")
        used[pid, int(fields[19])] = Usage(int(fields[11]) + int(fields[12]), written, stopped)
    return used


def has_worked(
    before: Mapping[ProcessKey, Usage], now: Mapping[ProcessKey, Usage], seconds: float, ticks_per_s: int
) -> bool:
    """Return whether processes worked between two samples.

    Processes have worked if they wrote anything or used more than :data:`BUSY_CORE_SHARE` of a core over ``seconds``.
    """
    pairs = [(new, before.get(key, Usage(0, 0))) for key, new in now.items()]
    ticks = sum(max(0, new.ticks - old.ticks) for new, old in pairs)
    return any(new.written > old.written for new, old in pairs) or ticks > BUSY_CORE_SHARE * seconds * ticks_per_s


@contextlib.asynccontextmanager
async def report_activity(supervisor: StepSupervisor, pid: int, started: asyncio.Event) -> AsyncIterator[None]:
    """Report a command's activity during the block, once ``started`` is set, if ``watch`` is ``"activity"``.

    Otherwise do nothing, because the command uses the worker API and reports by itself. ``pid`` is the command's
    process id.
    """
    if supervisor.launch.watch != "activity":
        yield
        return
    reporting = asyncio.create_task(ActivityReporter(supervisor, pid).run(started))
    reporting.add_done_callback(log_failure)
    try:
        yield
    finally:
        reporting.cancel()
        await asyncio.wait([reporting])
        supervisor.on_connect = tuple


class ActivityReporter:
    """Reports the activity of one command, whose process id is ``pid``, to the manager."""

    def __init__(self, supervisor: StepSupervisor, pid: int) -> None:
        self._supervisor, self._pid = supervisor, pid
        self._heartbeat_interval = float(supervisor.launch.env.get(HEARTBEAT_INTERVAL_ENV) or 1.0)
        self._phase = role_of(supervisor.launch.incarnation.replica)
        self._done = 0
        self._gpus: NodeGpus | None = NodeGpus()
        self._gpu_ids: tuple[str, ...] = ()

    async def run(self, started: asyncio.Event) -> None:
        """Wait until the command has started, then send a Hello and heartbeats until cancelled."""
        dialer, incarnation = self._supervisor.dialer, self._supervisor.launch.incarnation
        await started.wait()
        self._gpu_ids = await assigned_gpus_with_timeout(node_environment(self._supervisor.launch))
        self._supervisor.on_connect = lambda: [self._hello()]
        await dialer.send(self._hello())
        loop = asyncio.get_running_loop()
        before, at = self._sample(), loop.time()
        while True:
            await asyncio.sleep(self._heartbeat_interval)
            if (seconds := loop.time() - at) >= SAMPLE_INTERVAL_S:
                now = self._sample()
                if has_worked(before, now, seconds, os.sysconf("SC_CLK_TCK")) or await self._gpu_busy():
                    self._done += 1
                    if self._done == 1:
                        await dialer.send(FirstWorkDone(incarnation))
                before, at = now, at + seconds
            if dialer.connected:
                await dialer.send(Heartbeat(incarnation, self._phase, self._done))

    def _sample(self) -> dict[ProcessKey, Usage]:
        return usage([self._pid, *(process.pid for process in descendants(self._pid))])

    async def _gpu_busy(self) -> bool:
        if self._gpus is None:
            return False
        try:
            # instead of wait_for, which can lose a cancellation in Python 3.11
            async with asyncio.timeout(GPU_QUERY_TIMEOUT_S):
                return await asyncio.to_thread(self._gpus.any_busy)
        except TimeoutError:
            self._gpus = None
            return False

    def _hello(self) -> Hello:
        launch = self._supervisor.launch
        host = socket.gethostname()
        return Hello(
            launch.incarnation, launch.tag, self._supervisor.node, host, self._pid, self._phase, gpus=self._gpu_ids
        )
