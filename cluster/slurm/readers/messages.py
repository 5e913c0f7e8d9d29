"""The requests to the process that uses pyslurm, and its replies: one line of JSON each."""

from __future__ import annotations

from msgspec import Struct

from ....core.types import NodeName
from ..parsing import Job, NodeInfo, StepLine
from .base import SlurmConfig


class ReadJobs(Struct, frozen=True, tag=True):
    """A request for the jobs of the user who runs the process."""


class ReadSteps(Struct, frozen=True, tag=True):
    """A request for the numbered steps of the user who runs the process."""


class ReadNodes(Struct, frozen=True, tag=True):
    """A request for the nodes of these names; for all nodes if ``names`` is None."""

    names: tuple[NodeName, ...] | None


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


class JobRows(Struct, frozen=True, tag=True):
    """The jobs of this user."""

    rows: tuple[Job, ...]
    queue_length: int
    """Number of jobs of all users, which pyslurm had to read."""


class StepRows(Struct, frozen=True, tag=True):
    """The numbered steps of this user."""

    rows: tuple[StepLine, ...]


class NodeRows(Struct, frozen=True, tag=True):
    """The requested nodes that exist, by name."""

    rows: dict[NodeName, NodeInfo]


class Done(Struct, frozen=True, tag=True):
    """The reply to a request that has changed a node."""


class Failed(Struct, frozen=True, tag=True):
    """The reply to a request that failed."""

    number: int
    """Slurm's error number (slurm_errno.h), or errno. It is 0 if unknown, and -1 for an error that pyslurm itself
    raised."""
    text: str
    """Text of the error for people; decisions use ``number``."""


Reply = Ready | JobRows | StepRows | NodeRows | SlurmConfig | Done | Failed
