"""Processes that prepare calls with large bodies (:mod:`.turns.preparation`), so that these delay no other call.

Encoding holds Python's lock, so a thread would not help. A process ends with its parent; if it dies, or takes too much
time or memory, only its call fails. Started with ``python -m rrl.roles.endpoint.preparation_processes``.
"""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import signal
import subprocess
import sys
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from msgspec import structs

from ...core.run_spec import ModelSpec
from ..models.chat import open_chat
from .calls.call import Call, Policy
from .calls.errors import ApiError
from .turns.preparation import Preparation, Work
from .turns.turn_context import Context

_log = logging.getLogger("rrl.endpoint")

PROCESSES = 2
"""Number of processes for bodies that are not huge. An episode uses one at a time, so that one remains for the others.
Huge bodies have one process more, so that they delay only each other."""
TIMEOUT_S = 30.0
"""Seconds that one body may take. A context of 1 M tokens takes 5 s on a slow core."""
MEMORY_BYTES = 4 * 2**30
"""Address space of a process. 16 MB of text take 2.5 GB."""
_HUGE_BYTES = 2**20
"""Size (bytes) above which a body is huge. Its process yields to others, and ends afterwards, because it never returns
its memory."""


class _Process:
    """A process that is used by one thread at a time."""

    def __init__(self, model: ModelSpec, policy: Policy) -> None:
        self.pipe, other = Pipe()
        with other:
            command = [sys.executable, "-P", "-m", __name__, str(other.fileno())]
            self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=(other.fileno(),))
        self.pipe.send((model, policy))
        self.body = b""
        """The newest body, whose call the process remembers."""

    def ask(self, work: Work) -> Any:
        known, self.body = work.body is self.body, work.body
        self.pipe.send(structs.replace(work, body=b"") if known else work)
        return self.pipe.recv()

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


class PreparationProcesses:
    """Prepares calls in processes, which are started when they are needed.

    Args:
        model: The model.
        policy: The job's settings of sampling.
    """

    def __init__(self, model: ModelSpec, policy: Policy) -> None:
        self._model, self._policy = model, policy
        self._places = {huge: asyncio.Semaphore(1 if huge else PROCESSES) for huge in (False, True)}
        self._idle: list[_Process] = []
        self._working: set[_Process] = set()
        self._closed = False

    async def prepare(self, work: Work) -> tuple[Call, Context | None]:
        """Prepare a call, as :meth:`.Preparation.prepare` does."""
        huge = len(work.body) > _HUGE_BYTES
        async with self._places[huge]:
            self._idle = [idle for idle in self._idle if idle.process.poll() is None]
            if self._idle:
                place = next((at for at, idle in enumerate(self._idle) if idle.body is work.body), -1)
                process = self._idle.pop(place)
            else:
                process = await asyncio.to_thread(_Process, self._model, self._policy)
            self._working.add(process)
            try:
                async with asyncio.timeout(TIMEOUT_S):
                    call, context = await asyncio.to_thread(process.ask, work)
                self._idle += [process] * (not huge)
            except (TimeoutError, OSError, EOFError) as error:
                if self._closed:  # the connection is about to break, and the client to repeat the call
                    await asyncio.Event().wait()
                _log.warning("a request of %d bytes could not be encoded: %r", len(work.body), error)
                limits = f"{TIMEOUT_S:g} s and {MEMORY_BYTES >> 30} GiB"
                problem = f"the request could not be encoded within {limits}; shorten it"
                raise ApiError(413, problem, code="request_too_large") from None
            finally:
                self._working.discard(process)
                if process not in self._idle:  # in a thread, because freeing much memory takes long
                    asyncio.get_running_loop().run_in_executor(None, process.end)
        if isinstance(call, int):  # the status of an error, with its body
            raise ApiError(call, **context)
        return call, context

    def close(self) -> None:
        """End all processes; calls that are being prepared are not answered any more."""
        self._closed = True
        for process in (*self._idle, *self._working):
            process.end()


def main() -> None:
    """Prepare calls from a pipe, whose descriptor is the argument, until its end."""
    for number in (signal.SIGINT, signal.SIGTERM):  # a stop lets the calls of agents end first
        signal.signal(number, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    Path("/proc/self/oom_score_adj").write_text("1000")  # of the processes of a role, the kernel ends this one first
    pipe: Connection[Any, Any] = Connection(int(sys.argv[1]))
    model, policy = pipe.recv()
    preparation, body = Preparation(open_chat(model), policy), b""
    with suppress(EOFError):
        while True:
            work = pipe.recv()
            body = work.body or body
            if len(body) > _HUGE_BYTES:
                os.nice(10)
            try:
                pipe.send(preparation.prepare(structs.replace(work, body=body)))
            except ApiError as error:
                pipe.send((error.status, error.body["error"]))


if __name__ == "__main__":
    main()
