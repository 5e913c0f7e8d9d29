"""Request a fault from a run's manager (``rrl inject``). A fault that the manager would reject is rejected here."""

from __future__ import annotations

import getpass
import random
import secrets
from collections.abc import Callable
from typing import TypeVar

from ..core import units
from ..core.faults import Fault, FaultKind, FaultProblem, FaultTrigger, parse_trigger, resolve_target
from ..core.run_dir import RunDir
from ..core.run_spec import RunSpec
from ..core.types import UsageError
from ..manager.intake.user_commands import Command, rejection
from ..manager.model.state import State
from .command_sender import send

_T = TypeVar("_T")

_MISSING = {FaultProblem.NO_SECONDS: "; add --for 10s", FaultProblem.NO_AMOUNT: "; add --amount"}
"""Hint that is added to the error message about a problem: the missing option of the command line."""


def fault_of(
    job: RunSpec,
    kind: str,
    target: str,
    *,
    at: str | None = None,
    seconds: str | None = None,
    amount: float = 0.0,
    seed: int | None = None,
) -> Fault:
    """Return a new fault, with random choices filled in.

    Args:
        job: The job of the run.
        kind: Name of the kind of fault.
        target: Replica, rank, node, agent, standby process or manager; a role stands for a random replica of this role,
            and an empty text for a random replica of any role.
        at: The trigger, such as ``step=5``; None injects the fault at once.
        seconds: Duration as text, such as ``10s``; with None the fault does not end.
        amount: Parameter of the fault, whose meaning depends on the kind.
        seed: Seed of the random choices.

    Raises:
        UsageError: There is no such kind, or the trigger or the duration cannot be read.
    """
    if kind not in set(FaultKind):
        raise UsageError(f'there is no fault "{kind}"; the faults are {", ".join(FaultKind)}')
    moment = FaultTrigger() if at is None else parse_flag(parse_trigger, at, "--at")
    lasts = 0.0 if seconds is None else parse_flag(units.seconds, seconds, "--for")
    replicas = {role.name: role.replicas for role in job.roles}
    draw = random.Random(seed)
    chosen_target = target if "/" in target else resolve_target(target, FaultKind(kind), replicas, draw) or target
    return Fault(f"i{secrets.token_hex(3)}", FaultKind(kind), chosen_target, moment, lasts, amount)


def check_fault(run: RunDir, job: RunSpec, state: State | None, fault: Fault) -> None:
    """Raise UsageError if the run rejects a fault; ``state`` is None before the journal's first record."""
    if rejected := rejection(fault, job, state):
        raise UsageError(f"{run.id}: {rejected.text}{_MISSING.get(rejected.problem, '')}")


def request_fault(run: RunDir, fault: Fault) -> str:
    """Have the manager of a run inject a checked fault; return the name of its command file.

    Raises OperationFailed if the run directory cannot be written.
    """
    return send(run, Command("inject", getpass.getuser(), fault=fault))


def parse_flag(parse: Callable[[str], _T], text: str, flag: str) -> _T:
    """Return the parsed value of a flag; raise UsageError if ``parse`` raises ValueError."""
    try:
        return parse(text)
    except ValueError as error:
        raise UsageError(f"{flag}: {error}") from None
