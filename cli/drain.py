"""``rrl drain`` and ``rrl undrain``: a node is not to be used any more, or again, by a letter in the run's mailbox."""

from __future__ import annotations

import getpass
import sys
import time
from collections.abc import Callable

from rrl.cli.asking import BadInput, Failed, Reader, find_run
from rrl.cli.mailing import PAUSE, Presence, await_taken, send
from rrl.cli.screen import print_line
from rrl.manager.fold_marks import DRAIN, UNDRAIN
from rrl.manager.mailbox import Letter
from rrl.manager.planner.nodes import to_be_drained
from rrl.manager.state import State, workers
from rrl.spec.rundir import RunDir
from rrl.spec.words import NodeName

WITHIN = 120.0
"""s that it is waited for once the manager has taken the command, beyond the time that replacements may take"""


def drain(name: str, node: str, reason: str, *, wait: bool) -> int:
    """Exit code 0 when this run uses the node no more, whether it is drained in Slurm or that is only asked for; or,
    without ``wait``, when the command was left for its manager."""
    return _order(name, DRAIN, node, reason, _drained, wait)


def undrain(name: str, node: str, *, wait: bool) -> int:
    """Exit code 0 when this run may use the node again; or, without ``wait``, as for :func:`drain`."""
    return _order(name, UNDRAIN, node, "", _undrained, wait)


def _order(
    name: str, command: str, node: str, reason: str, told: Callable[[State, NodeName], str], wait: bool
) -> int:
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
            deadline = deadline or time.monotonic() + state.job.limits.allocation + WITHIN
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
