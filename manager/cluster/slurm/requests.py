"""Translate allocation requests into Slurm's options and batch scripts, and read from ``sinfo`` what each partition
offers. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from msgspec import Struct

from ....core.run_spec import Resources
from ....core.units import seconds
from ....slurm_templates.render import allocation_options, allocation_script
from ..base import AllocationRequest, NodeState
from .parsing import Unreadable, node_state, records

SHAPES_FORMAT = ("%P", "%D", "%c", "%m", "%G", "%T", "%l", "%s")
"""for ``sinfo -e -h -o``: partition, nodes of one kind, CPUs, MiB, gres, state, longest time, nodes a job may have"""


class Shape(Struct, frozen=True):
    """So many nodes of one kind."""

    count: int
    node: Resources
    usable: bool
    """up, not down or drained now"""


class Partition(Struct, frozen=True):
    name: str
    default: bool
    shapes: tuple[Shape, ...]
    max_walltime_s: float
    """s that a job may ask for; inf"""
    max_nodes: float
    """nodes that a job may have; inf"""

    def fitting(self, node: Resources, usable: bool = False) -> int:
        """How many nodes could carry ``node``; ``usable``: of those that are up."""
        return sum(shape.count for shape in self.shapes if _fits(shape.node, node) and (shape.usable or not usable))

    def missing_resource(self, node: Resources) -> str:
        """The key of job.toml that no node here is large enough for: ``cpus``, ``gpus`` or ``mem``."""
        for key in ("gpus", "mem", "cpus"):
            if all(getattr(shape.node, key) < getattr(node, key) for shape in self.shapes):
                return key
        return "cpus"

    def description(self) -> str:
        kinds = {(shape.node.cpus, shape.node.gpus, shape.node.mem): 0 for shape in self.shapes}
        for shape in self.shapes:
            kinds[shape.node.cpus, shape.node.gpus, shape.node.mem] += shape.count
        return (
            ", ".join(f"{count} of {resources_text(Resources(*kind))}" for kind, count in kinds.items()) or "no nodes"
        )


def read_partitions(text: str) -> list[Partition]:
    """Raises Unreadable."""
    rows: dict[str, list[list[str]]] = {}
    for record in records(text, len(SHAPES_FORMAT)):
        rows.setdefault(record[0], []).append(record[1:])
    partitions = []
    for name, lines in rows.items():
        try:
            shapes = tuple(_shape(*line[:5]) for line in lines)
            max_nodes = lines[0][6].rpartition("-")[2]
            limit = float("inf") if max_nodes in ("infinite", "UNLIMITED") else float(max_nodes)
            partitions.append(Partition(name.rstrip("*"), name.endswith("*"), shapes, seconds_of(lines[0][5]), limit))
        except ValueError as error:
            raise Unreadable(f"partition {name}: {error}") from error
    return partitions


def gpus_by_type(gres: str) -> dict[str, int]:
    """GPUs of a node, from ``gpu:h100:8(S:0-1),gpu:2,shard:16`` or ``(null)``: type → count."""
    gpus: dict[str, int] = {}
    for one in re.sub(r"\([^)]*\)", "", gres).split(","):
        if match := re.fullmatch(r"gpu(?::([^:]+?))??(?::(\d+))?", one):
            kind = match[1] or ""
            gpus[kind] = gpus.get(kind, 0) + int(match[2] or 1)
    return gpus


def seconds_of(text: str) -> float:
    """From ``infinite``, ``30:00``, ``12:00:00`` or ``1-00:00:00`` (squeue(1)). Raises ValueError."""
    return float("inf") if text in ("infinite", "UNLIMITED", "n/a") else float(seconds(text))


def eligible(partitions: list[Partition], options: Mapping[str, str]) -> list[Partition]:
    """Those that a job with these sbatch options may run in."""
    names = [name for name in options.get("partition", "").split(",") if name]
    return [one for one in partitions if (one.name in names if names else one.default)]


def required_resources(request: AllocationRequest) -> Resources:
    """What each node must carry; GPUs that the job spec asks for by an sbatch option are left to Slurm."""
    gpus = 0 if "gres" in request.sbatch else request.node.gpus
    return Resources(request.node.cpus, gpus, request.node.mem)


def resources_text(node: Resources) -> str:
    gpus = f", {node.gpus} GPUs" if node.gpus else ""
    return f"{node.cpus} CPUs, {node.mem / 2**20:g} MiB{gpus}"


def _shape(count: str, cpus: str, mem: str, gres: str, state: str) -> Shape:
    node = Resources(int(cpus), sum(gpus_by_type(gres).values()), int(mem) * 2**20)
    return Shape(int(count), node, node_state(state) is NodeState.UP)


def _fits(has: Resources, node: Resources) -> bool:
    return has.cpus >= node.cpus and has.gpus >= node.gpus and has.mem >= node.mem


def request_options(request: AllocationRequest) -> tuple[str, ...]:
    """Of one component, its ``more`` left aside. Raises ValueError for an option that cannot be passed on."""
    return allocation_options(
        tag=request.tag, comment=f"{request.comment} {request.tag}".strip(), nodes=request.count, node=request.node,
        walltime=request.walltime, exclude=request.exclude, extra=request.sbatch,
    )  # fmt: skip


def batch_script(request: AllocationRequest, command: Sequence[str] = (), output: str = "") -> str:
    """The batch script of an ask with all its components; ``command`` runs in it, and writes to ``output``, unless the
    job spec says where. Raises ValueError."""
    first, *more = (request_options(one) for one in (request, *request.further_components))
    if output and "output" not in request.sbatch:
        first = (*first, f"--output={output}")
    return allocation_script(first, *more, command=command)
