"""Orders of people: what a letter of the mailbox becomes, and which faults are refused. Pure."""

from __future__ import annotations

import msgspec

from rrl.manager import events as ev
from rrl.manager.mailbox import Letter
from rrl.manager.state import State
from rrl.spec.faults import MANAGER, TRAITS, Fault, Hits, Misfit, Unfit, unfit
from rrl.spec.jobview import JobView
from rrl.spec.words import AGENT, SHADOW


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
    """They come and go: only one that waits now can be hit."""
    there = [one.id for one in state.replicas.values() if one.role == SHADOW and one.believed] if state else []
    now = f"there are {', '.join(sorted(there))}" if there else "there is none now"
    return "" if target in there else f'no shadow "{target}" in this run; {now}'
