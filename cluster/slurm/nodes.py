"""Drain, undrain and give back single nodes of Slurm.

Measured on 22.05, 24.11 and 26.05 (docs/architecture/clusters.md):

- Root, SlurmUser and users with AdminLevel Administrator may drain. To all others, Operators included, slurmctld
  replies "Invalid user id" and logs a security violation. After the first such reply rrl does not try again.
- ``State=RESUME`` also ends a DOWN state that an administrator set; ``State=UNDRAIN`` removes only the drain. 24.11
  keeps the reason after both commands, so a reason is meaningful only together with the state.
- 24.11 and 26.05 append " : Not responding" to the reason of a drained node that is then lost.
- ``scontrol update JobId=J NodeList=<the rest>`` releases nodes of a job within 2 s. Tasks on the released nodes are
  killed; tasks on the other nodes continue, and steps can be started on these nodes. 22.05 shrinks each job only once
  (measured without accounting). No version releases the node of a batch script, or a node of a heterogeneous job's
  first component. If another component is left with one node, Slurm ends that component as soon as any node of the
  job fails.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from ClusterShell.NodeSet import NodeSet

from ...core.drains import RUN_PREFIX, DrainOwner, drain_owner
from ...core.types import NodeName
from ..base import Refused, Unanswered
from .parsing import Job
from .readers.base import NotPermitted, SlurmReader
from .readers.command_reader import NO_RIGHTS, RunCommand, one_line

NOT_RESPONDING_SUFFIX = " : Not responding"
"""Text that slurmctld appends to the reason of a node that it loses."""
_NO_RESIZE = re.compile(
    r"Unexpected message received for job|no longer pending execution|Job update not available right now|"
    r"resizing not supported|Invalid node name specified for job|not supported on this system",
    re.IGNORECASE,
)
"""Replies by which slurmctld refuses to shrink a job at all, or to release the requested nodes from it."""


class SlurmNodes:
    """Drains, undrains and gives back nodes on behalf of one run.

    Args:
        reader: reads, drains and undrains nodes.
        write: runs a command and returns its result; raises Unanswered if the command does not end in time.
    """

    def __init__(self, reader: SlurmReader, write: RunCommand) -> None:
        self._reader, self._write = reader, write
        self._no_rights = ""
        """slurmctld's message if it has denied this user a drain; empty otherwise."""
        self.drains: set[NodeName] = set()
        """Nodes that this run has drained or wants to drain. They are polled even after they have left the run's
        allocations, because a drain that was refused for the node's state may be possible later."""

    async def drain(self, node: NodeName, reason: str) -> None:
        """Drain a node with ``reason``; see :meth:`rrl.cluster.base.Cluster.drain`."""
        if drain_owner(reason) is DrainOwner.OTHER:
            raise ValueError(f"the reason of a drain by rrl must begin with {RUN_PREFIX}: {reason!r}")
        before = await self._reader.node(node)
        self.drains.add(node)
        if before.draining and _without_suffix(before.reason) == reason:
            return
        if before.set_aside:
            raise Refused(f"cannot drain {node}: it is {before.description}, and this run did not set this state")
        if self._no_rights:
            raise Refused(self._no_rights)
        try:
            await self._reader.drain(node, reason)
        except NotPermitted as error:
            self._no_rights = f"this user may not drain nodes: {error}"
            raise Refused(self._no_rights) from error
        after = await self._reader.node(node)
        if after.draining and _without_suffix(after.reason) != reason:
            raise Refused(
                f"{node} was not drained by this run: somebody else drained it at the same time ({after.description})"
            )
        if not after.draining:
            raise Unanswered(f"{node} is not drained although Slurm accepted the drain: it is {after.description}")

    async def undrain(self, node: NodeName, reason: str) -> None:
        """Remove this run's drain with ``reason``; see :meth:`rrl.cluster.base.Cluster.undrain`."""
        before = await self._reader.node(node)
        if before.draining:
            if _without_suffix(before.reason) != reason:
                raise Refused(f"cannot undrain {node}: it is {before.description}, and this run did not set that drain")
            await self._reader.undrain(node)
            if (after := await self._reader.node(node)).draining and _without_suffix(after.reason) == reason:
                raise Unanswered(f"Slurm accepted the undrain of {node}, but the node is still {after.description}")
        self.drains.discard(node)

    async def shrink(self, job: Job, nodes: Sequence[NodeName]) -> None:
        """Request that Slurm takes ``nodes`` from a job; the caller checks the result.

        Raises:
            Refused: Slurm cannot release these nodes, or the release would affect the other nodes.
        """
        rest = [node for node in job.nodes if node not in nodes]
        if not rest:
            raise Refused(
                f"cannot release {', '.join(nodes)}: no node of job {job.id} would be left; cancel the job instead"
            )
        if job.leader == job.id:
            raise Refused(
                f"cannot release {', '.join(nodes)} alone: Slurm does not support shrinking the first component of a"
                " heterogeneous job"
            )
        if job.leader and len(rest) == 1:
            raise Refused(
                f"cannot release {', '.join(nodes)}: component {job.id} of heterogeneous job {job.leader} would keep"
                " only one node, and would then end as soon as any node of the heterogeneous job fails"
            )
        ended = await self._write(("scontrol", "update", f"JobId={job.id}", f"NodeList={NodeSet(','.join(rest))}"))
        if ended.code:
            reply = one_line(ended)
            if _NO_RESIZE.search(ended.err) or NO_RIGHTS.search(ended.err):
                raise Refused(f"Slurm cannot shrink job {job.id}: {reply}")
            raise Unanswered(f"scontrol: {reply}")


def _without_suffix(reason: str) -> str:
    return reason.removesuffix(NOT_RESPONDING_SUFFIX)
