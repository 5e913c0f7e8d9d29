"""Export checkpoints according to ``[roles.trainer] export``, in a child process of the manager, one at a time.

The child has the lowest priority and needs little memory. It reads the run directory and writes into it, and uses none
of the run's nodes. An export that fails is reported and does not change the run. It is not repeated, but the next due
export is made as usual. ``rrl export`` makes a missing export. If the manager dies, its child ends too. If a manager
dies while the run ends, the next manager makes the last export.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
from collections.abc import Callable

from ...core.run_dir import write_atomically
from ...core.types import Outcome
from ..context import RunContext
from ..model import events as ev

_log = logging.getLogger("rrl.manager")

PROGRAM = "rrl.roles.trainer.checkpoint_export"
"""Module of the child process."""
EXPORT_TIMEOUT_S = 7200.0
"""Seconds after which an export is ended. A slow shared file system (200 MB/s) reads a checkpoint of 1.4 TB (120
billion parameters) in this time."""
END_TIMEOUT_S = 5.0
"""Seconds that a child has to remove its files after SIGTERM, before it is killed."""
MAX_REASON_CHARS = 1000
"""Maximum number of characters of an error that is reported."""


class CheckpointExports:
    """Starts exports, and reports those that fail.

    Args:
        context: The run.
        on_ended: Called when an export has ended.
    """

    def __init__(self, context: RunContext, on_ended: Callable[[], None]) -> None:
        self._context, self._on_ended = context, on_ended
        self._running: asyncio.Task[None] | None = None
        self._waiting: int | None = None
        """Step whose checkpoint is exported after the running export; None if no step waits."""
        self._newest = 0
        """Newest step whose export has begun or is waiting; 0 if there is none."""

    def on_event(self, event: ev.Event) -> None:
        """Export the checkpoint of a committed step, if ``export`` is a number and the step is a multiple of it."""
        every = self._context.state().job.trainer.export
        if isinstance(event, ev.StepCommitted) and isinstance(every, int) and event.step % every == 0:
            self._request(event.step)

    def is_settled(self) -> bool:
        """Return whether a run whose nodes are released may end, because no export is missing.

        The newest checkpoint of a completed run is exported before the run ends. If a user cancels the run, a running
        export is ended.
        """
        state = self._context.state()
        completed = state.finish is not None and state.finish.outcome is Outcome.COMPLETED
        if state.cancelled_by and self._running is not None:
            self._waiting = None
            self._running.cancel()
        elif completed and state.job.trainer.export is not None:
            self._request(state.step)
        return self._running is None

    async def close(self) -> None:
        """End the running export."""
        self._waiting = None
        if (running := self._running) is not None:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    def _request(self, step: int) -> None:
        if step > self._newest:
            self._newest = step
            self._waiting = step
            self._start()

    def _start(self) -> None:
        if self._running is None and (step := self._waiting) is not None:
            self._waiting = None
            self._running = asyncio.create_task(self._export(step))
            self._running.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._running = None
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("a checkpoint was not exported: %r", error)
        self._start()
        self._on_ended()

    async def _export(self, step: int) -> None:
        run = self._context.run_dir
        folder = run.export_of(step)
        if await asyncio.to_thread(folder.exists):  # the folder appears only when it is complete
            return
        _log.info("exporting the checkpoint of step %d to %s", step, folder)
        failure = await self._run_child([str(run.path), str(step), str(folder)])
        if not failure:
            await asyncio.to_thread(run.export_failure.unlink, missing_ok=True)
            return
        _log.warning("the checkpoint of step %d was not exported: %s", step, failure)
        with contextlib.suppress(OSError):  # the log has it
            await asyncio.to_thread(write_atomically, run.export_failure, f"step {step}: {failure}\n".encode())

    async def _run_child(self, arguments: list[str]) -> str:
        """Run the child process to its end; return why it failed, in one line (empty if it succeeded)."""
        try:
            child = await asyncio.create_subprocess_exec(
                sys.executable,
                "-P",
                "-m",
                PROGRAM,
                *arguments,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.PIPE,
                start_new_session=True,
            )
        except OSError as error:
            return f"{sys.executable}: {error.strerror}"
        assert child.stderr is not None
        assert child.stdin is not None
        try:
            async with asyncio.timeout(EXPORT_TIMEOUT_S):
                printed = (await child.stderr.read()).decode(errors="replace").strip()
                code = await child.wait()
        except TimeoutError:
            return f"the export did not end within {EXPORT_TIMEOUT_S / 3600:g} h"
        finally:
            if child.returncode is None:
                child.stdin.close()  # the child removes its files and ends
                await asyncio.shield(_wait_or_kill(child))
        if code == 0:
            return ""
        return " ".join(printed.split("\n")[-1].split())[:MAX_REASON_CHARS] or f"the export ended with code {code}"


async def _wait_or_kill(child: asyncio.subprocess.Process) -> None:
    try:
        async with asyncio.timeout(END_TIMEOUT_S):
            await child.wait()
    except TimeoutError:
        child.kill()
