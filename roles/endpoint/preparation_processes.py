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
from pathlib import Path
from typing import IO, Any

import msgspec
from msgspec import Struct

from ...core.run_spec import ModelSpec
from ..models.chat import open_chat
from .calls.call import Policy
from .calls.errors import ApiError
from .turns.preparation import Preparation, Prepared, Work

_log = logging.getLogger("rrl.endpoint")

PROCESSES = 2
"""Number of processes. An episode uses one at a time, so that one remains for the others."""
TIMEOUT_S = 30.0
"""Seconds that one body may take. A context of 1 M tokens takes 5 s on a slow core."""
MEMORY_BYTES = 4 * 2**30
"""Address space of a process. 16 MB of text take 2.5 GB."""
_KEPT_BYTES = 2**20
"""Size (bytes) of a body above which its process yields to others, and ends afterwards, because it never returns its
memory."""
_SIZE_BYTES = 8


class _Settings(Struct, frozen=True):
    """What a process needs before its first call."""

    model: ModelSpec
    policy: Policy


class _Refusal(Struct, frozen=True, tag=True):
    """The error with which a call is answered."""

    status: int
    error: dict[str, Any]


class _Process:
    """A process that is used by one thread at a time."""

    def __init__(self, settings: bytes) -> None:
        command = [sys.executable, "-P", "-m", __name__]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._input, self._output = self._process.stdin, self._process.stdout
        _write(self._input, settings)

    def ask(self, work: Work) -> Prepared | _Refusal:
        _write(self._input, msgspec.msgpack.encode(work))
        return msgspec.msgpack.decode(_read(self._output), type=Prepared | _Refusal)

    def end(self) -> None:
        self._process.kill()
        self._process.wait()


class PreparationProcesses:
    """Prepares calls in processes, which are started when they are needed.

    Args:
        model: The model.
        policy: The job's settings of sampling.
    """

    def __init__(self, model: ModelSpec, policy: Policy) -> None:
        self._settings = msgspec.msgpack.encode(_Settings(model, policy))
        self._places = asyncio.Semaphore(PROCESSES)
        self._idle: list[_Process] = []
        self._failed: set[str] = set()
        """Digests of bodies that have ended a process. They are refused at once if they come again."""

    async def prepare(self, work: Work, digest: str) -> Prepared:
        """Prepare a call whose body has this digest. Raises ApiError."""
        failed = ApiError(
            413, f"the request could not be encoded within {TIMEOUT_S:g} s and {MEMORY_BYTES >> 30} GiB; shorten it",
            code="request_too_large",
        )  # fmt: skip
        async with self._places:
            if digest in self._failed:
                raise failed
            process = self._idle.pop() if self._idle else await asyncio.to_thread(_Process, self._settings)
            kept = False
            try:
                async with asyncio.timeout(TIMEOUT_S):
                    answer = await asyncio.to_thread(process.ask, work)
                kept = len(work.body) <= _KEPT_BYTES
            except (TimeoutError, OSError, EOFError) as error:
                _log.warning("a request of %d bytes could not be encoded: %r", len(work.body), error)
                self._failed.add(digest)
                raise failed from None
            finally:
                if kept:
                    self._idle.append(process)
                else:  # in a thread, because freeing much memory takes long
                    asyncio.get_running_loop().run_in_executor(None, process.end)
        if isinstance(answer, _Refusal):
            of = answer.error
            raise ApiError(answer.status, of["message"], of["type"], of["code"], of["param"])
        return answer

    def close(self) -> None:
        """End the processes that do not work. The others end with this process."""
        while self._idle:
            self._idle.pop().end()


def _write(file: IO[bytes], message: bytes) -> None:
    file.write(len(message).to_bytes(_SIZE_BYTES, "big"))
    file.write(message)
    file.flush()


def _read(file: IO[bytes]) -> bytes:
    """Return the next message. Raises EOFError."""
    size = int.from_bytes(head := file.read(_SIZE_BYTES), "big")
    if len(head) < _SIZE_BYTES or len(message := file.read(size)) < size:
        raise EOFError
    return message


def main() -> None:
    """Prepare calls from stdin until its end."""
    for number in (signal.SIGINT, signal.SIGTERM):  # a stop lets the calls of agents end first
        signal.signal(number, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    Path("/proc/self/oom_score_adj").write_text("1000")  # of the processes of a role, the kernel ends this one first
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what libraries print goes to the log
    settings = msgspec.msgpack.decode(_read(sys.stdin.buffer), type=_Settings)
    preparation = Preparation(open_chat(settings.model), settings.policy)
    answer: Prepared | _Refusal
    with suppress(EOFError):
        while True:
            work = msgspec.msgpack.decode(_read(sys.stdin.buffer), type=Work)
            if len(work.body) > _KEPT_BYTES:
                os.nice(10)
            try:
                answer = preparation.prepare(work)
            except ApiError as error:
                answer = _Refusal(error.status, error.body["error"])
            _write(answers, msgspec.msgpack.encode(answer))


if __name__ == "__main__":
    main()
