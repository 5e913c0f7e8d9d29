"""``[faults]`` of job.toml: faults that a run plans for itself, and whether people may order others."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Annotated

from pydantic import AfterValidator, Field

from ...core.faults import FAULT_TRAITS, Fault, FaultKind, FaultTrigger, parse_trigger, resolve_target
from ...core.units import Duration
from .base import Table, Time

MAX_RANDOM_FAULTS = 1000
"""faults that one entry of [[faults.random]] gives at most: they lie in run_spec.json and in the journal, 80 bytes each"""


def _check_trigger(text: str) -> str:
    parse_trigger(text)
    return text


class PlannedFault(Table):
    """One fault, set off by the run itself: for demonstrations and tests."""

    kind: Annotated[FaultKind, Field(strict=False)]
    """docs/faults.md says what each does"""
    target: str = ""
    """a replica ("rollout/0"), a role (one of its replicas, drawn by the seed), "manager", "agent/NODE" or a node"""
    at: Annotated[str, AfterValidator(_check_trigger)]
    """"step=5": once the trainer has committed that step; "time=90s": after the first nodes came; "phase=train": once
    its target is in it"""
    seconds: Duration = 0.0
    """how long it lasts, for those kinds that end by themselves"""
    amount: Annotated[float, Field(ge=0)] = 0.0
    """slow: the share of time that is left to it; exit: its code; delay: ms"""


class RandomFaults(Table):
    """Faults at random moments, drawn from the seed: the same job has the same ones."""

    kinds: Annotated[tuple[Annotated[FaultKind, Field(strict=False)], ...], Field(strict=False, min_length=1)]
    """one of these each time"""
    target: str = ""
    """as for a planned one; empty: any replica of any role"""
    every: Time
    """mean time between two; there are at most 1000"""
    seconds: Duration = 0.0
    """how long each lasts"""
    amount: Annotated[float, Field(ge=0)] = 0.0
    """as for a planned one"""


class FaultsTable(Table):
    """Faults on demand. A run sets off none that its job spec does not name or allow."""

    allow: bool = False
    """whether rrl inject may hit this run"""
    seed: int = 0
    """of the random moments and targets"""
    planned: Annotated[tuple[PlannedFault, ...], Field(strict=False)] = ()
    random: Annotated[tuple[RandomFaults, ...], Field(strict=False)] = ()


def plan_faults(table: FaultsTable, replicas: Mapping[str, int], horizon: float) -> tuple[Fault, ...]:
    """Every fault of the run, drawn: ``replicas`` of each role, ``horizon`` (s) the longest that the run can be."""
    draw = random.Random(table.seed)
    planned = [
        Fault(
            f"f{i}",
            one.kind,
            resolve_target(one.target, one.kind, replicas, draw),
            parse_trigger(one.at),
            one.seconds,
            one.amount,
        )
        for i, one in enumerate(table.planned)
    ]
    for index, some in enumerate(table.random):
        at = 0.0
        for count in range(MAX_RANDOM_FAULTS):
            at += draw.expovariate(1.0 / some.every)
            if at > horizon:
                break
            kind = draw.choice(some.kinds)
            target = resolve_target(some.target, kind, replicas, draw)
            planned.append(
                Fault(f"r{index}.{count}", kind, target, FaultTrigger(time=round(at, 1)), *values_for_kind(kind, some))
            )
    return tuple(planned)


def values_for_kind(kind: FaultKind, entry: RandomFaults) -> tuple[float, float]:
    """seconds and amount of a drawn fault: what its kind does not take is for the other kinds of the entry."""
    traits = FAULT_TRAITS[kind]
    return entry.seconds if traits.takes_seconds else 0.0, entry.amount if traits.amount else 0.0
