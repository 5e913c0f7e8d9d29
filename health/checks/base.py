"""What a check is, and what it says when it looks once. Whether that condemns, :mod:`rrl.health.checks.evaluate`
says."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from msgspec import Struct

from ...config.health_rules import Rules
from ...core.types import Cause, Flag, Remedy, Verdict
from .node_state import NodeState


class Problem(Struct, frozen=True):
    """Something is wrong now. Texts never carry running numbers: an unchanged situation is an equal finding."""

    verdict: Verdict
    """WARN or FAIL"""
    cause: Cause
    remedy: Remedy
    text: tuple[str, ...]
    component: str = ""
    proof: bool = False
    """this one look is enough to condemn, and nobody needs a second opinion"""
    failures_to_raise: int | None = None
    """looks in a row before it is told; None: as the rules say for FAIL, one for WARN"""
    passes_to_clear: int | None = None
    """looks without it before it is forgotten; None: as the rules say"""
    at: float | None = None
    """when it began, where the reading tells (s)"""
    source: str = ""
    """of the evidence; empty: the check's first reader"""
    flags: tuple[Flag, ...] = ()
    """of the finding that is made of it"""


class Unknown(Struct, frozen=True):
    """It cannot be judged, and why. ``decides``: the node is then UNKNOWN too, if nothing worse is found."""

    reason: str
    makes_node_unknown: bool = False
    components: tuple[str, ...] = ()
    """of the node, that were not looked at: what is known of them stays"""


class Passed(Struct, frozen=True):
    """Words for a check that found nothing wrong."""

    text: str


CheckResult = Problem | Unknown | Passed
CheckFunction = Callable[[NodeState, Rules, float], Iterable[CheckResult]]


class Check(Struct, frozen=True):
    name: str
    readers: tuple[str, ...]
    run: CheckFunction
    description: str
    """one line for docs/health.md: what is looked at"""
    failure_description: str
    """when it is WARN or FAIL, and what is then done"""
    threshold_source: str
    """of its thresholds"""
    any_reader: bool = False
    """one of its readers is enough"""
    triggers: tuple[str, ...] = ()
    """what counts as a look, in :attr:`Seen.turn`; empty: each reading of its readers"""


def warn(cause: Cause, remedy: Remedy, *text: str, component: str = "", **details: object) -> Problem:
    return Problem(Verdict.WARN, cause, remedy, text, component, **details)  # type: ignore[arg-type]


def fail(cause: Cause, remedy: Remedy, *text: str, component: str = "", **details: object) -> Problem:
    return Problem(Verdict.FAIL, cause, remedy, text, component, **details)  # type: ignore[arg-type]
