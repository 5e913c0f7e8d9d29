"""Perform injected faults on a node: signals and limits for processes of the agent's run or for the agent itself.

A performer is a function that performs one kind of fault on the processes of a step (:class:`Target`) and returns a
description of what it did. It raises :class:`NotPerformed` with the reason if it must not or cannot perform the fault.
A lasting fault is performed by a helper process (:mod:`rrl.roles.node_agent.pause_helper`).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import sys
from collections.abc import Callable
from pathlib import Path
from signal import SIGCONT, SIGKILL, SIGSTOP, Signals

from msgspec import Struct

from ...core.faults import ANSWER_SENDING_S, Fault, FaultKind
from ...core.launch import LAUNCH_ENV, Launch
from ...core.processes import STEP_MODULE, Process, command_name, processes, read_process, send_signal
from ...transport.messages import Inject, Injected
from ..launcher.first_process import StepSupervisor
from ..launcher.process_group import kill_group

PAUSED_SUFFIX = ".held"
"""Suffix of a mark file beside the launch file of a step. The file exists while a pause helper stops the step. If the
helper is killed, the agent finds the mark and continues the step (:func:`resume_process`)."""


class NotPerformed(Exception):
    """A fault was not performed, and nothing was changed. The exception's text is the reason."""


class Target(Struct, frozen=True):
    """The first process of a running step, and the command's process, which leads a process group."""

    step: Process
    command: Process


def find_target(launch_file: str) -> Target:
    """Return the processes of a launch file's step on this machine. Raises NotPerformed if the step is not running."""
    tag = Path(launch_file).stem
    marked = [process for process in processes(os.path.dirname(launch_file)) if process.launch == launch_file]
    step = next((process for process in marked if process.module == STEP_MODULE), None)
    if step is None:
        raise NotPerformed(f"step {tag} is not running on this node")
    command = next(
        (
            process
            for process in marked
            if process.step == step.name and process.group == process.pid and process.parent == step.pid
        ),
        None,
    )
    if command is None:
        raise NotPerformed(f"step {tag} has not started its command")
    return Target(step, command)


def is_lasting(fault: Fault) -> bool:
    """Return whether a fault lasts for some time, and therefore needs a helper process (``pause_helper``)."""
    return fault.kind is FaultKind.SLOW or (fault.kind is FaultKind.FREEZE and fault.seconds > 0)


def resume_process(launch_file: str) -> bool:
    """Continue a step and return True if a killed pause helper has left its mark file; otherwise return False."""
    mark = Path(launch_file + PAUSED_SUFFIX)
    try:
        pid, _, started = mark.read_text().partition(".")
    except OSError:
        return False
    helper = read_process(int(pid)) if pid.isdigit() else None
    if helper is not None and str(helper.started) == started:
        return False
    with contextlib.suppress(NotPerformed):  # the step has ended
        kill_group(find_target(launch_file).command.group, SIGCONT)
    mark.unlink(missing_ok=True)
    return True


def _kill(target: Target) -> str:
    return _signal_group(target, SIGKILL)


def _freeze(target: Target) -> str:
    return _signal_group(target, SIGSTOP)


def _kill_step(target: Target) -> str:
    """Kill the step's slurmstepd or, without Slurm, kill the step's first process."""
    parent = read_process(target.step.parent)
    victim = parent if parent is not None and command_name(parent.pid) == "slurmstepd" else target.step
    try:
        if not send_signal(victim, SIGKILL):
            raise NotPerformed(f"process {victim.pid} has ended")
    except PermissionError:
        raise NotPerformed(f"slurmstepd (pid {victim.pid}) belongs to another user, so rrl may not kill it") from None
    return f"SIGKILL to {command_name(victim.pid) or 'the step'} (pid {victim.pid})"


def _out_of_memory(target: Target) -> str:
    """Limit the address space of each process of the group to its present size, so that further allocations fail."""
    folder = os.path.dirname(target.step.launch)
    group = [process for process in processes(folder) if process.group == target.command.group]
    limited = []
    for process in group:
        try:
            pages = int(Path(f"/proc/{process.pid}/statm").read_text().split()[0])
            size = pages * resource.getpagesize()
            hard = resource.prlimit(process.pid, resource.RLIMIT_AS)[1]
            resource.prlimit(process.pid, resource.RLIMIT_AS, (size, hard))
        except (OSError, IndexError):  # the process has ended
            continue
        limited.append(f"pid {process.pid} to {size / 2**20:.0f} MiB")
    if not limited:
        raise NotPerformed(f"process group {target.command.group} has ended")
    return f"address space limited: {', '.join(limited)}"


PERFORMERS: dict[FaultKind, Callable[[Target], str]] = {
    FaultKind.KILL: _kill,
    FaultKind.FREEZE: _freeze,
    FaultKind.KILL_STEP: _kill_step,
    FaultKind.OUT_OF_MEMORY: _out_of_memory,
}
"""The performers of faults that do not last, by kind."""


def _signal_group(target: Target, number: Signals) -> str:
    if not kill_group(target.command.group, number):
        raise NotPerformed(f"process group {target.command.group} has ended")
    return f"{number.name} to process group {target.command.group}"


class Injector:
    """Performs the faults that the manager requests from this agent.

    ``launch_of`` reads a launch file and returns the launch, or None if the launch is not of this run and node. The
    call may block.
    """

    def __init__(self, supervisor: StepSupervisor, launch_of: Callable[[str], Launch | None]) -> None:
        self._supervisor, self._launch_of = supervisor, launch_of

    async def inject(self, request: Inject) -> None:
        """Perform a fault on a step of this node or on this agent, and report the result.

        For a lasting fault, return after the fault has ended.
        """
        fault, supervisor = request.fault, self._supervisor
        path = f"{supervisor.steps}/{supervisor.run.launch_file(request.tag).name}"
        launch: Launch | None = None
        try:
            launch = await asyncio.to_thread(self._launch_of, path)
            if launch is None:
                raise NotPerformed(f"{request.tag} is not a step of this run on node {supervisor.launch.node}")
            if launch.tag == supervisor.launch.tag:
                await self._inject_into_agent(fault, launch)
                return
            target = await asyncio.to_thread(find_target, path)
            if is_lasting(fault):
                await self._pause(fault, launch, target.command, path)
                return
            if fault.kind not in PERFORMERS:
                raise NotPerformed(f"an agent cannot perform the fault {fault.kind}")
            detail = await asyncio.to_thread(PERFORMERS[fault.kind], target)
            await self._answer(fault, launch, True, detail)
        except (NotPerformed, OSError) as error:
            await self._answer(fault, launch, False, str(error))

    async def _inject_into_agent(self, fault: Fault, launch: Launch) -> None:
        """Report a fault on this agent before performing it, because the agent may be unable to report it later."""
        fatal: dict[FaultKind, Signals] = {FaultKind.KILL: SIGKILL, FaultKind.FREEZE: SIGSTOP}
        if is_lasting(fault):
            await self._pause(fault, launch, self._supervisor.process, None)
        elif fault.kind in fatal:
            await self._answer(fault, launch, True, f"{fatal[fault.kind].name} to pid {os.getpid()}")
            await asyncio.sleep(ANSWER_SENDING_S)
            os.kill(os.getpid(), fatal[fault.kind])
        else:
            raise NotPerformed(f"an agent cannot perform the fault {fault.kind} on itself")

    async def _pause(self, fault: Fault, launch: Launch, process: Process, path: str | None) -> None:
        """Perform a lasting fault by a pause helper, and wait until the helper has ended.

        The helper is a process of its own, which continues the target even if this agent is killed. ``path`` is the
        step's launch file, or None if the target is this agent.
        """
        mark = [] if path is None else [path + PAUSED_SUFFIX]
        helper = await asyncio.create_subprocess_exec(
            sys.executable,
            "-P",
            "-m",
            "rrl.roles.node_agent.pause_helper",
            process.name,
            str(fault.amount),
            str(fault.seconds),
            *mark,
            env=os.environ | {LAUNCH_ENV: self._supervisor.launch_file},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        assert helper.stdout is not None
        start_report = (await helper.stdout.readline()).decode().strip()
        if start_report:
            await self._answer(fault, launch, True, start_report)
        end_report, stderr = await helper.communicate()
        if path is not None:
            await asyncio.to_thread(resume_process, path)
        if not start_report:
            raise NotPerformed(stderr.decode(errors="replace").strip() or "the pause helper ended without a report")
        await self._answer(
            fault, launch, True, end_report.decode().strip() or "the pause helper was killed", ended=True
        )

    async def _answer(self, fault: Fault, launch: Launch | None, ok: bool, detail: str, ended: bool = False) -> None:
        incarnation = None if launch is None else launch.incarnation
        await self._supervisor.dialer.send(
            Injected(fault, ok, detail, incarnation, self._supervisor.launch.node, ended)
        )
