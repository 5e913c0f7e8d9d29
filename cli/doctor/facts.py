"""The facts that ``rrl doctor`` collects, as values.

A fact that could not be read is :class:`~rrl.cli.doctor.node_probe.host.Unavailable`, with a reason. Readers create the
facts, checks judge them, and ``rrl init`` writes a job.toml from them.
"""

from __future__ import annotations

from msgspec import Struct

from ...cluster.base import NodeState
from ...cluster.slurm.limits import JobLimits
from ...core.command_runner import CommandResult
from ...core.types import Verdict
from .node_probe.host import Host, Unavailable
from .node_probe.main import NodeReport


class Check(Struct, frozen=True):
    """The result of one check, which is shown as one line.

    ``found`` is the observation; ``fix`` is a command, a key of job.toml, or a person to ask.
    """

    name: str
    """``<subject>.<property>``, a key of :data:`rrl.cli.doctor.catalogue.MEANINGS`."""
    verdict: Verdict
    found: str
    fix: str = ""


class DoctorOptions(Struct, frozen=True):
    """Slurm options with which the user's jobs must be submitted. Slurm chooses the value of an empty option."""

    partition: str = ""
    account: str = ""
    qos: str = ""

    def sbatch_options(self, **overrides: str) -> tuple[str, ...]:
        """Return the options that are set, as arguments of sbatch; ``overrides`` replace some of them."""
        given = {"partition": self.partition, "account": self.account, "qos": self.qos} | overrides
        return tuple(f"--{key}={value}" for key, value in given.items() if value)


# ── Slurm ──────────────────────────────────────────────────────────────────────────────────────────────────────────
class Config(Struct, frozen=True, tag=True):
    """The values of ``scontrol show config`` by name. ``seconds`` is the time (s) until slurmctld answered."""

    values: dict[str, str]
    seconds: float


class Partition(Struct, frozen=True):
    """A partition of the cluster.

    ``max_time`` is in s, or None if there is no limit. ``preempted`` says whether its jobs may be preempted
    (PreemptMode other than OFF).
    """

    name: str
    default: bool
    up: bool
    max_time: float | None
    preempted: bool


class Partitions(Struct, frozen=True, tag=True):
    """The partitions of the cluster."""

    partitions: tuple[Partition, ...]


class Node(Struct, frozen=True):
    """A node of the cluster. ``memory`` is in bytes. ``gpus`` is the count by type; '' is the type of untyped GPUs."""

    name: str
    partitions: tuple[str, ...]
    state: NodeState
    cpus: int
    memory: int
    gpus: dict[str, int]


class Nodes(Struct, frozen=True, tag=True):
    """The nodes of the cluster."""

    nodes: tuple[Node, ...]

    def usable(self, partition: str) -> tuple[Node, ...]:
        """Return the nodes of ``partition`` that are up."""
        return tuple(node for node in self.nodes if partition in node.partitions and node.state is NodeState.UP)


class Accounts(Struct, frozen=True, tag=True):
    """The user's entry in Slurm's accounting.

    ``admin`` is ``None``, ``Operator`` or ``Administrator``; ``default`` is the account of jobs that name no account.
    """

    admin: str
    default: str
    names: tuple[str, ...]


class Trials(Struct, frozen=True, tag=True):
    """Results of ``sbatch --test-only``: whether Slurm would accept jobs of a run."""

    forms: dict[str, CommandResult | Unavailable]
    """Result of the smallest job of each form: ``pool``, ``replica``, ``hetjob``."""
    manager: dict[str, CommandResult | Unavailable]
    """Result of the manager's job by partition, in the order tried, up to the first partition that accepts the job."""


class CgroupConf(Struct, frozen=True, tag=True):
    """Slurm's cgroup settings by name. ``where`` is the file or command from which they were read."""

    values: dict[str, str]
    where: str


class Reader(Struct, frozen=True, tag=True):
    """The reader of Slurm that a manager would use with ``[cluster] reader = "auto"``."""

    reason: str
    """Which reader the manager would use, and why."""
    rejected: bool
    """True if pyslurm is installed, but does not fit this cluster."""


class Slurm(Struct, frozen=True):
    """All facts that were read from Slurm."""

    config: Config | Unavailable
    partitions: Partitions | Unavailable
    nodes: Nodes | Unavailable
    accounts: Accounts | Unavailable
    limits: JobLimits | Unavailable
    trials: Trials | Unavailable
    cgroups: CgroupConf | Unavailable
    reader: Reader | Unavailable


# ── the run directory, and a node ──────────────────────────────────────────────────────────────────────────────────
class Storage(Struct, frozen=True, tag=True):
    """The state of the folder of all runs.

    ``root`` is the folder of all runs. ``at`` is the examined folder: ``root``, or its nearest existing parent.

    ``kind`` is the type of the file system. ``free`` are its free bytes, ``inodes`` its free inodes (-1 if the file
    system does not count inodes). ``fsync`` is the time (s) of a small write with fsync. ``trouble`` says why nothing
    can be written at ``at``; it is empty if the write succeeded.
    """

    root: str
    at: str
    kind: str
    free: int
    inodes: int
    exclusive: bool
    """Whether O_EXCL lets only one of two creators succeed."""
    fsync: float
    trouble: str
    doubts: list[str] = []
    """Who else may exchange the directories of runs."""


class Visit(Struct, frozen=True, tag=True):
    """The report of the job on a compute node.

    ``visible_after_s`` is the time (s) from the first sign that the job was done (its report by TCP, or its end in
    Slurm) until the login node saw the file that the job wrote; None if it never saw the file. ``skew`` is the time
    (s) by which the node's clock is ahead, with an error of at most ``bound`` (s); None if no connection was available
    for the measurement.
    """

    report: NodeReport
    visible_after_s: float | None
    skew: float | None
    bound: float


class Facts(Struct, frozen=True):
    """All facts. Without a cluster ``slurm`` and ``node`` are None, and ``no_slurm`` gives the reason."""

    user: str
    uid: int
    wanted: DoctorOptions
    host: Host
    storage: Storage | Unavailable
    slurm: Slurm | None
    node: Visit | Unavailable | None
    no_slurm: str = ""
