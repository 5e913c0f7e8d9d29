"""Read Slurm by pyslurm in a child process, which returns typed values and error numbers instead of text.

Slurm's commands still submit jobs and launch steps. Each request has a deadline. A child that misses the deadline is
killed, and the outcome of the request is unknown. The next request starts a new child (:mod:`.child_process`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from msgspec import Struct

from ....core.types import NodeName
from ...base import NodeStatus, Refused, Unanswered
from .. import parsing as text
from ..commands import SlurmLimits
from .base import NotPermitted, SlurmConfig
from .child_process import PyslurmChild
from .messages import (
    Done,
    DrainNode,
    Failed,
    JobRows,
    NodeRows,
    ReadConfig,
    ReadJobs,
    ReadNodes,
    ReadSteps,
    Request,
    StepRows,
    UndrainNode,
)

NO_RIGHTS = frozenset({2002, 2010})
"""ESLURM_ACCESS_DENIED and ESLURM_USER_ID_MISSING ("Invalid user id"): this user may not make the change."""
SLURMCTLD_ERRORS = range(2000, 3000)
"""Error numbers with which slurmctld reports that it did not carry out a request. In slurm_errno.h, 1000 to 1999 and
5000 to 6999 are failures of the connection or the authentication; numbers below 1000 are the operating system's."""
UNSETTLED = frozenset({2027, 2090, 2131})
"""Numbers of :data:`SLURMCTLD_ERRORS` after which the outcome is unknown: ESLURM_IN_STANDBY_MODE, ESLURM_INTERNAL and
ESLURM_IN_STANDBY_USE_BACKUP. Another slurmctld that has taken over may carry out the request."""

T = TypeVar("T", bound=Struct)


class PyslurmReader:
    """The reader that sends requests to a child process with pyslurm (:class:`.base.SlurmReader`)."""

    def __init__(self, child: PyslurmChild, limits: SlurmLimits) -> None:
        self._child, self._limits = child, limits
        self.queue_length = 0
        """Number of jobs of all users at the last :meth:`jobs`."""

    async def jobs(self) -> list[text.Job]:
        """Return all jobs of this user that slurmctld still knows."""
        found = await self._read(ReadJobs(), JobRows)
        self.queue_length = found.queue_length
        return list(found.rows)

    async def steps(self) -> list[text.StepLine]:
        """Return the numbered steps of this user's jobs."""
        return list((await self._read(ReadSteps(), StepRows)).rows)

    async def nodes(self, names: Sequence[NodeName] | None) -> dict[NodeName, NodeStatus]:
        """Return the states of these nodes, or of all nodes."""
        found = await self._read(ReadNodes(None if names is None else tuple(names)), NodeRows)
        statuses = {name: text.node_status(node.state, node.reason) for name, node in found.rows.items()}
        return statuses | {name: text.UNKNOWN_NODE for name in names or () if name not in statuses}

    async def node(self, name: NodeName) -> text.NodeInfo:
        """Return the administrative state of a node."""
        found = await self._read(ReadNodes((name,)), NodeRows)
        if name not in found.rows:
            raise Refused(f"{name} is not known to Slurm")
        return found.rows[name]

    async def config(self) -> SlurmConfig:
        """Return the settings of slurmctld."""
        return await self._read(ReadConfig(), SlurmConfig)

    async def drain(self, name: NodeName, reason: str) -> None:
        """Drain a node."""
        await self._ask(DrainNode(name, reason), Done, self._limits.write_timeout_s)

    async def undrain(self, name: NodeName) -> None:
        """Remove a node's drain."""
        await self._ask(UndrainNode(name), Done, self._limits.write_timeout_s)

    async def close(self) -> None:
        """End the child process."""
        await self._child.close()

    async def _read(self, request: Request, reply_type: type[T]) -> T:
        return await self._ask(request, reply_type, self._limits.read_timeout_s)

    async def _ask(self, request: Request, reply_type: type[T], timeout_s: float) -> T:
        reply = await self._child.ask(request, reply_type, timeout_s)
        if isinstance(reply, Failed):
            raise error_of(reply)
        return reply


def error_of(failed: Failed) -> Refused | Unanswered:
    """Return the exception for a request that failed, according to the error number in the reply."""
    if failed.number in NO_RIGHTS:
        return NotPermitted(failed.text)
    if failed.number in SLURMCTLD_ERRORS and failed.number not in UNSETTLED:
        return Refused(f"slurmctld: {failed.text}")
    return Unanswered(f"pyslurm: {failed.text} (error {failed.number})")
