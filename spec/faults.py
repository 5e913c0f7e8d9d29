"""Fault kinds, and what each does to the world. The simulator and the scoring of detectors read the effect."""

from __future__ import annotations

from enum import StrEnum

from msgspec import Struct


class Effect(StrEnum):
    DIES = "dies"
    HANGS = "hangs"


class FaultKind(StrEnum):
    KILL = "kill"
    """SIGKILL to the process group of the role"""
    FREEZE = "freeze"
    """SIGSTOP to the process group of the role"""
    KILL_STEP = "kill_step"
    """SIGKILL to what holds the step: the role's launcher process, or its slurmstepd"""


EFFECT: dict[FaultKind, Effect] = {
    FaultKind.KILL: Effect.DIES,
    FaultKind.FREEZE: Effect.HANGS,
    FaultKind.KILL_STEP: Effect.DIES,
}


class Fault(Struct, frozen=True):
    """One planned fault: ``kind`` hits replica ``target`` once the trainer has committed step ``at_step``."""

    id: str
    kind: FaultKind
    target: str
    """``role/index``"""
    at_step: int
