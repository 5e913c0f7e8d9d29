"""The findings pipeline: the stages that a finding passes from its detector or check to the journal, in order.

1. ``first_match``: for one replica or node, keep the finding with the best evidence.
2. ``blame_gang_members``: for a stalled gang, keep the finding about the member that the others wait for.
3. ``blame_trainer_for_untaken_data``: blame a trainer that seems to wait although the store has data for it.
4. ``blame_ends_of_wait_chains``: replace findings about waiting replicas by one finding about the awaited replica.
5. ``suppress_on_failed_nodes``: drop findings about the replicas of failed nodes.
6. ``await_stacks``: downgrade a hang until its stacks are collected, then add them as evidence.
7. ``apply_settings``: drop or downgrade findings that must have no consequence according to the job's ``[health]``.
8. ``correlate``: downgrade findings that many nodes or replicas have at the same time.

:func:`rrl.health.detection.detect.detect` runs stages 1 to 5 over the findings of the manager's detectors. These stages
read only the observation table, because their result is kept until an observation changes. Then the manager requests
the stacks of hangs. Stages 6 to 8 run over the findings of detectors and agents together, before these are recorded.

A stage that changes a verdict, or replaces findings by another finding, adds a line of evidence with the reason to the
remaining finding. Two kinds of findings are dropped without a trace: findings of a check that the job turned off, and
findings that working replicas explain (stages 2 and 4).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from math import inf
from typing import TypeVar

from msgspec import Struct
from msgspec.structs import replace

from ...core.run_spec import HealthSpec, Limits
from ...core.types import Cause, Evidence, Finding, Flag, NodeName, Remedy, Verdict
from .attribution import correlation
from .attribution.correlation import CorrelationContext, CorrelationState
from .attribution.gangs import blame_gang_members
from .attribution.untaken_data import blame_trainer_for_untaken_data
from .attribution.wait_chains import blame_ends_of_wait_chains
from .detectors.base import Result
from .health_monitor import HealthMonitor

TERMINAL_DETECTORS = frozenset({"exit_record", "step_gone", "node_down"})
"""Detectors that prove the end of a process or node. No setting of the job can turn off their findings."""
NON_NODE_CAUSES = frozenset({Cause.USER, Cause.SOFTWARE, Cause.PROCESS, Cause.HANG})
"""Causes that do not blame the node. A FAIL about a node with one of these causes is downgraded to WARN."""

View = TypeVar("View")


class HangStacks(Struct, frozen=True):
    """The stacks collected for one hang."""

    pending: bool
    """Whether the stacks are still being collected and a FAIL must wait for them."""
    evidence: tuple[Evidence, ...] = ()
    """Summary of the stacks; empty if none were collected for this hang."""


_NO_STACKS = HangStacks(pending=False)


class PublicationContext(Struct, frozen=True):
    """The input of the stages ``PUBLICATION_STAGES`` besides the findings."""

    now: float
    """Manager's clock (s)."""
    settings: HealthSpec = HealthSpec()
    """``[health]`` of the job."""
    stacks: Mapping[str, HangStacks] = {}
    """Stacks of each hang, by the key of the finding that reports or suspects the hang."""
    run: CorrelationContext = CorrelationContext(0)
    """The run's nodes and replicas."""
    correlation: CorrelationState = CorrelationState()
    """State of :func:`correlate` after the previous publication."""
    next_check: float = inf
    """Time (s) at which the result may change without new findings (inf if never)."""


Published = tuple[list[Finding], PublicationContext]
"""The findings after a stage, and the context, which the stage may have changed."""


# ── stages of detection ──────────────────────────────────────────────────────────────────────────────────────────────
def first_match(
    detectors: Iterable[Callable[[View, Limits, float], Result]], view: View, limits: Limits, now: float
) -> Result:
    """Return the first finding of a ladder of detectors, and the time (s) at which the result may change.

    A ladder lists detectors in the order of their evidence, best first. Detectors with weaker evidence are not
    evaluated while a detector with better evidence has a finding.
    """
    next_evaluation = inf
    for detector in detectors:
        finding, then = detector(view, limits, now)
        next_evaluation = min(next_evaluation, then)
        if finding is not None:
            return finding, next_evaluation
    return None, next_evaluation


def suppress_on_failed_nodes(findings: Sequence[Finding], monitor: HealthMonitor) -> list[Finding]:
    """Drop findings without proof about replicas on failed nodes, because these replicas are replaced anyway.

    The finding about the node names the detectors of the warnings and failures that were dropped.
    """
    failed = {finding.node for finding in findings if finding.node and finding.verdict is Verdict.FAIL}
    kept = list[Finding]()
    dropped: dict[NodeName | None, set[str]] = {}
    for finding in findings:
        node = None if finding.incarnation is None else monitor.replicas[finding.incarnation.replica].node
        if node not in failed or finding.proof:
            kept.append(finding)
        elif finding.verdict in (Verdict.WARN, Verdict.FAIL):
            dropped.setdefault(node, set()).add(finding.title)
    return [_with_dropped(finding, dropped.get(finding.node, ())) for finding in kept]


def _with_dropped(finding: Finding, detectors: Collection[str]) -> Finding:
    """Return a node's failure with a line that names the detectors whose findings were dropped because of it."""
    if not detectors or finding.verdict is not Verdict.FAIL:
        return finding
    listed = ", ".join(sorted(detectors))
    return _with_note(
        finding, "manager", f"findings about its replicas are left out, because the replicas are replaced too: {listed}"
    )


# ── stages of publication ────────────────────────────────────────────────────────────────────────────────────────────
def await_stacks(findings: Sequence[Finding], context: PublicationContext) -> Published:
    """Downgrade a FAIL without proof while the stacks of its hang are being collected, then add the stacks as evidence.

    A restart ends the processes, after which their stacks cannot be collected.
    """
    published = list[Finding]()
    for finding in findings:
        stacks = context.stacks.get(finding.key, _NO_STACKS)
        if stacks.pending and finding.verdict is Verdict.FAIL and not finding.proof:
            finding = replace(finding, verdict=Verdict.WARN, remedy=Remedy.NONE)
            published.append(_with_note(finding, "manager", "its stacks are collected before it is restarted"))
        elif stacks.evidence:
            published.append(replace(finding, evidence=(*finding.evidence, *stacks.evidence)))
        else:
            published.append(finding)
    return published, context


def apply_settings(findings: Sequence[Finding], context: PublicationContext) -> Published:
    """Drop findings of checks that the job turned off, and downgrade each FAIL that must have no consequence.

    A FAIL must have no consequence if the job only observes its check, or if it is about a node but its cause does not
    blame the node.
    """
    settings = context.settings
    return [_downgraded(finding, settings) for finding in findings if not is_off(finding, settings)], context


def is_off(finding: Finding, settings: HealthSpec) -> bool:
    """Return whether the job turned off the check or detector of this finding. ``TERMINAL_DETECTORS`` are never off."""
    return not _proves_end(finding) and settings.checks.get(finding.detector) == "off"


def _proves_end(finding: Finding) -> bool:
    return finding.proof and finding.detector in TERMINAL_DETECTORS


def _downgraded(finding: Finding, settings: HealthSpec) -> Finding:
    """Return the finding, as a WARN if it is a FAIL that must have no consequence (see `apply_settings`)."""
    if finding.verdict is not Verdict.FAIL or _proves_end(finding):
        return finding
    if finding.node is not None and finding.cause in NON_NODE_CAUSES:
        finding = replace(finding, verdict=Verdict.WARN, proof=False)
        return _with_note(
            finding, "manager", f"only a warning, because the cause ({finding.cause}) is not the node itself"
        )
    if not settings.observe_only and settings.checks.get(finding.detector, "act") == "act":
        return finding
    key = "observe_only" if settings.observe_only else "checks"
    flags = (*finding.flags, Flag.OBSERVED)
    finding = replace(finding, verdict=Verdict.WARN, remedy=Remedy.NONE, proof=False, flags=flags)
    return _with_note(finding, "job", f"observe only: no action is taken ({key} in [health])")


def correlate(findings: Sequence[Finding], context: PublicationContext) -> Published:
    """Hold back findings that many nodes or replicas have at the same time, and add a finding about their shared cause.

    This is the last stage because it compares the findings that would have consequences. It keeps a state between
    publications.
    """
    correlated, state, next_check = correlation.correlate(findings, context.run, context.correlation, context.now)
    return correlated, replace(context, correlation=state, next_check=next_check)


# ── the pipeline ─────────────────────────────────────────────────────────────────────────────────────────────────────
DETECTION_STAGES: tuple[Callable[[Sequence[Finding], HealthMonitor], list[Finding]], ...] = (
    blame_gang_members,
    blame_trainer_for_untaken_data,
    blame_ends_of_wait_chains,
    suppress_on_failed_nodes,
)
"""Stages over the findings of the manager's detectors, after :func:`first_match`."""
PUBLICATION_STAGES: tuple[Callable[[Sequence[Finding], PublicationContext], Published], ...] = (
    await_stacks,
    apply_settings,
    correlate,
)
"""Stages over all findings, before they are recorded."""
PIPELINE: tuple[Callable[..., object], ...] = (first_match, *DETECTION_STAGES, *PUBLICATION_STAGES)
"""All stages in the order in which a finding passes them."""


def attribute(findings: Sequence[Finding], monitor: HealthMonitor) -> list[Finding]:
    """Return the findings of detectors after ``DETECTION_STAGES``, in the order of their keys."""
    findings = sorted(findings, key=_key)
    for stage in DETECTION_STAGES:
        findings = stage(findings, monitor)
    return sorted(findings, key=_key)


def publish(findings: Sequence[Finding], context: PublicationContext) -> Published:
    """Return the findings to record, after ``PUBLICATION_STAGES``, and the context for the next publication."""
    for stage in PUBLICATION_STAGES:
        findings, context = stage(findings, context)
    return list(findings), context


def _key(finding: Finding) -> str:
    return finding.key


def _with_note(finding: Finding, source: str, text: str) -> Finding:
    """Return the finding with a further line of evidence, dated to the start of the finding."""
    return replace(finding, evidence=(*finding.evidence, Evidence(source, text, finding.since)))
