"""Read user commands from the run directory's mailbox, and turn them into events or reject them.

A command is a file that only the run's owner can write. A file needs no open port and no running manager: the next
manager takes the pending commands.
"""

from __future__ import annotations

import logging

import msgspec
from msgspec import Struct

from ...core.faults import FAULT_TRAITS, MANAGER, Fault, FaultProblem, InvalidFault, TargetKind, validate_fault
from ...core.run_dir import RunDir
from ...core.run_spec import RunSpec
from ...core.types import AGENT, GUEST_ROLE, STANDBY_ROLE
from ..model import events as ev
from ..model.state import State

_log = logging.getLogger("rrl.manager")

_MAX_COMMAND_BYTES = 4 * 2**20
"""Maximum number of bytes read of a command file; a command has a few hundred bytes."""


class Command(Struct, frozen=True):
    """One command: ``cancel``, ``restart``, ``drain``, ``undrain``, ``resize``, or ``inject`` with its fault.

    ``id`` is the name of the command's file. A command whose id was handled before is ignored.
    """

    command: str
    by: str = ""
    id: str = ""
    fault: Fault | None = None
    target: str = ""
    """Replica of ``restart``; node of ``drain`` and ``undrain``; rollout pool of ``resize``."""
    reason: str = ""
    """Reason of ``drain``, as the user wrote it."""
    keep_allocations: bool = False
    """Whether ``cancel`` keeps the allocations."""
    replicas: int | None = None
    """Number of replicas that ``resize`` sets; None if the planner chooses it again."""


def pending_commands(run: RunDir) -> list[Command]:
    """Return the pending commands, sorted by the names of their files.

    A file that is not a valid command is renamed to ``.bad``, and logged once.
    """
    commands = []
    for path in sorted(run.mailbox.glob("[!.]*.json")):
        try:
            with path.open("rb") as file:
                command = msgspec.json.decode(file.read(_MAX_COMMAND_BYTES), type=Command)
        except (OSError, msgspec.MsgspecError) as error:
            _log.warning(
                "%s in the mailbox is not a valid command, and is renamed to %s.bad: %s", path.name, path.stem, error
            )
            path.rename(path.with_suffix(".bad"))
            continue
        commands.append(msgspec.structs.replace(command, id=path.stem))
    return commands


def acknowledge(run: RunDir, command: Command) -> None:
    """Delete the file of a command whose events are durable in the journal."""
    (run.mailbox / f"{command.id}.json").unlink(missing_ok=True)


def to_events(command: Command, state: State) -> list[ev.Event]:
    """Return the events that record a command. The rejection of a fault is recorded too, with the reason."""
    if command.fault is None:
        by = command.by or "somebody"
        return [
            ev.CommandReceived(
                command.command,
                by,
                command.id,
                command.target,
                command.keep_allocations,
                command.reason,
                command.replicas,
            )
        ]
    fault = msgspec.structs.replace(command.fault, by=command.by or "somebody")
    if fault.id in known_fault_ids(state):
        return [ev.CommandReceived(command.command, command.by, command.id)]  # the same fault again
    events: list[ev.Event] = [ev.FaultRequested(fault, fault.by, command.id)]
    if wrong := rejection(fault, state.job, state):
        events.append(ev.FaultInjected(fault.id, None, False, f"rejected: {wrong.text}", fault.kind, fault.target))
    return events


def known_fault_ids(state: State) -> set[str]:
    """Return the ids of all faults of this run: injected, requested or planned."""
    return {*state.triggered_faults, *(fault.id for fault in (*state.requested_faults, *state.job.faults))}


def rejection(fault: Fault, job: RunSpec, state: State | None) -> InvalidFault | None:
    """Return why this run rejects the fault; None if the run accepts it. ``state`` is None before the first record."""
    if not job.faults_allowed:
        return InvalidFault(
            FaultProblem.OTHER,
            "the job spec of this run allows no faults on demand; they need allow = true in [faults]",
        )
    if state is not None and state.outcome is not None:
        return InvalidFault(FaultProblem.OTHER, f"the run has ended already: {state.outcome.value}")
    if state is not None and state.finish is not None:
        return InvalidFault(FaultProblem.OTHER, f"the run is ending ({state.finish.outcome.value})")
    replicas = {role.name: job.most_replicas(role) for role in job.roles}
    ranks = {role.name: role.ranks for role in job.roles}
    if wrong := validate_fault(fault.kind, fault.target, fault.seconds, fault.amount, replicas, fault.at, ranks):
        return wrong
    role, slash, rest = fault.target.partition("/")
    if role == AGENT and slash:
        return _missing(_no_node(rest, state))
    if role in _PROCESSES and slash:
        return _missing(_no_process(fault.target, state))
    if FAULT_TRAITS[fault.kind].target_kind is TargetKind.NODE and not slash:
        return _missing(_no_node(fault.target, state))
    if FAULT_TRAITS[fault.kind].target_kind is TargetKind.REPLICA and fault.target != MANAGER:
        if not slash:
            return InvalidFault(
                FaultProblem.OTHER, f'"{fault.target}" is not a valid replica; a replica is written "rollout/0"'
            )
        if job.role(role).watch != "api" and not FAULT_TRAITS[fault.kind].by_signals:
            return InvalidFault(
                FaultProblem.OTHER, f"{fault.kind} needs the worker API, but {fault.target} does not use it"
            )
        if state is not None and fault.target not in state.replicas:
            return InvalidFault(FaultProblem.NO_SUCH_TARGET, f"{role} has no replica {fault.target} now")
    return None


def _missing(text: str) -> InvalidFault | None:
    return InvalidFault(FaultProblem.NO_SUCH_TARGET, text) if text else None


def _no_node(node: str, state: State | None) -> str:
    """Return why a fault cannot hit the node, or '' if the run holds the node."""
    own_nodes = [name for name, record in state.nodes.items() if record.allocation] if state is not None else []
    nodes_text = f"it has {', '.join(sorted(own_nodes))}" if own_nodes else "it has none yet"
    return "" if node in own_nodes else f'no node "{node}" in this run; {nodes_text}'


_PROCESSES = {STANDBY_ROLE: "standby process", GUEST_ROLE: "guest"}
"""Processes that are started and stopped during a run, and their names for people."""


def _no_process(target: str, state: State | None) -> str:
    """Return why a fault cannot hit this process (``standby/<node>``, ``guest/<node>``), or '' if it runs now."""
    role = target.partition("/")[0]
    running = (
        [replica.id for replica in state.replicas.values() if replica.role == role and replica.is_current]
        if state
        else []
    )
    running_text = f"there are {', '.join(sorted(running))}" if running else "there is none now"
    return "" if target in running else f'no {_PROCESSES[role]} "{target}" in this run; {running_text}'
