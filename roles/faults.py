"""Performs injected faults from outside, by signals and limits, and only on processes of the own run.

A performer gets the two processes of a step and returns what it did; it raises :class:`NotPerformed` with the reason
when it may not or cannot. What lasts is held by a process of its own (:mod:`rrl.roles.hold`).
"""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Callable
from pathlib import Path
from signal import SIGCONT, SIGKILL, SIGSTOP, Signals

from msgspec import Struct

from rrl.roles.processes import kill_group
from rrl.spec.faults import Fault, FaultKind
from rrl.spec.processes import STEP_MODULE, Process, look, processes, send

TOLD = 0.5
"""s for the answer to leave before whoever gives it ends: zmq sends in a thread of its own, within ms"""
HELD = ".held"
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


def lasts(fault: Fault) -> bool:
    """It takes a holder: not done once and for all."""
    return fault.kind is FaultKind.SLOW or (fault.kind is FaultKind.FREEZE and fault.seconds > 0)


def let_go(launch_file: str) -> bool:
    """Continue what a holder has left stopped by its death. True when there was such a one."""
    mark = Path(launch_file + HELD)
    try:
        pid, _, started = mark.read_text().partition(".")
    except OSError:
        return False
    holder = look(int(pid)) if pid.isdigit() else None
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
    parent = look(target.step.parent)
    holder = parent if parent is not None and _command_name(parent) == "slurmstepd" else target.step
    try:
        if not send(holder, SIGKILL):
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


PERFORM: dict[FaultKind, Callable[[Target], str]] = {
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
