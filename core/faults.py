"""Faults on demand: their kinds, what each does to the world, what each may hit, and when.

The simulator and the scoring of detectors read the effect; ``rrl inject`` and ``[faults]`` of job.toml read the rest.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import StrEnum
from typing import TYPE_CHECKING

from msgspec import Struct

from .types import AGENT, STANDBY_ROLE

if TYPE_CHECKING:
    import random

ANSWER_SENDING_S = 0.5
"""Seconds between the answer to an injected fault and the end of the process that gave it: zmq sends in a thread of its
own, within ms."""


class Effect(StrEnum):
    """What the world sees of a fault."""

    DIES = "dies"
    HANGS = "hangs"
    SLOWS = "slows"
    CUT = "cut"
    """alive, and nobody reaches it"""
    STORAGE = "storage"
    CLUSTER = "cluster"
    """Slurm itself does not answer"""


class FaultKind(StrEnum):
    KILL = "kill"
    """SIGKILL to the process group of the role"""
    FREEZE = "freeze"
    """SIGSTOP to the process group of the role; SIGCONT after ``seconds``, if given"""
    SLOW = "slow"
    """stopped and continued ten times a second, so that it runs ``amount`` (a share, 0 to 1) of the time"""
    EXIT = "exit"
    """the role ends itself with exit code ``amount``"""
    EXCEPTION = "exception"
    """an exception is raised in the role's own code"""
    OUT_OF_MEMORY = "out_of_memory"
    """its next allocations fail: the address space is limited to what it has"""
    ENGINE_DEAD = "engine_dead"
    """the process lives and beats, and works no more"""
    KILL_STEP = "kill_step"
    """SIGKILL to what holds the step: the role's launcher process, or its slurmstepd"""
    CRASH = "crash"
    """the node is gone with everything on it"""
    CUT = "cut"
    """the node's network is down for ``seconds``"""
    DELAY = "delay"
    """each packet of the node comes ``amount`` ms later, for ``seconds``"""
    DISK_FULL = "disk_full"
    """the run directory's file system is full for ``seconds``"""
    OUTAGE = "outage"
    """slurmctld answers nobody for ``seconds``; on a test cluster only"""


class TargetKind(StrEnum):
    """What a fault is aimed at."""

    REPLICA = "replica"
    """``role/index``, or one rank of a gang (``role/index.rank``); an agent (``agent/<node>``), a shadow
    (``standby/<node>``) and the manager (``manager``) too, where the kind says so"""
    NODE = "node"
    """a node's name, or a replica, which stands for the node that it is on"""
    RUN = "run"
    """the run directory or the cluster: needs no target"""


class FaultTraits(Struct, frozen=True):
    effect: Effect
    target_kind: TargetKind
    by_signals: bool = False
    """it is done from outside, by signals: agents and programs without the worker API can be hit too"""
    takes_seconds: bool = False
    """it ends by itself after ``seconds``, where they are given"""
    needs_seconds: bool = False
    """it needs ``seconds``"""
    amount: str = ""
    """what ``amount`` means, which it then needs"""


FAULT_TRAITS: dict[FaultKind, FaultTraits] = {
    FaultKind.KILL: FaultTraits(Effect.DIES, TargetKind.REPLICA, by_signals=True),
    FaultKind.FREEZE: FaultTraits(Effect.HANGS, TargetKind.REPLICA, by_signals=True, takes_seconds=True),
    FaultKind.SLOW: FaultTraits(
        Effect.SLOWS, TargetKind.REPLICA, by_signals=True, takes_seconds=True, amount="share of time left to it"
    ),
    FaultKind.EXIT: FaultTraits(Effect.DIES, TargetKind.REPLICA, amount="exit code"),
    FaultKind.EXCEPTION: FaultTraits(Effect.DIES, TargetKind.REPLICA),
    FaultKind.OUT_OF_MEMORY: FaultTraits(Effect.DIES, TargetKind.REPLICA, by_signals=True),
    FaultKind.ENGINE_DEAD: FaultTraits(Effect.HANGS, TargetKind.REPLICA, takes_seconds=True),
    FaultKind.KILL_STEP: FaultTraits(Effect.DIES, TargetKind.REPLICA, by_signals=True),
    FaultKind.CRASH: FaultTraits(Effect.DIES, TargetKind.NODE, takes_seconds=True),
    FaultKind.CUT: FaultTraits(Effect.CUT, TargetKind.NODE, takes_seconds=True, needs_seconds=True),
    FaultKind.DELAY: FaultTraits(Effect.SLOWS, TargetKind.NODE, takes_seconds=True, needs_seconds=True, amount="ms"),
    FaultKind.DISK_FULL: FaultTraits(Effect.STORAGE, TargetKind.RUN, takes_seconds=True, needs_seconds=True),
    FaultKind.OUTAGE: FaultTraits(Effect.CLUSTER, TargetKind.RUN, takes_seconds=True, needs_seconds=True),
}

MANAGER = "manager"
"""The target that stands for the run's manager: it may be killed."""
SUPPORT_ROLE_KINDS = (FaultKind.KILL, FaultKind.FREEZE, FaultKind.SLOW)
"""what an agent or a shadow can be hit by"""
MAX_EXIT_CODE = 255
"""the largest exit code that a process can have"""


class FaultTrigger(Struct, frozen=True, omit_defaults=True):
    """When a fault is due; nothing set: as soon as its target works."""

    step: int | None = None
    """the trainer has committed this step"""
    time: float | None = None
    """s since the run had its first nodes"""
    phase: str | None = None
    """its target is in this phase"""

    def __str__(self) -> str:
        conditions = {"step": self.step, "time": None if self.time is None else f"{self.time:g}s", "phase": self.phase}
        return next((f"{key}={value}" for key, value in conditions.items() if value is not None), "now")


def parse_trigger(text: str) -> FaultTrigger:
    """From ``step=5``, ``time=90s`` or ``phase=train``. Raises ValueError that says what would be right."""
    match = re.fullmatch(r"(step|time|phase)=(.+)", text)
    if match is None:
        raise ValueError(f'{text!r} is no moment; write "step=5", "time=90s" or "phase=train"')
    key, value = match.groups()
    if key == "phase":
        return FaultTrigger(phase=value)
    if key == "time":
        from .units import seconds  # here, because it brings pydantic, which rrl status does without

        return FaultTrigger(time=seconds(value))
    if not re.fullmatch(r"[0-9]{1,9}", value):
        raise ValueError(f'{text!r}: a step is a whole number, as in "step=5"')
    return FaultTrigger(step=int(value))


class Fault(Struct, frozen=True, omit_defaults=True):
    """One fault: ``kind`` hits ``target`` once ``at`` has come."""

    id: str
    kind: FaultKind
    target: str = ""
    """``role/index``, ``role/index.rank``, ``agent/<node>``, ``standby/<node>``, ``manager``, or the name of a node"""
    at: FaultTrigger = FaultTrigger()
    seconds: float = 0.0
    """how long it lasts; 0: for good"""
    amount: float = 0.0
    """what the kind makes of it: an exit code, a share, ms"""
    by: str = ""
    """who ordered it; empty: the job spec"""


def resolve_target(target: str, kind: FaultKind, replicas: Mapping[str, int], draw: random.Random) -> str:
    """A target that names one thing: of a role one replica is drawn, of nothing any replica."""
    if FAULT_TRAITS[kind].target_kind is TargetKind.RUN:
        return ""
    role = target or draw.choice(sorted(replicas))
    return f"{role}/{draw.randrange(replicas[role])}" if role in replicas else target


class FaultProblem(StrEnum):
    """What is wrong with a fault that is asked for."""

    NO_SECONDS = "no_seconds"
    """its kind needs seconds"""
    NO_AMOUNT = "no_amount"
    """its kind needs an amount, or another one"""
    NO_SUCH_TARGET = "no_such_target"
    """there is no such role, replica, rank or node"""
    OTHER = "other"


class InvalidFault(Struct, frozen=True):
    """Why a fault cannot be injected."""

    problem: FaultProblem
    text: str
    """what is wrong and what would be right, for people"""


def validate_fault(
    kind: FaultKind, target: str, seconds: float, amount: float, replicas: Mapping[str, int], at: FaultTrigger = FaultTrigger(),
    ranks: Mapping[str, int] | None = None,
) -> InvalidFault | None:  # fmt: skip
    """Return why this kind cannot hit that target so; None when it can. Names of nodes are not known before the run.

    ``replicas`` of each role, and ``ranks`` of each of these, where it is not one."""
    if wrong := _invalid_numbers(kind, seconds, amount):
        return wrong
    if wrong := _invalid_target(kind, target, replicas, ranks or {}):
        return wrong
    text = _invalid_trigger(kind, target, at)
    return InvalidFault(FaultProblem.OTHER, text) if text else None


def _invalid_numbers(kind: FaultKind, seconds: float, amount: float) -> InvalidFault | None:
    traits = FAULT_TRAITS[kind]
    if traits.needs_seconds and not seconds:
        return InvalidFault(FaultProblem.NO_SECONDS, f"{kind} needs seconds: how long it lasts")
    if seconds and not traits.takes_seconds:
        return InvalidFault(FaultProblem.OTHER, f"{kind} is for good: it takes no seconds")
    if amount and not traits.amount:
        return InvalidFault(FaultProblem.OTHER, f"{kind} takes no amount")
    if kind is FaultKind.SLOW and not 0 < amount < 1:
        share = "the share of time that is left to its target, between 0 and 1"
        return InvalidFault(FaultProblem.NO_AMOUNT, f"slow needs amount, {share}")
    if kind is FaultKind.EXIT and not (amount == int(amount) and 0 <= amount <= MAX_EXIT_CODE):
        return InvalidFault(FaultProblem.NO_AMOUNT, f"exit needs amount, the exit code, from 0 to {MAX_EXIT_CODE}")
    if kind is FaultKind.DELAY and not amount:
        return InvalidFault(FaultProblem.NO_AMOUNT, "delay needs amount: ms")
    return None


def _invalid_target(
    kind: FaultKind, target: str, replicas: Mapping[str, int], ranks: Mapping[str, int]
) -> InvalidFault | None:
    traits = FAULT_TRAITS[kind]
    role, slash, _ = target.partition("/")
    if traits.target_kind is TargetKind.RUN:
        return (
            InvalidFault(FaultProblem.OTHER, f"{kind} needs no target: it is about the whole run") if target else None
        )
    if target == MANAGER:
        wrong = InvalidFault(FaultProblem.OTHER, f"the manager can only be killed, not {kind}")
        return None if kind is FaultKind.KILL else wrong
    if role in (AGENT, STANDBY_ROLE) and slash:
        who = "an agent" if role == AGENT else "a shadow"
        wrong = InvalidFault(FaultProblem.OTHER, f"{who} can only have {', '.join(SUPPORT_ROLE_KINDS)}, not {kind}")
        return None if kind in SUPPORT_ROLE_KINDS else wrong
    if slash and role not in replicas:
        return InvalidFault(FaultProblem.NO_SUCH_TARGET, f'no role "{role}"; there are {", ".join(replicas)}')
    if slash:
        text = _invalid_replica(target, replicas[role], ranks.get(role, 1))
        return InvalidFault(FaultProblem.NO_SUCH_TARGET, text) if text else None
    if target and target not in replicas and traits.target_kind is not TargetKind.NODE:
        known = f'there are {", ".join(replicas)}; a replica is written "rollout/0"'
        return InvalidFault(FaultProblem.NO_SUCH_TARGET, f'no role "{target}"; {known}')
    return None


def _invalid_replica(target: str, replicas: int, ranks: int) -> str:
    """``target`` is ``role/index``, or ``role/index.rank`` of a gang, whose first rank bears the gang's own name."""
    role, _, index = target.partition("/")
    index, dot, rank = index.partition(".")
    if not (index.isdigit() and int(index) < replicas):
        return f'no replica "{target}"; of {role} there are {replicas}, so the last one is "{role}/{replicas - 1}"'
    if dot and not (rank.isdigit() and 0 < int(rank) < ranks):
        whole = f"{role}/{index}"
        known = f'"{whole}" is its first, "{whole}.{ranks - 1}" its last' if ranks > 1 else f"{whole} is one process"
        return f'no rank "{target}"; {known}'
    return ""


def _invalid_trigger(kind: FaultKind, target: str, at: FaultTrigger) -> str:
    aimed = (
        FAULT_TRAITS[kind].target_kind is TargetKind.REPLICA and target != MANAGER and not target.startswith("agent/")
    )
    return f"at {at} needs a replica as target: only replicas have phases" if at.phase and not aimed else ""
