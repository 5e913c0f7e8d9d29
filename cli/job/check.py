"""``rrl check``: validate a job spec, and show what it needs, what is doubtful, and what would be submitted.

The task is tried on this machine, and Slurm tests the jobs that would be submitted. No part of the run is started.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from ...api.preflight.job_folder import unimportable_modules
from ...api.preflight.job_preflight import checked, with_location
from ...api.preflight.notifications import notifications_text
from ...config.job.document import JobDocument, parse_setting
from ...config.job.load import job_from, resolved
from ...config.job.render import as_toml
from ...config.job.schema import Job
from ...core.types import UsageError
from ...health.detection.bounds import Bound, bounds
from ...manager.bootstrap.preview import Demand, demand
from ...transport.weights.select import UntrustedNetwork, detect_capabilities, select_transport
from ..common.output import print_json
from .detection import detection_text
from .overview import overview_text
from .task_check import TaskReport, try_task
from .task_trial import Sample


class Overview(Demand, frozen=True, kw_only=True):
    """The resources that the run requests from its cluster."""

    starts: dict[str, str]
    """Slurm's estimates of when jobs would start, by node group, as local times (ISO 8601)."""


class PlanPart(Struct, frozen=True):
    """One part of what would be submitted, as text."""

    title: str
    text: str


class TriedTask(Struct, frozen=True):
    """The result of trying the task on this machine."""

    not_tried: str
    """Why the task was not tried; empty if it was tried, or if there is no task."""
    samples: tuple[Sample, ...]


class CheckReport(Struct, frozen=True):
    """The output of ``rrl check --json``."""

    job: dict[str, Any]
    """Every key of job.toml with its value."""
    overview: Overview
    plan: tuple[PlanPart, ...]
    task: TriedTask
    detection: tuple[Bound, ...]
    """When rrl would fail a replica without progress, by role and phase."""
    warnings: tuple[str, ...]
    """Reasons for which the run may fail or wait."""


def check(
    files: Sequence[Path],
    settings: Sequence[str],
    *,
    task: bool,
    defaults: bool,
    detection: bool,
    trust: bool,
    json: bool,
) -> int:
    """Check a job spec and print the result, the most important part first; nothing is changed.

    Args:
        files: The files of the job spec.
        settings: Values of keys (``KEY=VALUE``), which replace those of the files.
        task: Whether the task is tried.
        defaults: Whether every key of the job is printed.
        detection: Whether the deadlines of each role and phase are printed.
        trust: Whether the job's folder may be used although other users can write it.
        json: Whether the result is printed as JSON, which always has every key.

    Raises:
        SpecError, UsageError: The run cannot work.
    """
    document = JobDocument(files, [parse_setting(setting) for setting in settings])
    _, job, spec, parts, found = checked(job_from(document), document, trust_folder=trust)
    plan = [*parts, ("weights", _transport_text(job))]
    if notifications := notifications_text(job):
        plan.append(("notifications", notifications))
    needs = demand(spec)
    if not json:
        _print((document.name, overview_text(spec, needs, found.starts)))
    report = try_task(job, spec, document.source) if task or job.task is None else TaskReport(not_tried="--no-task")
    if report.problem is not None:
        raise UsageError(with_location(document, report.problem))
    doubts = [*found.doubts, *unimportable_modules(document.source.absolute().parent), *report.warnings]
    plan += [("at most", found.limits)] if found.limits else []
    if json:
        overview = Overview(**msgspec.structs.asdict(needs), starts=found.starts)
        parts_of_plan = tuple(PlanPart(title, text) for title, text in plan)
        tried = TriedTask(report.not_tried, report.samples)
        print_json(CheckReport(resolved(job), overview, parts_of_plan, tried, tuple(bounds(spec)), tuple(doubts)))
        return 0
    _print(("doubts", "\n".join(f"- {doubt}" for doubt in doubts) or "none"), *plan)
    _print(*([("the task, tried on this machine", report.text)] if report.text else []))
    _print(*([("every key, also those that the job does not set", as_toml(job.without_secrets()))] if defaults else []))
    _print(*([("when a replica fails", detection_text(bounds(spec), spec.limits))] if detection else []))
    limitation = f" as far as it was checked: its task was not tried ({report.not_tried})" if report.not_tried else ""
    print(f"{document.name} is right{limitation}; nothing was submitted")
    return 0


def _print(*texts: tuple[str, str]) -> None:
    for title, text in texts:
        print(f"── {title} {'─' * max(0, 96 - len(title))}\n{text.strip()}\n", flush=True)


def _transport_text(job: Job) -> str:
    """Return a text about the weight transport that machines like this one would select."""
    try:
        choice = select_transport(job.transport.weights, detect_capabilities(), job.transport.trusted_network)
    except UntrustedNetwork as error:
        return str(error)
    return f"over {choice.kind}: {choice.reason}"
