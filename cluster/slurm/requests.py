"""Translate allocation requests into Slurm's options and scripts, and parse what each partition offers. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from msgspec import Struct

from ...core.types import Resources
from ...core.units import seconds
from ...slurm_templates.render import allocation_options, allocation_script
from ..base import AllocationRequest
from .node_states import takes_jobs
from .parsing import Unreadable, gpus_by_type, records

SHAPES_FORMAT = ("%P", "%D", "%c", "%m", "%G", "%T", "%l", "%s", "%a", "%M")
"""Fields for ``sinfo -e -h -o``: partition, number of nodes of one shape, CPUs, MiB, gres, state, time limit, nodes per
job, availability, preemption mode."""


class Shape(Struct, frozen=True):
    """A number of nodes of a partition that have the same resources and state."""

    count: int
    node: Resources
    gpus: dict[str, int]
    """Number of the node's GPUs by type; '' is the type of untyped GPUs."""
    usable: bool
    """True if Slurm starts jobs on the nodes, now or later, without a person's help."""


class Partition(Struct, frozen=True):
    """A partition as ``sinfo`` describes it: its nodes and the limits of a job in it."""

    name: str
    default: bool
    shapes: tuple[Shape, ...]
    max_walltime_s: float
    """Longest time limit of a job, in seconds; inf if unlimited."""
    max_nodes: float
    """Maximum number of nodes of a job; inf if unlimited."""
    up: bool
    preempted: bool
    """Whether its jobs may be preempted (PreemptMode other than OFF)."""

    @property
    def usable(self) -> tuple[Shape, ...]:
        """Return the shapes on whose nodes Slurm starts jobs (:func:`.node_states.takes_jobs`)."""
        return tuple(shape for shape in self.shapes if shape.usable)

    def fitting(self, node: Resources, usable: bool = False) -> int:
        """Return the number of nodes, or with ``usable`` of usable nodes, that have at least these resources."""
        return sum(shape.count for shape in (self.usable if usable else self.shapes) if _fits(shape.node, node))

    def missing_resource(self, node: Resources) -> str:
        """Return the key in job.toml (``cpus``, ``gpus`` or ``mem``) of a resource that no node has enough of.

        If each resource suffices on some node, but no node has enough of all resources, return ``cpus``.
        """
        for key in ("gpus", "mem", "cpus"):
            if all(getattr(shape.node, key) < getattr(node, key) for shape in self.shapes):
                return key
        return "cpus"

    def description(self) -> str:
        """Return a text with the number and the resources of the partition's nodes."""
        kinds = {(shape.node.cpus, shape.node.gpus, shape.node.mem): 0 for shape in self.shapes}
        for shape in self.shapes:
            kinds[shape.node.cpus, shape.node.gpus, shape.node.mem] += shape.count
        texts = [f"{count} of {resources_text(Resources(*kind))}" for kind, count in kinds.items()]
        return ", ".join(texts) or "no nodes"


def read_partitions(text: str) -> list[Partition]:
    """Parse the output of ``sinfo`` in :data:`SHAPES_FORMAT`. Raises Unreadable."""
    rows: dict[str, list[list[str]]] = {}
    for record in records(text, len(SHAPES_FORMAT)):
        rows.setdefault(record[0], []).append(record[1:])
    partitions = []
    for name, lines in rows.items():
        try:
            shapes = tuple(_shape(*line[:5]) for line in lines)
            max_nodes = lines[0][6].rpartition("-")[2]
            limit = float("inf") if max_nodes in ("infinite", "UNLIMITED") else float(max_nodes)
            *_, max_time, _, available, preemption = lines[0]
            up, preempted = available == "up", preemption.upper() not in ("OFF", "N/A")
            partitions.append(
                Partition(name.rstrip("*"), name.endswith("*"), shapes, seconds_of(max_time), limit, up, preempted)
            )
        except ValueError as error:
            raise Unreadable(f"partition {name}: {error}") from error
    return partitions


def seconds_of(text: str) -> float:
    """Return a duration such as ``infinite``, ``30:00`` or ``1-00:00:00`` (squeue(1)) in seconds. Raises ValueError."""
    return float("inf") if text in ("infinite", "UNLIMITED", "n/a") else float(seconds(text))


def eligible(partitions: Iterable[Partition], options: Mapping[str, str]) -> list[Partition]:
    """Return the partitions in which a job with these sbatch options may run."""
    names = [name for name in options.get("partition", "").split(",") if name]
    return [partition for partition in partitions if (partition.name in names if names else partition.default)]


def required_resources(request: AllocationRequest) -> Resources:
    """Return the resources that each node must have; without GPUs if the sbatch option ``gres`` is set."""
    gpus = 0 if "gres" in request.sbatch else request.node.gpus
    return Resources(request.node.cpus, gpus, request.node.mem)


def resources_text(node: Resources) -> str:
    """Return a text that describes the resources of a node."""
    gpus = f", {node.gpus} GPUs" if node.gpus else ""
    return f"{node.cpus} CPUs, {node.mem / 2**20:g} MiB{gpus}"


def _shape(count: str, cpus: str, mem: str, gres: str, state: str) -> Shape:
    gpus = gpus_by_type(gres)
    node = Resources(int(cpus), sum(gpus.values()), int(mem) * 2**20)
    return Shape(int(count), node, gpus, takes_jobs(state))


def _fits(has: Resources, node: Resources) -> bool:
    return has.cpus >= node.cpus and has.gpus >= node.gpus and has.mem >= node.mem


def request_options(request: AllocationRequest) -> tuple[str, ...]:
    """Return the sbatch options of one component, without the options of its further components.

    Raises:
        ValueError: an sbatch option of the job spec cannot be passed on.
    """
    return allocation_options(
        tag=request.tag,
        comment=f"{request.comment} {request.tag}".strip(),
        nodes=request.count,
        node=request.node,
        walltime=request.walltime,
        exclude=request.exclude,
        extra=request.sbatch,
    )


def batch_script(request: AllocationRequest, command: Sequence[str] = (), output: str = "") -> str:
    """Return the batch script of a request; with ``further_components`` it submits a heterogeneous job.

    Args:
        request: the request for the first component; its ``further_components`` are the others.
        command: command that the script runs on the first node; if empty, the script only holds the nodes.
        output: file for the script's output, unless the job spec names one.

    Raises:
        ValueError: an sbatch option of the job spec cannot be passed on.
    """
    first, *further = (request_options(component) for component in (request, *request.further_components))
    if output and "output" not in request.sbatch:
        first = (*first, f"--output={output}")
    return allocation_script(first, *further, command=command)
