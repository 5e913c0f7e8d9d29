"""What each partition could give, whatever it gives now: pure, over ``sinfo``'s text."""

from __future__ import annotations

import re
from collections.abc import Mapping

from msgspec import Struct

from rrl.manager.cluster import Ask, NodeState
from rrl.manager.cluster.slurm_text import Unreadable, node_state, records
from rrl.spec.jobview import Resources

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
    longest: float
    """s that a job may ask for; inf"""
    most: float
    """nodes that a job may have; inf"""

    def fitting(self, node: Resources, usable: bool = False) -> int:
        """How many nodes could carry ``node``; ``usable``: of those that are up."""
        return sum(shape.count for shape in self.shapes if _holds(shape.node, node) and (shape.usable or not usable))

    def lacks(self, node: Resources) -> str:
        """The key of job.toml that no node here is large enough for: ``cpus``, ``gpus`` or ``mem``."""
        for key in ("gpus", "mem", "cpus"):
            if all(getattr(shape.node, key) < getattr(node, key) for shape in self.shapes):
                return key
        return "cpus"

    def told(self) -> str:
        kinds = {(shape.node.cpus, shape.node.gpus, shape.node.mem): 0 for shape in self.shapes}
        for shape in self.shapes:
            kinds[shape.node.cpus, shape.node.gpus, shape.node.mem] += shape.count
        return ", ".join(f"{count} of {shown(Resources(*kind))}" for kind, count in kinds.items()) or "no nodes"


def read_partitions(text: str) -> list[Partition]:
    """Raises Unreadable."""
    rows: dict[str, list[list[str]]] = {}
    for record in records(text, len(SHAPES_FORMAT)):
        rows.setdefault(record[0], []).append(record[1:])
    partitions = []
    for name, lines in rows.items():
        try:
            shapes = tuple(_shape(*line[:5]) for line in lines)
            most = lines[0][6].rpartition("-")[2]
            limit = float("inf") if most in ("infinite", "UNLIMITED") else float(most)
            partitions.append(Partition(name.rstrip("*"), name.endswith("*"), shapes, seconds_of(lines[0][5]), limit))
        except ValueError as error:
            raise Unreadable(f"partition {name}: {error}") from error
    return partitions


def gpus_of(gres: str) -> int:
    """GPUs of a node, from ``gpu:2``, ``gpu:a100:4(S:0-1),shard:8`` or ``(null)``."""
    found = re.findall(r"(?:^|,)gpu(?::[^,:()]+)?:(\d+)", gres)
    return sum(int(count) for count in found)


def seconds_of(text: str) -> float:
    """From ``infinite``, ``30:00``, ``12:00:00`` or ``1-00:00:00`` (squeue(1)). Raises ValueError."""
    if text in ("infinite", "UNLIMITED", "n/a"):
        return float("inf")
    days, _, clock = text.rpartition("-")
    parts = [int(part) for part in clock.split(":")]
    hours, minutes, seconds = [0] * (3 - len(parts)) + parts
    return float(((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds)


def chosen(partitions: list[Partition], options: Mapping[str, str]) -> list[Partition]:
    """Those that a job with these sbatch options may run in."""
    names = [name for name in options.get("partition", "").split(",") if name]
    return [one for one in partitions if (one.name in names if names else one.default)]


def wanted(ask: Ask) -> Resources:
    """What each node must carry; GPUs that the job spec asks for by an sbatch option are left to Slurm."""
    gpus = 0 if "gres" in ask.sbatch else ask.node.gpus
    return Resources(ask.node.cpus, gpus, ask.node.mem)


def shown(node: Resources) -> str:
    gpus = f", {node.gpus} GPUs" if node.gpus else ""
    return f"{node.cpus} CPUs, {node.mem / 2**20:g} MiB{gpus}"


def _shape(count: str, cpus: str, mem: str, gres: str, state: str) -> Shape:
    node = Resources(int(cpus), gpus_of(gres), int(mem) * 2**20)
    return Shape(int(count), node, node_state(state) is NodeState.UP)


def _holds(has: Resources, node: Resources) -> bool:
    return has.cpus >= node.cpus and has.gpus >= node.gpus and has.mem >= node.mem
