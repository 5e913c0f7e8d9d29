"""End a run, restart a replica, resize a pool or drain a node, by a command to the manager (:mod:`.command_sender`).

The end of a run and a restart take two functions each: the first requests the change, the second waits for its end.
"""

from __future__ import annotations

import difflib
import getpass
import time
from typing import NamedTuple

from ..cluster.traits import traits_of
from ..core.command_runner import run_coroutine
from ..core.run_dir import RunDir
from ..core.types import OperationFailed, Outcome, ReplicaId, UsageError, gang_of
from ..manager.intake.user_commands import Command
from ..manager.model.queries import gang
from ..manager.model.reduce_nodes import DRAIN, UNDRAIN
from ..manager.model.state import Replica, State, Status
from ..manager.storage.resume_request import withdraw
from .command_sender import POLL_INTERVAL_S, send, wait_until_taken
from .runs import StateReader, job_of, read_state, resume_pending
from .watching.start_check import StartCheck

CANCEL_TIMEOUT_S = 120.0
"""Time (s) to wait for the run's end after its manager took the command."""
RESTART_TIMEOUT_S = 300.0
"""Time (s) to wait for the replica after the manager took the command, in addition to ``limits.join``."""


# ── the end of a run ───────────────────────────────────────────────────────────────────────────────────────────────
class EndRequest(NamedTuple):
    """The result of :func:`request_end`."""

    command: str = ""
    """Name of the command file that the manager has to take; empty if nothing is left to do."""
    ended: State | None = None
    """The state of the run if it had ended already, else None."""


def request_end(run: RunDir, *, keep: bool) -> EndRequest:
    """Have the manager of a run end the run; if the manager is still in Slurm's queue, cancel its job instead.

    With ``keep`` the nodes of the run are not given back.

    Raises:
        UsageError: The run has no allocations that could be kept.
        OperationFailed: The run directory cannot be written.
    """
    if keep:
        _check_keep_allowed(run)
    resumes = resume_pending(run)
    state = read_state(run)
    if state is not None and state.outcome is not None and not resumes:
        _cancel_pending_managers(run)
        return EndRequest(ended=state)
    command = send(run, Command("cancel", getpass.getuser(), keep_allocations=keep))
    if state is None and _cancel_pending_managers(run):
        return EndRequest()
    if resumes and _cancel_pending_managers(run) and withdraw(run):
        (run.mailbox / command).unlink(missing_ok=True)  # a later resume must not find this command
        return EndRequest()
    return EndRequest(command)


def await_end(run: RunDir, command: str) -> State | str:
    """Wait until the manager has taken the command and ended the run; return the state of the ended run.

    If no manager will ever begin the run, return why. Raises OperationFailed if no manager takes the command, or the
    end takes too long.
    """
    reader, start, began = StateReader(run), StartCheck(run), time.monotonic()
    while reader.state() is None and time.monotonic() - began < CANCEL_TIMEOUT_S:
        if failure := start.failure(None):
            (run.mailbox / command).unlink(missing_ok=True)
            return failure
        time.sleep(POLL_INTERVAL_S)
    wait_until_taken(run, command, "end it")
    began = time.monotonic()
    while time.monotonic() - began < CANCEL_TIMEOUT_S:
        state = reader.state()
        if state is not None and state.outcome is not None:
            return state
        time.sleep(POLL_INTERVAL_S)
    raise OperationFailed(f"{run.id} is still ending after {CANCEL_TIMEOUT_S:.0f} s; see: rrl status {run.id}")


def _check_keep_allowed(run: RunDir) -> None:
    job = job_of(run)
    if job is not None and traits_of(job.cluster).roles_run_here:
        raise UsageError(f"{run.id} runs on this machine: there are no allocations to keep")
    if job is not None and job.manager.where == "pool":
        raise UsageError(
            f'the allocations of {run.id} cannot be kept: its manager runs in the pool ([manager] where = "pool"),'
            " which ends with the manager"
        )


def _cancel_pending_managers(run: RunDir) -> bool:
    """Cancel pending manager jobs in Slurm; return whether no such job is left."""
    job = job_of(run)
    if job is None or not traits_of(job.cluster).manager_is_a_job:
        return False
    from ..manager.bootstrap import manager_job

    return run_coroutine(manager_job.none_pending(run.id, job))


# ── a restart ──────────────────────────────────────────────────────────────────────────────────────────────────────
class RestartRequest(NamedTuple):
    """A restart that was requested from the manager."""

    command: str
    """Name of the command file that the manager has to take."""
    replica: ReplicaId
    before: int
    """Number of the incarnation that is restarted."""
    timeout_s: float
    """Time (s) within which the replica must join again."""


def request_restart(run: RunDir, replica: str) -> RestartRequest:
    """Have the manager of a run restart a replica.

    Raises:
        UsageError: There is no such replica, or nothing of the run can be restarted.
        OperationFailed: The run directory cannot be written.
    """
    state = read_state(run)
    if state is None:
        raise UsageError(f"{run.id} has not begun yet; see: rrl status {run.id}")
    if state.finish is not None:
        raise UsageError(_cannot_restart(state))
    id = _replica(state, replica)
    before = state.replica(id).incarnation_number
    command = send(run, Command("restart", getpass.getuser(), target=id))
    return RestartRequest(command, id, before, state.job.limits.join + RESTART_TIMEOUT_S)


def await_restarted(run: RunDir, request: RestartRequest) -> Replica:
    """Wait until the restarted replica has joined again; return the replica.

    Raises OperationFailed if no manager takes the command, the run ends first, or the replica does not join in time.
    """
    id = request.replica
    wait_until_taken(run, request.command, f"restart {id}")
    reader, deadline = StateReader(run), time.monotonic() + request.timeout_s
    while time.monotonic() < deadline:
        now = reader.state()
        if now is not None and now.finish is not None:
            raise OperationFailed(f"{run.id} ended before {id} had joined again; see: rrl status {run.id}")
        if now is not None and _has_rejoined(now, id, request.before):
            return now.replica(id)
        time.sleep(POLL_INTERVAL_S)
    raise OperationFailed(f"{id} has not joined again within {request.timeout_s:g} s; see: rrl logs {run.id} {id}")


def _cannot_restart(state: State) -> str:
    """Return why no replica of an ended or ending run can be restarted, and what can be done instead."""
    if state.outcome is None:
        return f"{state.run} is ending: no replica is restarted any more"
    if state.outcome is not Outcome.COMPLETED:
        return f"{state.run} has ended ({state.outcome.value}); to continue it: rrl resume {state.run}"
    further = f"; to train more steps: rrl resume {state.run} --steps {2 * state.job.steps}" if state.job.steps else ""
    return f"{state.run} is complete{further}"


def _has_rejoined(state: State, id: ReplicaId, before: int) -> bool:
    return all(one.incarnation_number > before and one.status is Status.JOINED for one in gang(state, id))


def _replica(state: State, name: str) -> ReplicaId:
    gangs = sorted({gang_of(one.id) for one in state.workers})
    if name not in gangs and any(one.id == name for one in state.workers):
        gang_id = gang_of(ReplicaId(name))
        raise UsageError(
            f"{name} is one rank of {gang_id}, which restarts as a whole: rrl restart {state.run} {gang_id}"
        )
    if name not in gangs:
        raise UsageError(f'no replica "{name}" in this run; it has {", ".join(gangs)}')
    if state.replica(ReplicaId(name)).status is Status.COMPLETED:
        raise UsageError(f"{name} has completed; there is nothing to restart")
    return ReplicaId(name)


# ── a rollout pool ─────────────────────────────────────────────────────────────────────────────────────────────────
def request_resize(run: RunDir, pool: str, replicas: int | None) -> str:
    """Have the manager of a run hold an elastic pool at a number of replicas, or, with None, choose the number again.

    Returns:
        The name of the command file that the manager has to take.

    Raises:
        UsageError: The run has ended, or the pool cannot have this number of replicas.
        OperationFailed: The run directory cannot be written.
    """
    state = read_state(run)
    if state is None:
        raise UsageError(f"{run.id} has not begun yet; see: rrl status {run.id}")
    if state.finish is not None:
        ended = "is ending" if state.outcome is None else f"has ended ({state.outcome.value})"
        raise UsageError(f"{run.id} {ended}: its pools are not resized any more")
    roles = {role.name: role for role in state.job.roles}
    elastic = {
        name: (role.replicas, role.max_replicas) for name, role in roles.items() if role.max_replicas is not None
    }
    none = "the run has none ([rollouts.NAME] replicas = { max = 8 })"
    has = f"the run has {', '.join(elastic)}" if elastic else none
    if pool not in roles:
        near = difflib.get_close_matches(pool, elastic, 1)
        raise UsageError(f'no elastic pool "{pool}" in this run; {f"did you mean {near[0]}?" if near else has}')
    if pool not in elastic:
        text = f"{pool} has a fixed number of replicas ({roles[pool].replicas}); only an elastic pool can be resized"
        raise UsageError(f"{text}: {has}")
    fewest, most = elastic[pool]
    if replicas is not None and not fewest <= replicas <= most:
        raise UsageError(f"{pool} has {fewest} to {most} replicas in this run, not {replicas}; rrl resume changes both")
    return send(run, Command("resize", getpass.getuser(), target=pool, replicas=replicas))


# ── nodes ──────────────────────────────────────────────────────────────────────────────────────────────────────────
def request_drain(run: RunDir, state: State | None, node: str, reason: str) -> str:
    """Have the manager of a run move the run off a node and drain the node.

    Args:
        run: The run.
        state: The state of the run; None if the journal has no record yet.
        node: The node.
        reason: Reason that Slurm shows for the drain; may be empty.

    Returns:
        The name of the command file that the manager has to take.

    Raises:
        UsageError: The run has no such node, or no longer uses nodes.
        OperationFailed: The run directory cannot be written.
    """
    _check_node_command(run, state, node)
    return send(run, Command(DRAIN, getpass.getuser(), target=node, reason=reason))


def request_undrain(run: RunDir, state: State | None, node: str) -> str:
    """Have the manager of a run use a node again.

    The arguments, the result and the errors are those of :func:`request_drain`.
    """
    _check_node_command(run, state, node)
    return send(run, Command(UNDRAIN, getpass.getuser(), target=node))


def _check_node_command(run: RunDir, state: State | None, node: str) -> None:
    if state is None:
        raise UsageError(f"{run.id} has not begun yet; see: rrl status {run.id}")
    if state.finish is not None:
        raise UsageError(f"{run.id} is {state.outcome.value if state.outcome else 'ending'}: it no longer uses a node")
    held_nodes = sorted(name for name, one in state.nodes.items() if one.allocation or one.excluded is not None)
    if node not in held_nodes:
        has = f"it has {', '.join(held_nodes)}" if held_nodes else "it has none yet"
        raise UsageError(f'no node "{node}" in this run; {has}')
