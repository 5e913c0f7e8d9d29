"""Run readers from another program: in an event loop with :class:`ReaderClient`, or blocking with :func:`read_all`.

Both start one small process (:mod:`rrl.health.readers.isolation.supervisor`) that forks a process per reader. No code
of a reader runs in the caller, so hangs, crashes and leaks stay in the other processes.

The supervisor and the readers inherit the caller's environment plus ``env``. The agent passes the name of its launch
file (``RRL_LAUNCH``) in ``env``. By this name, processes that outlive the agent's step are found and ended. The
supervisor and the readers have no ``RRL_STEP``, so they do not count as orphans of a step while the agent runs. They
end with the caller, even if the caller is killed.
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

from ..base import READER_CLASSES, READERS, ReaderOptions
from ..samples import Reading
from . import framing

_log = logging.getLogger("rrl.readers")

END_TIMEOUT_S = 10.0
"""Timeout (s) for the end of the supervisor and its readers. They need at most 6 s (the sum of the timeouts in
:mod:`rrl.health.readers.isolation.supervisor`)."""
BACKOFF_S = (1.0, 60.0)
"""First and longest delay (s) before a supervisor that died is restarted. The delay doubles with each restart."""
_START_TIMEOUT_S = 10.0
"""Seconds that the start of the supervisor may take, in addition to the caller's timeout for the readers."""
_MODULE = "rrl.health.readers.isolation.supervisor"
_CHUNK_BYTES = 1 << 16


class ReaderClient:
    """The running readers and the stream of their results.

    Start it on the main thread, because the supervisor ends with the thread that started it. A reader is given as a
    name of `READERS`, or as ``name=module:Class``.
    """

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
        """Return the pid of the supervisor; None if it does not run."""
        return self._process.pid if self._process else None

    async def start(self) -> None:
        """Start the supervisor. Raises OSError if that fails."""
        config = framing.ReaderConfig(self._readers, self._options, os.getpid(), hung_timeout_s=self._hung_timeout_s)
        self._process, connection = _spawn(config, self._env)
        self._inbox = framing.Inbox()
        self._reader, self._writer = await asyncio.open_connection(sock=connection)

    async def next_reading(self) -> Reading:
        """Return the next result of any reader.

        If the supervisor dies, it is restarted, and each reader gets one result ``broken`` that reports the death. The
        call may be cancelled at any time without losing a result.
        """
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
        """End all processes: give them time to release their drivers, then kill the processes that still run.

        A process that hangs in the kernel is left running and named in the log.
        """
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
    """Read each of the ``readers`` once and return the results in the order of ``readers``.

    Blocks for ``timeout_s`` plus the time to start and end the processes. A reader that does not answer within
    ``timeout_s`` is ``hung``. Raises OSError if no process can be started.
    """
    places = _class_paths(readers)
    deadline = time.monotonic() + _START_TIMEOUT_S + 2 * timeout_s  # the start and the read each have timeout_s
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
    no_answer = f"did not answer within {timeout_s:g} s"
    return [found.get(name) or Reading(name, time.monotonic(), None, "hung", no_answer) for name in places]


def _class_paths(readers: Sequence[str]) -> dict[str, str]:
    """Return reader name → ``module:Class``."""
    pairs = (reader.partition("=") for reader in readers)
    return {name: class_path or READER_CLASSES[name] for name, _, class_path in pairs}


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
    """Wait for the end of a disconnected supervisor and return how it ended.

    If the supervisor does not end by itself, SIGTERM and then SIGKILL are sent to it.
    """
    for number in (None, signal.SIGTERM, signal.SIGKILL):
        if number is not None:
            process.send_signal(number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = process.wait(END_TIMEOUT_S)
            return f"with code {code}" if code >= 0 else f"by {signal.Signals(-code).name}"
    _log.error("the readers' supervisor (process %d) does not end on SIGKILL; it still runs", process.pid)
    return "not even on SIGKILL"
