"""Performs injected faults, and only on processes of the own run.

A performer gets the two processes of a step and returns what it did; it raises :class:`NotPerformed` with the reason
when it may not or cannot.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from signal import SIGKILL, SIGSTOP, Signals

from msgspec import Struct

from rrl.roles.processes import kill_group
from rrl.spec.faults import FaultKind
from rrl.spec.processes import STEP_MODULE, Process, look, processes, send


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


PERFORM: dict[FaultKind, Callable[[Target], str]] = {
    FaultKind.KILL: _kill,
    FaultKind.FREEZE: _freeze,
    FaultKind.KILL_STEP: _kill_step,
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
