"""``rrl inject``: order a fault. What the run does not allow, or is not its own, is refused here as by its manager."""

from __future__ import annotations

import getpass
import random
import secrets
import sys
import time
from collections.abc import Callable
from typing import TypeVar

import msgspec

from ...core.faults import At, Fault, FaultKind, Misfit, concrete, read_at
from ...core.run_dir import RunDir
from ...core.run_spec import JobView
from ...manager.intake.user_commands import Letter, refusal
from ...manager.model import events as ev
from ...manager.model.state import State
from ...manager.storage.journal import replay
from ..common.command_sender import PAUSE, Presence, await_taken, send
from ..common.output import print_json, print_line
from ..common.runs import BadInput, Failed, Reader, find_run, job_of

_T = TypeVar("_T")

_FLAGS = {Misfit.NO_SECONDS: "; add --for 10s", Misfit.NO_AMOUNT: "; add --amount"}
"""which flag gives what is missing"""


def inject(
    name: str, kind: str, target: str, at: str | None, seconds: str | None, amount: float, seed: int | None,
    *, wait: bool, json: bool,
) -> int:  # fmt: skip
    """Exit code 0 when the order was left for the manager, or, with ``wait``, when the fault was performed."""
    run = find_run(name)
    reader = Reader(run)
    state = reader.state()
    job = state.job if state is not None else job_of(run)
    if job is None:
        raise Failed(f"{run.view}: it cannot be read")
    fault = _fault(job, kind, target, at, seconds, amount, seed)
    if wrong := refusal(fault, job, state):
        raise BadInput(f"{run.id}: {wrong.text}{_FLAGS.get(wrong.misfit, '')}")
    letter = send(run, Letter("inject", getpass.getuser(), fault=fault))
    if not wait:
        _say(run, fault, "ordered", json)
        return 0
    await_taken(run, letter, "take the order")
    told = _await(run, reader, fault, aloud=not json)
    done = told.ok or (told.unknown and _ends_its_witness(fault))
    if json:
        print_json(told)
    elif done:
        print_line(f"{run.id}: {_named(fault)}: {told.detail}")
    elif told.unknown:
        raise Failed(f"{run.id}: nobody knows whether {_named(fault)} was performed: {told.detail}")
    else:
        raise Failed(f"{run.id}: {_named(fault)} was not performed: {told.detail}")
    return 0 if done else 1


def _fault(
    job: JobView, kind: str, target: str, at: str | None, seconds: str | None, amount: float, seed: int | None
) -> Fault:
    """Raises BadInput."""
    if kind not in set(FaultKind):
        raise BadInput(f'no fault "{kind}"; there are {", ".join(FaultKind)}')
    moment = At() if at is None else _read(read_at, at, "--at")
    lasts = 0.0 if seconds is None else _read(_seconds, seconds, "--for")
    draw = random.Random(seed)
    replicas = {role.name: role.replicas for role in job.roles}
    one = target if "/" in target else concrete(target, FaultKind(kind), replicas, draw) or target
    return Fault(f"i{secrets.token_hex(3)}", FaultKind(kind), one, moment, lasts, amount)


def _read(reading: Callable[[str], _T], text: str, flag: str) -> _T:
    try:
        return reading(text)
    except ValueError as error:
        raise BadInput(f"{flag}: {error}") from None


def _seconds(text: str) -> float:
    from ...core.units import seconds  # here: it brings pydantic

    return seconds(text)


def _await(run: RunDir, reader: Reader, fault: Fault, aloud: bool) -> ev.FaultInjected:
    """What was told of it first. Raises Failed when the run ends before that, or no manager is left to tell."""
    told_waiting = not aloud
    manager = Presence(run)
    while True:
        state = reader.state()
        if state is not None and fault.id in state.faults and f"fault:{fault.id}" not in state.intents:
            for stamped in replay(run):
                if isinstance(stamped.event, ev.FaultInjected) and stamped.event.fault == fault.id:
                    return stamped.event
        if state is not None and state.outcome is not None:
            raise Failed(f"{run.id} has ended ({state.outcome.value}) before {_named(fault)} was due")
        if manager.gone():
            if state is not None and fault.id in state.faults and _ends_its_witness(fault):
                return _no_manager_left(run, fault)
            raise Failed(manager.nobody(f"tell what became of {_named(fault)}"))
        if state is not None and not told_waiting:
            print(f"{run.id}: {_named(fault)} {_pending(state, fault)} ...", file=sys.stderr, flush=True)
            told_waiting = True
        time.sleep(PAUSE)


def _ends_its_witness(fault: Fault) -> bool:
    """Who would journal it dies of it: that the manager is gone is all that there is to see."""
    return fault.target == "manager"


def _no_manager_left(run: RunDir, fault: Fault) -> ev.FaultInjected:
    """As the next manager will have to journal it, where none has come by itself."""
    told = f"no manager lives any more; the roles go on, and the next one takes over: rrl manage {run.id}"
    return ev.FaultInjected(fault.id, None, False, told, fault.kind, fault.target, unknown=True)


def _pending(state: State, fault: Fault) -> str:
    if fault.id in state.faults:
        return "is being performed"
    return "is ordered" if fault.at == At() else f"waits for {fault.at}"


def _named(fault: Fault) -> str:
    return f"{fault.kind.value} {fault.target}".strip()


def _say(run: RunDir, fault: Fault, what: str, json: bool) -> None:
    if json:
        print_json({"run": run.id, **msgspec.to_builtins(fault)})
    else:
        when = "" if fault.at == At() else f" at {fault.at}"
        print(f"{run.id}: {_named(fault)}{when} is {what} ({fault.id})")
