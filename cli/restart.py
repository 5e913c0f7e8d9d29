"""``rrl restart``: end one replica's life and have it start anew, by a letter in the run's mailbox."""

from __future__ import annotations

import getpass
import time

from rrl.cli.asking import BadInput, Failed, Reader, find_run
from rrl.cli.mailing import PAUSE, await_taken, send
from rrl.manager.mailbox import Letter
from rrl.manager.state import State, Status, gang, workers
from rrl.spec.words import ReplicaId, gang_of

WITHIN = 300.0
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
    deadline = time.monotonic() + state.job.limits.join + WITHIN
    while time.monotonic() < deadline:
        now = reader.state()
        if now is not None and now.verdict is not None:
            raise Failed(f"{run.id} ended before {id} was there again; see: rrl status {run.id}")
        if now is not None and _is_back(now, id, before):
            print(f"{now.replica(id).life} works on {now.replica(id).node}")
            return 0
        time.sleep(PAUSE)
    raise Failed(f"{id} has not joined again within {state.job.limits.join + WITHIN:g} s; see: rrl logs {run.id} {id}")


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
