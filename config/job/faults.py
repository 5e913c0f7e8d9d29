"""``[faults]`` of job.toml: the faults that a run plans for itself, and whether users may inject others."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated

from pydantic import AfterValidator, Field

from ...core.faults import (
    FAULT_TRAITS,
    Fault,
    FaultKind,
    FaultProblem,
    FaultTrigger,
    InvalidFault,
    TargetKind,
    parse_trigger,
    resolve_target,
    validate_fault,
)
from .base import Duration, Table, Time, mistake
from .roles import CommandRole

if TYPE_CHECKING:
    from .schema import Job

MAX_RANDOM_FAULTS = 1000
"""Maximum number of faults from one entry of [[faults.random]]. run_spec.json and the journal store each fault in 80
bytes."""


def _check_trigger(text: str) -> str:
    parse_trigger(text)
    return text


class PlannedFault(Table):
    """A fault that the run injects itself: for demonstrations and tests."""

    kind: Annotated[FaultKind, Field(strict=False)]
    """Kind of the fault (docs/faults.md)."""
    target: str = ""
    """A replica ("rollout/0"), a role (one of its replicas, drawn by the seed), "manager", "agent/NODE" or a node."""
    at: Annotated[str, AfterValidator(_check_trigger)]
    """Trigger: "step=5" (the trainer has committed that step), "time=90s" (since the first nodes were granted) or
    "phase=train" (its target is in that phase)."""
    seconds: Duration = 0.0
    """Duration, for kinds that end by themselves."""
    amount: Annotated[float, Field(ge=0)] = 0.0
    """For slow: the share of the time for which the target runs; for exit: the exit code; for delay: ms."""


class RandomFaults(Table):
    """Faults at random times, drawn from the seed: the same job always has the same faults."""

    kinds: Annotated[tuple[Annotated[FaultKind, Field(strict=False)], ...], Field(strict=False, min_length=1)]
    """Kinds of faults, from which the kind of each fault is drawn."""
    target: str = ""
    """Target as for a planned fault; empty stands for any replica of any role."""
    every: Time
    """Mean time between two faults; at most 1000 are planned."""
    seconds: Duration = 0.0
    """Duration of each fault."""
    amount: Annotated[float, Field(ge=0)] = 0.0
    """Amount as for a planned fault."""


class FaultsTable(Table):
    """Fault injection. A run has only faults that its job spec plans or allows."""

    allow: bool = False
    """Whether rrl inject may inject faults into this run."""
    seed: int = 0
    """Seed of the random times and targets."""
    planned: Annotated[tuple[PlannedFault, ...], Field(strict=False)] = ()
    random: Annotated[tuple[RandomFaults, ...], Field(strict=False)] = ()


def plan_faults(table: FaultsTable, replicas: Mapping[str, int], horizon: float) -> tuple[Fault, ...]:
    """Return every fault of the run, with all random choices made.

    Args:
        table: The ``[faults]`` table.
        replicas: Number of replicas of each role.
        horizon: Longest duration of the run (s); later faults are not planned.
    """
    draw = random.Random(table.seed)
    planned = [
        Fault(
            f"f{index}",
            entry.kind,
            resolve_target(entry.target, entry.kind, replicas, draw),
            parse_trigger(entry.at),
            entry.seconds,
            entry.amount,
        )
        for index, entry in enumerate(table.planned)
    ]
    for index, random_entry in enumerate(table.random):
        at = 0.0
        for count in range(MAX_RANDOM_FAULTS):
            at += draw.expovariate(1.0 / random_entry.every)
            if at > horizon:
                break
            kind = draw.choice(random_entry.kinds)
            target = resolve_target(random_entry.target, kind, replicas, draw)
            trigger = FaultTrigger(time=round(at, 1))
            planned.append(Fault(f"r{index}.{count}", kind, target, trigger, *values_for_kind(kind, random_entry)))
    return tuple(planned)


def values_for_kind(kind: FaultKind, entry: RandomFaults) -> tuple[float, float]:
    """Return (seconds, amount) for a fault of ``kind`` that ``entry`` plans; 0 for a value that the kind does not take.

    An entry with several kinds may set values that only some of the kinds take.
    """
    traits = FAULT_TRAITS[kind]
    return entry.seconds if traits.takes_seconds else 0.0, entry.amount if traits.amount else 0.0


def check_faults(job: Job) -> None:
    """Check the values and the target of each fault of a job, and that the target can inject the fault."""
    replicas = {name: role.replicas for name, role in job.every_role().items()}
    ranks = {name: role.ranks for name, role in job.every_role().items()}
    for index, planned in enumerate(job.faults.planned):
        at = parse_trigger(planned.at)
        if invalid := validate_fault(
            planned.kind, planned.target, planned.seconds, planned.amount, replicas, at, ranks
        ):
            raise mistake(("faults", "planned", index, _key(invalid, "kind")), invalid.text)
        _check_needs_worker_api(job, planned.kind, planned.target, ("faults", "planned", index, "kind"))
    for index, entry in enumerate(job.faults.random):
        for kind in entry.kinds:
            if invalid := validate_fault(kind, entry.target, *values_for_kind(kind, entry), replicas, ranks=ranks):
                raise mistake(("faults", "random", index, _key(invalid, "kinds")), invalid.text)
            _check_needs_worker_api(job, kind, entry.target, ("faults", "random", index, "kinds"))


def _key(invalid: InvalidFault, default: str) -> str:
    return "target" if invalid.problem is FaultProblem.NO_SUCH_TARGET else default


def _check_needs_worker_api(job: Job, kind: FaultKind, target: str, at: tuple[str | int, ...]) -> None:
    """Check that a role uses the worker API if it must inject the fault itself."""
    role = job.every_role().get(target.partition("/")[0])
    traits = FAULT_TRAITS[kind]
    if (
        traits.target_kind is TargetKind.REPLICA
        and not traits.by_signals
        and isinstance(role, CommandRole)
        and role.watch != "api"
    ):
        raise mistake(at, f'{kind} needs the worker API, but {target} does not use it (watch = "{role.watch}")')
