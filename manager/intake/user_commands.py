"""Read user commands from the run directory's mailbox and turn them into events, or reject them.

A command is one file that only the run's owner can write. It works where no port can be reached, and while no manager
runs: the next one takes what waits.
"""

from __future__ import annotations

import logging
import os
import stat
from pathlib import Path

import msgspec
from msgspec import Struct

from ...core.faults import FAULT_TRAITS, MANAGER, Fault, FaultProblem, InvalidFault, TargetKind, validate_fault
from ...core.run_dir import RunDir
from ...core.run_spec import RunSpec
from ...core.types import AGENT, STANDBY_ROLE
from ..model import events as ev
from ..model.state import State

_log = logging.getLogger("rrl.manager")

_MAX_COMMAND_BYTES = 4 * 2**20
"""bytes of a letter that are read; a command has some hundred"""


class Command(Struct, frozen=True):
    """One command: ``cancel``, ``restart``, ``drain``, ``undrain``, or ``inject`` with its fault. ``id`` is its file's
    name: a command is taken once."""

    command: str
    by: str = ""
    id: str = ""
    fault: Fault | None = None
    target: str = ""
    """``restart``: a replica; ``drain``, ``undrain``: a node"""
    reason: str = ""
    """``drain``: in the person's own words"""
    keep_allocations: bool = False
    """``cancel``: leave the allocations"""


def pending_commands(run: RunDir) -> list[Command]:
    """What waits, in order. What cannot be read is put aside (``.bad``) and told: it must not be read for ever."""
    commands = []
    owner = run.path.stat().st_uid
    for path in sorted(run.mailbox.glob("[!.]*.json")):
        try:
            command = msgspec.json.decode(_read(path, owner), type=Command)
        except (OSError, msgspec.MsgspecError) as error:
            _log.warning("%s in the mailbox is not a valid command, it is set aside: %s", path.name, error)
            path.rename(path.with_suffix(".bad"))
            continue
        commands.append(msgspec.structs.replace(command, id=path.stem))
    return commands


def _read(path: Path, owner: int) -> bytes:
    """Raises PermissionError unless the run's owner wrote it, or root."""
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
        writer = os.fstat(file.fileno())
        if not stat.S_ISREG(writer.st_mode) or writer.st_uid not in (owner, 0):
            raise PermissionError(f"it is of user {writer.st_uid}, and the run of user {owner}")
        return file.read(_MAX_COMMAND_BYTES)


def acknowledge(run: RunDir, command: Command) -> None:
    """It is durable in the journal: its file can go."""
    (run.mailbox / f"{command.id}.json").unlink(missing_ok=True)


def to_events(command: Command, state: State) -> list[ev.Event]:
    """What is journaled of a letter. A refused fault is, too, with the reason."""
    if command.fault is None:
        by = command.by or "somebody"
        return [
            ev.CommandReceived(
                command.command, by, command.id, command.target, command.keep_allocations, command.reason
            )
        ]
    fault = msgspec.structs.replace(command.fault, by=command.by or "somebody")
    if fault.id in known_fault_ids(state):
        return [ev.CommandReceived(command.command, command.by, command.id)]  # the same order again
    events: list[ev.Event] = [ev.FaultRequested(fault, fault.by, command.id)]
    if wrong := rejection(fault, state.job, state):
        events.append(ev.FaultInjected(fault.id, None, False, f"refused: {wrong.text}", fault.kind, fault.target))
    return events


def known_fault_ids(state: State) -> set[str]:
    """Faults of this run, set off or yet to come."""
    return {*state.triggered_faults, *(one.id for one in (*state.requested_faults, *state.job.faults))}


def rejection(fault: Fault, job: RunSpec, state: State | None) -> InvalidFault | None:
    """Return why this run does not take that order; None when it does. ``state``: None before its first record."""
    if not job.faults_allowed:
        return InvalidFault(FaultProblem.OTHER, "its job spec allows no faults on demand ([faults] allow = true)")
    if state is not None and state.outcome is not None:
        return InvalidFault(FaultProblem.OTHER, f"it has ended already: {state.outcome.value}")
    if state is not None and state.finish is not None:
        return InvalidFault(FaultProblem.OTHER, f"it is ending ({state.finish.outcome.value})")
    replicas = {role.name: role.replicas for role in job.roles}
    ranks = {role.name: role.ranks for role in job.roles}
    if wrong := validate_fault(fault.kind, fault.target, fault.seconds, fault.amount, replicas, fault.at, ranks):
        return wrong
    role, slash, rest = fault.target.partition("/")
    if role == AGENT and slash:
        return _missing(_no_node(rest, state))
    if role == STANDBY_ROLE and slash:
        return _missing(_no_standby(fault.target, state))
    if FAULT_TRAITS[fault.kind].target_kind is TargetKind.NODE and not slash:
        return _missing(_no_node(fault.target, state))
    if FAULT_TRAITS[fault.kind].target_kind is TargetKind.REPLICA and fault.target != MANAGER:
        if not slash:
            return InvalidFault(FaultProblem.OTHER, f'"{fault.target}" is no replica; a replica is written "rollout/0"')
        if job.role(role).watch != "api" and not FAULT_TRAITS[fault.kind].by_signals:
            return InvalidFault(
                FaultProblem.OTHER, f"{fault.target} does not use the worker API: {fault.kind} needs its help"
            )
    return None


def _missing(text: str) -> InvalidFault | None:
    return InvalidFault(FaultProblem.NO_SUCH_TARGET, text) if text else None


def _no_node(node: str, state: State | None) -> str:
    """Only nodes that the run holds are its own."""
    own_nodes = [name for name, one in state.nodes.items() if one.allocation] if state is not None else []
    nodes_text = f"it has {', '.join(sorted(own_nodes))}" if own_nodes else "it has none yet"
    return "" if node in own_nodes else f'no node "{node}" in this run; {nodes_text}'


def _no_standby(target: str, state: State | None) -> str:
    """Return why a fault cannot hit the standby process ``target`` (``standby/<node>``), or '' if it runs now.

    Standbys come and go: a fault can only hit one that is there."""
    standbys = (
        [one.id for one in state.replicas.values() if one.role == STANDBY_ROLE and one.is_current] if state else []
    )
    standbys_text = f"there are {', '.join(sorted(standbys))}" if standbys else "there is none now"
    return "" if target in standbys else f'no shadow "{target}" in this run; {standbys_text}'
