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

from ...core.faults import MANAGER, TRAITS, Fault, Hits, Misfit, Unfit, unfit
from ...core.run_dir import RunDir
from ...core.run_spec import JobView
from ...core.types import AGENT, SHADOW
from ..model import events as ev
from ..model.state import State

_log = logging.getLogger("rrl.manager")

_LARGEST = 4 * 2**20
"""bytes of a letter that are read; a command has some hundred"""


class Letter(Struct, frozen=True):
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
    keep: bool = False
    """``cancel``: leave the allocations"""


def letters(run: RunDir) -> list[Letter]:
    """What waits, in order. What cannot be read is put aside (``.bad``) and told: it must not be read for ever."""
    waiting = []
    owner = run.path.stat().st_uid
    for path in sorted(run.mailbox.glob("[!.]*.json")):
        try:
            letter = msgspec.json.decode(_read(path, owner), type=Letter)
        except (OSError, msgspec.MsgspecError) as error:
            _log.warning("%s in the mailbox is not a valid command, it is set aside: %s", path.name, error)
            path.rename(path.with_suffix(".bad"))
            continue
        waiting.append(msgspec.structs.replace(letter, id=path.stem))
    return waiting


def _read(path: Path, owner: int) -> bytes:
    """Raises PermissionError unless the run's owner wrote it, or root."""
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
        writer = os.fstat(file.fileno())
        if not stat.S_ISREG(writer.st_mode) or writer.st_uid not in (owner, 0):
            raise PermissionError(f"it is of user {writer.st_uid}, and the run of user {owner}")
        return file.read(_LARGEST)


def taken(run: RunDir, letter: Letter) -> None:
    """It is durable in the journal: its file can go."""
    (run.mailbox / f"{letter.id}.json").unlink(missing_ok=True)


def events_of(letter: Letter, state: State) -> list[ev.Event]:
    """What is journaled of a letter. A refused fault is, too, with the reason."""
    if letter.fault is None:
        by = letter.by or "somebody"
        return [ev.Commanded(letter.command, by, letter.id, letter.target, letter.keep, letter.reason)]
    fault = msgspec.structs.replace(letter.fault, by=letter.by or "somebody")
    if fault.id in known_ids(state):
        return [ev.Commanded(letter.command, letter.by, letter.id)]  # the same order again
    events: list[ev.Event] = [ev.Ordered(fault, fault.by, letter.id)]
    if wrong := refusal(fault, state.job, state):
        events.append(ev.FaultInjected(fault.id, None, False, f"refused: {wrong.text}", fault.kind, fault.target))
    return events


def known_ids(state: State) -> set[str]:
    """Faults of this run, set off or yet to come."""
    return {*state.faults, *(one.id for one in (*state.ordered, *state.job.faults))}


def refusal(fault: Fault, job: JobView, state: State | None) -> Unfit | None:
    """Return why this run does not take that order; None when it does. ``state``: None before its first record."""
    if not job.faults_allowed:
        return Unfit(Misfit.OTHER, "its job spec allows no faults on demand ([faults] allow = true)")
    if state is not None and state.outcome is not None:
        return Unfit(Misfit.OTHER, f"it has ended already: {state.outcome.value}")
    if state is not None and state.verdict is not None:
        return Unfit(Misfit.OTHER, f"it is ending ({state.verdict.outcome.value})")
    replicas = {role.name: role.replicas for role in job.roles}
    ranks = {role.name: role.ranks for role in job.roles}
    if wrong := unfit(fault.kind, fault.target, fault.seconds, fault.amount, replicas, fault.at, ranks):
        return wrong
    role, slash, rest = fault.target.partition("/")
    if role == AGENT and slash:
        return _missing(_no_node(rest, state))
    if role == SHADOW and slash:
        return _missing(_no_shadow(fault.target, state))
    if TRAITS[fault.kind].hits is Hits.NODE and not slash:
        return _missing(_no_node(fault.target, state))
    if TRAITS[fault.kind].hits is Hits.REPLICA and fault.target != MANAGER:
        if not slash:
            return Unfit(Misfit.OTHER, f'"{fault.target}" is no replica; a replica is written "rollout/0"')
        if job.role(role).watch != "api" and not TRAITS[fault.kind].processes:
            return Unfit(Misfit.OTHER, f"{fault.target} does not use the worker API: {fault.kind} needs its help")
    return None


def _missing(text: str) -> Unfit | None:
    return Unfit(Misfit.NO_SUCH_TARGET, text) if text else None


def _no_node(node: str, state: State | None) -> str:
    """Only nodes that the run holds are its own."""
    held = [name for name, one in state.nodes.items() if one.allocation] if state is not None else []
    there = f"it has {', '.join(sorted(held))}" if held else "it has none yet"
    return "" if node in held else f'no node "{node}" in this run; {there}'


def _no_shadow(target: str, state: State | None) -> str:
    """Return why a fault cannot hit the standby process ``target`` (``shadow/<node>``), or '' if it runs now.

    Standbys come and go: a fault can only hit one that is there."""
    there = [one.id for one in state.replicas.values() if one.role == SHADOW and one.believed] if state else []
    now = f"there are {', '.join(sorted(there))}" if there else "there is none now"
    return "" if target in there else f'no shadow "{target}" in this run; {now}'
