"""The changes of a run that ``rrl top`` offers: a restart, a drain, and the injection of a fault.

The user confirms the effects of a change before it is requested. The request is the same command to the run's manager
as that of ``rrl restart``, ``rrl drain`` or ``rrl inject``.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator
from typing import NamedTuple

from textual.message import Message
from textual.screen import Screen

from ....api.fault_requests import check_fault, request_fault
from ....api.interventions import request_drain, request_restart
from ....api.runs import read_state
from ....api.watching.runs_watcher import WatchedRun
from ....cluster.traits import traits_of
from ....core.faults import FAULT_TRAITS, Fault, TargetKind
from ....core.run_dir import RunDir, runs_root
from ....core.types import TRAINER, NodeName, ReplicaId, gang_of
from ....manager.model.queries import gang
from ....manager.model.state import State
from ...views.status import is_of_pool
from .details import replicas_on


class Change(NamedTuple):
    """A change that the user is asked to confirm."""

    title: str
    effects: tuple[str, ...]
    """The effects of the change, a sentence each."""
    command: str
    """The command that makes the same change."""
    request: Callable[[str], str]
    """Requests the change, given the reason that the user wrote, and returns the message to show. Blocks on the file
    system. Raises UsageError or OperationFailed."""
    takes_reason: bool = False


class ChangeRequested(Message):
    """A screen asks the application to have a change confirmed, and then to request it."""

    def __init__(self, change: Change) -> None:
        super().__init__()
        self.change = change


def restart_of(watched: WatchedRun, state: State, replica: ReplicaId) -> Change:
    """Return the restart of a replica; for one rank of a gang, the restart of the gang."""
    id = gang_of(replica)
    members = gang(state, id)
    running = [one for one in members if one.is_current]
    names = ", ".join(f"{one.incarnation} on {one.node}" for one in running)
    if not running:
        effects = [f"No process of {id} runs now; a new one is started."]
    elif len(members) > 1:
        effects = [f"All {len(members)} ranks of {id} are ended and started again: {names}."]
    else:
        effects = [f"{names} is ended, and {id}#{running[0].incarnation_number + 1} is started."]
    if id == TRAINER:
        effects.append(f"Training goes on from the last committed step, {state.step}; no committed step is lost.")

    def request(reason: str) -> str:
        request_restart(watched.run, id)
        return f"{watched.run.id}: its manager is asked to restart {id}"

    command = _command("restart", watched.run, id)
    return Change(f"Restart {id}", (*effects, *_manager_doubt(watched)), command, request)


def drain_of(watched: WatchedRun, state: State, node: NodeName) -> Change:
    """Return the drain of a node."""
    moving = sorted({gang_of(one.id) for one in replicas_on(state, node)})
    effects = [
        f"{_listed(moving)} {'move' if moving[1:] else 'moves'} to other nodes first."
        if moving
        else f"No replica runs on {node}: nothing has to move."
    ]
    effects += [f"{one} restarts with all its ranks." for one in moving if len(gang(state, one)) > 1]
    spares = [
        one.name
        for one in state.nodes.values()
        if one.name != node and one.excluded is None and not replicas_on(state, one.name) and not is_of_pool(state, one)
    ]
    effects.append(f"Spare nodes now: {_listed(spares)}." if spares else "The run has no spare node now.")
    traits = traits_of(state.job.cluster)
    if traits.can_drain:
        effects.append(f"Then {node} is drained in Slurm, for every user, and the run no longer uses it.")
    else:
        what = ", a virtual node of this machine" if traits.roles_run_here else ""
        effects.append(f"Then the run no longer uses {node}{what}.")

    def request(reason: str) -> str:
        request_drain(watched.run, read_state(watched.run), node, reason)
        return f"{watched.run.id}: its manager is asked to drain {node}"

    undo = f"{_command('undrain', watched.run, node)} undoes it."
    command = _command("drain", watched.run, node)
    return Change(f"Drain {node}", (*effects, undo, *_manager_doubt(watched)), command, request, takes_reason=True)


def injection_of(watched: WatchedRun, state: State, fault: Fault) -> Change:
    """Return the injection of a fault that the run accepts."""
    effects = [FAULT_TRAITS[fault.kind].text.format(target=_fault_target(state, fault), amount=fault.amount)]
    if fault.seconds:
        effects.append(f"It ends by itself after {fault.seconds:g} s.")
    elif FAULT_TRAITS[fault.kind].takes_seconds:
        effects.append("It does not end by itself.")
    effects.append("The fault is real, and the manager answers it like any other failure.")

    def request(reason: str) -> str:
        check_fault(watched.run, state.job, read_state(watched.run), fault)
        request_fault(watched.run, fault)
        return f"{watched.run.id}: {fault.kind.value} {fault.target} is requested ({fault.id})"

    target = ("--target", fault.target) if fault.target else ()
    lasts = ("--for", f"{fault.seconds:g}s") if fault.seconds else ()
    amount = ("--amount", f"{fault.amount:g}") if fault.amount else ()
    command = _command("inject", watched.run, fault.kind.value, *target, *lasts, *amount)
    title = f"Inject {fault.kind.value} {fault.target}".rstrip()
    return Change(title, (*effects, *_manager_doubt(watched)), command, request)


CHANGES = ("restart", "drain", "inject")
"""The actions of screens that change a run."""


def can_change(state: State | None) -> bool:
    """Return whether a run still accepts changes: its state is known, and the manager has not decided to end it."""
    return state is not None and state.finish is None


def is_possible(action: str, state: State | None, replica: ReplicaId | None, node: NodeName | None) -> bool:
    """Return whether an action of a screen is possible now.

    Args:
        action: The action. An action that is not in :data:`CHANGES` is always possible.
        state: The state of the run; None if it is not known.
        replica: The replica that the action would restart; None if there is none.
        node: The node that the action would drain; None if there is none.
    """
    if action not in CHANGES:
        return True
    if state is None or not can_change(state):
        return False
    if action == "inject":
        return state.job.faults_allowed
    return (replica if action == "restart" else node) is not None


class ChangeKeys:
    """The keys with which a screen changes a run. The footer shows a key only while its change is possible.

    Args:
        screen: The screen. It has the actions :data:`CHANGES`.
    """

    def __init__(self, screen: Screen[None]) -> None:
        self._screen = screen
        self._offered: tuple[bool | None, ...] = ()

    def refresh(self) -> None:
        """Draw the keys again if other changes are possible now.

        Otherwise do nothing, because drawing the keys takes as long as all other updates.
        """
        offered = tuple(self._screen.check_action(change, ()) for change in CHANGES)
        if offered != self._offered:
            self._offered = offered
            self._screen.refresh_bindings()


def _fault_target(state: State, fault: Fault) -> str:
    """Return the target as text: a replica with its incarnation and node, or for a fault of a node, that node."""
    replica = state.replicas.get(ReplicaId(fault.target))
    if replica is None:
        return fault.target
    if FAULT_TRAITS[fault.kind].target_kind is TargetKind.NODE:
        return f"{replica.node} (of {replica.id})"
    return f"{replica.incarnation} on {replica.node}"


def _manager_doubt(watched: WatchedRun) -> Iterator[str]:
    """Yield why the request may have no effect yet: the run may have no manager."""
    if watched.liveness.note:
        yield f"Nothing happens before a manager is at work: {watched.liveness.note}"


def _command(name: str, run: RunDir, *arguments: str) -> str:
    named = run.id if run.path.parent == runs_root() else str(run.path)
    return shlex.join(("rrl", name, named, *arguments))


def _listed(names: list[str] | list[NodeName] | list[ReplicaId]) -> str:
    return ", ".join(names)
