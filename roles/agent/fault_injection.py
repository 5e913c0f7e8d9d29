"""Perform injected faults on a node: by signals and limits, only on processes of the own run, or on the agent itself.

A performer takes the two processes of a step and returns what it did; it raises :class:`NotPerformed` with the reason
when it must not or cannot. A fault that lasts is held by a process of its own (:mod:`rrl.roles.agent.pause_helper`).
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
from ...core.processes import STEP_MODULE, Process, processes, read_process, send_signal
from ...transport.messages import Inject, Injected
from ..launcher.first_process import StepSupervisor
from ..launcher.process_group import kill_group

PAUSED_SUFFIX = ".held"
"""Suffix of the launch file's name while a holder stops and continues its step: whoever comes after a holder that was
killed lets the step go (:func:`let_go`)."""


class NotPerformed(Exception):
    """The world is as it was; the text says why."""


class Target(Struct, frozen=True):
    """A living step: its first process and the role's command."""

    step: Process
    command: Process


def find_target(launch_file: str) -> Target:
    """The step of this launch file on this machine. Raises NotPerformed when it does not live."""
    tag = Path(launch_file).stem
    ours = [process for process in processes(os.path.dirname(launch_file)) if process.launch == launch_file]
    step = next((process for process in ours if process.module == STEP_MODULE), None)
    if step is None:
        raise NotPerformed(f"{tag} does not live on this node")
    command = next((process for process in ours if process.step == step.name and process.group == process.pid
                    and process.parent == step.pid), None)  # fmt: skip
    if command is None:
        raise NotPerformed(f"{tag} has not started its command")
    return Target(step, command)


def is_lasting(fault: Fault) -> bool:
    """It takes a holder: not done once and for all."""
    return fault.kind is FaultKind.SLOW or (fault.kind is FaultKind.FREEZE and fault.seconds > 0)


def resume_process(launch_file: str) -> bool:
    """Continue what a holder has left stopped by its death. True when there was such a one."""
    mark = Path(launch_file + PAUSED_SUFFIX)
    try:
        pid, _, started = mark.read_text().partition(".")
    except OSError:
        return False
    holder = read_process(int(pid)) if pid.isdigit() else None
    if holder is not None and str(holder.started) == started:
        return False
    with contextlib.suppress(NotPerformed):  # it has ended meanwhile
        kill_group(find_target(launch_file).command.group, SIGCONT)
    mark.unlink(missing_ok=True)
    return True


def _kill(target: Target) -> str:
    return _signal_group(target, SIGKILL)


def _freeze(target: Target) -> str:
    return _signal_group(target, SIGSTOP)


def _kill_step(target: Target) -> str:
    """Under Slurm slurmstepd, which holds the step; elsewhere the step's own first process."""
    parent = read_process(target.step.parent)
    holder = parent if parent is not None and _command_name(parent) == "slurmstepd" else target.step
    try:
        if not send_signal(holder, SIGKILL):
            raise NotPerformed(f"pid {holder.pid} was gone")
    except PermissionError:
        raise NotPerformed(f"slurmstepd (pid {holder.pid}) belongs to another user") from None
    return f"SIGKILL to {_command_name(holder) or 'the step'} (pid {holder.pid})"


def _out_of_memory(target: Target) -> str:
    """Each process of the group keeps the address space that it has; every further mmap and brk fails with ENOMEM."""
    folder = os.path.dirname(target.step.launch)
    group = [process for process in processes(folder) if process.group == target.command.group]
    limited = []
    for process in group:
        try:
            pages = int(Path(f"/proc/{process.pid}/statm").read_text().split()[0])
            size = pages * resource.getpagesize()
            hard = resource.prlimit(process.pid, resource.RLIMIT_AS)[1]
            resource.prlimit(process.pid, resource.RLIMIT_AS, (size, hard))
        except (OSError, IndexError):  # it has ended
            continue
        limited.append(f"pid {process.pid} to {size / 2**20:.0f} MiB")
    if not limited:
        raise NotPerformed(f"process group {target.command.group} was gone")
    return f"address space limited: {', '.join(limited)}"


PERFORMERS: dict[FaultKind, Callable[[Target], str]] = {
    FaultKind.KILL: _kill,
    FaultKind.FREEZE: _freeze,
    FaultKind.KILL_STEP: _kill_step,
    FaultKind.OUT_OF_MEMORY: _out_of_memory,
}


def _signal_group(target: Target, number: Signals) -> str:
    if not kill_group(target.command.group, number):
        raise NotPerformed(f"process group {target.command.group} was gone")
    return f"{number.name} to process group {target.command.group}"


def _command_name(process: Process) -> str:
    try:
        return Path(f"/proc/{process.pid}/comm").read_text().strip()
    except OSError:
        return ""


class Injector:
    """``launch_of``: the launch in a file if it is of this run and node, else None (blocking)."""

    def __init__(self, supervisor: StepSupervisor, launch_of: Callable[[str], Launch | None]) -> None:
        self._supervisor, self._launch_of = supervisor, launch_of

    async def inject(self, request: Inject) -> None:
        """On a step of this node, or on this agent itself. Returns once it is over, of what lasts."""
        fault, supervisor = request.fault, self._supervisor
        path = f"{supervisor.steps}/{supervisor.run.launch_file(request.tag).name}"
        launch: Launch | None = None
        try:
            launch = await asyncio.to_thread(self._launch_of, path)
            if launch is None:
                raise NotPerformed(f"{request.tag} is not a step of this run on {supervisor.launch.node}")
            if launch.tag == supervisor.launch.tag:
                await self._inject_into_agent(fault, launch)
                return
            target = await asyncio.to_thread(find_target, path)
            if is_lasting(fault):
                await self._pause(fault, launch, target.command, path)
                return
            if fault.kind not in PERFORMERS:
                raise NotPerformed(f"an agent cannot perform {fault.kind}")
            detail = await asyncio.to_thread(PERFORMERS[fault.kind], target)
            await self._answer(fault, launch, True, detail)
        except (NotPerformed, OSError) as error:
            await self._answer(fault, launch, False, str(error))

    async def _inject_into_agent(self, fault: Fault, launch: Launch) -> None:
        """The answer goes first: afterwards nobody could give it."""
        fatal: dict[FaultKind, Signals] = {FaultKind.KILL: SIGKILL, FaultKind.FREEZE: SIGSTOP}
        if is_lasting(fault):
            await self._pause(fault, launch, self._supervisor.process, None)
        elif fault.kind in fatal:
            await self._answer(fault, launch, True, f"{fatal[fault.kind].name} to pid {os.getpid()}")
            await asyncio.sleep(ANSWER_SENDING_S)
            os.kill(os.getpid(), fatal[fault.kind])
        else:
            raise NotPerformed(f"an agent cannot have {fault.kind}")

    async def _pause(self, fault: Fault, launch: Launch, process: Process, path: str | None) -> None:
        """By a process of its own: it lets go whatever happens to us. Waits until it has."""
        mark = [] if path is None else [path + PAUSED_SUFFIX]
        holder = await asyncio.create_subprocess_exec(
            sys.executable, "-P", "-m", "rrl.roles.agent.pause_helper", process.name, str(fault.amount),
            str(fault.seconds), *mark, env=os.environ | {LAUNCH_ENV: self._supervisor.launch_file},
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        assert holder.stdout is not None
        began = (await holder.stdout.readline()).decode().strip()
        if began:
            await self._answer(fault, launch, True, began)
        ended, stderr = await holder.communicate()
        if path is not None:
            await asyncio.to_thread(resume_process, path)
        if not began:
            raise NotPerformed(stderr.decode(errors="replace").strip() or "its holder ended without a word")
        await self._answer(fault, launch, True, ended.decode().strip() or "its holder was killed", ended=True)

    async def _answer(self, fault: Fault, launch: Launch | None, ok: bool, detail: str, ended: bool = False) -> None:
        incarnation = None if launch is None else launch.incarnation
        await self._supervisor.dialer.send(
            Injected(fault, ok, detail, incarnation, self._supervisor.launch.node, ended)
        )
