"""Manage the sruns that launch steps: start them, watch them until their step has connected, then kill them.

An srun consists of a parent and a child process. SIGTERM, which any ``scancel`` of the manager's own job sends, ends
the step. SIGKILL to the parent alone ends the step too, through the child. SIGKILL to both leaves the step running, and
the tasks still write their output files (measured on 22.05).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from msgspec import Struct

from ...core.command_runner import CommandResult, kill_session
from ...core.processes import AGENT_MODULE, STEP_MODULE
from ...core.text import last_lines, last_lines_of, shows_missing_command
from ...core.units import slurm_mem
from ..base import ExitedAtOnce, NotStarted, Refused, RefusedForNow, Step, Unanswered
from .commands import SlurmLimits, environment, failure, task_exit_code


class _Srun(Struct):
    """A running srun, which is launching one step."""

    process: asyncio.subprocess.Process
    stderr_file: Path
    """File for srun's standard error, in the run directory. Unlike a pipe, a file needs no reader."""
    joined: asyncio.Event
    """Set once the step has connected to the manager, or once the srun has to be killed."""
    watch_until: float
    """Time (time.monotonic) until which its start is watched."""


class Sruns:
    """The sruns of one manager, by the tags of their steps.

    ``prefix`` replaces ``python -P -m <module>`` in front of the launch file (for tests).
    """

    def __init__(self, python: str, limits: SlurmLimits, prefix: Sequence[str] | None = None) -> None:
        self._python = python
        self._limits = limits
        self._prefix = prefix
        self._running: dict[str, _Srun] = {}
        self._failed: set[str] = set()
        self._watchers: set[asyncio.Task[None]] = set()

    def __contains__(self, tag: str) -> bool:
        """Return whether an srun for this tag is still running."""
        return tag in self._running

    @property
    def failed(self) -> frozenset[str]:
        """Return the tags of the steps whose srun ended with an error before the step had connected.

        srun itself makes slurmd start the tasks of a step. Once srun has ended, a step that does not exist yet never
        starts, even if slurmctld still grants its resources.
        """
        return frozenset(self._failed)

    def command(self, job: Sequence[str], step: Step) -> tuple[str, ...]:
        """Return the srun command of a step; ``job`` are the options that identify its job.

        A role takes its own share of the node (``--exact``). With ``step.overlap`` it shares resources with other
        steps. The step gets the resource limits (memlock, nofile) of the node, not of the manager.
        """
        prefix = self._prefix
        if prefix is None:  # -P: do not search the working directory for modules
            prefix = (step.python or self._python, "-P", "-m", AGENT_MODULE if step.agent else STEP_MODULE)
        output = str(step.log_file).replace("%", "%%")
        return (
            "srun",
            *job,
            f"--job-name={step.tag}",
            "--nodes=1",
            "--ntasks=1",
            f"--nodelist={step.node}",
            "--exact",
            *(("--overlap",) if step.overlap else ()),
            f"--cpus-per-task={step.resources.cpus}",
            f"--mem={slurm_mem(step.resources.mem) if step.resources.mem else 0}",  # 0: share the job's memory
            f"--gres={f'gpu:{step.resources.gpus}' if step.resources.gpus else 'none'}",
            "--mpi=none",
            "--kill-on-bad-exit=0",
            "--no-kill",
            "--wait=0",
            f"--immediate={int(self._limits.step_queue_timeout_s)}",
            "--export=NONE",
            "--propagate=NONE",
            "--input=none",
            f"--output={output}.%t",
            f"--chdir={step.launch_file.parent}",
            "--quiet",
            *step.container,
            *prefix,
            str(step.launch_file),
        )

    async def start(self, job: Sequence[str], step: Step) -> None:
        """Start srun and watch it until the step runs, srun fails, or ``limits.launch_watch_s`` seconds have passed.

        srun itself waits for cores, but not for memory that a dead step has not released yet, and not for a node that
        slurmctld has not heard of since its own restart. So an srun that is refused for now is repeated for
        ``limits.step_retry_timeout_s`` seconds.
        """
        stderr_file = step.log_file.with_name(f"{step.log_file.name}.srun")
        process, watch_until = await self._spawn(job, step, stderr_file), time.monotonic() + self._limits.launch_watch_s
        srun = self._running[step.tag] = _Srun(process, stderr_file, asyncio.Event(), watch_until)
        watcher = asyncio.create_task(self._watch(job, step, srun))
        self._watchers.add(watcher)
        watcher.add_done_callback(self._watchers.discard)
        await self._await_start(step, srun, watcher)

    async def _spawn(self, job: Sequence[str], step: Step, stderr_file: Path) -> asyncio.subprocess.Process:
        try:
            fd = os.open(stderr_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_TRUNC, 0o600)
        except OSError as error:
            raise Refused(f"the step was not started: the file for srun's errors cannot be opened: {error}") from error
        try:
            return await asyncio.create_subprocess_exec(
                *self.command(job, step),
                stdin=subprocess.DEVNULL,
                stdout=fd,
                stderr=fd,
                env=environment(os.environ),
                start_new_session=True,
            )
        except OSError as error:
            raise Refused(f"srun cannot be started: {error}") from error
        finally:
            os.close(fd)

    async def _await_start(self, step: Step, srun: _Srun, watcher: asyncio.Task[None]) -> None:
        """Wait until the step connects (:meth:`on_step_joined`), srun ends, or the step's output file appears.

        Once the output file appears, wait only ``limits.interpreter_watch_s`` seconds longer: if the interpreter is
        missing on the node, slurmstepd reports this at once.
        """
        output, opened = _output_file(step), False
        while time.monotonic() < srun.watch_until and not srun.joined.is_set():
            if not opened and await asyncio.to_thread(output.exists):  # in a thread, since the run directory may hang
                srun.watch_until, opened = time.monotonic() + self._limits.interpreter_watch_s, True
            if watcher.done():
                if code := srun.process.returncode:
                    raise _early_failure(code, srun, output)
                return
            await asyncio.sleep(0.01)

    async def _watch(self, job: Sequence[str], step: Step, srun: _Srun) -> None:
        """Reap an srun when it ends, repeat it if it was refused for now, and record a failure in :attr:`failed`."""
        deadline = time.monotonic() + self._limits.step_retry_timeout_s
        while (code := await srun.process.wait()) and not srun.joined.is_set() and time.monotonic() < deadline:
            if not isinstance(_early_failure(code, srun, _output_file(step)), RefusedForNow):
                break
            srun.watch_until = time.monotonic() + self._limits.step_retry_pause_s + self._limits.launch_watch_s
            await asyncio.sleep(self._limits.step_retry_pause_s)
            if not srun.joined.is_set():
                with contextlib.suppress(Refused):  # the run directory cannot be written: this srun stays the last one
                    srun.process = await self._spawn(job, step, srun.stderr_file)
        if self._running.get(step.tag) is srun:
            del self._running[step.tag]
        if code and not srun.joined.is_set():
            self._failed.add(step.tag)
        with contextlib.suppress(OSError):
            if srun.stderr_file.stat().st_size == 0:
                srun.stderr_file.unlink()

    async def on_step_joined(self, tag: str) -> None:
        """Kill the srun of a step that has connected, and return once the srun has ended.

        srun is kept for ``limits.srun_release_delay_s`` seconds, because slurmstepd has to report the task's start to
        it. If slurmstepd cannot report, it retries for 2.3 s and ignores signals (measured with an srun that was killed
        a few ms after its task began).
        """
        if srun := self._running.get(tag):
            srun.joined.set()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._limits.srun_release_delay_s):
                    await srun.process.wait()
            await self.kill(tag)

    async def kill(self, tag: str) -> None:
        """Kill the srun of a tag. If srun has started the step, the step keeps running; otherwise it never starts."""
        if srun := self._running.get(tag):
            srun.joined.set()
            if srun.process.returncode is None:
                kill_session(srun.process.pid)
            await srun.process.wait()

    async def close(self) -> None:
        """Kill all sruns. Their steps keep running."""
        await asyncio.gather(*(self.kill(tag) for tag in list(self._running)))
        await asyncio.gather(*self._watchers, return_exceptions=True)


def _output_file(step: Step) -> Path:
    return step.log_file.with_name(f"{step.log_file.name}.0")


def _early_failure(code: int, srun: _Srun, output: Path) -> Refused | Unanswered:
    """Return the exception for an srun that ended early.

    It depends on srun's stderr and exit code, and on the output of the step's first process.
    """
    srun_output, step_output = _tail(srun.stderr_file), last_lines_of(output)
    if shows_missing_command(step_output):
        return NotStarted(step_output)
    if output.exists() and task_exit_code(srun_output) is not None:
        return ExitedAtOnce(step_output or last_lines(srun_output))
    return failure("srun", CommandResult(code, "", srun_output))


def _tail(path: Path) -> str:
    try:
        return path.read_text(errors="replace")[-2000:]
    except OSError:
        return ""
