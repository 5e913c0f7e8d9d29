"""Start the process that uses pyslurm, send it requests, and end it if it does not reply in time."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from typing import TypeVar

import msgspec
from msgspec import Struct

from ....core.command_runner import KILL_TIMEOUT_S, MAX_OUTPUT_BYTES
from ...base import Unanswered
from ..commands import environment
from .messages import Failed, Ready, Reply, Request

CHILD_MODULE = f"{__package__}.pyslurm_child"
START_TIMEOUT_S = 20.0
"""Seconds within which the process must import pyslurm. The import takes 0.3 s (measured). Without slurm.conf it takes
a minute and fails."""
_STDERR_BYTES = 2000
"""Number of bytes that are kept from the end of the process's stderr."""

T = TypeVar("T", bound=Struct)


class ChildFailed(Unanswered):
    """The process died, did not answer in time, or sent something that is not a reply. It no longer runs.

    The request may or may not have been carried out.
    """


class ChildClosed(Exception):
    """The process is not started again, because :meth:`PyslurmChild.close` was called; the request was not sent."""


class _Running(Struct):
    """A started process, the end of its stderr, and the task that reads its stderr."""

    process: asyncio.subprocess.Process
    stderr: bytearray
    reading: asyncio.Task[None]


class PyslurmChild:
    """The process that uses pyslurm. The first request starts it, and the first request after its end starts it again.

    After :meth:`close` the process is not started again, and every request raises ChildClosed.

    Args:
        module: the module that the process imports as pyslurm.
        python: the interpreter of the process; default: the interpreter of this process.
        start_timeout_s: seconds for the process to import the module.
    """

    def __init__(
        self, module: str = "pyslurm", python: str = sys.executable, start_timeout_s: float = START_TIMEOUT_S
    ) -> None:
        self._argv = (python, "-P", "-m", CHILD_MODULE, module)
        self._start_timeout_s = start_timeout_s
        self._lock = asyncio.Lock()
        self._running: _Running | None = None
        self._closed = False
        self._version = ""
        self._decoder = msgspec.json.Decoder(Reply)

    @property
    def pid(self) -> int | None:
        """Return the pid of the process; None if it does not run."""
        return self._running.process.pid if self._running else None

    async def version(self) -> str:
        """Return the version of pyslurm; start the process if it does not run. Raises ChildFailed, ChildClosed."""
        async with self._lock:
            await self._started()
            return self._version

    async def ask(self, request: Request, reply_type: type[T], timeout_s: float) -> T | Failed:
        """Return the reply to a request. Raises ChildFailed, ChildClosed."""
        async with self._lock:
            running = await self._started()
            async with self._deadline(running, timeout_s):
                assert running.process.stdin is not None
                running.process.stdin.write(msgspec.json.encode(request) + b"\n")
                await running.process.stdin.drain()
                reply = await self._reply(running)
                if not isinstance(reply, (reply_type, Failed)):
                    raise msgspec.ValidationError(f"{type(reply).__name__} instead of {reply_type.__name__}")
                return reply

    async def close(self) -> None:
        """End the process permanently; requests that wait for their turn are not sent."""
        self._closed = True
        async with self._lock:
            await self._kill()

    async def _started(self) -> _Running:
        if self._closed:
            raise ChildClosed
        if self._running is not None and self._running.process.returncode is not None:
            await self._kill()  # the process ended between two requests, so no reply is lost
        if self._running is None:
            self._running = running = await self._start()
            async with self._deadline(running, self._start_timeout_s):
                first = await self._reply(running)
                if not isinstance(first, Ready):
                    raise msgspec.ValidationError(f"{type(first).__name__} instead of Ready")
                self._version = first.version
        return self._running

    async def _start(self) -> _Running:
        starting = asyncio.create_task(
            asyncio.create_subprocess_exec(
                *self._argv,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=environment(os.environ),
                start_new_session=True,
                limit=MAX_OUTPUT_BYTES,
            )
        )
        try:
            process = await asyncio.shield(starting)
        except OSError as error:
            raise ChildFailed(f"the process of pyslurm cannot be started: {error}") from error
        except asyncio.CancelledError:  # complete the start first, as core.command_runner.run_async does
            with contextlib.suppress(OSError):
                (await starting).kill()
            raise
        assert process.stderr is not None
        stderr = bytearray()
        return _Running(process, stderr, asyncio.create_task(_keep_end(process.stderr, stderr)))

    async def _reply(self, running: _Running) -> Reply:
        assert running.process.stdout is not None
        line = await running.process.stdout.readline()
        if not line.endswith(b"\n"):
            raise EOFError
        reply: Reply = self._decoder.decode(line)
        return reply

    @contextlib.asynccontextmanager
    async def _deadline(self, running: _Running, timeout_s: float) -> AsyncIterator[None]:
        """End the process if the block fails, is cancelled, or takes longer than ``timeout_s`` seconds.

        If the process continued, its late reply would be taken for the reply to the next request.
        """
        try:
            async with asyncio.timeout(timeout_s):
                yield
        except TimeoutError:
            await self._kill()
            raise ChildFailed(f"pyslurm did not answer within {timeout_s:g} s") from None
        except (EOFError, OSError):
            await self._kill()
            code, last = running.process.returncode, _last_line(running.stderr)
            raise ChildFailed(f"the process of pyslurm ended with {code}{f': {last}' if last else ''}") from None
        except ValueError as error:  # not JSON, not a reply, or too long
            await self._kill()
            raise ChildFailed(f"the process of pyslurm sent an invalid reply: {error}") from None
        except BaseException:
            await self._kill()
            raise

    async def _kill(self) -> None:
        running, self._running = self._running, None
        if running is None:
            return
        with contextlib.suppress(ProcessLookupError):
            running.process.kill()
        with contextlib.suppress(TimeoutError):  # a process in uninterruptible sleep ends later
            async with asyncio.timeout(KILL_TIMEOUT_S):
                await running.process.wait()
                await running.reading
        running.reading.cancel()


async def _keep_end(stream: asyncio.StreamReader, kept: bytearray) -> None:
    """Read a stream to its end, and keep its last bytes."""
    while data := await stream.read(_STDERR_BYTES):
        kept += data
        del kept[:-_STDERR_BYTES]


def _last_line(stderr: bytearray) -> str:
    lines = [line.strip() for line in stderr.decode(errors="replace").splitlines() if line.strip()]
    return lines[-1] if lines else ""
