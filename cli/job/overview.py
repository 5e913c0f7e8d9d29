"""Render the overview of ``rrl check``: nodes, jobs, GPU-hours and start of a run. The functions are pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import datetime

from ...cluster.traits import traits_of
from ...core.run_spec import RunSpec
from ...core.text import span
from ...core.types import Resources
from ...core.units import duration_text
from ...manager.bootstrap.preview import Demand
from ..views.formatting import size


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
    if traits.roles_run_here:
        yield "nodes", f"{needs.nodes} virtual on this machine{spare}"
        yield "jobs", f'none: [cluster] kind = "{spec.cluster}"'
    else:
        groups = (f"{group.nodes} of {_resources(group.node)} for {group.name}" for group in spec.node_groups)
        yield "nodes", f"{needs.nodes}{spare}: {'; '.join(groups)}"
        yield "jobs", f"{needs.jobs_to_start} to start, at most {needs.jobs} at the same time"
    yield "GPU-hours", _hours_text(spec, needs)
    if traits.takes_batch_scripts:
        yield "start", _start_text(starts, now)


def _resources(node: Resources) -> str:
    gpus = [_count(node.gpus, "GPU")] if node.gpus else []
    return ", ".join([*gpus, _count(node.cpus, "core"), size(node.mem)])


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}{'' if number == 1 else 's'}"


def _hours_text(spec: RunSpec, needs: Demand) -> str:
    """Return the maximum number of GPU-hours, or of core-hours for a run without GPUs."""
    walltime = duration_text(spec.walltime)
    if needs.gpus:
        return f"at most {needs.gpu_hours:.0f}: {_count(needs.gpus, 'GPU')} for {walltime}"
    return f"none; at most {needs.core_hours:.0f} core-hours: {_count(needs.cpus, 'core')} for {walltime}"


def _start_text(starts: Mapping[str, str], now: datetime) -> str:
    """Return Slurm's estimates of the start as text, one for each job."""
    if not starts:
        return "Slurm gives no estimate"
    texts = []
    for job, start in starts.items():
        seconds = (datetime.fromisoformat(start) - now).total_seconds()
        texts.append(f"{job} {start} ({'now' if seconds < 60 else f'in {span(seconds)}'})")
    return f"Slurm estimates {', '.join(texts)}"
