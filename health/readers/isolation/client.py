"""Run readers from another program: in an event loop with :class:`ReaderClient`, or blocking with :func:`read_all`.

Each reader has a process (:mod:`rrl.health.readers.isolation.worker`). No code of a reader runs in the caller, so
hangs, crashes and leaks stay in the other processes. The client requests a sample with one byte, and enforces the
deadline of each read. Until the caller has taken the pending result of a reader, it requests no other sample of this
reader; the kernel and the drivers keep new data until then.

The readers inherit the caller's environment plus ``env``. The agent passes the name of its launch file (``RRL_LAUNCH``)
in ``env``. By this name, processes that outlive the agent's step are found and ended. The readers have no ``RRL_STEP``,
so they do not count as orphans of a step while the agent runs. They end with the caller, even if the caller is killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec

from ..base import READER_CLASSES, READERS, START_TIMEOUT_S, ReaderOptions
from ..samples import Reading
from .worker import HEAD_BYTES, Answer, WorkerConfig

_log = logging.getLogger("rrl.readers")

HUNG_TIMEOUT_S = 120.0
"""Seconds after which the process of a hung read is ended and a new process started. A call never returns if its driver
was reloaded during the call; calls of a new process return."""
RETRY_INTERVAL_S = 10.0
"""Minimum time (s) before a source that was absent, not permitted or broken is read again."""
CLOSE_TIMEOUT_S = 3.0
"""Seconds within which a reader that is not hung must end by itself."""
TERM_TIMEOUT_S = 2.0
"""Seconds from SIGTERM to SIGKILL."""
KILL_TIMEOUT_S = 1.0
"""Seconds after SIGKILL at which a process that still runs counts as hung in the kernel. It is then left running."""
BACKOFF_S = (1.0, 60.0)
"""First and longest delay (s) before a reader that died is restarted. The delay doubles with each restart."""
_STABLE_AFTER_S = 60.0
"""Seconds after which a reader process counts as stable. If it dies later, the delay before its restart is the first
value of ``BACKOFF_S`` again."""
_ALARM_AFTER_S = START_TIMEOUT_S + TERM_TIMEOUT_S
"""Seconds after the hung timeout at which a kernel timer ends a process that still hangs. The client ends such a
process earlier; the timer is needed only if the caller hangs, too."""
PYTHON_START_S = 10.0
"""Seconds that the start of Python may take, in addition to the caller's time for a reader that is read once."""
_MODULE = "rrl.health.readers.isolation.worker"
_MAX_FRAME_BYTES = 1 << 26
"""Maximum size of an answer in bytes. A greater length means that the bytes are not an answer."""
_decode = msgspec.msgpack.Decoder(Answer).decode


class ReaderClient:
    """The running readers and the stream of their results.

    Start it on the main thread, because the readers end with the thread that started them. A reader is given as a name
    of `READERS`, or as ``name=module:Class``. With ``once_within_s``, each reader is read once, and its creation and
    its read may each take this time (s).
    """

    def __init__(
        self,
        readers: Sequence[str] = READERS,
        options: ReaderOptions = ReaderOptions(),
        *,
        env: Mapping[str, str] | None = None,
        hung_timeout_s: float = HUNG_TIMEOUT_S,
        once_within_s: float | None = None,
    ) -> None:
        pairs = (reader.partition("=") for reader in readers)
        self._workers = [
            WorkerConfig(name, path or READER_CLASSES[name], options, os.getpid(), hung_timeout_s + _ALARM_AFTER_S)
            for name, _, path in pairs
        ]
        self._env, self._hung_timeout_s, self._once_within_s = env or {}, hung_timeout_s, once_within_s
        self._ready: asyncio.Queue[Reading | Exception] = asyncio.Queue(1)
        self._tasks: list[asyncio.Task[None]] = []
        self._processes: set[_Process] = set()
        """Processes that may still run."""

    def start(self) -> None:
        """Start to read."""
        self._tasks = [asyncio.create_task(self._guarded(worker)) for worker in self._workers]

    async def next_reading(self) -> Reading:
        """Return the next result of any reader. The call may be cancelled at any time without losing a result."""
        ready = await self._ready.get()
        if isinstance(ready, Exception):
            raise ready
        return ready

    async def close(self) -> None:
        """End all processes: give them time to release their drivers, then kill the processes that still run.

        A process that hangs in the kernel is left running and named in the log.
        """
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(process.end() for process in self._processes))

    async def _guarded(self, worker: WorkerConfig) -> None:
        """Read from one reader; an error in this module reaches the caller of :meth:`next_reading`."""
        try:
            await self._read_repeatedly(worker)
        except Exception as error:
            await self._ready.put(error)

    async def _read_repeatedly(self, worker: WorkerConfig) -> None:
        """Read from one reader, and start a new process whenever its process has ended or hangs for too long."""
        deaths = 0
        while True:
            began, problem = time.monotonic(), ""
            try:
                process = _Process(worker, self._env)
            except OSError as error:  # too many processes or descriptors: possibly temporary
                await self._report(worker, "broken", f"its process cannot be started: {error.strerror}")
                await asyncio.sleep(RETRY_INTERVAL_S)
                continue
            self._processes.add(process)
            try:
                await self._read(worker, process)
            except (EOFError, ConnectionError):
                problem = "its process ended"
            except (ValueError, msgspec.DecodeError):  # the process's memory may be damaged; others are unaffected
                problem = "its process sent an invalid frame"
            if not (ended := await process.end()) and self._once_within_s is None:
                await self._report(worker, "hung", f"does not end on SIGKILL{_blocked_call(process.pid)}")
            while not ended:  # no second process is started while this one exists
                await asyncio.sleep(RETRY_INTERVAL_S)
                ended = await process.end()
            self._processes.discard(process)
            if problem:
                how = f" {ended}" if problem == "its process ended" else ""
                await self._report(worker, "broken", f"{problem}{how}")
            if self._once_within_s is not None:
                return
            deaths = deaths + 1 if time.monotonic() - began < _STABLE_AFTER_S else 1
            await asyncio.sleep(min(BACKOFF_S[0] * 2.0 ** min(deaths - 1, 10), BACKOFF_S[1]))

    async def _read(self, worker: WorkerConfig, process: _Process) -> None:
        """Read from a process at the reader's interval, until the process hangs for too long.

        Raises EOFError or ConnectionError if the process has ended, ValueError or DecodeError for an invalid answer.
        """
        once_s, verb = self._once_within_s, "start"
        timeout_s = START_TIMEOUT_S if once_s is None else PYTHON_START_S + once_s
        while True:
            requested_at = time.monotonic()
            if (answer := await process.answer(timeout_s)) is None:
                why = f"did not {verb} within {timeout_s:g} s{_blocked_call(process.pid)}"
                process.hung = True
                await self._report(worker, "hung", why)
                left_s = requested_at + max(self._hung_timeout_s, timeout_s) - time.monotonic()
                if once_s is not None or (answer := await process.answer(left_s)) is None:
                    return
                process.hung = False
            timeout_s, verb = once_s or answer.timeout_s, "answer"
            if (reading := answer.reading) is not None:
                await self._ready.put(reading)
                if once_s is not None:
                    return
                pause_s = answer.interval_s if reading.state == "read" else max(answer.interval_s, RETRY_INTERVAL_S)
                if await process.answer(requested_at + pause_s - time.monotonic()) is not None:
                    raise ValueError("an answer without a request")
            process.request()

    async def _report(self, worker: WorkerConfig, state: Literal["hung", "broken"], why: str) -> None:
        await self._ready.put(Reading(worker.name, time.monotonic(), None, state, why))


class _Process:
    """The process of a reader, and the connection to it. Raises OSError if it cannot be started."""

    def __init__(self, worker: WorkerConfig, env: Mapping[str, str]) -> None:
        self._process, self._connection = _spawn(worker, env)
        self._connection.setblocking(False)
        self._answer: asyncio.Task[Answer] | None = None
        """The answer that is awaited."""
        self.pid = self._process.pid
        self.hung = False
        """Whether the request that it has not answered was reported as hung."""

    def request(self) -> None:
        """Request a reading."""
        with contextlib.suppress(OSError):  # the process has died, and the wait for its answer reports that
            self._connection.send(b"?")

    async def answer(self, timeout_s: float) -> Answer | None:
        """Return the next answer; None if it has not arrived after ``timeout_s`` s. A later call may return it then."""
        self._answer = self._answer or asyncio.create_task(self._read_answer())
        done, _ = await asyncio.wait({self._answer}, timeout=max(0.0, timeout_s))
        if not done:
            return None
        answer, self._answer = self._answer, None
        return answer.result()

    async def _read_answer(self) -> Answer:
        length = int.from_bytes(await self._receive(HEAD_BYTES), "little")
        if length > _MAX_FRAME_BYTES:
            raise ValueError(f"invalid frame of {length} bytes; at most {_MAX_FRAME_BYTES} are allowed")
        return _decode(await self._receive(length))

    async def _receive(self, size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            part = await asyncio.get_running_loop().sock_recv(self._connection, size - len(data))
            if not part:
                raise EOFError
            data += part
        return bytes(data)

    async def end(self) -> str:
        """Disconnect from the process, wait for its end, and return how it ended; '' if it does not end on SIGKILL.

        A process notices between two reads that it was disconnected. One that does not end by itself gets SIGTERM, and
        then SIGKILL.
        """
        if self._answer is not None:
            self._answer.cancel()
            await asyncio.gather(self._answer, return_exceptions=True)
        self._connection.close()
        for number, timeout_s in (
            (0, 0.0 if self.hung else CLOSE_TIMEOUT_S),
            (signal.SIGTERM, TERM_TIMEOUT_S),
            (signal.SIGKILL, KILL_TIMEOUT_S),
        ):
            if number:
                self._process.send_signal(number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = await asyncio.to_thread(self._process.wait, timeout_s)
                return f"with code {code}" if code >= 0 else f"by {signal.Signals(-code).name}"
        at = _blocked_call(self.pid)
        _log.error("process %d of a reader does not end on SIGKILL; it still runs%s", self.pid, at)
        return ""


def _spawn(worker: WorkerConfig, env: Mapping[str, str]) -> tuple[subprocess.Popen[bytes], socket.socket]:
    argv = [sys.executable, "-P", "-m", _MODULE, msgspec.json.encode(worker).decode()]
    parent_end, child_end = socket.socketpair()
    with child_end:
        try:
            process = subprocess.Popen(
                argv, stdin=child_end.fileno(), stdout=subprocess.DEVNULL, env=dict(os.environ) | dict(env)
            )
        except BaseException:
            parent_end.close()
            raise
    return process, parent_end


def read_all(
    readers: Sequence[str] = READERS,
    timeout_s: float = 30.0,
    options: ReaderOptions = ReaderOptions(),
    *,
    env: Mapping[str, str] | None = None,
) -> list[Reading]:
    """Read each of the ``readers`` once and return the results in the order of ``readers``.

    Blocks for ``timeout_s`` plus the time to start and end the processes. A reader that does not answer within
    ``timeout_s`` is ``hung``; one whose process cannot be started is ``broken``.
    """

    async def read() -> dict[str, Reading]:
        client = ReaderClient(readers, options, env=env, once_within_s=timeout_s)
        client.start()
        try:
            found = [await client.next_reading() for _ in readers]
        finally:
            await client.close()
        return {reading.reader: reading for reading in found}

    by_name = asyncio.run(read())
    return [by_name[reader.partition("=")[0]] for reader in readers]


def _blocked_call(pid: int) -> str:
    """Return where a process in uninterruptible sleep is blocked; empty for any other process."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            text = file.read()
        if text[text.rindex(b")") + 2 :][:1] != b"D":
            return ""
        with open(f"/proc/{pid}/wchan") as file:
            call = file.read()
    except (OSError, ValueError):
        return ""
    return f", in the kernel (state D{', ' + call if call not in ('', '0') else ''})"
