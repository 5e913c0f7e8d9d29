"""``rrl check``: validate a job spec, and show what it needs, what is doubtful, and what would be submitted.

The task is tried on this machine, and Slurm tests the jobs that would be submitted. No part of the run is started.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from ...api.preflight.job_folder import unimportable_modules
from ...api.preflight.job_preflight import checked, with_location
from ...api.preflight.layouts import lending_text
from ...api.preflight.memory import memory_text
from ...api.preflight.notifications import notifications_text
from ...cluster.traits import traits_of
from ...config.job.document import JobDocument, parse_setting
from ...config.job.load import job_from, resolved
from ...config.job.render import as_toml
from ...config.job.schema import Job
from ...config.job.validation import extras_of_step
from ...config.model_size import weight_count
from ...core.run_spec import Limits, RunSpec
from ...core.text import plural, span
from ...core.types import Resources, UsageError
from ...core.units import duration_text
from ...health.detection.bounds import Bound, bounds
from ...health.detection.detectors.base import SLOW_START_FACTOR, silence_limit
from ...manager.bootstrap.preview import Demand, demand, most_nodes, pool_lines
from ...transport.weights.select import UntrustedNetwork, detect_capabilities, select_transport
from ..common.output import print_json
from ..views.formatting import size
from .task_check import TaskReport, try_task
from .task_trial import Sample

LARGE_VERSION_BYTES = 2**27
"""Size in bytes of a version that takes a second at 1 Gbit/s."""


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
    plan = [*parts, ("weights", "\n".join([_transport_text(job), *_dtype_text(job, spec)]))]
    if job.sampling.extras:
        plan.append(("extras", _extras_text(job, spec)))
    if memory := memory_text(spec):
        plan.append(("memory of the trainer", memory))
    if lending := lending_text(spec):
        plan.append(("lending", lending))
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


def _extras_text(job: Job, spec: RunSpec) -> str:
    """Return a text about the size of the extras, in messages, on the shared storage and in the store's memory."""
    sampling, per_step = job.sampling, extras_of_step(job.sampling)
    answers, steps = sampling.prompts_per_step * sampling.group_size, spec.steps_in_store
    lines = [
        f"{name:13} {extra.per_token} bytes a token, beside 8 bytes of its id and log-probability"
        if extra.per_token is not None
        else f"{name:13} up to {size(extra.per_trajectory or 0)} a trajectory"
        for name, extra in sampling.extras.items()
    ]
    lines.append(
        f"a step of {answers} answers of {sampling.max_new_tokens} tokens: up to {size(per_step)}, and extras_limit is"
        f" {size(sampling.extras_limit)}; the store holds up to {steps} steps: {size(steps * per_step)}"
    )
    return "\n".join(lines)


def _transport_text(job: Job) -> str:
    """Return a text about the weight transport that machines like this one would select."""
    try:
        choice = select_transport(job.transport.weights, detect_capabilities(), job.transport.trusted_network)
    except UntrustedNetwork as error:
        return str(error)
    return f"over {choice.kind}: {choice.reason}"


def _dtype_text(job: Job, spec: RunSpec) -> Iterator[str]:
    """Yield a line about what versions in bfloat16 would save, if versions in float32 take noticeable time.

    The shares of changed bytes were measured with the trainer's Learner on SmolLM2-135M. The dtype in which a trainer
    of the user's own publishes is not known.
    """
    own = job.task is None or job.roles.trainer.command is not None
    if own or spec.model.dtype != "float32" or not job.transport.delta:
        return
    nbytes = 4 * weight_count(spec.model)  # 0 if this machine does not have the folder
    if not nbytes or nbytes >= LARGE_VERSION_BYTES:
        versions = f"{size(nbytes)} a version" if nbytes else "versions"
        yield (
            f'{versions} in float32; [model] dtype = "bfloat16" halves this, and deltas send 1 to 4 % of that at a'
            " learning rate of 1e-6, 3 to 6 % at 1e-5 (in float32 nearly all values change)"
        )


_HEAD = ("role", "phase", "loads", "first pass", "later", "because")


def detection_text(bounds: Sequence[Bound], limits: Limits) -> str:
    """Return a table of the bounds, after the deadlines that all replicas have."""
    rows = [_HEAD, *_rows(bounds)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEAD) - 1)]
    lines = ["  ".join([*map(str.ljust, row, widths), row[-1]]) for row in rows]
    return "\n".join([*deadlines_of_all(limits), "", *lines])


def deadlines_of_all(limits: Limits) -> Iterator[str]:
    """Yield a line about each deadline that does not depend on the phase."""
    yield f"An end of a process is found at once, silence after {span(silence_limit(limits))} without a heartbeat."
    yield (
        f"A start fails {span(limits.join)} after its agent last found it running without having joined,"
        f" {span(SLOW_START_FACTOR * limits.join)} after its launch at the latest."
    )
    yield (
        "Without progress a replica fails after these times: in the first pass of an incarnation, and once passes are"
        " known, if none took long (longer ones extend it)."
    )


def _rows(bounds: Sequence[Bound]) -> Iterator[tuple[str, ...]]:
    role = phase = ""
    for bound in bounds:
        same_role = bound.role == role
        same_phase = same_role and bound.phase == phase
        role, phase = bound.role, bound.phase
        times = ("never" if seconds is None else span(seconds) for seconds in (bound.first_s, bound.later_s))
        yield "" if same_role else role, "" if same_phase else phase, bound.condition, *times, bound.rule


def overview_text(spec: RunSpec, needs: Demand, starts: Mapping[str, str], now: datetime | None = None) -> str:
    """Return one line each about nodes, jobs, hours and the start.

    Args:
        spec: The run spec.
        needs: The resources that the run requests from its cluster.
        starts: Slurm's estimates of the start, by job, as local times (ISO 8601).
        now: The local time; default: the current time.
    """
    return "\n".join(f"{name:11}{text}" for name, text in _lines(spec, needs, starts, now or datetime.now()))


def _lines(spec: RunSpec, needs: Demand, starts: Mapping[str, str], now: datetime) -> Iterator[tuple[str, str]]:
    yield "run", f"{spec.name}, {spec.steps} steps" if spec.steps else f"{spec.name}, until its commands are complete"
    traits = traits_of(spec.cluster)
    spare = f", {needs.spares} of them spare" if needs.spares else ""
    at_most = "at most " if needs.nodes > spec.nodes else ""
    if traits.roles_run_here:
        yield "nodes", f"{at_most}{needs.nodes} virtual on this machine{spare}"
        yield "jobs", f'none: [cluster] kind = "{spec.cluster}"'
    else:
        groups = (f"{most_nodes(spec, one)} of {_resources(one.node)} for {one.name}" for one in spec.node_groups)
        yield "nodes", f"{at_most}{needs.nodes}{spare}: {'; '.join(groups)}"
        yield "jobs", f"{needs.jobs_to_start} to start, at most {needs.jobs} at the same time"
    for index, line in enumerate(pool_lines(spec)):
        yield "" if index else "pools", line
    yield "GPU-hours", _hours_text(spec, needs)
    if traits.takes_batch_scripts:
        yield "start", _start_text(starts, now)


def _resources(node: Resources) -> str:
    gpus = [plural(node.gpus, "GPU")] if node.gpus else []
    return ", ".join([*gpus, plural(node.cpus, "core"), size(node.mem)])


def _hours_text(spec: RunSpec, needs: Demand) -> str:
    """Return the maximum number of GPU-hours, or of core-hours for a run without GPUs."""
    walltime = duration_text(spec.walltime)
    if needs.nodes > spec.nodes:  # an elastic pool does not have all its nodes for the whole walltime
        return f"at most {needs.gpu_hours:.0f}" if needs.gpus else f"none; at most {needs.core_hours:.0f} core-hours"
    if needs.gpus:
        return f"at most {needs.gpu_hours:.0f}: {plural(needs.gpus, 'GPU')} for {walltime}"
    return f"none; at most {needs.core_hours:.0f} core-hours: {plural(needs.cpus, 'core')} for {walltime}"


def _start_text(starts: Mapping[str, str], now: datetime) -> str:
    """Return Slurm's estimates of the start as text, one for each job."""
    if not starts:
        return "Slurm gives no estimate"
    texts = []
    for job, start in starts.items():
        seconds = (datetime.fromisoformat(start) - now).total_seconds()
        texts.append(f"{job} {start} ({'now' if seconds < 60 else f'in {span(seconds)}'})")
    return f"Slurm estimates {', '.join(texts)}"
