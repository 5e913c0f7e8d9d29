"""Types of the node checks: a check and the results of one run of it.

:mod:`rrl.health.checks.evaluate` decides which results become findings.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from msgspec import Struct

from ...config.health_rules import Rules
from ...core.types import Cause, Flag, Remedy, Verdict
from .node_state import NodeState


class Problem(Struct, frozen=True):
    """A fault that one run of a check found.

    The text must not contain values that change from run to run, because an unchanged situation must give an equal
    finding.
    """

    verdict: Verdict
    """WARN or FAIL."""
    cause: Cause
    remedy: Remedy
    text: tuple[str, ...]
    """Evidence lines."""
    component: str = ""
    """Part of the node that has the problem, such as a GPU's UUID or a port; empty for the whole node."""
    proof: bool = False
    """Whether a single run that finds the problem suffices for a FAIL."""
    failures_to_raise: int | None = None
    """Number of runs in a row that must find the problem before its finding has this verdict. If None, the number is
    ``rules.hysteresis.bad`` for FAIL and 1 for WARN."""
    passes_to_clear: int | None = None
    """Number of runs in a row without the problem that clear the finding. If None, the number is
    ``rules.hysteresis.good``."""
    at: float | None = None
    """Time (s) at which the problem began; None if the sample does not contain this time."""
    source: str = ""
    """Reader that the evidence names as its source; if empty, the check's first reader."""
    flags: tuple[Flag, ...] = ()
    """Flags of the resulting finding."""


class Unknown(Struct, frozen=True):
    """Result of a check that could not judge the node, or some components of it."""

    reason: str
    """Why the node or the components could not be judged."""
    makes_node_unknown: bool = False
    """Whether the node's overall verdict becomes UNKNOWN too, unless a check finds something worse."""
    components: tuple[str, ...] = ()
    """Components that were not judged; their earlier results remain valid."""


class Passed(Struct, frozen=True):
    """The text that a check without problems reports instead of "nothing wrong"."""

    text: str


CheckResult = Problem | Unknown | Passed
CheckFunction = Callable[[NodeState, Rules, float], Iterable[CheckResult]]


class Check(Struct, frozen=True):
    """One node check and its description for docs/health.md."""

    name: str
    """Name of the check, used as `Finding.detector` and in the rules."""
    readers: tuple[str, ...]
    """Readers whose samples the check uses."""
    run: CheckFunction
    """Function that evaluates the node state."""
    description: str
    """One line about what the check examines."""
    failure_description: str
    """Conditions for WARN and FAIL, and the action that follows."""
    threshold_source: str
    """Project or document that the thresholds come from."""
    any_reader: bool = False
    """Whether the check can run if only some of its readers returned data."""
    triggers: tuple[str, ...] = ()
    """Keys of `NodeState.reading_counts` whose increase triggers a run of the check. If empty, each sample of `readers`
    and each increase of `NodeState.external_updates` triggers a run."""


def warn(cause: Cause, remedy: Remedy, *text: str, component: str = "", **details: object) -> Problem:
    """Return a `Problem` with verdict WARN."""
    return Problem(Verdict.WARN, cause, remedy, text, component, **details)  # type: ignore[arg-type]


def fail(cause: Cause, remedy: Remedy, *text: str, component: str = "", **details: object) -> Problem:
    """Return a `Problem` with verdict FAIL."""
    return Problem(Verdict.FAIL, cause, remedy, text, component, **details)  # type: ignore[arg-type]
