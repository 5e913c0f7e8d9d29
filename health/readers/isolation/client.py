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

END_TIMEOUT_S = 10.0
"""s for the keeper's process and its readers to end when asked; :mod:`rrl.health.readers.isolation.supervisor` needs at
most 6"""
BACKOFF_S = (1.0, 60.0)
"""s until a keeper's process that died is started again: first, and at most"""
_START_TIMEOUT_S = 10.0
"""s for the process itself, added to what a caller gives the readers"""
_MODULE = "rrl.health.readers.isolation.supervisor"
_CHUNK_BYTES = 1 << 16


class ReaderClient:
    """Readings of the ``readers`` as they come. Start it on the main thread: the process ends with the thread that
    started it. A reader may also be ``name=module:Class``."""

    def __init__(
        self,
        readers: Sequence[str] = READERS,
        options: ReaderOptions = ReaderOptions(),
        *,
        env: Mapping[str, str] | None = None,
        hung_timeout_s: float = framing.HUNG_TIMEOUT_S,
    ) -> None:
        self._readers, self._options, self._env = _class_paths(readers), options, env or {}
        self._hung_timeout_s = hung_timeout_s
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
        config = framing.ReaderConfig(self._readers, self._options, os.getpid(), hung_timeout_s=self._hung_timeout_s)
        self._process, connection = _spawn(config, self._env)
        self._inbox = framing.Inbox()
        self._reader, self._writer = await asyncio.open_connection(sock=connection)

    async def next_reading(self) -> Reading:
        """The next reading of any reader. A process that died is started again; that, too, is told as a reading of each
        reader. May be cancelled at any time without a loss."""
        while not self._ready:
            if self._reader is None:
                await self._restart()
                continue
            try:
                data = await self._reader.read(_CHUNK_BYTES)
                self._inbox.feed(data)
                self._ready += (framing.decode(body) for _, body in self._inbox.frames())
            except (OSError, ValueError, msgspec.DecodeError):
                data = b""
            if data:
                self._deaths = 0
            else:
                await self._on_process_end()
        return self._ready.popleft()

    async def close(self) -> None:
        """End all processes: they get time to close what they hold, then are killed. One that hangs in the kernel is
        left, and named in the log."""
        process, self._process = self._process, None
        await self._disconnect()
        if process is not None:
            await asyncio.get_running_loop().run_in_executor(None, _terminate, process)

    async def _on_process_end(self) -> None:
        process, self._process = self._process, None
        await self._disconnect()
        how = "?"
        if process is not None:
            how = await asyncio.get_running_loop().run_in_executor(None, _terminate, process)
        why = f"the readers' process ended {how}"
        self._ready += (Reading(name, time.monotonic(), None, "broken", why) for name in self._readers)

    async def _restart(self) -> None:
        await asyncio.sleep(min(BACKOFF_S[0] * 2.0 ** min(self._deaths, 10), BACKOFF_S[1]))
        self._deaths += 1
        try:
            await self.start()
        except OSError as error:
            why = f"the readers' process cannot be started: {error}"
            self._ready += (Reading(name, time.monotonic(), None, "broken", why) for name in self._readers)

    async def _disconnect(self) -> None:
        writer, self._writer, self._reader = self._writer, None, None
        if writer is not None:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()


def read_all(
    readers: Sequence[str] = READERS,
    timeout_s: float = 30.0,
    options: ReaderOptions = ReaderOptions(),
    *,
    env: Mapping[str, str] | None = None,
) -> list[Reading]:
    """One reading of each of the ``readers``, in their order; blocks, ``within`` s and some for the processes at most.
    Who does not answer within ``within`` s is ``hung``. Raises OSError when no process can be started."""
    places = _class_paths(readers)
    deadline = time.monotonic() + _START_TIMEOUT_S + 2 * timeout_s  # a start and a read each have theirs in the process
    process, connection = _spawn(
        framing.ReaderConfig(places, options, os.getpid(), once=True, read_timeout_s=timeout_s), env or {}
    )
    inbox, found = framing.Inbox(), dict[str, Reading]()
    try:
        while len(found) < len(places) and (left := deadline - time.monotonic()) > 0:
            if not select.select([connection], [], [], left)[0]:
                break
            if not (data := connection.recv(_CHUNK_BYTES)):
                break
            inbox.feed(data)
            for _, body in inbox.frames():
                reading = framing.decode(body)
                found.setdefault(reading.reader, reading)
    finally:
        connection.close()
        _terminate(process)
    silent = f"did not answer within {timeout_s:g} s"
    return [found.get(name) or Reading(name, time.monotonic(), None, "hung", silent) for name in places]


def _class_paths(readers: Sequence[str]) -> dict[str, str]:
    """Name → ``module:Class``."""
    pairs = (reader.partition("=") for reader in readers)
    return {name: where or READER_CLASSES[name] for name, _, where in pairs}


def _spawn(config: framing.ReaderConfig, env: Mapping[str, str]) -> tuple[subprocess.Popen[bytes], socket.socket]:
    parent_end, child_end = socket.socketpair()
    with child_end:
        try:
            argv = [sys.executable, "-P", "-m", _MODULE, msgspec.json.encode(config).decode()]
            process = subprocess.Popen(
                argv, stdin=child_end.fileno(), stdout=subprocess.DEVNULL, env=dict(os.environ) | dict(env)
            )
        except BaseException:
            parent_end.close()
            raise
    return process, parent_end


def _terminate(process: subprocess.Popen[bytes]) -> str:
    """Wait for the end of a process that was hung up on; says how it ended. SIGTERM asks once more, then SIGKILL."""
    for number in (None, signal.SIGTERM, signal.SIGKILL):
        if number is not None:
            process.send_signal(number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = process.wait(END_TIMEOUT_S)
            return f"with code {code}" if code >= 0 else f"by {signal.Signals(-code).name}"
    _log.error("process %d of the readers does not end on SIGKILL, it is left", process.pid)
    return "not even on SIGKILL"
