"""``rrl cancel``, ``rrl restart``, ``rrl drain`` and ``rrl undrain``.

Each writes a command into the run's mailbox, from which the manager takes it, so that they work where no socket can be
reached.
"""

from __future__ import annotations

import asyncio
import getpass
import sys
import time
from collections.abc import Callable

from ...core.run_dir import RunDir
from ...core.types import NodeName, ReplicaId, gang_of
from ...manager.intake.user_commands import Letter
from ...manager.model.queries import gang, workers
from ...manager.model.reduce_nodes import DRAIN, UNDRAIN
from ...manager.model.state import State, Status
from ...manager.planner.capacity.node_lifecycle import to_be_drained
from ..common.command_sender import PAUSE, Presence, await_taken, send
from ..common.output import print_line
from ..common.runs import BadInput, Failed, Reader, find_run, job_of
from ..views.status import kept_jobs

DRAIN_TIMEOUT_S = 120.0
"""s that it is waited for once the manager has taken the command, beyond the time that replacements may take"""


def drain(name: str, node: str, reason: str, *, wait: bool) -> int:
    """Exit code 0 when this run uses the node no more, whether it is drained in Slurm or that is only asked for; or,
    without ``wait``, when the command was left for its manager."""
    return _order(name, DRAIN, node, reason, _drained, wait)


def undrain(name: str, node: str, *, wait: bool) -> int:
    """Exit code 0 when this run may use the node again; or, without ``wait``, as for :func:`drain`."""
    return _order(name, UNDRAIN, node, "", _undrained, wait)


def _order(name: str, command: str, node: str, reason: str, told: Callable[[State, NodeName], str], wait: bool) -> int:
    run = find_run(name)
    reader = Reader(run)
    state = reader.state()
    _refuse(run, state, node)
    letter = send(run, Letter(command, getpass.getuser(), target=node, reason=reason))
    if not wait:
        print(f"{run.id}: its manager is asked to {command} {node}")
        return 0
    await_taken(run, letter, f"{command} {node}")
    manager, moving, deadline = Presence(run), "", None
    while True:
        state = reader.state()
        if state is not None and state.verdict is not None:
            raise Failed(f"{run.id} ended before that; see: rrl status {run.id}")
        if state is not None and (said := told(state, NodeName(node))):
            print_line(said)
            return 0
        if state is not None:
            deadline = deadline or time.monotonic() + state.job.limits.allocation + DRAIN_TIMEOUT_S
            moving = _moving(state, NodeName(node), moving)
        if manager.gone():
            raise Failed(manager.nobody(f"{command} {node}"))
        if deadline is not None and time.monotonic() > deadline:
            raise Failed(f"{run.id}: {node} is not yet {command}ed; see: rrl status {run.id}")
        time.sleep(PAUSE)


def _refuse(run: RunDir, state: State | None, node: str) -> None:
    if state is None:
        raise BadInput(f"{run.id} has not begun yet; see: rrl status {run.id}")
    if state.verdict is not None:
        raise BadInput(f"{run.id} is {state.outcome.value if state.outcome else 'ending'}: it needs no node any more")
    there = sorted(name for name, one in state.nodes.items() if one.allocation or one.excluded is not None)
    if node not in there:
        has = f"it has {', '.join(there)}" if there else "it has none yet"
        raise BadInput(f'no node "{node}" in this run; {has}')


def _moving(state: State, node: NodeName, said: str) -> str:
    """Who is still on it, told once."""
    there = ", ".join(one.id for one in workers(state) if one.believed and one.node == node)
    if there and there != said and node in state.marks:
        moves = "move" if "," in there else "moves"
        print(f"{node}: {there} {moves} first ...", file=sys.stderr, flush=True)
        return there
    return said


def _drained(state: State, node: NodeName) -> str:
    """What has become of it; empty while that is open."""
    one = state.nodes.get(node)
    if one is None:
        return f"{node} has left the run"
    if one.excluded is None or node in state.marks or f"{node}!drain" in state.intents or to_be_drained(state, one):
        return ""
    if one.drained:
        return f"{node} is drained: {one.drained}"
    unused = f"{node} is used no more by this run"
    if one.not_drained:
        return f"{unused}; its drain is asked for in summary.json: {one.not_drained}"
    return f"{unused}; {one.seen.detail}" if one.seen is not None and one.seen.detail else unused


def _undrained(state: State, node: NodeName) -> str:
    one = state.nodes.get(node)
    if one is None:
        return f"{node} has left the run"
    if one.excluded is not None or one.drained or node in state.marks or f"{node}!undrain" in state.intents:
        return ""
    if not one.allocation:
        return f"this run may use {node} again; it does not hold it now"
    return f"{node} may be used again{f'; Slurm says {one.seen.detail}' if one.seen and one.seen.detail else ''}"


CANCEL_TIMEOUT_S = 120.0
"""s that a run is waited for once its manager has taken the command"""


def cancel(name: str, *, wait: bool, keep: bool = False) -> int:
    """Exit code 0 when the run has ended, or, without ``wait``, when the command was left for its manager. ``keep``:
    its nodes are not given back."""
    run = find_run(name)
    if keep:
        _check_keeps(run)
    reader = Reader(run)
    state = reader.state()
    if state is not None and state.outcome is not None:
        _withdrawn(run)
        print(f"{run.id} has ended already: {state.outcome.value}")
        return 0
    letter = send(run, Letter("cancel", getpass.getuser(), keep=keep))
    if state is None and _withdrawn(run):
        print(f"{run.id}: taken from the queue before it began")
        return 0
    if not wait:
        print(f"{run.id}: its manager is asked to end it")
        return 0
    print(f"{run.id}: ending ...", file=sys.stderr, flush=True)
    await_taken(run, letter, "end it")
    return _await_end(run, reader)


def _check_keeps(run: RunDir) -> None:
    job = job_of(run)
    if job is not None and job.cluster != "slurm":
        raise BadInput(f"{run.id} runs on this machine: there are no allocations to keep")
    if job is not None and job.manager.where == "pool":
        raise BadInput(f'{run.id} has its manager in its pool ([manager] where = "pool"), which ends with it')


def _withdrawn(run: RunDir) -> bool:
    """Managers that wait in Slurm's queue are taken from it, and none is there any more."""
    job = job_of(run)
    if job is None or job.cluster != "slurm":
        return False
    from ...manager.bootstrap import manager_job

    return asyncio.run(manager_job.withdrawn(run.id, job))


def _await_end(run: RunDir, reader: Reader) -> int:
    began = time.monotonic()
    while time.monotonic() - began < CANCEL_TIMEOUT_S:
        state = reader.state()
        if state is not None and state.outcome is not None:
            kept = kept_jobs(state)
            left = f"kept: {kept} (rrl resume {run.id} uses it, scancel {kept} gives it back)"
            given = left if kept else "everything is given back"
            print(f"{run.id}: {state.outcome.value} after {state.step} steps; {given}")
            return 0
        time.sleep(PAUSE)
    raise Failed(f"{run.id} is still ending after {CANCEL_TIMEOUT_S:.0f} s; see: rrl status {run.id}")


RESTART_TIMEOUT_S = 300.0
"""s that it is waited for once the manager has taken the command, beyond ``limits.join``"""


def restart(name: str, replica: str, *, wait: bool) -> int:
    """Exit code 0 when it has joined again, or, without ``wait``, when the command was left for its manager."""
    run = find_run(name)
    reader = Reader(run)
    state = reader.state()
    if state is None:
        raise BadInput(f"{run.id} has not begun yet; see: rrl status {run.id}")
    if state.verdict is not None:
        ended = state.outcome.value if state.outcome else "ending"
        raise BadInput(f"{run.id} is {ended}; to have it go on: rrl resume {run.id}")
    id = _replica(state, replica)
    before = state.replica(id).incarnation
    letter = send(run, Letter("restart", getpass.getuser(), target=id))
    if not wait:
        print(f"{run.id}: its manager is asked to restart {id}")
        return 0
    await_taken(run, letter, f"restart {id}")
    deadline = time.monotonic() + state.job.limits.join + RESTART_TIMEOUT_S
    while time.monotonic() < deadline:
        now = reader.state()
        if now is not None and now.verdict is not None:
            raise Failed(f"{run.id} ended before {id} was there again; see: rrl status {run.id}")
        if now is not None and _is_back(now, id, before):
            print(f"{now.replica(id).life} works on {now.replica(id).node}")
            return 0
        time.sleep(PAUSE)
    raise Failed(
        f"{id} has not joined again within {state.job.limits.join + RESTART_TIMEOUT_S:g} s; see: rrl logs {run.id} {id}"
    )


def _is_back(state: State, id: ReplicaId, before: int) -> bool:
    return all(one.incarnation > before and one.status is Status.JOINED for one in gang(state, id))


def _replica(state: State, name: str) -> ReplicaId:
    there = sorted({gang_of(one.id) for one in workers(state)})
    if name not in there and any(one.id == name for one in workers(state)):
        whole = gang_of(ReplicaId(name))
        raise BadInput(f"{name} is one rank of {whole}, which restarts as a whole: rrl restart {state.run} {whole}")
    if name not in there:
        raise BadInput(f'no replica "{name}" in this run; it has {", ".join(there)}')
    if state.replica(ReplicaId(name)).status is Status.COMPLETED:
        raise BadInput(f"{name} has done its work already")
    return ReplicaId(name)
