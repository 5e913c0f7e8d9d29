"""The requests to the process that uses pyslurm, and its replies: one line of JSON each."""

from __future__ import annotations

from msgspec import Struct


class ReadJobs(Struct, frozen=True, tag=True):
    """A request for the jobs of the user who runs the process."""


class ReadSteps(Struct, frozen=True, tag=True):
    """A request for the numbered steps of the user who runs the process."""


class ReadNodes(Struct, frozen=True, tag=True):
    """A request for the nodes of these names; for all nodes if ``names`` is None."""

    names: tuple[str, ...] | None


class ReadConfig(Struct, frozen=True, tag=True):
    """A request for the settings of slurmctld."""


class DrainNode(Struct, frozen=True, tag=True):
    """A request to drain a node."""

    name: str
    reason: str


class UndrainNode(Struct, frozen=True, tag=True):
    """A request to remove a node's drain."""

    name: str


Request = ReadJobs | ReadSteps | ReadNodes | ReadConfig | DrainNode | UndrainNode


class Ready(Struct, frozen=True, tag=True):
    """The first message of the process, sent once pyslurm is imported."""

    version: str
    """Version of pyslurm; its first two numbers are the release of Slurm that it was built for."""


class JobRow(Struct, frozen=True):
    """A job, or a component of a heterogeneous job; texts are Slurm's own, times are in seconds."""

    id: int
    state: str
    nodes: str
    """Host list in Slurm's folded notation; empty if the job has no nodes."""
    name: str
    reason: str
    comment: str
    leader: int
    """Id of the heterogeneous job; 0 if the job is not heterogeneous."""
    offset: int
    """Index of the component in the heterogeneous job."""
    limit_s: float | None
    """Time limit; None if unlimited."""
    run_s: float
    """Seconds for which the job has run; suspensions do not count."""
    start: float | None
    """Start (s since 1970); None if unknown."""
    end: float | None
    """End, or expected end (s since 1970); None if unknown."""


class JobRows(Struct, frozen=True, tag=True):
    """The jobs of this user."""

    rows: tuple[JobRow, ...]
    queue_length: int
    """Number of jobs of all users, which pyslurm had to read."""


class StepRow(Struct, frozen=True):
    """A numbered step of a job."""

    job: int
    number: int
    nodes: str
    name: str


class StepRows(Struct, frozen=True, tag=True):
    """The numbered steps of this user."""

    rows: tuple[StepRow, ...]


class NodeRow(Struct, frozen=True):
    """A node."""

    name: str
    state: str
    """State with its flags, for example ``IDLE+DRAIN``."""
    reason: str
    reason_by: str
    """User who recorded the reason, and the time: ``root@2026-11-26T10:00:00``, in local time; empty if unknown."""


class NodeRows(Struct, frozen=True, tag=True):
    """The requested nodes that exist."""

    rows: tuple[NodeRow, ...]


class ConfigRow(Struct, frozen=True, tag=True):
    """The settings of slurmctld."""

    version: str
    inactive_limit_s: int


class Done(Struct, frozen=True, tag=True):
    """The reply to a request that has changed a node."""


class Failed(Struct, frozen=True, tag=True):
    """The reply to a request that failed."""

    number: int
    """Slurm's error number (slurm_errno.h), or errno. It is 0 if unknown, and -1 for an error that pyslurm itself
    raised."""
    text: str
    """Text of the error for people; decisions use ``number``."""


Reply = Ready | JobRows | StepRows | NodeRows | ConfigRow | Done | Failed
