"""The facts that ``rrl doctor`` collects, as values.

A fact that could not be read is :class:`~rrl.cli.doctor.node_probe.host.Unavailable`, with a reason. Readers create the
facts, checks judge them, and ``rrl init`` writes a job.toml from them.
"""

from __future__ import annotations

from msgspec import Struct
from msgspec.structs import asdict

from ...cluster.slurm.requests import Partition
from ...cluster.slurm.site import Accounts, JobLimits
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

    def given(self, **overrides: str) -> dict[str, str]:
        """Return the sbatch options that are set; ``overrides`` replace some of them."""
        return {name: value for name, value in (asdict(self) | overrides).items() if value}

    def arguments(self, **overrides: str) -> tuple[str, ...]:
        """Return the options that are set, as arguments of sbatch."""
        return tuple(f"--{name}={value}" for name, value in self.given(**overrides).items())


# ── Slurm ──────────────────────────────────────────────────────────────────────────────────────────────────────────
class Config(Struct, frozen=True, tag=True):
    """Settings of Slurm by name, and the file or command from which they were read."""

    values: dict[str, str]
    source: str = "scontrol show config"
    seconds: float = 0.0
    """Time (s) until slurmctld answered; 0 for a file."""


class Trials(Struct, frozen=True, tag=True):
    """Results of ``sbatch --test-only``: whether Slurm would accept jobs of a run."""

    forms: dict[str, CommandResult | Unavailable]
    """Result of the smallest job of each form: ``pool``, ``replica``, ``hetjob``."""
    manager: dict[str, CommandResult | Unavailable]
    """Result of the manager's job by partition, in the order tried, up to the first partition that accepts the job."""


class Reader(Struct, frozen=True, tag=True):
    """The reader of Slurm that a manager would use with ``[cluster] reader = "auto"``."""

    reason: str
    """Which reader the manager would use, and why."""
    rejected: bool
    """True if pyslurm is installed, but does not fit this cluster."""


class Slurm(Struct, frozen=True):
    """All facts that were read from Slurm."""

    config: Config | Unavailable
    partitions: tuple[Partition, ...] | Unavailable
    accounts: Accounts | Unavailable
    limits: JobLimits | Unavailable
    trials: Trials | Unavailable
    cgroups: Config | Unavailable
    reader: Reader | Unavailable

    @property
    def settings(self) -> dict[str, str]:
        """Return Slurm's configuration by name; empty if it could not be read."""
        return {} if isinstance(self.config, Unavailable) else self.config.values


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
    """The report of the job on a compute node."""

    report: NodeReport
    visible_after_s: float | None
    """Time (s) from the first sign that the job was done (its report by TCP, or its end in Slurm) until the login node
    saw the file that the job wrote; None if it never saw the file."""


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
