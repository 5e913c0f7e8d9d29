"""The user's agent as a program: ``[roles.agents] command``, which is started once for each attempt.

The program needs no code for rrl: the clients of OpenAI and Anthropic read the endpoint and its key from environment
variables, Codex reads them from a folder that is made for the attempt, the text of the item is in ``RRL_ITEM``, and the
program prints the reward.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from ...core.text import on_one_line
from .user_function import Agent

ITEM_ENV = "RRL_ITEM"
"""Environment variable with the text of the item."""
TEMPORARY_FAILURE = os.EX_TEMPFAIL
"""Exit code with which a program reports that something outside of it has failed (sysexits.h)."""
_KEY_VARIABLES = "OPENAI_API_KEY", "CODEX_API_KEY", "ANTHROPIC_API_KEY", "ANTHROPIC_AUTH_TOKEN"
"""Environment variables from which clients read a key. All are set, so that no client calls a provider with a key of
the user's shell."""
_CODEX_CONFIG = """\
model = "policy"
model_provider = "rrl"
[model_providers.rrl]
name = "rrl"
base_url = {}
env_key = "OPENAI_API_KEY"
wire_api = "responses"
"""
"""Settings of Codex, which ignores ``OPENAI_BASE_URL``. It knows no model of this name; for a model that it knows, it
would offer another tool instead of a shell."""
_TAIL_BYTES = 2**15
"""Number of bytes kept from the end of each output. The last line of stdout is the reward, and the last line of stderr
is the reason of a failure."""
_LAST_READS = 16
"""Maximum number of reads (64 KiB each) from a pipe after the program's end. One read empties the pipe, but other
processes may still write to it."""
_MAX_REASON_CHARS = 300


class ProgramFailed(Exception):
    """A process of the agent's program has ended without a result.

    Args:
        why: How the process ended, and the last line that it wrote to stderr.
        environmental: True if something outside of the program may be the cause.
    """

    def __init__(self, why: str, environmental: bool) -> None:
        super().__init__(why)
        self.environmental = environmental


def program_environment(base_url: str, api_key: str, codex_home: Path) -> dict[str, str]:
    """Return the environment variables by which clients find the endpoint.

    Args:
        base_url: Base URL for OpenAI's clients, which ends with ``/v1``.
        api_key: The key of the attempt.
        codex_home: The folder in which Codex finds its settings.
    """
    return {
        "OPENAI_BASE_URL": base_url,
        "ANTHROPIC_BASE_URL": base_url.removesuffix("/v1"),
        "CODEX_HOME": str(codex_home),
        **dict.fromkeys(_KEY_VARIABLES, api_key),
    }


def program_agent(command: Sequence[str], folder: Path, codex_home: Callable[[str], Path]) -> Agent:
    """Return an agent that starts a command for each attempt, and kills the command's process group after the attempt.

    The agent returns the last line of stdout, a number or a JSON object of rewards by name, or None if that line is
    neither. It raises :class:`ProgramFailed` for an exit code other than 0.

    Args:
        command: The program and its arguments.
        folder: Folder of job.toml, in which the program runs.
        codex_home: Returns for a key the folder that Codex uses in the attempt, which is made and removed. Codex writes
            its path into a conversation, so every attempt at an episode must have the same one to be replayed.
    """

    async def run(item: str, base_url: str, api_key: str) -> Any:
        home = codex_home(api_key)
        await asyncio.to_thread(_make_codex_home, home, base_url)
        try:
            return await _run(item, program_environment(base_url, api_key, home))
        finally:
            shutil.rmtree(home, ignore_errors=True)

    async def _run(item: str, environment: dict[str, str]) -> Any:
        process = _start(command, folder, environment | {ITEM_ENV: item})
        assert process.stdout is not None
        assert process.stderr is not None
        output, errors = _Tail(process.stdout), _Tail(process.stderr)
        try:
            await _ended(process.pid)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # the id is not reused before the process is reaped below
            try:
                await _ended(process.pid)
            finally:
                printed, reason, code = output.close(), errors.close()[:_MAX_REASON_CHARS], process.poll()
        if code:
            how = f"exit code {code}" if code > 0 else f"signal {-code} ({signal.strsignal(-code)})"
            why = f"{command[0]} ended with {how}{': ' if reason else ''}{reason}"
            raise ProgramFailed(why, environmental=code < 0 or code == TEMPORARY_FAILURE)
        return _result(printed)

    return run


def _make_codex_home(home: Path, base_url: str) -> None:
    """Make the folder in which Codex finds the endpoint, in place of one that an attempt on this node has left."""
    shutil.rmtree(home, ignore_errors=True)
    try:
        home.mkdir(mode=0o700)  # refused if another user has made a file or link of this name in /tmp
        (home / "config.toml").write_text(_CODEX_CONFIG.format(json.dumps(base_url)))
    except OSError as error:
        raise ProgramFailed(f"the folder for Codex cannot be made: {error}", environmental=True) from None


def _start(command: Sequence[str], folder: Path, given: dict[str, str]) -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(
            command,
            cwd=folder,
            env=os.environ | given,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
    except (OSError, ValueError) as error:
        environmental = isinstance(error, OSError) and not isinstance(error, FileNotFoundError | PermissionError)
        raise ProgramFailed(f"{command[0]} cannot be started: {error}", environmental) from None


class _Tail:
    """The last bytes that a process wrote to a pipe; the pipe is always emptied, so that the process never waits."""

    def __init__(self, pipe: IO[bytes]) -> None:
        self._pipe, self._content, self._loop = pipe, b"", asyncio.get_running_loop()
        os.set_blocking(pipe.fileno(), False)
        self._loop.add_reader(pipe.fileno(), self._read)

    def close(self) -> str:
        """Close the pipe, and return the last line that is not empty."""
        for _ in range(_LAST_READS):
            if not self._read():
                break
        self._loop.remove_reader(self._pipe.fileno())
        self._pipe.close()
        lines = [line for line in self._content.decode(errors="replace").splitlines() if line.strip()]
        return on_one_line(lines[-1]).strip() if lines else ""

    def _read(self) -> bool:
        """Read what the pipe contains, and return whether there may be more."""
        try:
            read = os.read(self._pipe.fileno(), 2**16)
        except BlockingIOError:
            return False
        if not read:
            self._loop.remove_reader(self._pipe.fileno())
        self._content = (self._content + read)[-_TAIL_BYTES:]
        return bool(read)


async def _ended(pid: int) -> None:
    """Wait until a child process has ended, but do not reap the process."""
    loop, descriptor = asyncio.get_running_loop(), os.pidfd_open(pid)
    ended: asyncio.Future[None] = loop.create_future()

    def on_end() -> None:
        loop.remove_reader(descriptor)
        if not ended.done():
            ended.set_result(None)

    loop.add_reader(descriptor, on_end)
    try:
        await ended
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)


def _result(line: str) -> Any:
    try:
        return json.loads(line) if line.startswith("{") else float(line)
    except (ValueError, RecursionError):
        return None
