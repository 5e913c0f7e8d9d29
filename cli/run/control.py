"""``rrl cancel``, ``rrl restart``, ``rrl resize``, ``rrl drain`` and ``rrl undrain``.

Each writes a user command into the run's mailbox, from which the manager takes it. They therefore also work on a
machine that cannot connect to the manager.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

from ...api.command_sender import POLL_INTERVAL_S, ManagerPresence, wait_until_taken
from ...api.interventions import (
    await_end,
    await_restarted,
    request_drain,
    request_end,
    request_resize,
    request_restart,
    request_undrain,
)
from ...api.runs import StateReader, find_run
from ...core.run_dir import RunDir
from ...core.types import NodeName, OperationFailed, UsageError
from ...manager.model.reduce_nodes import DRAIN, UNDRAIN
from ...manager.model.state import State
from ...manager.planner.capacity.node_lifecycle import should_drain
from ..common.output import print_line
from ..views.status import retained_jobs

AUTO = "auto"
"""Size with which the run chooses the number of replicas of an elastic pool."""
DRAIN_TIMEOUT_S = 120.0
"""Time (s) to wait for the drain after the manager took the command, in addition to the time for replacement nodes."""


def drain(name: str, node: str, reason: str, *, wait: bool) -> int:
    """Have the run stop using a node and drain the node.

    Returns exit code 0 once the run no longer uses the node; the drain in Slurm may then be done or only requested.
    Without ``wait``, returns 0 once the command is written for the manager.
    """
    run = find_run(name)
    reader = StateReader(run)
    file_name = request_drain(run, reader.state(), node, reason)
    return _await_node_command(run, reader, DRAIN, NodeName(node), file_name, _drain_outcome, wait)


def undrain(name: str, node: str, *, wait: bool) -> int:
    """Have the run use a node again.

    Returns exit code 0 once this run may use the node, or, without ``wait``, once the command is written for the
    manager.
    """
    run = find_run(name)
    reader = StateReader(run)
    file_name = request_undrain(run, reader.state(), node)
    return _await_node_command(run, reader, UNDRAIN, NodeName(node), file_name, _undrain_outcome, wait)


def _await_node_command(
    run: RunDir,
    reader: StateReader,
    command: str,
    node: NodeName,
    file_name: str,
    outcome_text: Callable[[State, NodeName], str],
    wait: bool,
) -> int:
    if not wait:
        print(f"{run.id}: its manager is asked to {command} {node}")
        return 0
    wait_until_taken(run, file_name, f"{command} {node}")
    manager, moving, deadline = ManagerPresence(run), "", None
    while True:
        state = reader.state()
        if state is not None and state.finish is not None:
            raise OperationFailed(f"{run.id} ended before {node} was {command}ed; see: rrl status {run.id}")
        if state is not None and (outcome := outcome_text(state, node)):
            print_line(outcome)
            return 0
        if state is not None:
            deadline = deadline or time.monotonic() + state.job.limits.allocation + DRAIN_TIMEOUT_S
            moving = _print_moving(state, node, moving)
        if manager.is_gone():
            raise OperationFailed(manager.absent_message(f"{command} {node}"))
        if deadline is not None and time.monotonic() > deadline:
            raise OperationFailed(f"{run.id}: {node} is not yet {command}ed; see: rrl status {run.id}")
        time.sleep(POLL_INTERVAL_S)


def _print_moving(state: State, node: NodeName, printed: str) -> str:
    """Print which replicas must leave the node first, except if ``printed`` (the text printed last) says the same.

    Returns the text that was printed last.
    """
    replicas = ", ".join(one.id for one in state.workers if one.is_current and one.node == node)
    if replicas and replicas != printed and node in state.node_commands:
        moves = "move" if "," in replicas else "moves"
        print(f"{node}: {replicas} {moves} first ...", file=sys.stderr, flush=True)
        return replicas
    return printed


def _drain_outcome(state: State, node: NodeName) -> str:
    """Return the outcome of the drain as text; empty while the drain is not complete."""
    one = state.nodes.get(node)
    if one is None:
        return f"{node} has left the run"
    if (
        one.excluded is None
        or node in state.node_commands
        or f"{node}!drain" in state.intents
        or should_drain(state, one)
    ):
        return ""
    if one.drain_reason:
        return f"{node} is drained: {one.drain_reason}"
    unused = f"this run no longer uses {node}"
    if one.drain_error:
        return f"{unused}; its drain is requested in summary.json: {one.drain_error}"
    return f"{unused}; {one.status.detail}" if one.status is not None and one.status.detail else unused


def _undrain_outcome(state: State, node: NodeName) -> str:
    one = state.nodes.get(node)
    if one is None:
        return f"{node} has left the run"
    if (
        one.excluded is not None
        or one.drain_reason
        or node in state.node_commands
        or f"{node}!undrain" in state.intents
    ):
        return ""
    if not one.allocation:
        return f"this run may use {node} again, but does not hold this node now"
    return f"{node} may be used again{f'; Slurm says {one.status.detail}' if one.status and one.status.detail else ''}"


def cancel(name: str, *, wait: bool, keep: bool = False) -> int:
    """End a run.

    Returns exit code 0 once the run has ended, or, without ``wait``, once the command is written for its manager. With
    ``keep`` its nodes are not given back.
    """
    run = find_run(name)
    request = request_end(run, keep=keep)
    if request.ended is not None:
        print(f"{run.id} has ended already: {request.ended.outcome}")
    elif not request.command:
        print(f"{run.id}: removed from Slurm's queue before it began")
    elif not wait:
        print(f"{run.id}: its manager is asked to end it")
    else:
        print(f"{run.id}: ending ...", file=sys.stderr, flush=True)
        state = await_end(run, request.command)
        if isinstance(state, str):
            print_line(f"{run.id} never began: {state}; to remove it: rrl rm {run.id}")
            return 0
        retained = retained_jobs(state)
        left = f"kept: {retained} (rrl resume {run.id} uses it, scancel {retained} gives it back)"
        given = left if retained else "everything is given back"
        print(f"{run.id}: {state.outcome} after {state.step} steps; {given}")
    return 0


def restart(name: str, replica: str, *, wait: bool) -> int:
    """Restart a replica.

    Returns exit code 0 once it has joined again, or, without ``wait``, once the command is written for the manager.
    """
    run = find_run(name)
    request = request_restart(run, replica)
    if not wait:
        print(f"{run.id}: its manager is asked to restart {request.replica}")
        return 0
    joined = await_restarted(run, request)
    print(f"{joined.incarnation} works on {joined.node}")
    return 0


def resize(name: str, pool: str, size: str, *, wait: bool) -> int:
    """Hold an elastic pool at ``size`` replicas; with ``auto``, let the run choose their number again.

    Returns exit code 0 once the manager has taken the command, or, without ``wait``, once the command is written for
    the manager. The nodes of a larger pool may come much later.
    """
    if size != AUTO and not (size.isascii() and size.isdigit()):
        raise UsageError(f'"{size}" is not a number of replicas; write a whole number, or {AUTO}')
    run = find_run(name)
    file_name = request_resize(run, pool, None if size == AUTO else int(size))
    if not wait:
        print(f"{run.id}: its manager is asked to resize {pool}")
        return 0
    wait_until_taken(run, file_name, f"resize {pool}")
    if size == AUTO:
        print(f"{pool}: the run chooses the number of replicas again")
    else:
        print(f"{pool}: held at {size} until the run is resumed, or until: rrl resize {run.id} {pool} {AUTO}")
    return 0
