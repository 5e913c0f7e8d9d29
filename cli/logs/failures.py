"""The failures of a run for ``rrl logs --failed``: the records of the failure timeline, each with evidence as text."""

from __future__ import annotations

from collections.abc import Iterable
from signal import Signals
from typing import NamedTuple

from ...core.launch import exit_text
from ...core.types import STACKS, Incarnation, NodeName, role_of
from ...manager.model import events as ev
from ...manager.reporting.failure_records import Failure
from ...manager.reporting.failure_timeline import FailureTimeline, fences

STACKS_WINDOW_S = 60.0
"""Maximum time (s) between a failure and the stack traces (stacks) that are shown with it."""


class FailureReport(NamedTuple):
    """A failure, and the texts of its findings, its step's end and its fence, without duplicates."""

    failure: Failure
    evidence: tuple[str, ...]


def failures(events: Iterable[ev.Stamped]) -> list[FailureReport]:
    """Return the failures in the order of their first records."""
    timeline = FailureTimeline()
    evidence: dict[Incarnation | NodeName, dict[str, None]] = {}
    with_stacks: set[Incarnation | None] = set()
    """Incarnations with a finding whose evidence already contains stacks."""
    stacks: dict[Incarnation, tuple[float, ev.StacksCollected]] = {}
    """For each incarnation, when its newest stacks were collected (s), and the event with these stacks."""
    for stamped in events:
        event = stamped.event
        for failure in timeline.apply(stamped).failures:
            lines = evidence.setdefault(failure.incarnation or failure.node, {})
            lines.update(dict.fromkeys(_lines(failure, event)))
        if isinstance(event, ev.StacksCollected):
            stacks[event.incarnation] = stamped.at, event
        elif isinstance(event, ev.FindingChanged) and any(line.source == STACKS for line in event.finding.evidence):
            with_stacks.add(event.finding.incarnation)
    reports = []
    for key, failure in timeline.failures.items():
        lines = evidence.get(key, {})
        if failure.incarnation in stacks and failure.incarnation not in with_stacks:
            at, collected = stacks[failure.incarnation]
            lines = lines if abs(at - failure.recorded_at) > STACKS_WINDOW_S else {**lines, **_stack_lines(collected)}
        reports.append(FailureReport(failure, tuple(lines)))
    return reports


def _lines(failure: Failure, event: ev.Event) -> Iterable[str]:
    """Return the lines of evidence that an event adds to a failure."""
    if isinstance(event, ev.FindingChanged):
        return [f"{event.finding.title}: {line.source}: {line.text}" for line in event.finding.evidence]
    if isinstance(event, ev.StepEnded):
        code, number = event.code, event.signal
        how = f"exit code {code}, " if code is not None else f"{_signal(number)}, " if number else ""
        return [f"its step ended: {how}{exit_text(event.reason, event.detail)}"]
    if isinstance(event, ev.IntentSettled):
        return [f"not launched: {event.detail}"]
    if isinstance(event, ev.Decided):
        finding = failure.diagnosis.finding
        listed = {line.text for line in finding.evidence} if finding is not None else set[str]()
        return [
            line
            for fence in fences(event)
            if fence.incarnation == failure.incarnation
            for line in fence.why.evidence
            if line not in listed  # the detector's lines already contain the finding's own texts
        ]
    return []


def _stack_lines(stacks: ev.StacksCollected) -> dict[str, None]:
    lines = [*stacks.groups, *([f"all stacks: {stacks.file}"] if stacks.file else [])]
    return dict.fromkeys(f"stacks: {line}" for line in lines)


def _signal(number: int) -> str:
    try:
        return f"signal {number} ({Signals(number).name})"
    except ValueError:
        return f"signal {number}"


def concerns(selector: str | None, failure: Failure) -> bool:
    """Return whether the failure concerns the selected role, replica or incarnation; True without a selector."""
    incarnation = failure.incarnation
    if selector is None or incarnation is None:
        return selector is None
    return selector in (role_of(incarnation.replica), incarnation.replica, str(incarnation))
