"""The tables of job.toml about the site: cluster, manager, environment of the nodes, containers and networks."""

from __future__ import annotations

import ipaddress
import re
from typing import Annotated, Literal, get_args
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, model_validator

from ...cluster.traits import ClusterName, ClusterTraits, traits_of
from ...core.run_spec import NotificationKind
from ...core.types import DEFAULT_LOG_LEVEL, LogLevel
from .base import OptionalTime, SbatchOptions, Size, Strings, Table, Time

NOTIFICATION_KINDS: tuple[NotificationKind, ...] = get_args(NotificationKind)
MASK = "..."
"""Text that replaces the parts of a notification's target that may be secret."""


def _lines(lines: tuple[str, ...]) -> tuple[str, ...]:
    for line in lines:
        if "\n" in line or not line.strip():
            raise ValueError('each entry must be one line of bash, for example "source /opt/site/profile.sh"')
    return lines


def _variables(names: tuple[str, ...]) -> tuple[str, ...]:
    for name in names:
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*\*?", name):
            problem = f"{name!r} is not a valid environment variable name"
            raise ValueError(f'{problem}; write for example "WANDB_API_KEY" or "NCCL_*"')
    return names


def _modules(names: tuple[str, ...]) -> tuple[str, ...]:
    for name in names:
        if not re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", name, re.ASCII):
            raise ValueError(f'{name!r} is not a valid Python module name; write for example "torch"')
    return names


def _mounts(mounts: tuple[str, ...]) -> tuple[str, ...]:
    for mount in mounts:
        if not re.fullmatch(r"/[^:,]*(:/[^:,]*(:(ro|rw))?)?", mount):
            raise ValueError(f'{mount!r} is not a mount; write "/source", "/source:/target" or "/source:/target:ro"')
    return mounts


def _network(text: str) -> str:
    if text and not re.fullmatch(r"[A-Za-z][\w.@-]{0,14}", text):
        try:
            ipaddress.ip_network(text, strict=False)
        except ValueError:
            problem = f"{text!r} is neither an interface nor a network"
            raise ValueError(f'{problem}; write for example "ib0" or "10.4.0.0/16"') from None
    return text


Network = Annotated[str, AfterValidator(_network)]


def _webhook(address: str) -> str:
    """Return the address of a webhook if it is valid.

    Raises:
        ValueError: The address is not valid. The message does not quote it, because it may contain a secret.
    """
    example = 'write for example "https://hooks.example.org/services/..."'
    try:
        parts = urlsplit(address)
        valid = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        valid = False
    if not valid or not address.isascii() or not address.isprintable() or " " in address:
        raise ValueError(f"is not the address of a webhook; {example}")
    return address


class NodeTable(Table):
    """Resources that rrl uses on a node: on every node with form "pool", else on the nodes that several roles share."""

    cpus: Annotated[int, Field(ge=1)] = 4
    """Cores of a node."""
    gpus: Annotated[int, Field(ge=0)] = 0
    """GPUs of a node."""
    mem: Annotated[Size, Field(gt=0)] = 4 * 2**30
    """Memory of a node."""


class ClusterTable(Table):
    """The nodes of the run and how they are requested."""

    kind: ClusterName = "local"
    """local: virtual nodes on this machine; slurm: the Slurm cluster that this login node belongs to."""
    form: Literal["pool", "replica", "hetjob"] = "pool"
    """pool: one allocation over all nodes and spares; replica: one job for each node of the exclusive roles, and one
    for all other roles; hetjob: one heterogeneous job with a component for each role
    (docs/architecture/clusters.md)."""
    spares: Annotated[int, Field(ge=0, le=4096)] = 1
    """Number of nodes kept ready in addition to the nodes that the roles need; form "pool" only."""
    node: NodeTable = NodeTable()
    walltime: Time = 86400.0
    """Time limit of the run, and of its allocations."""
    job_walltime: OptionalTime = None
    """Time limit of each allocation and of the manager's own job, if the site allows less than walltime. Before an
    allocation ends (limits.rotate), another allocation is requested, and the roles move to it."""
    start_within: Time = 3600.0
    """With form "replica": time from the first request until the run gives its nodes back and ends, if the trainer or
    min_replicas of a role still lack nodes."""
    reader: Literal["auto", "commands", "pyslurm"] = "auto"
    """How the manager reads Slurm: by its commands, or by pyslurm in a child process. auto: pyslurm if it is installed
    and was built for this version of Slurm (docs/sites.md)."""
    one_node_components: bool = False
    """With form "hetjob": allow components of one node. Slurm kills such a component when a node of another component
    fails (measured on 22.05, 24.11 and 26.05)."""

    @property
    def traits(self) -> ClusterTraits:
        """Return what the cluster of the run can do."""
        return traits_of(self.kind)


class ManagerTable(Table):
    """Where the manager runs on a Slurm cluster, and what rrl's processes log."""

    where: Literal["job", "pool"] = "job"
    """job: in a small Slurm job of its own. pool: on the first node of the pool, for sites where no partition accepts
    such a small job, or where jobs may not submit jobs (rrl submit --foreground is an alternative)."""
    slurm: SbatchOptions = {}
    """Options of sbatch for the manager's own job; default: partition, account, qos and reservation of [slurm]."""
    log_level: LogLevel = DEFAULT_LOG_LEVEL
    """Lowest level of the messages that the manager, agents, launchers and workers log; rrl --verbose sets debug."""


class EnvTable(Table):
    """The setup of a node before each role's command, in the order of these keys."""

    setup: Annotated[tuple[str, ...], Field(strict=False), AfterValidator(_lines)] = ()
    """Lines of bash; a role does not start if one of them fails."""
    modules: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """Modules to load with "module load"."""
    venv: str | None = None
    """Folder of a virtual environment to activate, for commands of your own."""
    conda: str | None = None
    """Name or folder of a conda environment to activate, for commands of your own."""
    python: str | None = None
    """The interpreter on the nodes that has rrl and runs the built-in roles; default: the interpreter of rrl submit."""
    passed: Annotated[tuple[str, ...], Field(strict=False), AfterValidator(_variables)] = ()
    """Variables of the submitting shell that roles get besides a fixed list such as PATH and HOME; for example
    "WANDB_API_KEY", "NCCL_*"."""
    probe: Annotated[tuple[str, ...], Field(strict=False), AfterValidator(_modules)] = ()
    """Python modules that each node must be able to import before a role is placed there."""


class ContainerTable(Table):
    """The container of roles whose launcher is apptainer or pyxis.

    The run directory, the folder of job.toml and /dev/shm are always mounted.
    """

    image: str | None = None
    """A .sif or .sqsh file, or any image name that the launcher accepts ("docker://...")."""
    mounts: Annotated[tuple[str, ...], Field(strict=False), AfterValidator(_mounts)] = ()
    """Mounts, each as "/source:/target[:ro]"."""
    python: str = "python3"
    """The interpreter in the image that has rrl."""


class NotifyTable(Table):
    """Notifications: messages about what happens to the run, at most one an hour of each kind (docs/explain.md).

    Needs ``command`` or ``webhook``. Only the manager sends them, so a run whose manager cannot run sends none.
    """

    on: Annotated[tuple[NotificationKind, ...], Field(strict=False, min_length=1)] = NOTIFICATION_KINDS
    """failed: the run ended as failed or rejected. degraded: it continues without a replica. stalled: it commits no
    training step for 30 min, or for ``limits.adaptive`` times as long as usual if that is longer. completed: it is
    complete. drain: a node was drained, or an administrator should drain it."""
    command: Strings | None = None
    """Program that gets the message as JSON on stdin; it runs in the folder of job.toml, for at most 30 s."""
    webhook: Annotated[str, AfterValidator(_webhook)] | None = None
    """Address to which the message is posted as JSON. The key ``text`` contains the line that chat services show."""

    @model_validator(mode="after")
    def _one_target(self) -> NotifyTable:
        if (self.command is None) == (self.webhook is None):
            raise ValueError('must have exactly one of: command = ["program", ...], webhook = "https://..."')
        return self

    def without_secrets(self) -> NotifyTable:
        """Return the table with the arguments of the command and the path of the webhook masked."""
        if self.webhook is not None:
            parts = urlsplit(self.webhook)
            host = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname
            port = f":{parts.port}" if parts.port is not None else ""
            return self.model_copy(update={"webhook": f"{parts.scheme}://{host}{port}/{MASK}"})
        command = self.command or ()
        return self.model_copy(update={"command": (*command[:1], *([MASK] if command[1:] else []))})
