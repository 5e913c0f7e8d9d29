"""What job.toml says of the place: cluster, the manager's own job, environment on a node, containers, networks."""

from __future__ import annotations

import ipaddress
import re
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from ...core.run_spec import DEFAULT_LOG_LEVEL, LogLevel
from ...core.units import Size
from .base import OptionalTime, SbatchOptions, Table, Time


def _lines(lines: tuple[str, ...]) -> tuple[str, ...]:
    for line in lines:
        if "\n" in line or not line.strip():
            raise ValueError('each entry is one line of bash, for example "source /opt/site/profile.sh"')
    return lines


def _variables(names: tuple[str, ...]) -> tuple[str, ...]:
    for name in names:
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*\*?", name):
            raise ValueError(f"{name!r} is no name of an environment variable; write for example \"WANDB_API_KEY\""
                             " or \"NCCL_*\"")  # fmt: skip
    return names


def _modules(names: tuple[str, ...]) -> tuple[str, ...]:
    for name in names:
        if not re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", name, re.ASCII):
            raise ValueError(f'{name!r} is no name of a Python module; write for example "torch"')
    return names


def _mounts(mounts: tuple[str, ...]) -> tuple[str, ...]:
    for mount in mounts:
        if not re.fullmatch(r"/[^:,]*(:/[^:,]*(:(ro|rw))?)?", mount):
            raise ValueError(f'{mount!r} is no mount; write "/source", "/source:/target" or "/source:/target:ro"')
    return mounts


def _network(text: str) -> str:
    if text and not re.fullmatch(r"[A-Za-z][\w.@-]{0,14}", text):
        try:
            ipaddress.ip_network(text, strict=False)
        except ValueError:
            raise ValueError(f'{text!r} is no interface and no network; write "ib0" or "10.4.0.0/16"') from None
    return text


Network = Annotated[str, AfterValidator(_network)]


class NodeTable(Table):
    """What rrl takes of each node: of the pool, or in the other forms of those that several roles share."""

    cpus: Annotated[int, Field(ge=1)] = 4
    """cores"""
    gpus: Annotated[int, Field(ge=0)] = 0
    """GPUs"""
    mem: Annotated[Size, Field(gt=0)] = 4 * 2**30
    """memory"""


class ClusterTable(Table):
    """Where the run gets its nodes from."""

    kind: Literal["local", "slurm"] = "local"
    """virtual nodes on this machine, or the Slurm cluster that this login node belongs to"""
    form: Literal["pool", "replica", "hetjob"] = "pool"
    """pool: one allocation over all nodes plus spares; replica: a job for each node of the roles that take nodes
    of their own, and one for the others; hetjob: one heterogeneous job with a component for each role
    (docs/architecture.md)"""
    spares: Annotated[int, Field(ge=0, le=4096)] = 1
    """nodes held ready beyond what the roles need; form "pool" only"""
    node: NodeTable = NodeTable()
    walltime: Time = 86400.0
    """of the run, and of its allocations"""
    job_walltime: OptionalTime = None
    """of each allocation and of the manager's own job, where the site allows less than walltime: before an allocation
    ends (limits.rotate), another is asked for, and the roles move there"""
    start_within: Time = 3600.0
    """form "replica": what has come is given back, and the run ends, if the trainer and min_replicas of each role have
    no nodes so long after the first request"""
    one_node_components: bool = False
    """form "hetjob": consent to components of one node. When a node of another component fails, Slurm kills them too
    (measured on 22.05, 24.11 and 26.05)"""


class ManagerTable(Table):
    """Where the manager runs, if the cluster is Slurm's, and what rrl's processes log."""

    where: Literal["job", "pool"] = "job"
    """job: a small Slurm job of its own; pool: on the first node of the pool, where no partition takes so small a job
    or where jobs may not submit jobs; or use: rrl submit --foreground"""
    slurm: SbatchOptions = {}
    """sbatch options of its own job; default: partition, account, qos and reservation of [slurm]"""
    log_level: LogLevel = DEFAULT_LOG_LEVEL
    """lowest level of the messages that the manager, agents, launchers and workers log; rrl --verbose: debug"""


class EnvTable(Table):
    """What is set up on a node, in this order, before each role's command."""

    setup: Annotated[tuple[str, ...], Field(strict=False), AfterValidator(_lines)] = ()
    """lines of bash; one that fails keeps the role from starting"""
    modules: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """for "module load" """
    venv: str | None = None
    """folder of a virtual environment that is activated, for commands of your own"""
    conda: str | None = None
    """name or folder of a conda environment that is activated, for commands of your own"""
    python: str | None = None
    """the interpreter on the nodes that has rrl, which runs the built-in roles; default: the one that runs rrl
    submit"""
    passed: Annotated[tuple[str, ...], Field(strict=False), AfterValidator(_variables)] = ()
    """variables of the submitting shell that roles get besides PATH, HOME and the like: "WANDB_API_KEY", "NCCL_*" """
    probe: Annotated[tuple[str, ...], Field(strict=False), AfterValidator(_modules)] = ()
    """Python modules that each node must be able to import before a role is placed there"""


class ContainerTable(Table):
    """The container of roles whose launcher is apptainer or pyxis. The run directory, the folder of job.toml and
    /dev/shm are always mounted."""

    image: str | None = None
    """a .sif or .sqsh file, or what the launcher understands ("docker://...")"""
    mounts: Annotated[tuple[str, ...], Field(strict=False), AfterValidator(_mounts)] = ()
    """each as "/source:/target[:ro]" """
    python: str = "python3"
    """the interpreter in the image that has rrl"""
