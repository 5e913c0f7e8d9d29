"""Run a command to its end, with a deadline and a limit on its output: :func:`run` blocks, :func:`run_async` does not.

A command gets a session of its own, so that it can be ended together with its children. Processes that outlive the
call, such as the command of a role, a health reader or an srun, are not started here. Blocking code uses
:func:`run_coroutine` to call coroutines that run commands.
"""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, TypeVar

from msgspec import Struct

if TYPE_CHECKING:
    import asyncio

MAX_OUTPUT_BYTES = 64 * 2**20
"""Default maximum number of bytes that are returned of stdout, and of stderr: 300,000 lines of 200 bytes. A list of all
jobs is far shorter, since Slurm holds 10,000 jobs by default (slurm.conf(5), MaxJobCount)."""
KILL_TIMEOUT_S = 0.5
"""Seconds to wait for the end of a command after SIGKILL. A command in uninterruptible sleep may end later."""
_CHUNK_BYTES = 2**16
T = TypeVar("T")


class CommandResult(Struct, frozen=True, tag=True):
    """The exit code (negative: a signal) and the output of a command that has ended."""

    code: int
    out: str
    err: str
    truncated: bool = False
    """True if the command printed more than the limit, so that ``out`` or ``err`` lacks its end."""

    @property
    def message(self) -> str:
        """Return the command's stderr, or its stdout if stderr is empty, on one line."""
        return " / ".join(line.strip() for line in (self.err or self.out).splitlines() if line.strip())


def run(
    argv: Sequence[str],
    timeout_s: float,
    *,
    env: Mapping[str, str] | None = None,
    cwd: str | None = None,
    stdin_text: str = "",
    max_output_bytes: int = MAX_OUTPUT_BYTES,
    term_grace_s: float = 0.0,
    preexec_fn: Callable[[], None] | None = None,
) -> CommandResult:
    """Run a command until it has ended and its output is closed.

    Args:
        argv: the command and its arguments; it is not run by a shell.
        timeout_s: seconds until the command and its children are ended.
        env: the environment; None selects the environment of this process.
        cwd: the working directory; None selects the working directory of this process.
        stdin_text: the content of the command's stdin.
        max_output_bytes: maximum number of bytes kept of stdout, and of stderr; further output is read and dropped.
        term_grace_s: seconds from SIGTERM to SIGKILL when the command is ended; 0 sends SIGKILL at once.
        preexec_fn: called in the child before the command; only allowed in a process with one thread.

    Raises:
        TimeoutError: the command did not end in time, and was terminated.
        OSError: the command could not be started.
    """
    with _stdin_file(stdin_text) as stdin:
        process = subprocess.Popen(
            list(argv),
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            env=None if env is None else dict(env),
            cwd=cwd,
            start_new_session=True,
            preexec_fn=preexec_fn,
        )
    deadline = time.monotonic() + timeout_s
    try:
        out, err = _read_outputs(process, deadline, max_output_bytes)
        code = process.wait(max(0.0, deadline - time.monotonic()))
    except (TimeoutError, subprocess.TimeoutExpired):
        raise TimeoutError(_timeout_text(argv, timeout_s)) from None
    finally:
        if process.returncode is None:
            _end(process, term_grace_s)
        for pipe in (process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()
    return _result(code, out, err, max_output_bytes)


async def run_async(
    argv: Sequence[str],
    timeout_s: float,
    *,
    env: Mapping[str, str] | None = None,
    stdin_text: str = "",
    max_output_bytes: int = MAX_OUTPUT_BYTES,
    term_grace_s: float = 0.0,
) -> CommandResult:
    """Run a command as :func:`run` does, but without blocking the event loop.

    If the caller is cancelled, the command is ended too.
    """
    import asyncio  # imported here: asyncio takes 6 MiB (measured), and the readers of a node's health only need run()

    with _stdin_file(stdin_text) as stdin:
        starting = asyncio.create_task(
            asyncio.create_subprocess_exec(
                *argv,
                stdin=stdin,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=None if env is None else dict(env),
                start_new_session=True,
            )
        )
        try:
            process = await asyncio.shield(starting)
        except asyncio.CancelledError:
            # The start is completed first: asyncio of Python 3.11 never returns if it is cancelled while it connects
            # the pipes.
            with suppress(OSError):
                if (process := await starting).returncode is None:
                    await _end_async(process, term_grace_s)
            raise
    assert process.stdout is not None and process.stderr is not None  # noqa: PT018
    try:
        async with asyncio.timeout(timeout_s):  # Python 3.11's wait_for may lose a cancellation
            out, err = await asyncio.gather(
                _read_stream(process.stdout, max_output_bytes), _read_stream(process.stderr, max_output_bytes)
            )
            code = await process.wait()
    except TimeoutError:
        raise TimeoutError(_timeout_text(argv, timeout_s)) from None
    finally:
        if process.returncode is None:
            await _end_async(process, term_grace_s)
    return _result(code, out, err, max_output_bytes)


def run_coroutine(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end in an event loop of its own, and return its result.

    If this thread already runs an event loop, as in a notebook, the new event loop runs in another thread, since a
    thread can run only one event loop.
    """
    import asyncio
    from concurrent.futures import ThreadPoolExecutor

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(coroutine)
    with ThreadPoolExecutor(1) as executor:
        return executor.submit(asyncio.run, coroutine).result()


def kill_session(leader: int) -> None:
    """Send SIGSTOP, then SIGKILL, to all processes of a session; ``leader`` is the pid of its first process.

    All processes are stopped first, because the step of an srun that rrl kills may have to continue. If an srun dies
    while its child runs, the child ends the step (measured: 2.5 s later). A stopped child does not notice the death.
    """
    _signal_session(leader, signal.SIGSTOP)
    _signal_session(leader, signal.SIGKILL)


def _signal_session(leader: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError, PermissionError):  # the session has ended, or runs as another user
        os.killpg(leader, number)


@contextmanager
def _stdin_file(text: str) -> Iterator[int]:
    """Open a file that contains ``text``, and yield its descriptor.

    Unlike a pipe, a file needs no writer while the command runs.
    """
    fd = os.memfd_create("stdin") if text else os.open(os.devnull, os.O_RDONLY)
    try:
        if text:
            os.write(fd, text.encode())
            os.lseek(fd, 0, os.SEEK_SET)
        yield fd
    finally:
        os.close(fd)


def _read_outputs(process: subprocess.Popen[bytes], deadline: float, limit: int) -> tuple[bytes, bytes]:
    """Read stdout and stderr to their ends; raise TimeoutError at ``deadline``.

    At most ``limit`` + 1 bytes of each are returned. The additional byte shows that the output exceeds the limit.
    """
    assert process.stdout is not None and process.stderr is not None  # noqa: PT018
    contents = {process.stdout.fileno(): bytearray(), process.stderr.fileno(): bytearray()}
    with selectors.DefaultSelector() as selector:
        for fd in contents:
            selector.register(fd, selectors.EVENT_READ)
        while selector.get_map():
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError
            for key, _ in selector.select(left):
                data = os.read(key.fd, _CHUNK_BYTES)
                contents[key.fd] += data[: limit + 1 - len(contents[key.fd])]
                if not data:
                    selector.unregister(key.fd)
    out, err = contents.values()
    return bytes(out), bytes(err)


async def _read_stream(stream: asyncio.StreamReader, limit: int) -> bytes:
    """Read a stream to its end; return at most ``limit`` + 1 bytes: one more shows that the limit was exceeded."""
    content = bytearray()
    while data := await stream.read(_CHUNK_BYTES):
        content += data[: limit + 1 - len(content)]
    return bytes(content)


def _result(code: int, out: bytes, err: bytes, limit: int) -> CommandResult:
    out_text, err_text = (content[:limit].decode(errors="replace") for content in (out, err))
    return CommandResult(code, out_text, err_text, truncated=max(len(out), len(err)) > limit)


def _timeout_text(argv: Sequence[str], timeout_s: float) -> str:
    return f"{os.path.basename(argv[0])}: no answer within {timeout_s:g} s"


def _end(process: subprocess.Popen[bytes], term_grace_s: float) -> None:
    if term_grace_s > 0:
        _signal_session(process.pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(term_grace_s)
            return
    kill_session(process.pid)
    with suppress(subprocess.TimeoutExpired):
        process.wait(KILL_TIMEOUT_S)


async def _end_async(process: asyncio.subprocess.Process, term_grace_s: float) -> None:
    import asyncio

    async def wait(timeout_s: float) -> bool:
        """Wait until the command has ended, and return whether it ended in time.

        While it waits, the command's output is read, since a full pipe would block the command.
        """
        assert process.stdout is not None and process.stderr is not None  # noqa: PT018
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await asyncio.gather(_read_stream(process.stdout, 0), _read_stream(process.stderr, 0), process.wait())
                return True
        return False

    if term_grace_s > 0:
        _signal_session(process.pid, signal.SIGTERM)
        if await wait(term_grace_s):
            return
    kill_session(process.pid)
    await wait(KILL_TIMEOUT_S)
