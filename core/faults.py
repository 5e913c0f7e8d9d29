"""Faults that can be injected: their kinds, effects, permitted targets and triggers.

The simulator and the scoring of detectors use the effects; ``rrl inject`` and ``[faults]`` of job.toml use everything
else.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import StrEnum
from typing import TYPE_CHECKING

from msgspec import Struct

from . import units
from .types import AGENT, GUEST_ROLE, STANDBY_ROLE

if TYPE_CHECKING:
    import random

ANSWER_SENDING_S = 0.5
"""Seconds that a process waits after reporting a fault that will end or stop it. Without the wait, the report might not
be sent, since zmq sends in a background thread, within milliseconds."""


class Effect(StrEnum):
    """The effect of a fault, as an observer outside of the target sees it."""

    DIES = "dies"
    HANGS = "hangs"
    SLOWS = "slows"
    CUT = "cut"
    """The target runs, but nothing can reach it."""
    STORAGE = "storage"
    CLUSTER = "cluster"
    """Slurm itself does not reply."""


class FaultKind(StrEnum):
    """The kinds of faults that rrl can inject."""

    KILL = "kill"
    """SIGKILL to the process group of the role."""
    FREEZE = "freeze"
    """SIGSTOP to the process group of the role; SIGCONT after ``seconds``, if given."""
    SLOW = "slow"
    """SIGSTOP and SIGCONT ten times a second, so that the role runs for the share ``amount`` (0 to 1) of the time."""
    EXIT = "exit"
    """The role exits with code ``amount``."""
    EXCEPTION = "exception"
    """An exception is raised in the role's own code."""
    OUT_OF_MEMORY = "out_of_memory"
    """The role's next allocations fail: its address space is limited to the current size."""
    ENGINE_DEAD = "engine_dead"
    """The process runs and sends heartbeats, but does no work."""
    KILL_STEP = "kill_step"
    """SIGKILL to the process that holds the step: the role's launcher, or its slurmstepd."""
    CRASH = "crash"
    """The node is lost with everything on it."""
    CUT = "cut"
    """The node has no network for ``seconds``."""
    DELAY = "delay"
    """Each packet of the node is delayed by ``amount`` ms, for ``seconds``."""
    DISK_FULL = "disk_full"
    """The run directory's file system is full for ``seconds``."""
    OUTAGE = "outage"
    """slurmctld does not reply for ``seconds``; on a test cluster only."""


class TargetKind(StrEnum):
    """The kind of a fault's target."""

    REPLICA = "replica"
    """``role/index``, or one rank of a gang (``role/index.rank``). If the fault kind allows it, also an agent
    (``agent/<node>``), a standby process (``standby/<node>``), a guest (``guest/<node>``) or the manager
    (``manager``)."""
    NODE = "node"
    """A node, given by its name or by a replica that runs on it."""
    RUN = "run"
    """The run directory or the cluster: the fault takes no target."""


class FaultTraits(Struct, frozen=True):
    """The traits of a kind of fault: effect, kind of target, and parameters."""

    effect: Effect
    target_kind: TargetKind
    text: str
    """What happens, for people who confirm the fault; may contain ``{target}`` and ``{amount:g}``."""
    by_signals: bool = False
    """True if the agent causes the fault from outside, mostly by signals, so that agents and programs without the
    worker API can be targets too."""
    takes_seconds: bool = False
    """True if ``seconds`` may be given, after which the fault ends by itself."""
    needs_seconds: bool = False
    """True if ``seconds`` is required."""
    amount: str = ""
    """What ``Fault.amount`` means for this kind, which then requires an amount; empty if the kind takes none."""


FAULT_TRAITS: dict[FaultKind, FaultTraits] = {
    FaultKind.KILL: FaultTraits(
        Effect.DIES, TargetKind.REPLICA, "{target} gets SIGKILL, with all its processes.", by_signals=True
    ),
    FaultKind.FREEZE: FaultTraits(
        Effect.HANGS,
        TargetKind.REPLICA,
        "{target} is stopped (SIGSTOP) with all its processes.",
        by_signals=True,
        takes_seconds=True,
    ),
    FaultKind.SLOW: FaultTraits(
        Effect.SLOWS,
        TargetKind.REPLICA,
        "{target} runs only {amount:g} of the time: it is stopped and continued ten times a second.",
        by_signals=True,
        takes_seconds=True,
        amount="share of the time it runs",
    ),
    FaultKind.EXIT: FaultTraits(
        Effect.DIES, TargetKind.REPLICA, "{target} exits with code {amount:g}.", amount="exit code"
    ),
    FaultKind.EXCEPTION: FaultTraits(
        Effect.DIES, TargetKind.REPLICA, "An exception is raised in the code of {target}."
    ),
    FaultKind.OUT_OF_MEMORY: FaultTraits(
        Effect.DIES,
        TargetKind.REPLICA,
        "{target} gets no more memory: its address space is limited to its size.",
        by_signals=True,
    ),
    FaultKind.ENGINE_DEAD: FaultTraits(
        Effect.HANGS, TargetKind.REPLICA, "{target} sends heartbeats, but does no work.", takes_seconds=True
    ),
    FaultKind.KILL_STEP: FaultTraits(
        Effect.DIES, TargetKind.REPLICA, "The process that holds the step of {target} gets SIGKILL.", by_signals=True
    ),
    FaultKind.CRASH: FaultTraits(
        Effect.DIES, TargetKind.NODE, "The node {target} is lost, with everything on it.", takes_seconds=True
    ),
    FaultKind.CUT: FaultTraits(
        Effect.CUT, TargetKind.NODE, "The node {target} has no network.", takes_seconds=True, needs_seconds=True
    ),
    FaultKind.DELAY: FaultTraits(
        Effect.SLOWS,
        TargetKind.NODE,
        "Each packet of the node {target} is delayed by {amount:g} ms.",
        takes_seconds=True,
        needs_seconds=True,
        amount="ms",
    ),
    FaultKind.DISK_FULL: FaultTraits(
        Effect.STORAGE,
        TargetKind.RUN,
        "The file system of the run directory is filled up.",
        takes_seconds=True,
        needs_seconds=True,
    ),
    FaultKind.OUTAGE: FaultTraits(
        Effect.CLUSTER, TargetKind.RUN, "slurmctld does not answer.", takes_seconds=True, needs_seconds=True
    ),
}

MANAGER = "manager"
"""Target that stands for the run's manager, which can only be killed."""
SUPPORT_ROLE_KINDS = (FaultKind.KILL, FaultKind.FREEZE, FaultKind.SLOW)
"""Kinds of faults whose target can be an agent, a standby process or a guest."""
_SUPPORT_NAMES = {AGENT: "an agent", STANDBY_ROLE: "a standby process", GUEST_ROLE: "a guest"}
MAX_EXIT_CODE = 255
"""Largest exit code that a process can have."""


class FaultTrigger(Struct, frozen=True, omit_defaults=True):
    """The condition under which a fault is injected. Without any field, it is injected once its target has joined."""

    step: int | None = None
    """The training step whose commit triggers the fault."""
    time: float | None = None
    """Seconds since the run had its first nodes."""
    phase: str | None = None
    """The phase that the target must be in."""

    def __str__(self) -> str:
        conditions = {"step": self.step, "time": None if self.time is None else f"{self.time:g}s", "phase": self.phase}
        return next((f"{key}={value}" for key, value in conditions.items() if value is not None), "now")


def parse_trigger(text: str) -> FaultTrigger:
    """Parse ``step=5``, ``time=90s`` or ``phase=train``.

    Raises:
        ValueError: ``text`` is not a valid trigger; the message has the valid forms.
    """
    match = re.fullmatch(r"(step|time|phase)=(.+)", text)
    if match is None:
        raise ValueError(f'{text!r} is not a valid trigger; write "step=5", "time=90s" or "phase=train"')
    key, value = match.groups()
    if key == "phase":
        return FaultTrigger(phase=value)
    if key == "time":
        return FaultTrigger(time=units.seconds(value))
    if not re.fullmatch(r"[0-9]{1,9}", value):
        raise ValueError(f'{text!r}: a step is a whole number, as in "step=5"')
    return FaultTrigger(step=int(value))


class Fault(Struct, frozen=True, omit_defaults=True):
    """One fault: ``kind`` is injected into ``target`` once the trigger ``at`` holds."""

    id: str
    kind: FaultKind
    target: str = ""
    """``role/index``, ``role/index.rank``, ``agent/<node>``, ``standby/<node>``, ``guest/<node>``, ``manager``, or the
    name of a node."""
    at: FaultTrigger = FaultTrigger()
    seconds: float = 0.0
    """Duration in seconds; 0 means permanent."""
    amount: float = 0.0
    """Parameter of the kind: an exit code, a share of time, or ms."""
    by: str = ""
    """User who requested the fault; empty if the job spec plans it."""


def resolve_target(target: str, kind: FaultKind, replicas: Mapping[str, int], draw: random.Random) -> str:
    """Return the target with random choices filled in, or an empty text if ``kind`` takes no target.

    A role name becomes a random replica of that role, and an empty target a random replica of any role.
    """
    if FAULT_TRAITS[kind].target_kind is TargetKind.RUN:
        return ""
    role = target or draw.choice(sorted(role for role, number in replicas.items() if number))
    return f"{role}/{draw.randrange(replicas[role])}" if replicas.get(role) else target


class FaultProblem(StrEnum):
    """The kind of mistake in a requested fault."""

    NO_SECONDS = "no_seconds"
    """The kind requires ``seconds``, which were not given."""
    NO_AMOUNT = "no_amount"
    """The kind requires ``amount``, which was not given, or the given amount is out of range."""
    NO_SUCH_TARGET = "no_such_target"
    """The role, replica, rank or node does not exist."""
    OTHER = "other"


class InvalidFault(Struct, frozen=True):
    """The reason why a fault cannot be injected."""

    problem: FaultProblem
    text: str
    """What is wrong and what would be right, for people."""


def validate_fault(
    kind: FaultKind,
    target: str,
    seconds: float,
    amount: float,
    replicas: Mapping[str, int],
    at: FaultTrigger = FaultTrigger(),
    ranks: Mapping[str, int] | None = None,
) -> InvalidFault | None:
    """Return why a fault of this kind cannot be injected into that target; None if it can be injected.

    Node names are not checked, since they are unknown before the run.

    Args:
        kind: Kind of the fault.
        target: Target as in :class:`Fault`.
        seconds: Duration in seconds; 0 if it is not given.
        amount: Parameter of the kind; 0 if it is not given.
        replicas: Number of replicas of each role.
        at: Trigger of the fault.
        ranks: Number of ranks of each replica of a role; a role that is not listed has one rank.
    """
    if wrong := _invalid_numbers(kind, seconds, amount):
        return wrong
    if wrong := _invalid_target(kind, target, replicas, ranks or {}):
        return wrong
    text = _invalid_trigger(kind, target, at)
    return InvalidFault(FaultProblem.OTHER, text) if text else None


def _invalid_numbers(kind: FaultKind, seconds: float, amount: float) -> InvalidFault | None:
    traits = FAULT_TRAITS[kind]
    if traits.needs_seconds and not seconds:
        return InvalidFault(FaultProblem.NO_SECONDS, f"{kind} needs seconds: its duration")
    if seconds and not traits.takes_seconds:
        return InvalidFault(FaultProblem.OTHER, f"{kind} is permanent: it takes no seconds")
    if amount and not traits.amount:
        return InvalidFault(FaultProblem.OTHER, f"{kind} takes no amount")
    if kind is FaultKind.SLOW and not 0 < amount < 1:
        share = "the share of the time in which the target runs, between 0 and 1"
        return InvalidFault(FaultProblem.NO_AMOUNT, f"slow needs amount, {share}")
    if kind is FaultKind.EXIT and not (amount == int(amount) and 0 <= amount <= MAX_EXIT_CODE):
        return InvalidFault(FaultProblem.NO_AMOUNT, f"exit needs amount, the exit code, from 0 to {MAX_EXIT_CODE}")
    if kind is FaultKind.DELAY and not amount:
        return InvalidFault(FaultProblem.NO_AMOUNT, "delay needs amount, in ms")
    return None


def _invalid_target(
    kind: FaultKind, target: str, replicas: Mapping[str, int], ranks: Mapping[str, int]
) -> InvalidFault | None:
    traits = FAULT_TRAITS[kind]
    role, slash, _ = target.partition("/")
    if traits.target_kind is TargetKind.RUN:
        return InvalidFault(FaultProblem.OTHER, f"{kind} takes no target: it affects the whole run") if target else None
    if target == MANAGER:
        wrong = InvalidFault(FaultProblem.OTHER, f"the manager can only be the target of kill, not of {kind}")
        return None if kind is FaultKind.KILL else wrong
    if role in _SUPPORT_NAMES and slash:
        kinds = ", ".join(SUPPORT_ROLE_KINDS)
        wrong = InvalidFault(
            FaultProblem.OTHER, f"{_SUPPORT_NAMES[role]} can only be the target of {kinds}, not of {kind}"
        )
        return None if kind in SUPPORT_ROLE_KINDS else wrong
    if slash and role not in replicas:
        return InvalidFault(FaultProblem.NO_SUCH_TARGET, f'no role "{role}"; there are {", ".join(replicas)}')
    if slash:
        text = _invalid_replica(target, replicas[role], ranks.get(role, 1))
        return InvalidFault(FaultProblem.NO_SUCH_TARGET, text) if text else None
    if target in replicas and not replicas[target]:
        return InvalidFault(FaultProblem.NO_SUCH_TARGET, f"role {target} has no replicas")
    if target and target not in replicas and traits.target_kind is not TargetKind.NODE:
        known = f'there are {", ".join(replicas)}; a replica is written "rollout/0"'
        return InvalidFault(FaultProblem.NO_SUCH_TARGET, f'no role "{target}"; {known}')
    return None


def _invalid_replica(target: str, replicas: int, ranks: int) -> str:
    """Return what is wrong with a target ``role/index`` or ``role/index.rank``, or an empty text.

    Rank 0 of a gang is written ``role/index``.
    """
    role, _, index = target.partition("/")
    index, dot, rank = index.partition(".")
    if not replicas:
        return f"role {role} has no replicas"
    if not (index.isdigit() and int(index) < replicas):
        return f'no replica "{target}"; role {role} has {replicas}, the last is "{role}/{replicas - 1}"'
    if dot and not (rank.isdigit() and 0 < int(rank) < ranks):
        gang = f"{role}/{index}"
        known = f'the first is "{gang}", the last "{gang}.{ranks - 1}"' if ranks > 1 else f"{gang} is one process"
        return f'no rank "{target}"; {known}'
    return ""


def _invalid_trigger(kind: FaultKind, target: str, at: FaultTrigger) -> str:
    targets_replica = FAULT_TRAITS[kind].target_kind is TargetKind.REPLICA
    has_phases = targets_replica and target != MANAGER and not target.startswith("agent/")
    return f"at {at} needs a replica as target: only replicas have phases" if at.phase and not has_phases else ""
