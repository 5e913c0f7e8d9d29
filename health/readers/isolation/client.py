"""Readers from outside: :class:`Keeper` for a program with a loop, :func:`read_all` for one without.

Both start one small process (:mod:`rrl.health.readers.isolation.supervisor`) that forks a process per reader. Nothing
of a reader runs in the caller: whatever hangs, dies or leaks does so elsewhere.

The process and the readers carry the caller's environment and what ``env`` adds: an agent names its launch file there
(``RRL_LAUNCH``), so that a sweep of its step finds them. They carry no ``RRL_STEP``, and so are nobody's orphans while
the agent lives. They end with the caller, also when that is killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence

import msgspec

from ..base import READER_CLASSES, ReaderOptions
from ..samples import READERS, Reading
from . import framing

_log = logging.getLogger("rrl.readers")

ENDS_WITHIN = 10.0
"""s for the keeper's process and its readers to end when asked; :mod:`rrl.health.readers.isolation.supervisor` needs at
most 6"""
BACK_OFF = (1.0, 60.0)
"""s until a keeper's process that died is started again: first, and at most"""
_STARTS_WITHIN = 10.0
"""s for the process itself, added to what a caller gives the readers"""
_MODULE = "rrl.health.readers.isolation.supervisor"
_CHUNK = 1 << 16


class Keeper:
    """Readings of the ``readers`` as they come. Start it on the main thread: the process ends with the thread that
    started it. A reader may also be ``name=module:Class``."""

    def __init__(
        self,
        readers: Sequence[str] = READERS,
        options: ReaderOptions = ReaderOptions(),
        *,
        env: Mapping[str, str] | None = None,
        hung_ends: float = framing.HUNG_ENDS,
    ) -> None:
        self._readers, self._options, self._env = _places(readers), options, env or {}
        self._hung_ends = hung_ends
        self._process: subprocess.Popen[bytes] | None = None
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._inbox = framing.Inbox()
        self._ready: deque[Reading] = deque()
        self._deaths = 0

    @property
    def pid(self) -> int | None:
        """of the keeper's process"""
        return self._process.pid if self._process else None

    async def start(self) -> None:
        """Raises OSError when the process cannot be started."""
        order = framing.Order(self._readers, self._options, os.getpid(), hung_ends=self._hung_ends)
        self._process, line = _spawn(order, self._env)
        self._inbox = framing.Inbox()
        self._reader, self._writer = await asyncio.open_connection(sock=line)

    async def next(self) -> Reading:
        """The next reading of any reader. A process that died is started again; that, too, is told as a reading of each
        reader. May be cancelled at any time without a loss."""
        while not self._ready:
            if self._reader is None:
                await self._again()
                continue
            try:
                data = await self._reader.read(_CHUNK)
                self._inbox.feed(data)
                self._ready += (framing.decode(body) for _, body in self._inbox.frames())
            except (OSError, ValueError, msgspec.DecodeError):
                data = b""
            if data:
                self._deaths = 0
            else:
                await self._died()
        return self._ready.popleft()

    async def close(self) -> None:
        """End all processes: they get time to close what they hold, then are killed. One that hangs in the kernel is
        left, and named in the log."""
        process, self._process = self._process, None
        await self._hang_up()
        if process is not None:
            await asyncio.get_running_loop().run_in_executor(None, _end, process)

    async def _died(self) -> None:
        process, self._process = self._process, None
        await self._hang_up()
        how = "?"
        if process is not None:
            how = await asyncio.get_running_loop().run_in_executor(None, _end, process)
        why = f"the readers' process ended {how}"
        self._ready += (Reading(name, time.monotonic(), None, "broken", why) for name in self._readers)

    async def _again(self) -> None:
        await asyncio.sleep(min(BACK_OFF[0] * 2.0 ** min(self._deaths, 10), BACK_OFF[1]))
        self._deaths += 1
        try:
            await self.start()
        except OSError as error:
            why = f"the readers' process cannot be started: {error}"
            self._ready += (Reading(name, time.monotonic(), None, "broken", why) for name in self._readers)

    async def _hang_up(self) -> None:
        writer, self._writer, self._reader = self._writer, None, None
        if writer is not None:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()


def read_all(
    readers: Sequence[str] = READERS,
    within: float = 30.0,
    options: ReaderOptions = ReaderOptions(),
    *,
    env: Mapping[str, str] | None = None,
) -> list[Reading]:
    """One reading of each of the ``readers``, in their order; blocks, ``within`` s and some for the processes at most.
    Who does not answer within ``within`` s is ``hung``. Raises OSError when no process can be started."""
    places = _places(readers)
    deadline = time.monotonic() + _STARTS_WITHIN + 2 * within  # a start and a read each have theirs in the process
    process, line = _spawn(framing.Order(places, options, os.getpid(), once=True, within=within), env or {})
    inbox, found = framing.Inbox(), dict[str, Reading]()
    try:
        while len(found) < len(places) and (left := deadline - time.monotonic()) > 0:
            if not select.select([line], [], [], left)[0]:
                break
            if not (data := line.recv(_CHUNK)):
                break
            inbox.feed(data)
            for _, body in inbox.frames():
                reading = framing.decode(body)
                found.setdefault(reading.reader, reading)
    finally:
        line.close()
        _end(process)
    silent = f"did not answer within {within:g} s"
    return [found.get(name) or Reading(name, time.monotonic(), None, "hung", silent) for name in places]


def _places(readers: Sequence[str]) -> dict[str, str]:
    """Name → ``module:Class``."""
    pairs = (reader.partition("=") for reader in readers)
    return {name: where or READER_CLASSES[name] for name, _, where in pairs}


def _spawn(order: framing.Order, env: Mapping[str, str]) -> tuple[subprocess.Popen[bytes], socket.socket]:
    ours, theirs = socket.socketpair()
    with theirs:
        try:
            argv = [sys.executable, "-P", "-m", _MODULE, msgspec.json.encode(order).decode()]
            process = subprocess.Popen(
                argv, stdin=theirs.fileno(), stdout=subprocess.DEVNULL, env=dict(os.environ) | dict(env)
            )
        except BaseException:
            ours.close()
            raise
    return process, ours


def _end(process: subprocess.Popen[bytes]) -> str:
    """Wait for the end of a process that was hung up on; says how it ended. SIGTERM asks once more, then SIGKILL."""
    for number in (None, signal.SIGTERM, signal.SIGKILL):
        if number is not None:
            process.send_signal(number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = process.wait(ENDS_WITHIN)
            return f"with code {code}" if code >= 0 else f"by {signal.Signals(-code).name}"
    _log.error("process %d of the readers does not end on SIGKILL, it is left", process.pid)
    return "not even on SIGKILL"
