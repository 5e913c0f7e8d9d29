"""``rrl cancel``, ``rrl restart``, ``rrl drain`` and ``rrl undrain``.

Each writes a user command into the run's mailbox, from which the manager takes it. They therefore also work on a
machine that cannot connect to the manager.
"""

from __future__ import annotations

import asyncio
import getpass
import sys
import time
from collections.abc import Callable

from ...core.run_dir import RunDir
from ...core.types import NodeName, Outcome, ReplicaId, gang_of
from ...manager.intake.user_commands import Command
from ...manager.model.queries import gang, workers
from ...manager.model.reduce_nodes import DRAIN, UNDRAIN
from ...manager.model.state import State, Status
from ...manager.planner.capacity.node_lifecycle import should_drain
from ..common.command_sender import POLL_INTERVAL_S, ManagerPresence, send, wait_until_taken
from ..common.output import print_line
from ..common.runs import OperationFailed, StateReader, UsageError, find_run, job_of
from ..views.status import retained_jobs

DRAIN_TIMEOUT_S = 120.0
"""Time (s) to wait for the drain after the manager took the command, beyond the time that replacements may take."""


def drain(name: str, node: str, reason: str, *, wait: bool) -> int:
    """Have the run stop using a node and drain it.

    Returns exit code 0 once the run no longer uses the node, whether Slurm drained it or the drain is only requested,
    or, without ``wait``, once the command is written for the manager.
    """
    return _send_node_command(name, DRAIN, node, reason, _drain_outcome, wait)


def undrain(name: str, node: str, *, wait: bool) -> int:
    """Have the run use a node again.

    Returns exit code 0 once this run may use the node, or, without ``wait``, once the command is written for the
    manager.
    """
    return _send_node_command(name, UNDRAIN, node, "", _undrain_outcome, wait)


def _send_node_command(
    name: str, command: str, node: str, reason: str, outcome_text: Callable[[State, NodeName], str], wait: bool
) -> int:
    run = find_run(name)
    reader = StateReader(run)
    state = reader.state()
    _check_node_command(run, state, node)
    file_name = send(run, Command(command, getpass.getuser(), target=node, reason=reason))
    if not wait:
        print(f"{run.id}: its manager is asked to {command} {node}")
        return 0
    wait_until_taken(run, file_name, f"{command} {node}")
    manager, moving, deadline = ManagerPresence(run), "", None
    while True:
        state = reader.state()
        if state is not None and state.finish is not None:
            raise OperationFailed(f"{run.id} ended before that; see: rrl status {run.id}")
        if state is not None and (outcome := outcome_text(state, NodeName(node))):
            print_line(outcome)
            return 0
        if state is not None:
            deadline = deadline or time.monotonic() + state.job.limits.allocation + DRAIN_TIMEOUT_S
            moving = _print_moving(state, NodeName(node), moving)
        if manager.is_gone():
            raise OperationFailed(manager.absent_message(f"{command} {node}"))
        if deadline is not None and time.monotonic() > deadline:
            raise OperationFailed(f"{run.id}: {node} is not yet {command}ed; see: rrl status {run.id}")
        time.sleep(POLL_INTERVAL_S)


def _check_node_command(run: RunDir, state: State | None, node: str) -> None:
    if state is None:
        raise UsageError(f"{run.id} has not begun yet; see: rrl status {run.id}")
    if state.finish is not None:
        raise UsageError(f"{run.id} is {state.outcome.value if state.outcome else 'ending'}: it no longer uses a node")
    held_nodes = sorted(name for name, one in state.nodes.items() if one.allocation or one.excluded is not None)
    if node not in held_nodes:
        has = f"it has {', '.join(held_nodes)}" if held_nodes else "it has none yet"
        raise UsageError(f'no node "{node}" in this run; {has}')


def _print_moving(state: State, node: NodeName, printed: str) -> str:
    """Print which replicas must leave the node first, unless that is what was ``printed`` last.

    Returns the replicas that were printed last.
    """
    replicas = ", ".join(one.id for one in workers(state) if one.is_current and one.node == node)
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
        return f"this run may use {node} again; it does not hold it now"
    return f"{node} may be used again{f'; Slurm says {one.status.detail}' if one.status and one.status.detail else ''}"


CANCEL_TIMEOUT_S = 120.0
"""Time (s) to wait for the run's end after its manager took the command."""


def cancel(name: str, *, wait: bool, keep: bool = False) -> int:
    """End a run.

    Returns exit code 0 once the run has ended, or, without ``wait``, once the command is written for its manager. With
    ``keep`` its nodes are not given back.
    """
    run = find_run(name)
    if keep:
        _check_keep_allowed(run)
    reader = StateReader(run)
    state = reader.state()
    if state is not None and state.outcome is not None:
        _cancel_pending_managers(run)
        print(f"{run.id} has ended already: {state.outcome.value}")
        return 0
    file_name = send(run, Command("cancel", getpass.getuser(), keep_allocations=keep))
    if state is None and _cancel_pending_managers(run):
        print(f"{run.id}: taken from the queue before it began")
        return 0
    if not wait:
        print(f"{run.id}: its manager is asked to end it")
        return 0
    print(f"{run.id}: ending ...", file=sys.stderr, flush=True)
    wait_until_taken(run, file_name, "end it")
    return _await_end(run, reader)


def _check_keep_allowed(run: RunDir) -> None:
    job = job_of(run)
    if job is not None and job.cluster != "slurm":
        raise UsageError(f"{run.id} runs on this machine: there are no allocations to keep")
    if job is not None and job.manager.where == "pool":
        raise UsageError(f'{run.id} has its manager in its pool ([manager] where = "pool"), which ends with it')


def _cancel_pending_managers(run: RunDir) -> bool:
    """Cancel pending manager jobs in Slurm; return whether none is left."""
    job = job_of(run)
    if job is None or job.cluster != "slurm":
        return False
    from ...manager.bootstrap import manager_job

    return asyncio.run(manager_job.none_pending(run.id, job))


def _await_end(run: RunDir, reader: StateReader) -> int:
    began = time.monotonic()
    while time.monotonic() - began < CANCEL_TIMEOUT_S:
        state = reader.state()
        if state is not None and state.outcome is not None:
            retained = retained_jobs(state)
            left = f"kept: {retained} (rrl resume {run.id} uses it, scancel {retained} gives it back)"
            given = left if retained else "everything is given back"
            print(f"{run.id}: {state.outcome.value} after {state.step} steps; {given}")
            return 0
        time.sleep(POLL_INTERVAL_S)
    raise OperationFailed(f"{run.id} is still ending after {CANCEL_TIMEOUT_S:.0f} s; see: rrl status {run.id}")


RESTART_TIMEOUT_S = 300.0
"""Time (s) to wait for the replica after the manager took the command, beyond ``limits.join``."""


def restart(name: str, replica: str, *, wait: bool) -> int:
    """Restart a replica.

    Returns exit code 0 once it has joined again, or, without ``wait``, once the command is written for the manager.
    """
    run = find_run(name)
    reader = StateReader(run)
    state = reader.state()
    if state is None:
        raise UsageError(f"{run.id} has not begun yet; see: rrl status {run.id}")
    if state.finish is not None:
        raise UsageError(_cannot_restart(state))
    id = _replica(state, replica)
    before = state.replica(id).incarnation_number
    file_name = send(run, Command("restart", getpass.getuser(), target=id))
    if not wait:
        print(f"{run.id}: its manager is asked to restart {id}")
        return 0
    wait_until_taken(run, file_name, f"restart {id}")
    deadline = time.monotonic() + state.job.limits.join + RESTART_TIMEOUT_S
    while time.monotonic() < deadline:
        now = reader.state()
        if now is not None and now.finish is not None:
            raise OperationFailed(f"{run.id} ended before {id} had joined again; see: rrl status {run.id}")
        if now is not None and _has_rejoined(now, id, before):
            print(f"{now.replica(id).incarnation} works on {now.replica(id).node}")
            return 0
        time.sleep(POLL_INTERVAL_S)
    raise OperationFailed(
        f"{id} has not joined again within {state.job.limits.join + RESTART_TIMEOUT_S:g} s; see: rrl logs {run.id} {id}"
    )


def _cannot_restart(state: State) -> str:
    """Return why no replica of a run that has ended, or ends now, can be restarted, and what can be done instead."""
    if state.outcome is None:
        return f"{state.run} is ending: no replica is restarted any more"
    if state.outcome is not Outcome.COMPLETED:
        return f"{state.run} has ended ({state.outcome.value}); to continue it: rrl resume {state.run}"
    further = f"; to train more steps: rrl resume {state.run} --steps {2 * state.job.steps}" if state.job.steps else ""
    return f"{state.run} is complete{further}"


def _has_rejoined(state: State, id: ReplicaId, before: int) -> bool:
    return all(one.incarnation_number > before and one.status is Status.JOINED for one in gang(state, id))


def _replica(state: State, name: str) -> ReplicaId:
    gangs = sorted({gang_of(one.id) for one in workers(state)})
    if name not in gangs and any(one.id == name for one in workers(state)):
        gang_id = gang_of(ReplicaId(name))
        raise UsageError(
            f"{name} is one rank of {gang_id}, which restarts as a whole: rrl restart {state.run} {gang_id}"
        )
    if name not in gangs:
        raise UsageError(f'no replica "{name}" in this run; it has {", ".join(gangs)}')
    if state.replica(ReplicaId(name)).status is Status.COMPLETED:
        raise UsageError(f"{name} has completed; there is nothing to restart")
    return ReplicaId(name)
