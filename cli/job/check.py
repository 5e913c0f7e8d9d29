"""``rrl check``: validate a job spec, and show what it needs, what is doubtful, and what would be submitted.

The task is tried on this machine, and Slurm tests the jobs that would be submitted. No part of the run is started.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from ...api.preflight.job_preflight import checked, with_location
from ...api.preflight.notifications import notifications_text
from ...config.job.document import JobDocument, parse_setting
from ...config.job.load import job_from, resolved
from ...config.job.render import as_toml
from ...config.job.schema import Job
from ...core.types import UsageError
from ...manager.bootstrap.preview import demand
from ...transport.weights.select import UntrustedNetwork, detect_capabilities, select_transport
from ..common.output import print_json
from .overview import overview_text
from .task_check import TaskReport, try_task


def check(files: Sequence[Path], settings: Sequence[str], *, task: bool, defaults: bool, json: bool) -> int:
    """Check a job spec and print the result, what matters first; nothing is changed.

    Args:
        files: The files of the job spec.
        settings: Values of keys (``KEY=VALUE``), which replace those of the files.
        task: Whether the task is tried.
        defaults: Whether every key of the job is printed.
        json: Whether the result is printed as JSON, which always has every key.

    Raises:
        SpecError, UsageError: The run cannot work.
    """
    document = JobDocument(files, [parse_setting(setting) for setting in settings])
    _, job, spec, parts, found = checked(job_from(document), document)
    plan = [*parts, ("weights", _transport_text(job))]
    if notifications := notifications_text(job):
        plan.append(("notifications", notifications))
    needs = demand(spec)
    if not json:
        _print((document.name, overview_text(spec, needs, found.starts)))
    report = try_task(job, spec, document.source) if task or job.task is None else TaskReport(not_tried="--no-task")
    if report.problem is not None:
        raise UsageError(with_location(document, report.problem))
    doubts = [*found.doubts, *report.warnings]
    plan += [("at most", found.limits)] if found.limits else []
    if json:
        shown = [{"title": title, "text": text} for title, text in plan]
        tried = {"not_tried": report.not_tried, "samples": report.samples}
        overview = msgspec.to_builtins(needs) | {"starts": found.starts}
        print_json({"job": resolved(job), "overview": overview, "plan": shown,
                    "task": msgspec.to_builtins(tried), "warnings": doubts})  # fmt: skip
        return 0
    _print(("doubts", "\n".join(f"- {doubt}" for doubt in doubts) or "none"), *plan)
    _print(*([("the task, tried on this machine", report.text)] if report.text else []))
    _print(*([("every key, also those that the job does not set", as_toml(job.without_secrets()))] if defaults else []))
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
