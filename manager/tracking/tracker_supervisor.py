"""Keep one process for each tracker of a job running while this manager manages the run.

A tracker never delays the run. If a tracker does not work, the manager logs one line and starts its process again with
growing pauses. Steps that were not sent remain in the journal until they are sent.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
from asyncio.subprocess import Process

import msgspec

from ...core.command_runner import kill_session
from ...core.role_environment import INHERITED_VARIABLES
from ...core.run_dir import RunDir
from ...core.run_spec import RunSpec
from .main import FOLLOW, HUNG_EXIT, ONCE
from .tracker_files import TRACKER_ENV, end_leftovers, log_file, mark_of, read_progress

_log = logging.getLogger("rrl.manager")

MODULE = "rrl.manager.tracking.main"
RESTART_DELAY_S = 1.0
"""Seconds before a process that ended is started again; doubles with each process that has sent no step."""
MAX_RESTART_DELAY_S = 300.0
END_TIMEOUT_S = 20.0
"""Seconds that a manager waits at the end of the run for steps to be sent; ``rrl track`` can send the remaining steps
later."""
LEAVE_TIMEOUT_S = 3.0
"""Seconds that a manager waits for a process if the manager exits before the run's end. The next manager starts another
process."""
MAX_LOG_BYTES = 2**20
"""Size of the log of a tracker above which it is emptied before the next process starts."""


class TrackerSupervisor:
    """The processes of a run's trackers, started by :meth:`start`."""

    def __init__(self, run: RunDir, spec: RunSpec) -> None:
        self._run, self._spec = run, spec
        self._processes: dict[str, Process] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def start(self) -> None:
        """Start the processes, and keep them running in the background."""
        self._tasks = {name: asyncio.create_task(self._keep_running(name)) for name in self._spec.track.to}

    async def close(self, ended: bool) -> None:
        """Let the processes send what is in the journal, and end them.

        Args:
            ended: whether the run has ended. If so, a warning names each tracker that lacks steps.
        """
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        await asyncio.gather(*(self._end(name, ended) for name in self._tasks))
        self._tasks = {}

    async def _keep_running(self, name: str) -> None:
        delay_s, step = RESTART_DELAY_S, -1
        while True:
            try:
                process = await self._start(name, FOLLOW)
                reason = _reason(await process.wait())
            except OSError as error:
                reason = str(error)
            progress = await asyncio.to_thread(read_progress, self._run, name)
            if progress.step != step:  # the process has sent steps since the last failure
                delay_s, step = RESTART_DELAY_S, progress.step
                _log.warning(
                    "tracker %s: %s; the run goes on, and its steps after %d are sent later",
                    name,
                    progress.error or reason,
                    step,
                )
            await asyncio.sleep(delay_s)
            delay_s = min(2 * delay_s, MAX_RESTART_DELAY_S)

    async def _start(self, name: str, mode: str) -> Process:
        environment = await asyncio.to_thread(self._prepare, name)
        with log_file(self._run, name).open("ab") as log:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-P",
                "-m",
                MODULE,
                str(self._run.path),
                name,
                str(os.getpid()),
                mode,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env=environment,
                cwd=self._run.trackers,
            )
        self._processes[name] = process
        return process

    def _prepare(self, name: str) -> dict[str, str]:
        """Prepare the start of a tracker's process, and return the environment of the process. Raises OSError.

        The folder of the trackers is created, and the tracker's log is emptied if it is longer than
        :data:`MAX_LOG_BYTES`. The environment is made like the environment of a role.
        """
        self._run.trackers.mkdir(mode=0o700, exist_ok=True)
        log = log_file(self._run, name)
        if log.exists() and log.stat().st_size > MAX_LOG_BYTES:
            os.truncate(log, 0)
        inherited = {key: os.environ[key] for key in INHERITED_VARIABLES if key in os.environ}
        passed = msgspec.json.decode(self._run.passed_env.read_bytes(), type=dict[str, str])
        return inherited | passed | {TRACKER_ENV: mark_of(self._run, name)}

    async def _end(self, name: str, ended: bool) -> None:
        """Let a tracker's process send what is in the journal, for a limited time, and end the process."""
        process = self._processes.get(name)
        code: int | None = None
        try:
            async with asyncio.timeout(END_TIMEOUT_S if ended else LEAVE_TIMEOUT_S):
                if process is not None and process.returncode is None:
                    process.send_signal(signal.SIGTERM)
                    code = await process.wait()
                if code != 0 and ended:  # no process ran, or it failed: a last process sends the remaining steps
                    process = await self._start(name, ONCE)
                    code = await process.wait()
        except (TimeoutError, OSError):
            code = None
        if process is not None and process.returncode is None:
            kill_session(process.pid)
            with contextlib.suppress(ProcessLookupError):
                await process.wait()
        await asyncio.to_thread(end_leftovers, self._run, name)
        progress = await asyncio.to_thread(read_progress, self._run, name)
        if ended and not progress.finished:
            _log.warning(
                "tracker %s has the steps up to %d only; to send the others: rrl track %s --to %s",
                name,
                progress.step,
                self._run.id,
                name,
            )


def _reason(code: int) -> str:
    """Return why a process ended, from its exit code."""
    if code == HUNG_EXIT:
        return "it does not answer"
    return f"its process was ended by {signal.Signals(-code).name}" if code < 0 else f"its process exited with {code}"
