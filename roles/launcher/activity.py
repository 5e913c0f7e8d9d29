"""Speaks to the manager for a command that does not use the worker API (``watch = "activity"`` in job.toml).

The command joins once it is started; it is in a phase of its role's own name, and each beat in which it used the CPU or
a GPU, or wrote something, is a unit of progress. A command that busily waits is taken for one that works: only its own
word (:func:`rrl.join`) could tell.
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
from ...core.processes import descendants
from ...core.types import role_of
from ...transport.messages import FirstWorkDone, Heartbeat, Hello
from .environment import node_environment
from .first_process import StepSupervisor, log_failure
from .gpus import Gpus, assigned_gpus_with_timeout

BUSY_CORE_SHARE = 0.01
"""share of one core above which a command is at work; an interpreter that sleeps takes less than a tenth of it"""
SAMPLE_INTERVAL_S = 2.0
"""s between two looks: each reads all of /proc"""
GPU_QUERY_TIMEOUT_S = 5.0
"""s for the driver to answer; a driver that hangs is not asked again, and CPU and output are what is left"""

ProcessKey = tuple[int, int]
"""pid and start time: a pid may be used again"""


class Usage(Struct, frozen=True):
    """What a process has used since it began."""

    ticks: int
    """CPU time, user and system, in clock ticks"""
    written: int
    """bytes that it wrote, wherever to (proc(5), io: wchar)"""


def usage(pids: Iterable[int]) -> dict[ProcessKey, Usage]:
    """Of those that live and may be looked into."""
    used = {}
    for pid in pids:
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            io = Path(f"/proc/{pid}/io").read_text()
        except OSError:
            continue
        written = next((int(line.split()[1]) for line in io.splitlines() if line.startswith("wchar:")), 0)
        used[pid, int(fields[19])] = Usage(int(fields[11]) + int(fields[12]), written)
    return used


def has_worked(
    before: Mapping[ProcessKey, Usage], now: Mapping[ProcessKey, Usage], seconds: float, ticks_per_s: int
) -> bool:
    """Whether these processes worked between two looks: more CPU time than :data:`BUSY`, or anything written."""
    grown = [(one, before.get(name, Usage(0, 0))) for name, one in now.items()]
    ticks = sum(max(0, one.ticks - old.ticks) for one, old in grown)
    return any(one.written > old.written for one, old in grown) or ticks > BUSY_CORE_SHARE * seconds * ticks_per_s


@contextlib.asynccontextmanager
async def report_activity(supervisor: StepSupervisor, pid: int, started: asyncio.Event) -> AsyncIterator[None]:
    """Inside, once it has ``begun``, a command that does not join by itself is spoken for, where its job says so."""
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
    """For one command of one step: ``pid`` is the command's."""

    def __init__(self, supervisor: StepSupervisor, pid: int) -> None:
        self._supervisor, self._pid = supervisor, pid
        self._heartbeat_interval = float(supervisor.launch.env.get(HEARTBEAT_INTERVAL_ENV) or 1.0)
        self._phase = role_of(supervisor.launch.incarnation.replica)
        self._done = 0
        self._gpus: Gpus | None = Gpus()
        self._gpu_ids: tuple[str, ...] = ()

    async def run(self, started: asyncio.Event) -> None:
        """Until it is cancelled."""
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
            async with asyncio.timeout(
                GPU_QUERY_TIMEOUT_S
            ):  # not wait_for: in Python 3.11 it can forget that it was cancelled
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
