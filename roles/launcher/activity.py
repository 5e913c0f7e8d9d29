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

from ...core.launch import BEAT_ENV
from ...core.processes import descendants
from ...core.types import role_of
from ...transport.messages import Beat, FirstWork, Hello
from .environment import on_this_node
from .first_process import FirstProcess, log_failure
from .gpus import Gpus, held_gpus_within

BUSY = 0.01
"""share of one core above which a command is at work; an interpreter that sleeps takes less than a tenth of it"""
LOOK = 2.0
"""s between two looks: each reads all of /proc"""
GPU_WITHIN = 5.0
"""s for the driver to answer; a driver that hangs is not asked again, and CPU and output are what is left"""

Name = tuple[int, int]
"""pid and start time: a pid may be used again"""


class Usage(Struct, frozen=True):
    """What a process has used since it began."""

    ticks: int
    """CPU time, user and system, in clock ticks"""
    written: int
    """bytes that it wrote, wherever to (proc(5), io: wchar)"""


def usage(pids: Iterable[int]) -> dict[Name, Usage]:
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


def at_work(before: Mapping[Name, Usage], now: Mapping[Name, Usage], seconds: float, ticks_per_s: int) -> bool:
    """Whether these processes worked between two looks: more CPU time than :data:`BUSY`, or anything written."""
    grown = [(one, before.get(name, Usage(0, 0))) for name, one in now.items()]
    ticks = sum(max(0, one.ticks - old.ticks) for one, old in grown)
    return any(one.written > old.written for one, old in grown) or ticks > BUSY * seconds * ticks_per_s


@contextlib.asynccontextmanager
async def spoken_for(first: FirstProcess, pid: int, begun: asyncio.Event) -> AsyncIterator[None]:
    """Inside, once it has ``begun``, a command that does not join by itself is spoken for, where its job says so."""
    if first.launch.watch != "activity":
        yield
        return
    speaking = asyncio.create_task(StandIn(first, pid).speak(begun))
    speaking.add_done_callback(log_failure)
    try:
        yield
    finally:
        speaking.cancel()
        await asyncio.wait([speaking])
        first.greet = tuple


class StandIn:
    """For one command of one step: ``pid`` is the command's."""

    def __init__(self, first: FirstProcess, pid: int) -> None:
        self._first, self._pid = first, pid
        self._beat = float(first.launch.env.get(BEAT_ENV) or 1.0)
        self._phase = role_of(first.launch.life.replica)
        self._done = 0
        self._gpus: Gpus | None = Gpus()
        self._held: tuple[str, ...] = ()

    async def speak(self, begun: asyncio.Event) -> None:
        """Until it is cancelled."""
        dialer, life = self._first.dialer, self._first.launch.life
        await begun.wait()
        self._held = await held_gpus_within(on_this_node(self._first.launch))
        self._first.greet = lambda: [self._hello()]
        await dialer.send(self._hello())
        loop = asyncio.get_running_loop()
        before, at = self._look(), loop.time()
        while True:
            await asyncio.sleep(self._beat)
            if (seconds := loop.time() - at) >= LOOK:
                now = self._look()
                if at_work(before, now, seconds, os.sysconf("SC_CLK_TCK")) or await self._gpu_at_work():
                    self._done += 1
                    if self._done == 1:
                        await dialer.send(FirstWork(life))
                before, at = now, at + seconds
            if dialer.connected:
                await dialer.send(Beat(life, self._phase, self._done))

    def _look(self) -> dict[Name, Usage]:
        return usage([self._pid, *(process.pid for process in descendants(self._pid))])

    async def _gpu_at_work(self) -> bool:
        if self._gpus is None:
            return False
        try:
            async with asyncio.timeout(GPU_WITHIN):  # not wait_for: in Python 3.11 it can forget that it was cancelled
                return await asyncio.to_thread(self._gpus.at_work)
        except TimeoutError:
            self._gpus = None
            return False

    def _hello(self) -> Hello:
        launch = self._first.launch
        host = socket.gethostname()
        return Hello(launch.life, launch.tag, self._first.node, host, self._pid, self._phase, gpus=self._held)
