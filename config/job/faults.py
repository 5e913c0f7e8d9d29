"""``[faults]`` of job.toml: the faults that a run plans for itself, and whether users may inject others."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, Field

from ...core.faults import FAULT_TRAITS, FaultKind, parse_trigger
from .base import Duration, Table, Time


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

    def values_for(self, kind: FaultKind) -> tuple[float, float]:
        """Return (seconds, amount) for a fault of ``kind``; 0 for a value that the kind does not take.

        An entry with several kinds may set values that only some of the kinds take.
        """
        traits = FAULT_TRAITS[kind]
        return self.seconds if traits.takes_seconds else 0.0, self.amount if traits.amount else 0.0


class FaultsTable(Table):
    """Fault injection. A run has only faults that its job spec plans or allows."""

    allow: bool = False
    """Whether rrl inject may inject faults into this run."""
    seed: int = 0
    """Seed of the random times and targets."""
    planned: Annotated[tuple[PlannedFault, ...], Field(strict=False)] = ()
    random: Annotated[tuple[RandomFaults, ...], Field(strict=False)] = ()
