"""Define the interface by which rrl reads from Slurm and changes nodes.

There are two implementations. :mod:`.command_reader` runs Slurm's commands and parses what they print.
:mod:`.pyslurm_reader` asks a child process that uses pyslurm. Both return the same values (:mod:`..parsing`).
:mod:`.selection` chooses between them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from msgspec import Struct

from ....core.types import NodeName
from ...base import NodeStatus, Refused
from ..parsing import Job, NodeInfo, StepLine


class NotPermitted(Refused):
    """Slurm does not permit this user to change nodes, so it would also refuse any other change of a node."""


class SlurmConfig(Struct, frozen=True, tag=True):
    """The settings of slurmctld that rrl needs."""

    version: str
    """Version of slurmctld, for example ``24.11.5``."""
    inactive_limit_s: int
    """InactiveLimit in seconds; 0 means that a job continues without a running salloc."""


class SlurmReader(Protocol):
    """A reader: it reads jobs, steps, nodes and settings from Slurm, and drains and undrains nodes.

    All methods raise only Refused or Unanswered, and each returns within its own deadline.
    """

    async def jobs(self) -> list[Job]:
        """Return all jobs of this user that slurmctld still knows, including ended jobs."""

    async def steps(self) -> list[StepLine]:
        """Return the numbered steps of this user's jobs, without batch, extern, interactive and pending steps."""

    async def nodes(self, names: Sequence[NodeName] | None) -> dict[NodeName, NodeStatus]:
        """Return the states of these nodes, or of all nodes if ``names`` is None.

        A node that Slurm does not know is UNKNOWN.
        """

    async def node(self, name: NodeName) -> NodeInfo:
        """Return the administrative state of a node: whether it is drained, why and by whom.

        Raises:
            Refused: Slurm does not know the node.
        """

    async def config(self) -> SlurmConfig:
        """Return the settings of slurmctld."""

    async def drain(self, name: NodeName, reason: str) -> None:
        """Drain a node.

        Raises:
            NotPermitted: this user may not drain nodes.
        """

    async def undrain(self, name: NodeName) -> None:
        """Remove a node's drain, but not a DOWN state.

        Raises:
            NotPermitted: this user may not change nodes.
        """

    async def close(self) -> None:
        """End the processes of the reader."""
