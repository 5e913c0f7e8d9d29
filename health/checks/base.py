"""What a check is, and what it says when it looks once. Whether that condemns, :mod:`rrl.health.checks.evaluate`
says."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from msgspec import Struct

from ...config.health_rules import Rules
from ...core.types import Cause, Flag, Remedy, Verdict
from .node_state import Seen


class Bad(Struct, frozen=True):
    """Something is wrong now. Texts never carry running numbers: an unchanged situation is an equal finding."""

    verdict: Verdict
    """WARN or FAIL"""
    cause: Cause
    remedy: Remedy
    text: tuple[str, ...]
    part: str = ""
    proof: bool = False
    """this one look is enough to condemn, and nobody needs a second opinion"""
    needs: int | None = None
    """looks in a row before it is told; None: as the rules say for FAIL, one for WARN"""
    clears: int | None = None
    """looks without it before it is forgotten; None: as the rules say"""
    at: float | None = None
    """when it began, where the reading tells (s)"""
    source: str = ""
    """of the evidence; empty: the check's first reader"""
    flags: tuple[Flag, ...] = ()
    """of the finding that is made of it"""


class Unknown(Struct, frozen=True):
    """It cannot be judged, and why. ``decides``: the node is then UNKNOWN too, if nothing worse is found."""

    why: str
    decides: bool = False
    parts: tuple[str, ...] = ()
    """of the node, that were not looked at: what is known of them stays"""


class Good(Struct, frozen=True):
    """Words for a check that found nothing wrong."""

    text: str


Said = Bad | Unknown | Good
Look = Callable[[Seen, Rules, float], Iterable[Said]]


class Check(Struct, frozen=True):
    name: str
    readers: tuple[str, ...]
    look: Look
    what: str
    """one line for docs/health.md: what is looked at"""
    bad: str
    """when it is WARN or FAIL, and what is then done"""
    source: str
    """of its thresholds"""
    any_reader: bool = False
    """one of its readers is enough"""
    turns: tuple[str, ...] = ()
    """what counts as a look, in :attr:`Seen.turn`; empty: each reading of its readers"""


def warn(cause: Cause, remedy: Remedy, *text: str, part: str = "", **more: object) -> Bad:
    return Bad(Verdict.WARN, cause, remedy, text, part, **more)  # type: ignore[arg-type]


def fail(cause: Cause, remedy: Remedy, *text: str, part: str = "", **more: object) -> Bad:
    return Bad(Verdict.FAIL, cause, remedy, text, part, **more)  # type: ignore[arg-type]
